"""What a case leaves behind in its process, where it would change the next one.

before = look()
...
expect(before)  # raises, and names what is there now and was not then
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing import forkserver, resource_sharer, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Look = dict[str, Any]

_MOST_BYTES = 100_000  # one tensor of so many may stay
PATIENCE_S = 5.0
_ENDING = {"threads", "threads of Trireme", "processes", "files", "shared memory"}


class LeftBehind(AssertionError):
    """A case has passed, and has not restored its process."""


def look(things: Look | None = None) -> Look:
    """The state of this process, by name: a value, or things by key.

    ``things`` are those that expect() has found, if nothing has run since.
    """
    found = {name: now() for name, now in _THINGS.items()} if things is None else things
    return {name: now() for name, now in _VALUES.items()} | found


def expect(before: Look) -> Look:
    """Raises LeftBehind unless all is as it was, at the latest when what ends by itself has had
    PATIENCE_S for that. Returns the things that are there."""
    _clear_torchs_caches()
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    left, things = _left(before)
    while left.keys() & _ENDING and time.monotonic() < deadline:
        time.sleep(0.01)
        left, things = _left(before)
    if left:
        texts = [f"{name}: {text}" for name, text in left.items()]
        raise LeftBehind(f"the case left behind: {'; '.join(texts)}")
    return things


def _left(before: Look) -> tuple[dict[str, str], Look]:
    """What is there now and was not then, as texts; and all things that are there."""
    left = {}
    for name, now in _VALUES.items():
        value, was = now(), before[name]
        if value != was:
            if isinstance(was, dict):
                value, was = _less(value, was), _less(was, value)
            left[name] = f"{value!r}, was {was!r}"
    found = {name: things() for name, things in _THINGS.items()}
    for name, things in found.items():
        more = {key: text for key, text in things.items() if key not in before[name]}
        if more:
            left[name] = ", ".join(sorted(more.values()))
    return left, found


def _less(some: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    return {key: it for key, it in some.items() if key not in others or others[key] != it}


_searched: set[str] = set()
_caches: list[Any] = []
_planners: list[Any] = []


def _clear_torchs_caches() -> None:
    """What torch knows of DTensors by their meshes; these hold process groups for ever."""
    new = sys.modules.keys() - _searched
    _searched.update(new)
    for name in new:
        if name.startswith(("torch.distributed.tensor", "torch.distributed.device_mesh")):
            own = list(_own(sys.modules[name]))
            _caches.extend(it for _, _, it in own if type(it) is functools._lru_cache_wrapper)
            _planners.extend(owner for owner, key, _ in own if key == "_planner_cache")
    for cache in _caches:
        cache.cache_clear()
    for owner in _planners:
        owner._planner_cache.clear()
    debug._clear_sharding_prop_cache()


def _own(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """What a module and its classes define, each with its owner and its name."""
    for key, value in vars(module).items():
        yield module, key, value
        if type(value) is type and value.__module__ == module.__name__:
            for name, own in vars(value).items():
                yield value, name, getattr(own, "__func__", own)


def _objects(things: Iterable[Any]) -> dict[Any, str]:
    """The objects themselves are not kept, or they would be found again."""
    return {id(thing): repr(thing) for thing in things}


def _limits() -> dict[str, Any]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _handlers() -> dict[str, str]:
    """All but that of SIGALRM, by which pytest-timeout ends a test."""
    numbers = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
    numbers.remove(signal.SIGALRM)
    return {number.name: repr(signal.getsignal(number)) for number in numbers}


def _standard_files() -> list[tuple[int, int]]:
    found = [os.fstat(number) for number in range(3)]
    return [(status.st_dev, status.st_ino) for status in found]


def _global_hooks() -> dict[Any, str]:
    """All but those that Trireme has registered once, for the life of the process."""
    return {
        (name, key): f"{name}: {hook!r}"
        for name, table in (*vars(modules).items(), *vars(optimizers).items())
        if name.startswith("_global_") and isinstance(table, dict)
        for key, hook in table.items()
        if not (getattr(hook, "__module__", None) or "").startswith("trireme.")
    }


def _groups() -> dict[Any, str]:
    return {id(group): name for group, name in dist.distributed_c10d._world.pg_names.items()}


def _logging() -> dict[str, Any]:
    loggers = [logging.getLogger(name) for name in (None, "trireme", "torch")]
    return {it.name: (it.level, [str(handler) for handler in it.handlers]) for it in loggers}


def _threads() -> dict[Any, str]:
    """All but the one of multiprocessing that passes files to other processes."""
    serving = getattr(resource_sharer._resource_sharer, "_thread", None)
    return _objects(thread for thread in threading.enumerate() if thread is not serving)


def _of_threads(file: str) -> Iterator[tuple[str, str]]:
    """The number of each thread of this process, and what that file of /proc says of it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            yield task.name, (task / file).read_text().strip()


