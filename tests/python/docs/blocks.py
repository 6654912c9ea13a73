"""The code blocks of the pages, as tests run them.

A comment of HTML in front of a block says how, and the reader of the page does not see it:

    <!-- fragment -->             it cannot run by itself
    <!-- alone -->                in fresh ranks, which have no process group yet
    <!-- diff of python -->       (or cpp) the lines without a minus are a program
    <!-- before:
    code
    -->                           what runs, or is compiled, in front of it
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMES = ["README.md", "CONTRIBUTING.md", "csrc/README.md"]
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "cpp", "sh", "cmake", "diff", "text"}
FENCE = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*-->\n)*)^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # is that of its first line in the page
    language: str
    code: str
    before: str
    marks: frozenset[str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        language, code = match["language"], match["code"]
        before, marks = "", set()
        for mark in re.findall(r"<!--(.*?)-->", match["marks"], re.S):
            if mark.strip().startswith("before:"):
                before += textwrap.dedent(mark.split(":", 1)[1].strip("\n")) + "\n"
            else:
                marks.add(mark.split(":")[0].strip())
        for mark in [mark for mark in marks if mark.startswith("diff of ")]:
            language, code = mark.removeprefix("diff of "), side_of(code, "+")
            marks.add("diff")
        line = text.count("\n", 0, match.start("code")) + 1
        yield Block(page, line, language, code, before, frozenset(marks))


def side_of(diff: str, sign: str) -> str:
    """The lines of a diff that are before (-) or after it (+)."""
    return "".join(
        line[1:] if line[0] in f"{sign} " else "\n" if line == "\n" else ""
        for line in diff.splitlines(keepends=True)
    )


def all_blocks(*languages: str) -> list[Block]:
    found = [block for page in PAGES for block in blocks_of(_name(page), page.read_text())]
    return [
        block for block in found if block.language in languages and "fragment" not in block.marks
    ]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
