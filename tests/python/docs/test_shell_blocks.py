"""Commands in the pages: targets, programs, files and options that they name exist."""

import re
import shlex
from collections.abc import Iterator, Sequence

import pytest
import trireme.__main__ as trireme_main
from torch.distributed.run import get_args_parser

from docs.blocks import ROOT, Block, all_blocks

OTHERS = {"pip", "cmake", "mpirun", "srun", ".", "git"}  # programs that are not ours
TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
DEV = re.findall(r"^  ([a-z]+)\)", (ROOT / "scripts" / "dev.sh").read_text(), re.M)


class Wrong(Exception):
    """What a command names and the repository does not have."""


def commands(code: str) -> Iterator[list[str]]:
    """Each command as its words; lines may go on, comments end them, and a variable is 1."""
    for line in re.sub(r"\$[A-Z]+", "1", code.replace("\\\n", " ")).splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", ";", "|"):
                words.append(word)
            elif words:
                yield words
                words = []


def check(words: Sequence[str]) -> None:
    while re.match(r"[A-Z_]+=", words[0]):  # VARIABLE=value
        words = words[1:]
    name, *rest = words
    if name == "make":
        need([word for word in rest if "=" not in word], TARGETS, "target of make")
    elif name == "scripts/dev.sh":
        need(rest[:1], DEV, "command of scripts/dev.sh")
        if rest[0] == "build":
            need(rest[1:], built(), "target of CMake")
        elif rest[1:]:
            check(rest[1:])
    elif name == "torchrun":
        arguments = get_args_parser().parse_args(rest)
        program(arguments.training_script, arguments.training_script_args)
    elif name == "python" and rest[0] == "-m":
        module(rest[1], rest[2:])
    elif name == "python":
        program(rest[0], rest[1:])
    elif name in OTHERS:
        other(name, rest)
    else:
        program(name, rest)


def need(words: Sequence[str], known: Sequence[str], what: str) -> None:
    for word in words:
        if word not in known:
            raise Wrong(f"there is no {what} '{word}'")


def built() -> list[str]:
    return ["trireme", "_C", *(path.stem for path in (ROOT / "examples/cpp").glob("*.cpp"))]


def module(name: str, options: Sequence[str]) -> None:
    if name == "trireme":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["trireme", *options])
            for command in ("plan", "examine"):  # options are read, nothing is done
                patch.setattr(trireme_main, command, lambda arguments: 0)
            try:
                trireme_main.main()
            except SystemExit:
                raise Wrong(f"python -m trireme does not take {shlex.join(options)}") from None
    elif name == "pytest":
        need([path for path in options if not (ROOT / path).exists()], [], "test")
    elif name not in ("venv", "torch.distributed.run"):
        raise Wrong(f"the pages run no module '{name}'")


def program(path: str, options: Sequence[str]) -> None:
    """A program of the repository, or, without a folder in its name, one of the reader."""
    if "/" not in path.removeprefix("./"):
        return
    compiled = re.fullmatch(r"build/\w+/(examples|tests)/cpp/(\w+)", path)
    if compiled and compiled[1] == "tests":
        need(
            [compiled[2].removeprefix("test_")],
            [p.name for p in (ROOT / "tests/cpp").iterdir()],
            path,
        )
        return
    source = ROOT / (f"examples/cpp/{compiled[2]}.cpp" if compiled else path)
    if not source.is_file():
        raise Wrong(f"there is no {path}")
    shared = sorted((ROOT / "benchmarks" / "measure").glob("*.py"))
    text = "".join(file.read_text() for file in [source, *shared])
    for option in options:
        if option.startswith("--") and f'"{option.split("=")[0]}"' not in text:
            raise Wrong(f"{path} has no option {option}")
        if re.match(r"(examples|benchmarks|docs)/", option) and not (ROOT / option).exists():
            raise Wrong(f"there is no {option}")


def other(name: str, words: Sequence[str]) -> None:
    if name == "pip":
        files = [words[at + 1] for at, word in enumerate(words) if word == "-r"]
        need(
            [file for file in files if not (ROOT / file.removeprefix("<trireme>/")).is_file()],
            [],
            "file",
        )
    elif name == "cmake":
        texts = [(ROOT / "CMakeLists.txt"), *sorted((ROOT / "cmake").iterdir())]
        known = "".join(path.read_text() for path in texts)
        for option in re.findall(r"-D(TRIREME_\w+)", " ".join(words)):
            if option not in known:
                raise Wrong(f"CMake has no option {option}")


@pytest.mark.parametrize("block", all_blocks("sh"), ids=str)
def test_commands_exist(block: Block) -> None:
    for words in commands(block.code):
        try:
            check(words)
        except (Wrong, SystemExit) as error:
            raise AssertionError(f"{block}: {shlex.join(words)}: {error}") from error


@pytest.mark.parametrize(
    "line",
    [
        "make no_such_target",
        "scripts/dev.sh no_such_command",
        "scripts/dev.sh core python benchmarks/compare.py --no-such-option",
        "torchrun --nproc-per-node 2 examples/python/no_such_program.py",
        "torchrun --no-such-option train.py",
        "python -m trireme plan --no-such-option",
        "cmake -B build -DTRIREME_NO_SUCH=ON && true",
        "pip install -r scripts/no_such_file.txt",
    ],
)
def test_what_is_not_there_is_found(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((Wrong, SystemExit)):
        for words in commands(line):
            check(words)


def test_a_line_is_cut_into_its_commands() -> None:
    assert list(commands("A=1 make a b && c \\\n  d  # && e\n\nf\n")) == [
        ["A=1", "make", "a", "b"],
        ["c", "d"],
        ["f"],
    ]
