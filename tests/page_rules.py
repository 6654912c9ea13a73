"""Rules of the pages: how sentences open, where links lead, which languages code blocks have."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

LANGUAGES = {"python", "cpp", "sh", "cmake", "diff", "text"}
BEGIN = r"(?:^|(?<=[.!?:|] )|(?<=\*\* )|(?<=\* )|(?<=- ))"
# Pronouns; "That rank has ended." has a subject.
THAT = r"That(?=,|$| (?:is|was|has|had|does|holds|can|may|must|will|would|[a-z]+s|one|way)\b)"
OPENING = re.compile(rf"{BEGIN}(Of\b|{THAT}|The same\b)(?!-)")
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+)\)")
FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
SHAPE = re.compile(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[^\s]*)?$")

Rule = Callable[[Path, str], list[str]]


def blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def prose(text: str) -> str:
    """The text without code blocks and comments, its lines where they were."""
    without_code = FENCED.sub(blank, text)
    return re.sub(r"<!--.*?-->", blank, without_code, flags=re.S)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Sentences are not cut where a line ends."""
    first, lines = 0, list[str]()
    for number, line in enumerate([*prose(text).splitlines(), ""], 1):
        begins = re.match(r"\s*([*-] |\d+\. |[|#>])", line)
        if lines and (not line.strip() or begins):
            yield first, " ".join(lines)
            lines = []
        if line.strip():
            first = first if lines else number
            lines.append(line.strip().removeprefix("> "))
    assert not lines


def openings(page: Path, text: str) -> list[str]:
    return [
        f"{page}:{number}: a sentence opens with '{found[1]}'; give it a subject"
        for number, paragraph in paragraphs(text)
        for found in OPENING.finditer(paragraph)
    ]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.*)$", prose(text), re.M)}


def links(page: Path, text: str) -> list[str]:
    """Links inside lead to a file, and to a heading of it; those outside have the shape of one."""
    wrong = []
    shown = re.sub(r"`[^`]*`", "``", prose(text))
    for number, line in enumerate(shown.splitlines(), 1):
        for target in [*LINK.findall(line), *(path for _, path in PICTURE.findall(line))]:
            name, _, anchor = target.partition("#")
            leads = page.parent / name if name else page
            if ":" in target:
                if not SHAPE.match(target):
                    wrong.append(f"{page}:{number}: {target} is no https link")
            elif not leads.is_file():
                wrong.append(f"{page}:{number}: there is no {target}")
            elif anchor and anchor not in anchors(leads.read_text(encoding="utf-8")):
                wrong.append(f"{page}:{number}: {name or page.name} has no heading for #{anchor}")
    return wrong


def code_languages(page: Path, text: str) -> list[str]:
    fences = re.findall(r"^ *```(.*)$", text, re.M)[::2]
    return [
        f"{page}: a code block is '{fence}', expected one of {sorted(LANGUAGES)}"
        for fence in fences
        if fence not in LANGUAGES
    ]


def pictures_have_words(page: Path, text: str) -> list[str]:
    return [
        f"{page}: {path} has no text for those who do not see it"
        for words, path in PICTURE.findall(text)
        if len(words) < 10
    ]
