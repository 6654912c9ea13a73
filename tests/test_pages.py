"""The pages keep their rules. Needs no torch: python -m pytest tests/test_pages.py"""

from pathlib import Path

import pytest
from page_rules import Rule, code_languages, links, openings, pictures_have_words, slug

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "csrc/README.md"]
PAGES += [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
MAX_README_LINES = 140


@pytest.mark.parametrize("rule", [openings, links, code_languages, pictures_have_words])
def test_pages_keep_the_rule(rule: Rule) -> None:
    pages = [ROOT / name for name in PAGES]
    assert [line for page in pages for line in rule(page, page.read_text("utf-8"))] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MAX_README_LINES


def test_the_site_has_all_pages() -> None:
    listed = (ROOT / "docs" / "site" / "index.md").read_text("utf-8").splitlines()
    assert [name for name in PAGES if name != "README.md" and name[:-3] not in listed] == []


@pytest.mark.parametrize(
    ("rule", "text", "bites"),
    [
        (openings, "Of the ring, in bytes.", True),
        (openings, "It is long. That\nmakes it slow.", True),
        (openings, "* **A word.** The same holds.", True),
        (openings, "That rank has ended.", False),
        (openings, "| a | That is so |\n", True),
        (openings, "Often it is. The saved one, that of the ring.\n```text\nOf it\n```", False),
        (links, "[a](no_such_page.md)", True),
        (links, "[a](docs/fsdp.md#no-such-heading)", True),
        (links, "[a](http://example.org)", True),
        (links, "[a](docs/fsdp.md#gathered-parameters) [b](https://example.org/x#y)", False),
        (links, "`[]` and [x](#here)\n# Here", False),
        (code_languages, "```\nx\n```", True),
        (code_languages, "```sh\nx\n```\n\n```text\ny\n```", False),
        (pictures_have_words, "![](x.svg)", True),
    ],
)
def test_the_rules_bite(tmp_path: Path, rule: Rule, text: str, bites: bool) -> None:
    page = ROOT / "README.md"
    if "#here" in text:
        page = tmp_path / "page.md"
        page.write_text(text)
    assert bool(rule(page, text)) == bites


def test_slugs_are_those_of_github() -> None:
    assert slug("Deposit and collect: what DDP does with it") == (
        "deposit-and-collect-what-ddp-does-with-it"
    )
    assert slug("torch's FSDP2 (`fully_shard`)") == "torchs-fsdp2-fully_shard"
