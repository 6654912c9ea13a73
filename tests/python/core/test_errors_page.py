"""docs/errors.md explains each text of the sources, quotes no other, and has all areas."""

import re
from pathlib import Path

from core.error_texts import cpp_texts, python_texts, unexplained

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def sources(folder: str, *kinds: str) -> list[str]:
    paths = [path for kind in kinds for path in sorted((ROOT / folder).rglob(kind))]
    return [path.read_text(encoding="utf-8") for path in paths]


CPP_SOURCES = sources("csrc", "*.cpp", "*.h")
PYTHON_SOURCES = sources("python/trireme", "*.py")
SOURCES = CPP_SOURCES + PYTHON_SOURCES
# Literals that a line break cuts in two are one text.
JOINED = [re.sub(r'"\s*\n\s*f?"', "", text).replace('\\"', '"') for text in SOURCES]
QUOTED = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)


def parts_of(quoted: str) -> list[str]:
    """What stands between placeholders."""
    return [part.strip(" '().") for part in re.split(r"<[^>]*>", quoted) if len(part.strip()) > 3]


def is_in_sources(part: str) -> bool:
    for place, text in enumerate(JOINED):
        if part in text:
            JOINED.insert(0, JOINED.pop(place))  # what stands near it on the page is there, too
            return True
    return False


def test_the_page_is_not_empty() -> None:
    assert len(QUOTED) > 900


def test_quoted_texts_exist() -> None:
    lacking = {
        text: [part for part in parts_of(text) if not is_in_sources(part)] for text in QUOTED
    }
    assert {text: parts for text, parts in lacking.items() if parts or not parts_of(text)} == {}


def test_a_made_up_text_is_noticed() -> None:
    assert not is_in_sources("has gone for a walk in the park")


def test_each_text_of_the_sources_has_a_row() -> None:
    texts = [text for code in CPP_SOURCES for text in cpp_texts(code)]
    texts += [text for code in PYTHON_SOURCES for text in python_texts(code)]
    assert len(texts) > 500
    assert unexplained(PAGE, texts) == []


def test_a_text_without_a_row_is_noticed() -> None:
    (text,) = cpp_texts('error_text(kArea, "got a walk of " + name + " in the park", where, "");')
    assert unexplained(PAGE, [text]) == ['"got a walk of "<...>" in the park"']
    assert unexplained("| `got a walk of <ten> in the park` | a | b |", [text]) == []
    program = 'def f(name):\n    refuse(f"got a walk of {name} in the park", "Go home.")\n'
    assert unexplained(PAGE, python_texts(program)) != []


def test_every_area_has_a_section() -> None:
    headings = "\n".join(re.findall(r"^## .*$", PAGE, re.MULTILINE))
    patterns = (r'error_text\(\s*"(\w+)"', r'k\w*Area\w* = "(\w+)"', r'Area\("(\w+)"\)')
    areas = {area for text in SOURCES for pattern in patterns for area in re.findall(pattern, text)}
    assert len(areas) > 25
    assert sorted(area for area in areas if f"`{area}`" not in headings) == []
