"""Finds the error texts of csrc and python, and asks that docs/errors.md explains each.

A text is a list of its literals; what stands between them differs from case to case. A row of the
page, whose `<...>` differ likewise, explains it if all words of the row are in the text, or the
longest literal of the text is in the row.
"""

import ast
import re
from collections.abc import Iterable, Iterator

ENOUGH_WORDS = 5  # so many in a row tell a text from the others
FEWEST_WORDS = 3  # texts of fewer are put together of others, or of names
QUOTED = r'"(?:[^"\\\n]|\\.)*"'
COMMENT = re.compile(rf"({QUOTED}|'(?:[^'\\\n]|\\.)')|//[^\n]*|/\*.*?\*/", re.S)
TOKEN = re.compile(rf"{QUOTED}|'(?:[^'\\\n]|\\.)'|.", re.S)
STATEMENT = re.compile(rf"(?:{QUOTED}|[^;{{}}\"])+")
# error_text() has its text behind the area, these as the first argument that has words.
REFUSAL = re.compile(
    r"\b(error_text|refuse\w*|fail|complain|check_[a-z]+|checks_\.expect|expect_no_key)\("
)
PYTHON_REFUSAL = re.compile(r"_?refuse\w*|error_text|warn")
OPENING = re.compile(r"got |cannot |.*, expected ", re.S)
# A row that says "got a message" explains what all of these say.
PIECES = {"refuse_bytes", "refuse_message"}
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}

Texts = Iterator[list[str]]


def words(text: str) -> list[str]:
    return re.findall(r"[\w./=-]*\w", text.replace('\\"', '"').replace("\\n", " ").lower())


def literals(code: str) -> list[str]:
    """The compiler joins neighbours."""
    return re.findall(rf"(?<!')({QUOTED})", re.sub(r'(?<!\\)"\s+"', "", code))


def arguments(code: str, bracket: int) -> tuple[list[str], int]:
    """The arguments of the call whose bracket opens there, and where it closes."""
    found, depth, at = [""], 0, bracket
    while token := TOKEN.match(code, at):
        at = token.end()
        depth += BRACKETS.get(token[0], 0)
        if depth == 0:
            break
        if depth == 1 and token[0] == ",":
            found.append("")
        else:
            found[-1] += token[0]
    return found, at


def cpp_texts(code: str) -> Texts:
    code = COMMENT.sub(lambda found: found[1] or "", code)
    rest = code
    for call in REFUSAL.finditer(code):
        given, end = arguments(code, call.end() - 1)
        if call[1] in PIECES:
            continue
        if call[1] == "error_text":
            given = given[1:2]
        elif "error_text(" in given[0]:
            continue
        texts = [literals(argument) for argument in (given[:-1] or given)]
        said = [text for text in texts if any(" " in part for part in text)]
        yield said[0] if said else []
        rest = rest[: call.end()] + " " * (end - call.end()) + rest[end:]
    for found in STATEMENT.finditer(rest):
        text = literals(found[0])
        if any(OPENING.match(part[1:]) for part in text):
            yield text


def python_text(node: ast.AST) -> list[str]:
    """The literals of an expression, formatted texts opened."""
    return [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def python_texts(code: str) -> Texts:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if PYTHON_REFUSAL.fullmatch(name) and len(node.args) > 1:
                yield python_text(node.args[name == "error_text"])
        elif isinstance(node, ast.Assign | ast.Return | ast.AugAssign) and node.value:
            text = python_text(node.value)
            if any(OPENING.match(part) for part in text):
                yield text


def rows(page: str) -> list[str]:
    """The first cells of its tables."""
    return re.findall(r"^\| (`.*?`) \|", page, re.M)


def in_words(text: str) -> str:
    return f" {' '.join(word for word in words(text) if word != 'got')} "


class Text:
    def __init__(self, literals: list[str]) -> None:
        sizes = [len(words(part)) for part in literals]
        self.all = " ...".join(in_words(part) for part in literals)
        self.size = sum(sizes)
        self.longest_size = max(sizes, default=0)
        self.longest = in_words(literals[sizes.index(self.longest_size)] if literals else "")


class Row:
    def __init__(self, row: str) -> None:
        self.plain = in_words(re.sub("[<>]", " ", row))
        parts = [in_words(part) for part in re.split(r"<[^<>]*>", row)]
        self.longest = max(parts, key=lambda part: len(part.split()))
        self.telling = len(self.longest.split())
        self.words = len(words(re.sub(r"<[^<>]*>", " ", row)))
        self.pattern = re.compile(
            ".*".join(re.escape(part[:-1]) + "(?= )" for part in parts if part.strip())
        )

    def explains(self, text: Text) -> bool:
        """Its words are in the text, and are most of it; or it has the longest literal."""
        is_most = FEWEST_WORDS <= self.words >= text.size * 2 / 3
        is_telling = self.telling >= ENOUGH_WORDS or is_most
        if is_telling and self.longest[:-1] in text.all and self.pattern.search(text.all):
            return True
        return text.longest_size >= FEWEST_WORDS and text.longest in self.plain


def unexplained(page: str, texts: Iterable[list[str]]) -> list[str]:
    """Those of the texts that no row of the page explains."""
    known = [Row(row) for row in rows(page)]
    return [
        "<...>".join(literals)
        for literals in texts
        if (text := Text(literals)).size >= FEWEST_WORDS
        and not any(row.explains(text) for row in known)
    ]
