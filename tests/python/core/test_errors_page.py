"""docs/errors.md quotes texts that the sources have, and has a place for each area."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SOURCES = [
    path.read_text(encoding="utf-8")
    for folder, kinds in (("csrc", ("*.cpp", "*.h")), ("python/trireme", ("*.py",)))
    for kind in kinds
    for path in sorted((ROOT / folder).rglob(kind))
]
# Literals that a line break cuts in two are one text.
JOINED = [re.sub(r'"\s*\n\s*f?"', "", text).replace('\\"', '"') for text in SOURCES]
QUOTED = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", PAGE, re.MULTILINE)


def parts_of(quoted: str) -> list[str]:
    """What stands between placeholders."""
    return [part.strip(" '().") for part in re.split(r"<[^>]*>", quoted) if len(part.strip()) > 3]


def is_in_sources(part: str, literals: int = 3) -> bool:
    """As one literal, or as a few that the code puts together, of two words or more each."""
    if any(part in text for text in JOINED):
        return True
    words = part.split(" ")
    cuts = range(len(words) - 1, 0, -1) if literals > 1 else ()
    return any(
        is_in_sources(" ".join(words[:cut]), literals=1)
        and is_in_sources(" ".join(words[cut:]), literals - 1)
        for cut in cuts
        if 1 < cut < len(words) - 1 or words[:cut] == ["got"]
    )


def test_the_page_is_not_empty() -> None:
    assert len(QUOTED) > 60


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_text_exists(quoted: str) -> None:
    parts = parts_of(quoted)
    assert parts, quoted
    assert [part for part in parts if not is_in_sources(part)] == []


def test_a_made_up_text_is_noticed() -> None:
    assert not is_in_sources("has gone for a walk in the park")


def test_every_area_has_a_section() -> None:
    headings = "\n".join(re.findall(r"^## .*$", PAGE, re.MULTILINE))
    patterns = (r'error_text\(\s*"(\w+)"', r'k\w*Area\w* = "(\w+)"', r'Area\("(\w+)"\)')
    areas = {area for text in SOURCES for pattern in patterns for area in re.findall(pattern, text)}
    assert len(areas) > 25
    assert sorted(area for area in areas if f"`{area}`" not in headings) == []
