"""The rules that a reader of one file cannot see. Needs neither compiler nor torch.

The made-up snippets of structure_snippets.py prove that each rule bites.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from python_drawing import drawn, package_edges, page_with, upward
from structure_rules import (
    MAX_FLAT_TESTS,
    MAX_MEMBERS,
    MAX_PAIRS,
    MAX_PUBLIC_FUNCTIONS,
    MAX_TOP_FILES,
    TORCH_HEADER,
    Rule,
    class_bodies,
    class_size,
    comm_edges,
    comment_openings,
    conditional_compilation,
    cpp_function_length,
    cpp_hygiene,
    crowded,
    declared_classes,
    file_length,
    foreign_headers,
    foreign_members,
    import_circle,
    imports_of_tests,
    includes,
    layer_edges,
    module_name,
    pure_values,
    python_function_length,
    python_rooms,
    refused_names,
    twice_defined,
    unsafe_python,
)
from structure_snippets import SNIPPETS, TWINS

ROOT = Path(__file__).resolve().parent.parent

CPP_RULES: list[Rule] = [
    layer_edges, comm_edges, foreign_headers, conditional_compilation, cpp_hygiene,
    comment_openings, cpp_function_length, refused_names, pure_values,
]  # fmt: skip
PYTHON_RULES: list[Rule] = [python_function_length, refused_names]


def sources(*patterns: str) -> Iterator[tuple[PurePosixPath, str]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            where = PurePosixPath(path.relative_to(ROOT).as_posix())
            # An editable installation puts headers and libraries beside the Python sources.
            if path.is_file() and where.parts[:3] not in (
                ("python", "trireme", "include"),
                ("python", "trireme", "lib"),
            ):
                yield where, path.read_text(encoding="utf-8")


def complaints(rules: list[Rule], *patterns: str) -> list[str]:
    return [
        line for path, text in sources(*patterns) for rule in rules for line in rule(path, text)
    ]


CSRC = ("csrc/*/**/*.h", "csrc/*/**/*.cpp", "csrc/*/**/*.cu")


def core_sources() -> list[tuple[PurePosixPath, str]]:
    """csrc without the declarations that stand in for Gloo's headers: those follow Gloo's names."""
    return [(path, text) for path, text in sources(*CSRC) if "gloo_shim" not in path.parts]


@pytest.mark.parametrize("rule", CPP_RULES, ids=lambda rule: rule.__name__)
def test_csrc(rule: Rule) -> None:
    assert [line for path, text in core_sources() for line in rule(path, text)] == []


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python(rule: Rule) -> None:
    patterns = ("python/trireme/**/*.py", "benchmarks/**/*.py", "examples/**/*.py")
    assert complaints([rule], *patterns) == []


def test_comments_open_with_a_subject_or_a_verb() -> None:
    folders = ("tests", "benchmarks", "examples")
    cpp = [f"{folder}/cpp/**/*.{kind}" for folder in folders for kind in ("h", "cpp")]
    python = [f"{folder}/**/*.py" for folder in ("python", *folders)]
    others = ("python/trireme/**/*.pyi", "scripts/*.py")
    assert complaints([comment_openings], *cpp, *python, *others) == []


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


def top_files() -> list[str]:
    found = sources("python/trireme/*.py*", "python/trireme/py.typed")
    return [path.name for path, _ in found if path.name != "_build_info.py"]


def test_python_package_has_few_files_on_top() -> None:
    assert crowded("python/trireme", top_files(), MAX_TOP_FILES) == []


def flat_tests() -> list[str]:
    return [path.name for path, _ in sources("tests/python/test_*.py")]


def test_tests_of_the_python_package_lie_in_rooms() -> None:
    assert crowded("tests/python", flat_tests(), MAX_FLAT_TESTS) == []


def pairs_by_folder() -> dict[str, list[str]]:
    """The files of each folder of csrc, a source and its header being one."""
    folders: dict[str, set[str]] = {}
    for path, _ in core_sources():
        folders.setdefault(path.parent.as_posix(), set()).add(path.stem)
    return {folder: sorted(stems) for folder, stems in sorted(folders.items())}


# Exceptions; the aim is to have none.
LARGE_CLASSES = {
    "ShmBackend": "it overrides every verb of c10d::Backend",
    "HostGroup": "what ranks of a host share is asked for by all of shm/",
    "ShardedModule": "FSDPModule's functions are its own",
}
SPLIT_CLASSES = {
    "ShmBackend": "verbs, memory and hooks of c10d::Backend, a file each",
    "Collectives": "what moves data, and what reduces it",
    "HostGroup": "what happens to a group when a rank fails",
    "Mailbox": "what happens to messages when a rank fails",
    "MultiHostCollectives": "memory, moves and reductions over hosts, a file each",
    "Zero": "its step, its writing, its samples and its fused optimizer, a file each",
}


def headers() -> dict[PurePosixPath, str]:
    return {path: text for path, text in core_sources() if path.suffix == ".h"}


def test_classes_are_small() -> None:
    sizes = [
        (name, *class_size(body))
        for text in headers().values()
        for name, body in class_bodies(text).items()
    ]
    large = {
        name
        for name, functions, members in sizes
        if functions > MAX_PUBLIC_FUNCTIONS or members > MAX_MEMBERS
    }
    assert large == set(LARGE_CLASSES)


def test_a_source_defines_the_classes_of_its_header() -> None:
    known = headers()
    declared = {name for text in known.values() for name in declared_classes(text)}
    found = {
        name
        for path, text in core_sources()
        if path.suffix == ".cpp"
        for name in foreign_members(text, known.get(path.with_suffix(".h"), ""), declared)
    }
    assert found == set(SPLIT_CLASSES)


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


def test_folders_of_the_core_have_few_files() -> None:
    assert [
        line
        for folder, stems in pairs_by_folder().items()
        for line in crowded(folder, stems, MAX_PAIRS)
    ] == []


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


def count_lines(folder: str, *kinds: str) -> int:
    files = sources(*(f"{folder}/**/*.{kind}" for kind in kinds))
    return sum(text.count("\n") for _, text in files)


def test_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints how full the rooms are, and how long what is in them is."""
    reducer = dict(sources("csrc/grad/grad_reducer.h", "csrc/grad/grad_reducer.cpp"))
    bodies = [class_bodies(text).get("GradReducer", "") for text in reducer.values()]
    functions, members = class_size(max(bodies, key=len))
    headers = len(list(sources("csrc/comm/*.h")))
    rooms = Counter(path.parts[2] for path, _ in sources("python/trireme/*/**/*.py"))
    tests = Counter(path.parts[2] for path, _ in sources("tests/python/*/**/test_*.py"))
    with capsys.disabled():
        print(
            f"\npython/trireme: {len(top_files())} files of its own;", dict(sorted(rooms.items()))
        )
        print(f"tests/python: {len(flat_tests())} tests of its own;", dict(sorted(tests.items())))
        print("csrc:", {folder[5:]: len(stems) for folder, stems in pairs_by_folder().items()})
        print(
            f"lines: csrc {count_lines('csrc', 'h', 'cpp', 'cu')}, python/trireme "
            f"{count_lines('python/trireme', 'py', 'pyi')}, tests "
            f"{count_lines('tests', 'h', 'cpp', 'cu', 'py')}"
        )
        print(
            f"GradReducer: {functions} public functions, {members} members, "
            f"{max(text.count(chr(10)) for text in reducer.values())} lines in its longest file; "
            f"csrc/comm: {headers} headers of its own"
        )


def test_files_are_short() -> None:
    kinds = ("h", "cpp", "cu", "py", "pyi")
    folders = ("csrc", "python", "tests", "benchmarks", "examples")
    patterns = [f"{folder}/**/*.{kind}" for folder in folders for kind in kinds]
    assert complaints([file_length], *patterns, "setup.py") == []


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
    places = {}
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


def test_a_crowded_folder_is_found() -> None:
    assert crowded("python/trireme", ["a.py"] * 23, 22)
    assert not crowded("python/trireme", ["a.py"] * 22, 22)
