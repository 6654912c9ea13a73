"""Every Python block of the pages runs on two ranks."""

import re
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import trireme

from docs.blocks import PAGES, ROOT, Block, all_blocks, blocks_of, side_of
from docs.ranks import run_alone, run_blocks
from harness.ranks import RankFailed, run_ranks

BLOCKS = all_blocks("python")
ALONE = [block for block in BLOCKS if {"alone", "diff"} & block.marks]
BY_PAGE = groupby((block for block in BLOCKS if block not in ALONE), key=lambda block: block.page)
TOGETHER = {page: list(blocks) for page, blocks in BY_PAGE}


@pytest.mark.parametrize("page", TOGETHER)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    run_ranks(run_blocks, 2, str(tmp_path), TOGETHER[page], fresh=True)


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_programs_run(block: Block, tmp_path: Path) -> None:
    run_ranks(run_alone, 2, str(tmp_path), block, fresh=True)


def test_what_readme_starts_from_is_plain_torch(tmp_path: Path) -> None:
    """The lines before the diff run on one rank, and have no word of ours."""
    diffs = [
        block for block in blocks_of("README.md", PAGES[0].read_text()) if "diff" in block.marks
    ]
    texts = [
        match for match in (ROOT / "README.md").read_text().split("```") if match[:5] == "diff\n"
    ]
    befores = [
        replace(block, code=side_of(text.removeprefix("diff\n"), "-"))
        for block, text in zip(diffs, texts, strict=True)
        if block.language == "python"
    ]
    assert len(befores) == 2
    for before in befores:
        assert "trireme" not in before.code
        run_ranks(run_alone, 1, str(tmp_path), before, fresh=True)


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    (broken,) = blocks_of("docs/x.md", "text\n\n<!-- before:\nx = 1\n-->\n```python\nx + y\n```\n")
    assert (broken.line, broken.before, broken.code) == (7, "x = 1\n", "x + y\n")
    with pytest.raises(RankFailed, match=r"the block at docs/x\.md:7 failed: NameError"):
        run_ranks(run_blocks, 1, str(tmp_path), [broken], fresh=True)


def test_marks_are_read() -> None:
    text = "<!-- diff of cpp -->\n```diff\n a\n-b\n+c\n\n```\n\n"
    text += "<!-- fragment: why -->\n```sh\nd\n```\n"
    diff, fragment = blocks_of("x.md", text)
    assert (diff.language, diff.code, diff.marks) == ("cpp", "a\nc\n\n", {"diff of cpp", "diff"})
    assert (fragment.language, fragment.marks) == ("sh", {"fragment"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_module_exist(page: Path) -> None:
    """What pages call trireme.<name> can be imported; file names and ranges are something else."""
    text = re.sub(r"[\w.]*\"?trireme\.h|trireme::\S+|lib\w*trireme\S*", "", page.read_text())
    for name in sorted(set(re.findall(r"(?<![\w./])trireme\.([A-Za-z_]\w*)", text))):
        assert hasattr(trireme, name) or find_spec(f"trireme.{name}"), f"no trireme.{name}"
