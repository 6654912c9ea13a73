"""The text that the GPT learns: Python's standard library, or any file."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from measure.bad_input import BadInput

LIMIT_BYTES = 8 * 2**20
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """`title` says where the bytes come from."""

    title: str
    text: bytes


def read_corpus(text_file: str | None) -> Corpus:
    """The bytes of `text_file`, or this interpreter's standard library, sources sorted by path.

    At most 8 MiB are taken. Raises BadInput if the file cannot be read.
    """
    if text_file is None:
        return _standard_library()
    try:
        with open(text_file, "rb") as file:
            return Corpus(text_file, file.read(LIMIT_BYTES))
    except OSError as error:
        raise BadInput(
            "compare",
            f"got --text {text_file!r} ({error.strerror}), expected a readable file",
            "Check the path, or leave --text out to train on Python's standard library.",
        ) from error


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    text = bytearray()
    for source in sources:
        text += source.read_bytes()
        if len(text) >= LIMIT_BYTES:
            break
    return Corpus("sources of Python's standard library", bytes(text[:LIMIT_BYTES]))
