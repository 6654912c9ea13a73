"""The rules that a reader of one file cannot see. Needs neither compiler nor torch.

The made-up snippets of structure_snippets.py prove that each rule bites.
"""

import re
import subprocess
import sys
from pathlib import PurePosixPath

import pytest
from python_drawing import drawn, package_edges, page_with, upward
from structure_rules import (
    ROOT,
    TORCH_HEADER,
    Rule,
    class_bodies,
    class_size,
    comm_edges,
    comment_openings,
    conditional_compilation,
    core_sources,
    cpp_functions,
    cpp_hygiene,
    declared_classes,
    foreign_headers,
    foreign_members,
    import_circle,
    imports_of_tests,
    include_circle,
    includes,
    layer_edges,
    module_name,
    pure_values,
    python_functions,
    python_rooms,
    refused_names,
    sources,
    twice_defined,
    unsafe_python,
)
from structure_snippets import SNIPPETS, TWINS

CPP_RULES: list[Rule] = [
    layer_edges, comm_edges, foreign_headers, conditional_compilation, cpp_hygiene,
    comment_openings, refused_names, pure_values,
]  # fmt: skip


def complaints(rules: list[Rule], *patterns: str) -> list[str]:
    return [
        line for path, text in sources(*patterns) for rule in rules for line in rule(path, text)
    ]


@pytest.mark.parametrize("rule", CPP_RULES, ids=lambda rule: rule.__name__)
def test_csrc(rule: Rule) -> None:
    assert [line for path, text in core_sources() for line in rule(path, text)] == []


def test_names_of_python_files() -> None:
    patterns = ("python/trireme/**/*.py", "benchmarks/**/*.py", "examples/**/*.py")
    assert complaints([refused_names], *patterns) == []


def test_package_turns_no_data_into_code() -> None:
    assert complaints([unsafe_python], "python/trireme/**/*.py") == []


def test_python_rooms_import_only_what_is_below_them() -> None:
    assert complaints([python_rooms], "python/trireme/**/*.py") == []


def test_no_file_imports_a_test_file() -> None:
    assert complaints([imports_of_tests], "tests/**/*.py") == []


def python_modules() -> dict[str, str]:
    return {module_name(path): text for path, text in sources("python/trireme/**/*.py")}


def test_python_modules_import_each_other_in_no_circle() -> None:
    assert import_circle({"trireme._C": "", **python_modules()}) == []


def test_the_drawing_of_python_packages_is_current() -> None:
    """And no arrow in it points upwards. tests/python_drawing.py writes it anew."""
    edges = package_edges(python_modules())
    assert upward(edges) == []
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert page_with(page, drawn(edges)) == page, "run: python tests/python_drawing.py"


# Exceptions; the aim is to have none.
SPLIT_CLASSES = {
    "ShmBackend": "verbs, memory and hooks of c10d::Backend, a file each",
    "Collectives": "what moves data, and what reduces it",
    "HostGroup": "what happens to a group when a rank fails",
    "Mailbox": "what happens to messages when a rank fails",
    "ModuleRounds": "its steps, and its part of a checkpoint",
    "MultiHostCollectives": "memory, moves and reductions over hosts, a file each",
    "PipelineEngine": "what there is around the actions of a step, and the actions",
    "Zero": "its step, its writing, its samples and its fused optimizer, a file each",
}


def test_a_source_defines_the_classes_of_its_header() -> None:
    known = {path: text for path, text in core_sources() if path.suffix == ".h"}
    declared = {name for text in known.values() for name in declared_classes(text)}
    found = {
        name
        for path, text in core_sources()
        if path.suffix == ".cpp"
        for name in foreign_members(text, known.get(path.with_suffix(".h"), ""), declared)
    }
    assert found == set(SPLIT_CLASSES)


@pytest.mark.parametrize("room", ["csrc/comm/*", "csrc/strategies/pipeline/**/*"])
def test_files_of_a_room_include_each_other_in_no_circle(room: str) -> None:
    assert include_circle(dict(sources(f"{room}.h", f"{room}.cpp"))) == []


