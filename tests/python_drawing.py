"""The drawing of python/trireme in docs/design.md: which of its packages import which at run time.

python tests/python_drawing.py    writes it

A line of it imports only what stands on lines below.
"""

import ast
import re
import textwrap
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path, PurePosixPath

from structure_rules import module_name, trireme_imports

BEGIN = "<!-- drawing: written by tests/python_drawing.py from python/trireme -->\n```text\n"
END = "```\n<!-- drawing end -->\n"
TOP = "trireme"  # its own __init__.py, which shows names of all others
BUILT = "trireme._build_info"  # is there only after an editable installation
PUBLIC = 3  # modules and packages that users import
LEVELS = {"_C": 0, "_core": 1, TOP: 4, "cli": 5, "integrations": 5, "__main__": 6}
WIDTH, NAMES = 120, 20
Edges = dict[str, set[str]]


def level(package: str) -> int:
    """An arrow points to a lower one; public modules may also import each other."""
    return LEVELS.get(package, 2 if package.startswith("_") else PUBLIC)


def modules_by_name(text: str) -> list[str]:
    """The modules that a file hands to import_module() now or later."""
    if "import_module(" not in text:
        return []
    words = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [word for word in words if isinstance(word, str) and re.match(r"trireme\.", word)]


def package_edges(texts: Mapping[str, str]) -> Edges:
    """What each package of Trireme imports at run time, of files given by the names of modules."""
    texts = {name: text for name, text in texts.items() if name != BUILT}
    packages = {name.split(".")[1] for name in texts if "." in name} | {"_C"}

    def package_of(name: str) -> str:
        first = name.split(".")[1] if "." in name else TOP
        return first if first in packages else TOP  # a name that __init__.py shows

    edges: Edges = {"_C": set()}
    for module, text in texts.items():
        here = package_of(module)
        by_name = [name for name in modules_by_name(text) if name in (*texts, "trireme._C")]
        names = [*trireme_imports(text, types=False), *by_name]
        edges.setdefault(here, set()).update({package_of(name) for name in names} - {here})
    return edges


def upward(edges: Edges) -> list[str]:
    """The arrows that point upwards, or from one package to another one beside it."""
    wrong = [
        f"{here} may not import {there} at run time"
        for here, targets in sorted(edges.items())
        for there in sorted(targets)
        if level(there) >= level(here) and not level(there) == level(here) == PUBLIC
    ]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        wrong.append(f"{' -> '.join(error.args[1])} is a circle")
    return wrong


def drawn(edges: Edges) -> str:
    """A line for those that import the same packages; who imports stands above who is imported."""
    # The number of arrows down to the ground, which orders public modules among themselves.
    heights: dict[str, int] = {}
    for package in TopologicalSorter(edges).static_order():
        heights[package] = 1 + max((heights[one] for one in edges[package]), default=0)

    def place(package: str) -> tuple[int, int, list[str]]:
        return -level(package), -heights[package], targets(package)

    def targets(package: str) -> list[str]:
        return sorted(edges[package], key=lambda one: (-level(one), one))

    lines: list[str] = []
    last = None
    for (of_level, _, below), names in groupby(sorted(sorted(edges), key=place), key=place):
        if last not in (None, of_level):
            lines.append("")
        last = of_level
        line = "  ".join(names)
        if below:
            line = f"{line:<{NAMES}}  ->  {'  '.join(below)}"
        indent = " " * (NAMES + 6)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def page_with(page: str, drawing: str) -> str:
    """The text of a page with that drawing in the place of the one that it has."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + drawing + END + tail


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    paths = sorted((root / "python" / "trireme").rglob("*.py"))
    names = {path: module_name(PurePosixPath(path.relative_to(root))) for path in paths}
    texts = {name: path.read_text("utf-8") for path, name in names.items()}
    page = root / "docs" / "design.md"
    page.write_text(page_with(page.read_text("utf-8"), drawn(package_edges(texts))), "utf-8")


if __name__ == "__main__":
    main()
