"""Beginning and end, and which rank this is."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_timeout

from trireme import _C
from trireme._core.farewell import call_at_the_end
from trireme._core.group_communicator import communicator_of, device_of_numbers
from trireme.horovod.engine import Engine
from trireme.horovod.errors import refuse
from trireme.horovod.process_sets import ProcessSet, begin_sets, end_sets
from trireme.horovod.run import Place, Run, current_run, has_run, set_run
from trireme.horovod.timeline import Timeline
from trireme.launch import Context
from trireme.launch import init as init_trireme

_RANKS = {
    "RANK": "HOROVOD_RANK",
    "WORLD_SIZE": "HOROVOD_SIZE",
    "LOCAL_RANK": "HOROVOD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "HOROVOD_LOCAL_SIZE",
}

_WITHOUT_EFFECT = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE")
_said: list[bool] = []


def init(process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Makes this process a rank, as ``trireme.init()`` does, or takes the group that exists.

    Args:
        process_sets: sets of ranks to register, the same on all ranks. "dynamic" is accepted: sets
            may be added and removed at any time in any case.
    """
    if has_run():
        return
    _say_without_effect()
    for name, horovods in _RANKS.items():
        if name not in os.environ and horovods in os.environ:
            os.environ[name] = os.environ[horovods]
    context = init_trireme()
    group = dist.group.WORLD
    assert group is not None
    report_after = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "60"))
    engine = Engine(group, report_after, _timeout_of(group))
    set_run(Run(context, _place_of(context, group), engine))
    begin_sets(context.world, [] if isinstance(process_sets, str) else list(process_sets or ()))
    call_at_the_end(_end)
    _start_timeline_asked_for()


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(device_of_numbers(group))
    given = getattr(getattr(backend, "options", None), "_timeout", None)
    return given or _get_default_timeout(dist.get_backend())


def _say_without_effect() -> None:
    found = [name for name in _WITHOUT_EFFECT if name in os.environ]
    if found and not _said and _C.read_launch_environment(None, None).rank == 0:
        _said.append(True)
        got = f"got {', '.join(found)}, which has no effect here"
        next_step = "Buckets of gradients and the order of operations need no tuning."
        warnings.warn(_C.error_text("horovod", got, next_step), stacklevel=3)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begins to write a timeline on rank 0; does nothing on the others.

    Each operation has a lane by its name: ``NEGOTIATE_ALLREDUCE`` while it waits for ranks, then
    ``ALLREDUCE``, in microseconds since this call.

    Args:
        file_path: is written anew, unless it is being written.
        mark_cycles: also notes when the engine takes the next operation, as ``CYCLE_START``.

    Raises:
        ValueError: there is one in another file.
        OSError: the file cannot be written.
    """
    running = current_run()
    if running.place.rank != 0:
        return
    if running.engine.timeline is not None:
        if running.engine.timeline.path == file_path:
            return
        got = f"got a second timeline beside {running.engine.timeline.path}, expected one"
        refuse(got, "Call hvd.stop_timeline() before.")
    running.engine.timeline = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Completes the file of ``start_timeline``; does nothing where there is none."""
    current_run().engine.stop_timeline()


def _start_timeline_asked_for() -> None:
    """Begins what HOROVOD_TIMELINE asks for, unless it leaves that to ``start_timeline``."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path not in ("", "DYNAMIC"):
        marks = os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0")
        start_timeline(path, marks not in ("", "0", "false", "False"))


def shutdown() -> None:
    """Ends the run; operations in flight raise. ``init`` may begin another one."""
    if not has_run():
        return
    run = current_run()
    end_sets()
    set_run(None)
    run.engine.close()
    run.engine.stop_timeline()
    run.context.__exit__(None, None, None)


def _end(text: str) -> None:
    """Lets go of the others where the program has not."""
    if has_run():
        current_run().engine.leave()
        current_run().engine.stop_timeline()


def _place_of(context: Context, group: dist.ProcessGroup) -> Place:
    own = f"{socket.gethostname()} {context.local_rank} {context.local_world}"
    communicator = communicator_of(group)
    texts = _C.gather_texts(own, communicator, communicator.device)
    others = [text.split() for text in texts]
    alike = [rank for rank, text in enumerate(others) if int(text[1]) == context.local_rank]
    return Place(
        context.rank,
        context.world,
        context.local_rank,
        context.local_world,
        alike.index(context.rank),
        len(alike),
        len({text[2] for text in others}) == 1,
    )


def is_initialized() -> bool:
    """Says whether ``init`` was called."""
    return has_run()


def rank() -> int:
    """Returns the number of this process among all."""
    return current_run().place.rank


def size() -> int:
    """Returns how many processes there are."""
    return current_run().place.size


def local_rank() -> int:
    """Returns the number of this process on its host."""
    return current_run().place.local_rank


def local_size() -> int:
    """Returns how many processes this host has."""
    return current_run().place.local_size


def cross_rank() -> int:
    """Returns the number of this host among those that have a process of this local rank."""
    return current_run().place.cross_rank


def cross_size() -> int:
    """Returns how many hosts have a process of this local rank."""
    return current_run().place.cross_size


def is_homogeneous() -> bool:
    """Says whether all hosts have as many processes."""
    return current_run().place.is_homogeneous


def mpi_threads_supported() -> bool:
    """Returns False: there is no MPI here."""
    current_run()
    return False


def mpi_enabled() -> bool:
    """Returns False: there is no MPI here."""
    current_run()
    return False


def gloo_enabled() -> bool:
    """Returns True: what Horovod does without MPI works."""
    current_run()
    return True


def mpi_built() -> bool:
    """Returns False: MPI is not used."""
    return False


def gloo_built() -> bool:
    """Says whether the installed torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Returns NCCL's version as a number, or 0, as Horovod does."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """Returns False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Returns False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Says whether the installed torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Says whether the installed torch was built for ROCm."""
    return torch.version.hip is not None
