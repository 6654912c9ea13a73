"""docs/pipeline.md shows what its programs print."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "pipeline.md"
PRINTED = re.compile(r"```python\n([^`]*)```\n\n```text\n([^`]*)```")


def test_the_page_shows_what_is_printed() -> None:
    words: dict[str, object] = {}
    blocks = PRINTED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 12
    for program, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, words)
        assert shown == printed.getvalue().rstrip("\n") + "\n", program
