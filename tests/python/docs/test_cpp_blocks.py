"""Every C++ block of the pages compiles, each as a function of one translation unit."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import trireme

from docs.blocks import ROOT, Block, all_blocks, blocks_of, side_of

PRELUDE = Path(__file__).with_name("prelude.h")
# Beside the package in a build tree.
COMMANDS = Path(trireme.__file__).parents[2] / "compile_commands.json"
LIKE = "examples/cpp/train_ddp.cpp"  # has the flags of programs, and their precompiled header


def translation_unit(blocks: list[Block], headers: bool) -> str:
    lines = [f'#include "{PRELUDE}"'] if headers else []
    for block in blocks:
        code = block.before + f'#line {block.line} "{block.page}"\n' + block.code
        includes = re.findall(r"^#include .*$", code, re.M)
        lines += includes
        name = re.sub(r"\W", "_", str(block))
        lines += [f"void {name}() {{", re.sub(r"^#include .*$", "", code, flags=re.M), "}"]
    return "\n".join(lines) + "\n"


def compiler(headers: bool) -> list[str]:
    if not COMMANDS.exists():
        pytest.skip("this package is not in a build tree")
    for entry in json.loads(COMMANDS.read_text()):
        if entry["file"] == str(ROOT / LIKE):
            command = shlex.split(entry["command"])
            if not headers and "-include" in command:
                place = command.index("-include")
                del command[place : place + 2]
            return [*command[: command.index("-o")], "-w", "-fsyntax-only", "-fmax-errors=20"]
    pytest.skip("this build has no C++ examples")


def errors(blocks: list[Block], folder: Path, headers: bool = True) -> str:
    """Without ``headers`` blocks have none of torch and of the library: these take the time."""
    source = folder / "blocks.cpp"
    source.write_text(translation_unit(blocks, headers))
    compiled = subprocess.run(
        [*compiler(headers), str(source)],
        cwd=COMMANDS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = "\n".join(re.findall(r"^\S+:\d+:\d+: (?:fatal )?error: .*$", compiled.stderr, re.M))
    assert bool(found) == bool(compiled.returncode), compiled.stderr
    return found


@pytest.mark.timeout(300)
def test_blocks_compile(tmp_path: Path) -> None:
    blocks = all_blocks("cpp")
    assert len(blocks) > 10
    readme = (ROOT / "README.md").read_text()
    (after,) = [block for block in blocks if block.page == "README.md"]
    (diff,) = [
        text[5:] for text in readme.split("```") if text.startswith("diff\n") and "::" in text
    ]
    plain = Block("README.md", after.line, "cpp", side_of(diff, "-"), "", frozenset({"before"}))
    assert "trireme" not in plain.code
    named = Block("README.md", after.line + 1000, "cpp", plain.code, "", plain.marks)
    assert errors([*blocks, named], tmp_path) == ""


@pytest.mark.timeout(300)
def test_a_block_that_does_not_compile_is_named(tmp_path: Path) -> None:
    (broken,) = blocks_of("docs/x.md", "\n```cpp\nint x = 1;\nno_such_name(x);\n```\n")
    assert re.match(
        r"docs/x\.md:4:1: error: .*no_such_name", errors([broken], tmp_path, headers=False)
    )