def test_no_two_headers_define_one_class() -> None:
    assert twice_defined(dict(sources("csrc/**/*.h"))) == []


def test_class_rules_bite() -> None:
    small = "class TRIREME_API A final : public B {\n public:\n  void f() { g(1); }\n  A(int x);\n"
    small += " private:\n  void g(int);\n  int x_ = f();\n  std::map<int, int> y_{};\n};\n"
    assert class_size(class_bodies(small)["A"]) == (2, 2)
    struct = "struct C {\n  int x = 1;  // a; b\n  bool operator==(const C&) const = default;\n};\n"
    assert class_size(class_bodies(struct)["C"]) == (1, 1)
    source = "namespace t {\n\nint A::f(int x) const {\n  return B::g();\n}\n\n}  // namespace t\n"
    assert foreign_members(source, "", {"A", "B"}) == ["A"]
    assert foreign_members(source, small, {"A", "B"}) == []


def test_the_map_of_the_core_is_true() -> None:
    """csrc/README.md names one file for each X, and what to look for in it."""
    row = re.compile(r"^\| [^|]+ \| `([^`|]+)` \| `([^`|]+)` \|$", re.MULTILINE)
    text = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    found = row.findall(text[text.index("## Where does X happen") :])
    assert len(found) > 50
    wrong = []
    for name, symbol in found:
        path = ROOT / name if name.startswith("python/") else ROOT / "csrc" / name
        if not path.is_file() or symbol not in path.read_text(encoding="utf-8"):
            wrong.append(f"{name} has no {symbol}")
    assert wrong == []


def test_functions_are_measured() -> None:
    cpp = "struct A {\n  int x;\n};\n\nvoid A::f(\n    int x) {\n  x;\n}\n"
    assert cpp_functions(cpp) == [(3, 5, "A::f")]
    assert python_functions('x = 1\ndef f():\n    """A\n    b."""\n    y = 1\n') == [(1, 2, "f")]