def _native_threads() -> dict[Any, str]:
    """Those that Trireme names; torch keeps some of its own for ever."""
    return {number: name for number, name in _of_threads("comm") if name.startswith("trireme")}


def _children() -> dict[Any, str]:
    """All but the servers of multiprocessing, which the first test that forks starts for all."""
    servers = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)
    return {
        pid: f"process {pid}"
        for _, pids in _of_threads("children")
        for pid in pids.split()
        if int(pid) not in servers
    }


def _open_files() -> dict[Any, str]:
    """Files, but for pipes and sockets: a FaultBoard keeps up to eight for its last words."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
            kind = stat.S_IFMT(os.stat(f"/proc/self/fd/{number}").st_mode)
        except FileNotFoundError:
            continue
        if kind == stat.S_IFREG:
            found[number, target] = f"file {target}"
    return found


_SHARED = re.compile(r"^\S+ \S+ \S+ \S+ \d+ +(/dev/shm/trireme\S*|/memfd:trireme\S*)", re.MULTILINE)


def _shared_memory() -> dict[Any, str]:
    maps = Path("/proc/self/maps").read_text()
    if "/dev/shm/trireme" not in maps and "/memfd:trireme" not in maps:  # much faster than a search
        return {}
    return {name: name for name in _SHARED.findall(maps)}


def _tensors() -> dict[Any, str]:
    """Those of many bytes that Python sees. Small ones may stay in cycles that lead through C++, as
    torch's own of a graph of gradients does."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and _bytes_of(thing) > _MOST_BYTES:
            found[id(thing)] = f"{type(thing).__name__} {list(thing.shape)} {thing.dtype}"
    return found


def _bytes_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # one without memory of its own
        return 0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _run() -> Any:
    launch = sys.modules.get("trireme._launch.launch")
    return launch and launch._run and "begun by trireme.init()"


_VALUES: dict[str, Callable[[], Any]] = {
    "run": _run,
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "saved tensor hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "dispatch modes": lambda: [str(mode) for mode in _get_current_dispatch_mode_stack()],
    "function modes": torch._C._len_torch_function_stack,
    "signal handlers": _handlers,
    "exception hooks": lambda: (sys.unraisablehook, threading.excepthook),
    "switch interval": sys.getswitchinterval,
    "recursion limit": sys.getrecursionlimit,
    "trace function": sys.gettrace,
    "arguments": lambda: list(sys.argv),
    "import path": lambda: list(sys.path),
    "folder": os.getcwd,
    "limits": _limits,
    "cores": lambda: sorted(os.sched_getaffinity(0)),
    "network": lambda: os.readlink("/proc/thread-self/ns/net"),
    "standard files": _standard_files,
    "environment": _environment,
    "logging": _logging,
    "module that torch's DDP runs": lambda: type(TorchDDP._get_active_ddp_module()).__name__,
}

_THINGS: dict[str, Callable[[], dict[Any, str]]] = {
    "groups": _groups,
    "threads": _threads,
    "threads of Trireme": _native_threads,
    "processes": _children,
    "files": _open_files,
    "shared memory": _shared_memory,
    "global hooks": _global_hooks,
    "tensors": _tensors,
}


# --- in /dev/shm ---------------------------------------------------------------------------------


def files_in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("trireme-*")}


def left_in_memory(before: Collection[str]) -> set[str]:
    """Files that were not there ``before`` and stay; those of other tests go when these meet."""
    left = files_in_memory() - set(before)
    deadline = time.monotonic() + 20
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= files_in_memory()
    return left
