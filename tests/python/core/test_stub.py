"""The typed stub of the compiled module says what the module has.

pybind11 writes each function's signature into its docstring; the stub names the same parameters.
"""

import ast
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
import trireme
from trireme import _C

PACKAGE = Path(trireme.__file__).resolve().parent
STUBS = (PACKAGE / "_C.pyi", *PACKAGE.rglob("_c_*.pyi"))
# Made by pybind11 for every class or enumeration, and of no use to a reader.
UNSAID = {"_pybind11_conduit_v1_"}

Signature = list[tuple[str, bool]]


def parameters_of(function: ast.FunctionDef) -> Signature:
    """(name, has a default) per parameter, a keyword-only one with a star before its name."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    found = [(argument.arg, i >= without_default) for i, argument in enumerate(positional)]
    found += [
        (f"*{argument.arg}", default is not None)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found


def signature_of(documented: object) -> Signature:
    line = (getattr(documented, "__doc__", "") or "").splitlines()[0]
    function = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return parameters_of(function)


def _is_left_out(name: str) -> bool:
    """Python calls these itself."""
    return name.startswith("__") and name != "__init__"


def describe_module_class(owner: type) -> dict[str, object]:
    """Name -> Signature of a method, or what kind of attribute it is."""
    described: dict[str, object] = {}
    for name, value in vars(owner).items():
        if name in UNSAID or _is_left_out(name):
            continue
        if isinstance(value, staticmethod):
            value = value.__func__
        if isinstance(value, property):
            described[name] = "attribute" if value.fset else "property"
        elif isinstance(value, owner):
            described[name] = "constant"
        elif name != "__init__" or (value.__doc__ or "").startswith("__init__(self: "):
            described[name] = signature_of(value)
    return described


def describe_stub_class(owner: ast.ClassDef) -> dict[str, object]:
    described: dict[str, object] = {}
    for node in owner.body:
        if isinstance(node, ast.AnnAssign):
            is_constant = ast.unparse(node.annotation).startswith("ClassVar")
            described[ast.unparse(node.target)] = "constant" if is_constant else "attribute"
        elif isinstance(node, ast.FunctionDef) and not _is_left_out(node.name):
            is_property = any(
                ast.unparse(decorator) == "property" for decorator in node.decorator_list
            )
            described[node.name] = "property" if is_property else parameters_of(node)
    return described


def describe_module(module: ModuleType) -> dict[str, object]:
    described: dict[str, object] = {}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            described[name] = describe_module_class(value)
        else:
            described[name] = signature_of(value)
    return described


def describe_stub(text: str) -> dict[str, object]:
    described: dict[str, object] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            described[node.name] = describe_stub_class(node)
        elif isinstance(node, ast.FunctionDef):
            described[node.name] = parameters_of(node)
    return described


def text_of_stubs() -> str:
    return "\n".join(path.read_text() for path in STUBS)


def test_stub_and_module_have_the_same_names() -> None:
    assert sorted(describe_stub(text_of_stubs())) == sorted(describe_module(_C))


@pytest.mark.parametrize("name", sorted(describe_module(_C)))
def test_stub_and_module_have_the_same_signatures(name: str) -> None:
    stub = describe_stub(text_of_stubs())
    assert stub[name] == describe_module(_C)[name]


def test_a_missing_parameter_is_seen() -> None:
    text = text_of_stubs().replace("outputs: _Tensors, ", "")
    stub = describe_stub(text)
    assert stub["Ddp"] != describe_module(_C)["Ddp"]


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", trireme.__all__)
def test_annotations_are_found(name: str) -> None:
    """Some libraries look them up in every class that a user's class is made of."""
    shown = getattr(trireme, name)
    if getattr(shown, "__module__", "").startswith("trireme"):  # no module, and not torch's
        get_type_hints(shown)
