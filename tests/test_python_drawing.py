"""Arrows upwards are found. Whether Trireme has any, test_structure.py says."""

import pytest
from python_drawing import drawn, package_edges, upward

BELOW = {
    "trireme": "",
    "trireme._core": "from trireme import _C",
    "trireme._zero": "",
    "trireme.zero": "",
}


@pytest.mark.parametrize(
    ("module", "text", "bites"),
    [
        ("trireme._ddp.a", "from trireme import zero", True),
        ("trireme._ddp.a", "def f():\n  from trireme._zero import x", True),
        ("trireme._ddp.a", "from trireme import DistributedDataParallel", True),
        ("trireme._core.a", 'import_module("trireme.zero")', True),
        ("trireme.zero.a", "import trireme", True),
        ("trireme._ddp.a", "if TYPE_CHECKING:\n  from trireme import zero", False),
        ("trireme._ddp.a", "from trireme import _C\nfrom trireme._core import x", False),
        ("trireme._core.a", 'import_module("trireme._build_info")', False),
        ("trireme.ddp", "from trireme import zero", False),
        ("trireme.zero.a", "import trireme._zero.x", False),
        ("trireme", 'X = {"trireme.zero": "y"}\nimport_module(z)', False),
    ],
)
def test_an_arrow_upwards_is_found(module: str, text: str, bites: bool) -> None:
    assert bool(upward(package_edges({**BELOW, module: text}))) == bites


def test_a_circle_of_public_packages_is_found() -> None:
    texts = {"trireme.a": "import trireme.b.x", "trireme.b": "", "trireme.b.y": "import trireme.a"}
    assert upward(package_edges(texts)) == ["a -> b -> a is a circle"]


def test_who_imports_stands_above() -> None:
    texts = {**BELOW, "trireme.a": "import trireme.zero", "trireme.zero": "import trireme._zero"}
    lines = drawn(package_edges(texts)).splitlines()
    expected = [
        "trireme",
        "",
        "a -> zero",
        "zero -> _zero",
        "",
        "_zero",
        "",
        "_core -> _C",
        "",
        "_C",
    ]
    assert [" ".join(line.split()) for line in lines] == expected
