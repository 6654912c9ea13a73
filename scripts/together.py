"""Writes docs/together.md from the table of tests/python/contract/pairs.py. Needs no torch.

python scripts/together.py          rewrite the page
python scripts/together.py --check  exit 1 if the page is not what the table says
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "python"))

from contract.pairs import CELLS, COLUMNS, NoPair, Refused, Right, cell_of, grid  # noqa: E402

PAGE = ROOT / "docs" / "together.md"
IN_CPP = ROOT / "tests" / "cpp" / "strategies"

HEAD = """\
# What goes with what

<!-- written by scripts/together.py from tests/python/contract/pairs.py -->

The rows are what a model, a loss or a program brings. The columns are what runs it. A cell says
whether both go together:

* **yes**: outputs, losses, parameters after some steps, and what is saved equal those of one
  process on whole batches. A number leads to what a program has to do for it.
* **no**: an error names the pair, when it is made or at its first use, on all ranks that take part.
  Its number leads to the text, and to what you can do instead. The group of the ranks works on.
* **-**: the pair has no meaning. Its number leads to the reason.

A test trains every cell for three steps. Sums may differ in the order of their terms. Another one,
`tests/cpp/strategies/pairs_test.cpp`, does so for C++ programs, where C++ has both parts: {in_cpp}.

"""

WORDS = {Right: "yes", Refused: "no", NoPair: "-"}


def page() -> str:
    """Returns the whole page."""
    cells = grid()
    order = list(dict.fromkeys(name for name in cells.values() if name != "+"))
    numbers = {name: number for number, name in enumerate(order, 1)}
    return "\n".join([HEAD.format(in_cpp=in_cpp()) + table(numbers), *notes(numbers)])


def in_cpp() -> str:
    """Returns how large the table of C++ programs is."""
    rows = entries("pair_rows.h", "kRows{")
    columns = entries("pairs_test.cpp", "kColumns{")
    return f"{rows} rows, {columns} columns, {entries('pairs_test.cpp', 'kRefused{')} cells refused"


def entries(file: str, begin: str) -> int:
    """Returns how many entries a list of the C++ table has, of which each begins a line."""
    text = (IN_CPP / file).read_text("utf-8").partition(begin)[2].partition(";\n\n")[0]
    return len(re.findall(r"^    \{(?=[\"{])", text, re.MULTILINE))


def table(numbers: dict[str, int]) -> str:
    heads = [f"[{column}]({where})" for column, where in COLUMNS.items()]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in dict.fromkeys(row for row, _ in grid()):
        said = [shown(row, column, numbers) for column in COLUMNS]
        lines.append(f"| {row} | {' | '.join(said)} |")
    return "\n".join(lines)


def shown(row: str, column: str, numbers: dict[str, int]) -> str:
    word, name = WORDS[type(cell_of(row, column))], grid()[row, column]
    return word if name == "+" else f"{word} ({numbers[name]})"


def notes(numbers: dict[str, int]) -> list[str]:
    """The numbers, by what they lead to."""
    lines = ["", "## What a program has to do", "", "| | |", "|---|---|"]
    for name, number in numbers.items():
        if isinstance(cell := CELLS[name], Right):
            lines.append(f"| {number} | {cell.how} |")
    lines += ["", "## What is refused", "", "| | the error says | instead |", "|---|---|---|"]
    for name, number in numbers.items():
        if isinstance(cell := CELLS[name], Refused):
            lines.append(f"| {number} | `{cell.text}` | {cell.instead} |")
    lines += ["", "## What has no meaning", "", "| | |", "|---|---|"]
    for name, number in numbers.items():
        if isinstance(cell := CELLS[name], NoPair):
            lines.append(f"| {number} | {cell.why} |")
    return [*lines, ""]


def main() -> int:
    """Returns the exit code."""
    if "--check" in sys.argv:
        is_current = PAGE.exists() and PAGE.read_text("utf-8") == page()
        if not is_current:
            print(f"{PAGE.name} is not what the table says: python scripts/together.py")
        return int(not is_current)
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
