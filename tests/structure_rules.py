"""The rules of structure, each a function of (path, text) that returns complaints.

python -m tests.structure_rules    prints what is long or full. No rule limits these counts.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

# An arrow may only point to a lower number; folders of one number never include each other.
LAYERS = {
    "common": 0,
    "shm": 1,
    "kernels": 2,
    "memory": 2,
    "comm": 2,
    "module": 2,
    "optim": 3,
    "sync": 3,
    "grad": 4,
    "param": 4,
    "activation": 4,
    "saving": 5,
    "strategies": 6,
    "pipetransformer": 7,
    "bindings": 8,
}
# Inside comm arrows obey these; its own files are the contract.
COMM_ROOMS = {"contract": 0, "c10d": 1, "threads": 1, "hosts": 2, "backend": 3, "launch": 4}
REFUSED_WORDS = {"manager", "helper", "helpers", "util", "utils", "handler", "base", "new", "v2"}

Rule = Callable[[PurePosixPath, str], list[str]]


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


def core_sources() -> list[tuple[PurePosixPath, str]]:
    """csrc without the declarations that stand in for Gloo's headers: those follow Gloo's names."""
    found = sources("csrc/*/**/*.h", "csrc/*/**/*.cpp", "csrc/*/**/*.cu")
    return [(path, text) for path, text in found if "gloo_shim" not in path.parts]


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*([<"][^>"]+)[>"]', text, re.MULTILINE)


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def home(path: PurePosixPath) -> str:
    """The folder that a csrc path belongs to: a layer, or strategies/<name>."""
    parts = path.parts[1:-1] if path.parts[0] == "csrc" else path.parts[:-1]
    if not parts:  # trireme.h, which shows every layer to users and to none of the layers
        return "users"
    return "/".join(parts[:2]) if parts[0] == "strategies" else parts[0]


def layer_edges(path: PurePosixPath, text: str) -> list[str]:
    found = []
    here = home(path)
    if here.split("/")[0] not in LAYERS:
        return [f"{path}: {here} is no layer; see csrc/README.md"]
    for include in includes(text):
        name = include[1:]
        if include[0] == '"':
            found.append(f'{path}: "{name}" must be written <trireme/...>')
        if not name.startswith("trireme/"):
            continue
        there = home(PurePosixPath(name.removeprefix("trireme/")))
        down = LAYERS.get(there.split("/")[0], 99) < LAYERS[here.split("/")[0]]
        if there != here and not down:
            found.append(f"{path}: {here} may not include {there} ({name})")
    return found


def comm_room(path: PurePosixPath) -> str:
    """The room of csrc/comm/... or trireme/comm/...."""
    return path.parts[2] if len(path.parts) > 3 else "contract"


def comm_edges(path: PurePosixPath, text: str) -> list[str]:
    if home(path) != "comm":
        return []
    here = comm_room(path)
    targets = (PurePosixPath(name[1:]) for name in includes(text) if "<trireme/comm/" in name)
    return [
        f"{path}: {here} may not include {there} ({target})"
        for target in targets
        if (there := comm_room(target)) != here and COMM_ROOMS[there] > COMM_ROOMS[here]
    ]


CUDA_HEADER = re.compile(
    r"(cuda|cublas|cudnn|nccl|cub/|c10/cuda/|ATen/cuda/|torch/csrc/cuda/)"
    r"|torch/csrc/distributed/c10d/(nccl2/)?(ProcessGroupNCCL|NCCL)"
)
CUDA_HOMES = ("csrc/kernels/cuda/*", "csrc/common/stream.*", "csrc/comm/c10d/nccl/*")
PYTHON_HEADER = re.compile(
    r"(pybind11/|Python\.h|torch/csrc/utils/pybind|torch/csrc/autograd/python_|torch/python)"
)
TORCH_HEADER = re.compile(r"(ATen/|c10/|torch/)")
GLOO_HEADER = re.compile(r"(gloo/|torch/csrc/distributed/c10d/ProcessGroupGloo)")


def foreign_headers(path: PurePosixPath, text: str) -> list[str]:
    here = home(path)
    in_cuda = any(map(path.match, CUDA_HOMES))
    limits = [
        (PYTHON_HEADER, here == "bindings", "belongs in bindings/ only"),
        (
            re.compile(r"torch/csrc/distributed/c10d/"),
            here in ("comm", "bindings"),
            "belongs in comm/ or bindings/ only",
        ),
        (CUDA_HEADER, in_cuda, f"belongs in {CUDA_HOMES} only"),
        (
            GLOO_HEADER,
            path.match("csrc/comm/c10d/gloo_group.cpp"),
            "belongs in comm/c10d/gloo_group.cpp",
        ),
        (TORCH_HEADER, here != "shm", "is torch's, and shm/ is torch-free"),
        (TORCH_HEADER, path.suffix != ".cu", "is torch's: kernels take raw pointers"),
        (re.compile(r"torch/extension\.h"), False, "costs 37 s per file; include what is used"),
        (re.compile(r"ATen/ATen\.h"), path.suffix != ".h", "is heavy; use ATen/core/Tensor.h"),
    ]
    return [
        f"{path}: <{include[1:]}> {why}"
        for include in includes(text)
        for pattern, allowed, why in limits
        if pattern.match(include[1:]) and not allowed
    ]


# Values that need neither a tensor nor a group, whatever else lies in their folder.
PURE = re.compile(
    r"csrc/strategies/pipeline/(action|partition|refuse|schedule\w*|stage_costs)\.(h|cpp)"
)
PURE_MAY_INCLUDE = re.compile(
    r"[a-z_]+|c10/util/Exception\.h"
    r"|trireme/(common/\w+|strategies/pipeline/(action|partition|refuse|schedule\w*|stage_costs))\.h"
)


def pure_values(path: PurePosixPath, text: str) -> list[str]:
    """Schedules of pipelines are made, checked and costed before there is a process."""
    if not PURE.fullmatch(path.as_posix()):
        return []
    return [
        f"{path}: a schedule is a value and may not include {include[1:]}"
        for include in includes(text)
        if not PURE_MAY_INCLUDE.fullmatch(include[1:])
    ]


def conditional_compilation(path: PurePosixPath, text: str) -> list[str]:
    """Variants are files or libraries that CMake chooses. What remains has one place per reason."""
    if home(path) == "common" or path.match("*_compat.h") or path.match("csrc/kernels/cpu/*"):
        return []
    return [
        f"{path}:{number}: conditional compilation; choose a file in CMake, or move the difference "
        "to a *_compat.h"
        for number, line in enumerate(text.splitlines(), 1)
        if re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b", line)
        and not ("__CUDACC__" in line and path.match("csrc/kernels/cuda/*.h"))
    ]


def cpp_hygiene(path: PurePosixPath, text: str) -> list[str]:
    code = without_comments(text)
    found = []
    if path.suffix == ".h" and "#pragma once" not in text:
        found.append(f"{path}: a header begins with #pragma once")
    if path.suffix == ".h" and re.search(r"^\s*using namespace", code, re.MULTILINE):
        found.append(f"{path}: a header may not open a namespace for its users")
    if "getenv" in code and not path.match("csrc/common/env.*"):
        found.append(f"{path}: environment variables are read in common/env.cpp only")
    if re.search(
        r"\bpickle_(load|save)\b|torch::jit\b|(?<![\w.>:])(?<!void )(std::)?(_?exit|abort)\(", code
    ):
        found.append(f"{path}: no pickle, no TorchScript, no ending of the process in the library")
    return found


LITERAL = re.compile(r"""'(\\.|[^'\\])'|"(\\.|[^"\\])*\"""")


