"""docs/errors.md has a row for each error text of csrc and python."""

from pathlib import Path

from error_texts import cpp_texts, python_texts, unexplained

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text()


def test_each_error_text_has_a_row() -> None:
    texts = []
    for folder, kinds, texts_of in (
        ("csrc", ("*.cpp", "*.h"), cpp_texts),
        ("python/trireme", ("*.py",), python_texts),
    ):
        for kind in kinds:
            for path in (ROOT / folder).rglob(kind):
                texts += [text for _, text in texts_of(path.read_text())]
    assert len(texts) > 500
    assert unexplained(PAGE, texts) == []


def test_a_text_without_a_row_is_noticed() -> None:
    code = 'error_text(kArea, "got a walk of " + name + " in the park", where, "Go home.");'
    (text,) = [text for _, text in cpp_texts(code)]
    assert unexplained(PAGE, [text]) == ['"got a walk of "<...>" in the park"']
    assert unexplained("| `got a walk of <ten> in the park` | a | b |", [text]) == []
    program = 'def f(name):\n    refuse("ps", f"got a walk of {name} in the park", "Go home.")\n'
    assert [text for _, text in python_texts(program)] != []