def test_counts_are_printed() -> None:
    command = [sys.executable, "-m", "tests.structure_rules"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.search(r"^ *\d+  +\d+  csrc/grad$", shown, re.MULTILINE), shown


def test_every_included_file_exists() -> None:
    generated = {"csrc/common/version.h"}
    tests = sources("tests/cpp/**/*.h", "tests/cpp/**/*.cpp", "examples/cpp/*.cpp")
    missing = [
        f"{path}: <{name[1:]}>"
        for path, text in [*core_sources(), *tests]
        for name in includes(text)
        if name.startswith("<trireme/")
        and (target := name[1:].replace("trireme/", "csrc/", 1)) not in generated
        and not (ROOT / target).is_file()
    ]
    assert missing == []


def test_every_source_is_built() -> None:
    lists = [ROOT / "csrc" / "CMakeLists.txt", ROOT / "csrc" / "bindings" / "CMakeLists.txt"]
    words = set(" ".join(path.read_text() for path in lists).replace(")", " ").split())
    unlisted = [
        path.as_posix()
        for path, _ in sources("csrc/*/**/*.cpp", "csrc/*/**/*.cu")
        if path.as_posix().removeprefix("csrc/").removeprefix("bindings/") not in words
    ]
    assert unlisted == []


def test_shm_reaches_no_torch_header_through_common() -> None:
    texts = {path.as_posix(): text for path, text in core_sources()}
    todo = [path for path in texts if path.startswith("csrc/shm/")]
    reached = set(todo)
    while todo:
        for name in includes(texts.get(todo.pop(), "")):
            target = name[1:].replace("trireme/", "csrc/", 1)
            if name.startswith("<trireme/") and target not in reached:
                reached.add(target)
                todo.append(target)
    with_torch = [
        path
        for path in sorted(reached)
        if any(TORCH_HEADER.match(name[1:]) for name in includes(texts.get(path, "")))
    ]
    assert with_torch == []


PLACE = re.compile(
    r"^// \w+ path (\d)/(\d)\. In: (\w+).*?\sOut: (?:\(comm\), )?(\w+)", re.MULTILINE
)


@pytest.mark.parametrize("folder", ["grad", "param"])
def test_headers_of_a_path_name_their_neighbours(folder: str) -> None:
    places: dict[str, tuple[str, str, str, str]] = {}
    for path, text in sources(f"csrc/{folder}/*.h"):
        if " path " not in "".join(text.splitlines(keepends=True)[:4]):
            continue
        match = PLACE.search(text)
        assert match, f"{path}: the place reads '// Gradient path 2/5. In: x.h  Out: y.h'"
        number, total, before, after = match.groups()
        assert number not in places, f"{path}: {places[number][0]} has place {number}"
        places[number] = (path.stem, total, before, after)
    assert len({total for _, total, _, _ in places.values()}) <= 1, f"{folder}: of how many?"
    for number, (stem, _, _, after) in places.items():
        following = places.get(str(int(number) + 1))
        assert not following or (after, following[2]) == (following[0], stem)


def test_trace_names_are_stage_names() -> None:
    stages = {path.stem for path, _ in sources("csrc/grad/*.h", "csrc/param/*.h")}
    wrong = [
        f'{path}: "{name}"'
        for path, text in sources("csrc/grad/*.cpp", "csrc/param/*.cpp")
        for name in re.findall(r'TRIREME_TRACE\("([^"]+)"', text)
        if name.split(".")[0] not in stages
    ]
    assert wrong == []


@pytest.mark.parametrize(("rule", "path", "text", "bites"), SNIPPETS)
def test_the_rules_bite(rule: Rule, path: str, text: str, bites: bool) -> None:
    assert bool(rule(PurePosixPath(path), text)) == bites


def test_an_import_of_a_test_file_is_named_with_its_line() -> None:
    text = "import os\n\nfrom ddp.ranks import sgd\nfrom ddp.test_join import inputs\n"
    assert imports_of_tests(PurePosixPath("tests/python/zero/test_join.py"), text) == [
        "tests/python/zero/test_join.py:4: imports the test file ddp.test_join; what several files "
        "need lies in a module of its room, or in tests/python/harness"
    ]


@pytest.mark.parametrize(
    ("text", "bites"),
    [
        ("from trireme import b", True),
        ("def f():\n  from trireme.b import x", True),
        ("if TYPE_CHECKING:\n  from trireme.b import x", False),
    ],
)
def test_a_circle_is_found(text: str, bites: bool) -> None:
    texts = {"trireme.a": text, "trireme.b": "import trireme.a"}
    assert bool(import_circle(texts)) == bites


def test_a_circle_of_includes_is_found() -> None:
    there = "#include <trireme/comm/b.h>\n"
    back = "#include <trireme/comm/a.h>\n"
    texts = {PurePosixPath("csrc/comm/a.cpp"): there, PurePosixPath("csrc/comm/b.h"): ""}
    assert include_circle(texts) == []
    assert include_circle(texts | {PurePosixPath("csrc/comm/b.cpp"): back}) != []


@pytest.mark.parametrize(("one", "other", "bites"), TWINS)
def test_a_class_that_two_headers_define_is_found(one: str, other: str, bites: bool) -> None:
    headers = {PurePosixPath("csrc/grad/a.h"): one, PurePosixPath("csrc/param/a.h"): other}
    assert bool(twice_defined(headers)) == bites


def test_a_class_defined_twice_is_named_with_both_places() -> None:
    one = "#pragma once\n\nnamespace trireme {\n\nclass TRIREME_API Row {};\n\n}\n"
    other = "namespace trireme {\n// Rows.\ntemplate <class T>\nstruct Row final : T {\n};\n}\n"
    headers = {PurePosixPath("csrc/grad/a.h"): one, PurePosixPath("csrc/param/b.h"): other}
    assert twice_defined(headers) == [
        "csrc/param/b.h:4: defines trireme::Row, as csrc/grad/a.h:5 does; rename one"
    ]