def comments(text: str) -> list[tuple[int, str]]:
    """Each comment and its first line: a block of whole lines, or what follows code on a line."""
    found: list[tuple[int, str]] = []
    in_block = False
    for number, line in enumerate(text.splitlines(), 1):
        continues, in_block = in_block, line.lstrip().startswith("//")
        code = line if in_block else LITERAL.sub("", line)
        _, slashes, words = code.partition("//")
        if in_block and continues:
            found[-1] = (found[-1][0], f"{found[-1][1]} {words.strip()}")
        elif slashes:
            found.append((number, words.strip()))
    return found


VERB = re.compile(r"(Is|Are|Has)\b")


def comment_openings(path: PurePosixPath, text: str) -> list[str]:
    return [
        f"{path}:{number}: a comment opens with '{opening[0]}'; a noun phrase says what a type or "
        "a member is, a verb says what a function does"
        for number, comment in comments(text)
        if (opening := VERB.match(comment))
    ]


CLASS = r"\b(?:class|struct)\s+(?:TRIREME_API\s+)?(\w+)\b(?!::|;)"


def declared_classes(text: str) -> set[str]:
    return set(re.findall(CLASS, without_comments(text)))


def foreign_members(text: str, header: str, declared: set[str]) -> list[str]:
    """Classes of which a source defines members, though its own header does not declare them."""
    own = declared_classes(text) | declared_classes(header)
    member = r"^(?:[\w:<>,*&\s]+?[\s*&])?(\w+)::~?\w+\([^;]*?\{$"
    defined = set(re.findall(member, without_comments(text), re.MULTILINE))
    return sorted((defined & declared) - own)


NO_CODE = re.compile(
    rf"//[^\n]*|/\*.*?\*/|{LITERAL.pattern}|^[ \t]*#(\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)
NAMESPACE_HEAD = re.compile(r"\b(?:namespace\s+([\w:]+)|extern)\s*$")
CLASS_HEAD = re.compile(
    r"\b(?:class|struct)\s+(?:(?:TRIREME_\w+\b|alignas\s*\(.*\)|\[\[.*?\]\])\s*)*"
    r"(\w+)\s*(?:\bfinal\s*)?(?::(?!:).*)?$",
    re.DOTALL,
)


def code_alone(text: str) -> str:
    """Comments, literals and lines of the preprocessor become spaces, so that places stay."""
    return NO_CODE.sub(lambda match: re.sub(r"\S", " ", match[0]), text)


def class_lines(text: str) -> dict[str, int]:
    """Full names and lines of classes, structs and scoped enums; none of those that are nested."""
    code = code_alone(text)
    found: dict[str, int] = {}
    scopes: list[str | None] = []  # None is a body or an anonymous namespace: nothing in it counts
    end = 0
    for mark in re.finditer(r"[{};]", code):
        start, end = end, mark.end()
        head = code[start : mark.start()]
        if mark[0] == "}":
            del scopes[-1:]
        elif mark[0] == "{":
            if (named := CLASS_HEAD.search(head)) and None not in scopes:
                name = "::".join(filter(None, [*scopes, named[1]]))
                found.setdefault(name, code.count("\n", 0, start + named.start(1)) + 1)
            opened = NAMESPACE_HEAD.search(head)
            scopes.append((opened[1] or "") if opened else None)
    return found


def twice_defined(headers: Mapping[PurePosixPath, str]) -> list[str]:
    """C++'s one-definition rule: the linker takes two classes of one full name for one."""
    first: dict[str, tuple[PurePosixPath, int]] = {}
    found = []
    for path, text in headers.items():
        for name, line in class_lines(text).items():
            there, there_line = first.setdefault(name, (path, line))
            if there != path:
                found.append(
                    f"{path}:{line}: defines {name}, as {there}:{there_line} does; rename one"
                )
    return found


def refused_names(path: PurePosixPath, _text: str) -> list[str]:
    words = {word for part in path.parts for word in part.split(".")[0].split("_")}
    return [
        f"{path}: '{word}' is a refused word; name what it does" for word in words & REFUSED_WORDS
    ]


UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval", "exec", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip


def unsafe_python(path: PurePosixPath, text: str) -> list[str]:
    """Nothing that another process or a file sends may become code: no pickle, eval or exec."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        bad = UNSAFE_MODULES & set(names)
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            plain = call if call in ("eval", "exec") else call.rpartition(".")[2]
            if call in UNSAFE_CALLS or (plain in UNSAFE_CALLS and plain not in ("eval", "exec")):
                bad.add(plain)
            safe_load = any(
                word.arg == "weights_only" and ast.unparse(word.value) == "True"
                for word in node.keywords
            )
            if call == "torch.load" and not safe_load:
                bad.add("torch.load without weights_only=True")
        found += [f"{path}:{getattr(node, 'lineno', 0)}: {name} at run time" for name in bad]
    return found


def trireme_imports(text: str, *, types: bool) -> list[str]:
    """The modules of Trireme, or names in them, that a file imports, also within functions.

    With ``types`` those under TYPE_CHECKING count as well.
    """
    found: list[str] = []
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        else:
            pending += ast.iter_child_nodes(node)
    return [name for name in found if re.match(r"\.|trireme(\.|$)", name)]


def python_rooms(path: PurePosixPath, text: str) -> list[str]:
    """A package imports itself, _core and _C; those for programs the public modules, too."""
    room = path.parts[2] if len(path.parts) > 3 else ""
    found = []
    for name in trireme_imports(text, types=True) if room else []:
        there = "" if name[0] == "." else name.partition(".")[2].partition(".")[0]
        is_public = there != "" and there[0] != "_"
        sees_all = room in ("cli", "horovod", "integrations", "pipetransformer") and is_public
        if there not in (room, "_core", "_C") and not sees_all:
            found.append(f"{path}: {room} may not import {name}")
    return found


def module_name(path: PurePosixPath) -> str:
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def import_circle(texts: Mapping[str, str]) -> list[str]:
    """Modules, by name, of which each imports the next one at run time; none if there is none."""
    edges = {}
    for module, text in texts.items():
        names = trireme_imports(text, types=False)
        targets = {name if name in texts else name.rpartition(".")[0] for name in names}
        edges[module] = targets & texts.keys()
    return circle_in(edges)


def circle_in(edges: Mapping[str, Collection[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def include_circle(texts: Mapping[PurePosixPath, str]) -> list[str]:
    """Pairs of header and source, of which each includes the next one; none if there is none."""
    edges: dict[str, set[str]] = {}
    for path, text in texts.items():
        own = path.with_suffix("").relative_to("csrc").as_posix()
        names = {include[1:].removeprefix("trireme/") for include in includes(text)}
        others = {name.removesuffix(".h") for name in names} - {own}
        edges.setdefault(own, set()).update(others)
    return circle_in({own: others & edges.keys() for own, others in edges.items()})


def imports_of_tests(path: PurePosixPath, text: str) -> list[str]:
    """A test file is for pytest alone: what other files need lies elsewhere."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            names = [f"{module}{alias.name}" for alias in node.names]
        tests = {match[0] for name in names if (match := re.match(r"(.*?\.)??test_\w+", name))}
        found += [
            f"{path}:{getattr(node, 'lineno', 0)}: imports the test file {test}; what several "
            "files need lies in a module of its room, or in tests/python/harness"
            for test in sorted(tests)
        ]
    return found


def class_bodies(text: str) -> dict[str, str]:
    """The classes at namespace level of clang-formatted code, without what braces hold in them."""
    bodies = {}
    head = rf"^{CLASS}(?:\s+final)?(?:\s*:[^{{;]*)?\s*\{{(.*?)^\}};"
    for match in re.finditer(head, without_comments(text), re.MULTILINE | re.DOTALL):
        body, depth = [], 0
        for letter in match[2]:
            depth -= letter == "}"
            if depth == 0:
                body.append(letter)
            depth += letter == "{"
        bodies[match[1]] = match[0].split(maxsplit=1)[0] + "\n" + "".join(body)
    return bodies


NO_MEMBER = r"(using|friend|enum|struct|class|template|static_assert|typedef)\b"


def class_size(body: str) -> tuple[int, int]:
    """How many public functions, constructors and operators included, and data members it has."""
    kind, _, rest = body.partition("\n")
    is_public, functions, members = kind == "struct", 0, 0
    for statement in re.split(r";|\{\}|(?<=:)\n", rest):
        words = " ".join(statement.split())
        if words in ("public:", "private:", "protected:"):
            is_public = words == "public:"
        elif not words or re.match(NO_MEMBER, words):
            continue
        elif "(" in words.split("=")[0] or "operator" in words:
            functions += is_public and not words.endswith("= delete")
        elif not words.startswith("static constexpr"):
            members += 1
    return functions, members


def cpp_functions(text: str) -> list[tuple[int, int, str]]:
    """Lines, first line and name of each function at namespace level of clang-formatted code."""
    found = []
    start, head = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line == "}":  # ends a body at namespace level
            if re.search(r"\)[^;=]*\{$", head):
                name = re.search(r"([\w:~]+)\(", head)
                found.append((number - start, start, name[1] if name else ""))
            head = ""
        elif re.match(r"(namespace|class|struct|enum|union|extern|#|//|\};|\}  //)", line):
            head = ""
        elif re.match(r"\w", line):
            start, head = number, line
        elif head and not head.endswith("{"):
            head += " " + line.strip()
    return found


def python_functions(text: str) -> list[tuple[int, int, str]]:
    """Lines of the body without its docstring, first line and name of each function."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            found.append((node.end_lineno - first.lineno + 1, node.lineno, node.name))
    return found


Row = tuple[int | str, ...]


def print_table(title: str, head: Row, rows: Iterable[Row]) -> None:
    """Numbers, then a column of words."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"{title}\n")
    for *numbers, words in cells:
        row = [number.rjust(width) for number, width in zip(numbers, widths, strict=False)]
        print("  ".join([*row, words]))
    print()


def main() -> None:
    core = core_sources()
    python = list(sources("python/**/*.py", "python/**/*.pyi"))
    places = ("tests", "benchmarks", "examples")
    kinds = ("h", "cpp", "cu", "py")
    others = sources(*(f"{place}/**/*.{kind}" for place in places for kind in kinds), "setup.py")

    stems: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    for path, text in (*core, *python):
        folder = path.parent.as_posix()
        stems.setdefault(folder, set()).add(path.stem)
        lines[folder] = lines.get(folder, 0) + text.count("\n")
    print_table(
        "Folders. Pairs count a source and its header as one.",
        ("pairs", "lines", "folder"),
        [(len(stems[folder]), lines[folder], folder) for folder in sorted(stems)],
    )

    files = [(text.count("\n"), str(path)) for path, text in (*core, *python, *others)]
    print_table("The longest files", ("lines", "file"), sorted(files, reverse=True)[:10])

    for language, texts, functions in (
        ("C++", core, cpp_functions),
        ("Python", python, python_functions),
    ):
        found = [
            (length, f"{path}:{line} {name}")
            for path, text in texts
            for length, line, name in functions(text)
        ]
        title = f"The longest functions of the library in {language}"
        print_table(title, ("lines", "function"), sorted(found, reverse=True)[:10])

    classes = [
        (*class_size(body), f"{path} {name}")
        for path, text in core
        if path.suffix == ".h"
        for name, body in class_bodies(text).items()
    ]
    classes.sort(key=lambda row: row[0] + row[1], reverse=True)
    print_table(
        "The largest classes, by both numbers together",
        ("public functions", "members", "class"),
        classes[:10],
    )


if __name__ == "__main__":
    main()
