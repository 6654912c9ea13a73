"""The beginning and the end of a run: which rank is this process, and which device is its own."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from trireme import _C
from trireme._launch import refuse
from trireme._launch.checks import as_timedelta, check_available, expect, parse_device
from trireme._launch.shm_backend import SHM

_FAREWELL = timedelta(seconds=30)
_FAREWELL_OF_A_FAILURE = timedelta(seconds=1)
_CPU_AND_CUDA = f"cpu:{SHM},cuda:nccl"
_MEET_BY_THEMSELVES = ("mpi", "fake")


@dataclass(frozen=True)
class Context:
    """This process as one rank of a run.

    It is a context manager that ends the run that its ``init()`` began (see :func:`shutdown`).
    Leaving it by an exception does not wait for the other ranks.
    """

    rank: int
    world: int
    local_rank: int
    """Number among the ranks of this host."""
    local_world: int
    """How many ranks this host has."""
    device: torch.device
    """Where this rank computes; a CUDA device is already the current one."""
    _began_here: bool = dataclasses.field(default=False, repr=False, compare=False)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._began_here:
            # A program that exits with 0 in here has ended well.
            ended_well = isinstance(error, SystemExit) and not error.code
            _end_run(None if ended_well else error)


@dataclass(frozen=True)
class _Run:
    """What an ``init()`` made, and what ``shutdown()`` therefore ends."""

    context: Context
    group: dist.ProcessGroup
    backend: str
    rendezvous: Any  # _C.Rendezvous, or None for an engine whose ranks meet by themselves


_run: _Run | None = None


def init(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    set_threads: bool = True,
) -> Context:
    """Make this process a rank and initialise ``torch.distributed``; every rank calls it.

    The place of the process comes from ``rank`` and ``world`` (as under ``mp.spawn``), else from
    RANK and WORLD_SIZE (torchrun, or set by hand), else from the variables of mpirun (Open MPI,
    MPICH, Intel MPI, MVAPICH) or SLURM; if nobody says anything, it is alone: world 1, no port is
    opened.

    If the default process group already exists, nothing is made: the context describes that group,
    and using it as a context manager ends nothing.

    Args:
        backend: as for ``torch.distributed.init_process_group``. Default: ``trireme``
            on the CPU (shared memory between the ranks of a host; Gloo if they do not share it),
            ``cpu:trireme,cuda:nccl`` on a CUDA device.
        device: ``cpu`` or ``cuda``; CUDA without an index means the GPU numbered like the local
            rank. Default: CUDA if there is a GPU and no backend is given, or one with ``nccl``.
        timeout: of one collective, and of meeting the others; seconds, or a timedelta. Default:
            torch's for collectives, 5 minutes for meeting.
        init_method: where the ranks meet: ``tcp://host:port``, ``file:///path`` or ``env://``
            (MASTER_ADDR and MASTER_PORT). Default: the variable TRIREME_INIT_METHOD, else
            ``env://``; under SLURM rank 0's host and a port are found without variables.
        rank, world: both or neither.
        set_threads: call ``torch.set_num_threads`` so that the ranks of a host share its CPUs
            (those of the affinity mask, within the control group's quota; under SLURM the cpus
            per task). An OMP_NUM_THREADS in the environment is left in force, except torchrun's
            default of 1, which cannot be told from a user's 1: to keep that, pass False.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: the environment contradicts itself, or an argument cannot be honoured.
        torch.distributed.DistBackendError: the ranks did not find each other, or MASTER_PORT is
            in use.
    """
    backend = expect("backend", backend, str)
    init_method = expect("init_method", init_method, str)
    rank = expect("rank", rank, int)
    world = expect("world", world, int)
    limit = as_timedelta(timeout)
    if (rank is None) != (world is None):
        refuse("rank and world were not given together", "Pass both or neither.")
    if dist.is_initialized():
        return _describe_group(backend, device, set_threads)

    environment = _C.read_launch_environment(rank, world)
    own_device = _choose_device(device, backend, environment)
    check_available(backend, environment)
    if set_threads:
        _share_cpus(environment)
    if backend is None:
        backend = SHM if own_device.type == "cpu" else _CPU_AND_CUDA
    rendezvous = None
    if backend not in _MEET_BY_THEMSELVES:
        rendezvous = _C.Rendezvous(environment, init_method or "", limit)
    _make_default_group(backend, rendezvous, environment, limit, own_device)
    return _begin_run(_context(environment, own_device), backend, rendezvous)


def shutdown() -> None:
    """End the run that :func:`init` began; every rank calls it, last.

    Destroys the process group. A rank that serves the Store then waits until the others have left
    it too, at most half a minute, and warns if they have not. A default group that the program
    made itself stays, and calling this again does nothing.
    """
    _end_run(None)


def _make_default_group(
    backend: str,
    rendezvous: Any,
    environment: Any,
    timeout: timedelta | None,
    device: torch.device,
) -> None:
    place: dict[str, Any] = {}
    if backend != "mpi":
        place = {"rank": environment.rank, "world_size": environment.world}
    if rendezvous is not None:
        place["store"] = rendezvous.store
    # Bound to its GPU, NCCL connects here instead of in the first collective.
    device_id = device if "nccl" in backend else None
    dist.init_process_group(backend, timeout=timeout, device_id=device_id, **place)


def _context(environment: Any, device: torch.device) -> Context:
    return Context(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        local_rank=environment.local_rank,
        local_world=environment.local_world,
        device=device,
    )


def _begin_run(context: Context, backend: str, rendezvous: Any) -> Context:
    global _run
    _run = _Run(context, _default_group(), backend, rendezvous)
    return dataclasses.replace(context, _began_here=True)


def _end_run(error: BaseException | None) -> None:
    global _run
    failing = error is not None
    run, _run = _run, None
    if run is None:
        return
    if failing:
        _C.abort_saves(f"{type(error).__name__}: {error}")
    _C.finish_saves()
    if dist.is_initialized() and _default_group() is run.group:
        if failing:
            _C.leave_all_groups(f"{type(error).__name__}: {error}")
            run.group.abort()  # else NCCL waits for peers that do not come
        dist.destroy_process_group()
    if run.rendezvous is None:
        return
    all_left = run.rendezvous.leave(_FAREWELL_OF_A_FAILURE if failing else _FAREWELL)
    if not all_left and not failing:
        warnings.warn(
            _C.error_text(
                "launch",
                "ended before all other ranks had called shutdown()",
                "They may lose the Store that this rank served; look for a rank that failed.",
                rank=run.context.rank,
                world=run.context.world,
            ),
            stacklevel=3,
        )


def _describe_group(
    backend: str | None, device: str | torch.device | None, set_threads: bool
) -> Context:
    """The context of a default group that exists; what the caller asks for must fit it."""
    run = _run if _run is not None and _run.group is _default_group() else None
    backends = {dist.get_backend(), dist.get_backend_config()} | ({run.backend} if run else set())
    if backend is not None and backend.lower() not in backends:
        refuse(
            f"backend is {backend!r}, but the default group exists and has {dist.get_backend()!r}",
            "Call shutdown() before another init().",
        )
    environment = _C.read_launch_environment(dist.get_rank(), dist.get_world_size())
    if run is None:
        if set_threads:
            _share_cpus(environment)
        return _context(environment, _choose_device(device, dist.get_backend_config(), environment))
    own = run.context.device
    asked = own if device is None else parse_device(device)
    if asked.type != own.type or asked.index not in (None, own.index):
        refuse(
            f"device is {asked}, but this rank was initialised on {own}",
            "Call shutdown() before another init().",
        )
    return run.context


def _choose_device(
    device: str | torch.device | None, backend: str | None, environment: Any
) -> torch.device:
    where = {"rank": environment.rank, "world": environment.world}
    has_nccl = backend is not None and "nccl" in backend.lower()
    if device is not None:
        wanted = parse_device(device)
    elif has_nccl or (backend is None and torch.cuda.is_available()):
        wanted = torch.device("cuda")
    else:
        wanted = torch.device("cpu")
    if wanted.type == "cpu":
        if has_nccl and "cpu:" not in str(backend):
            refuse(
                f"backend {backend} cannot serve device cpu",
                'Use the backend "trireme" or "gloo", or a CUDA device.',
                **where,
            )
        return wanted

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        refuse(
            f"device is {wanted} but torch sees no GPU",
            'Check the driver and CUDA_VISIBLE_DEVICES, or pass device="cpu".',
            **where,
        )
    # A job step that gives each rank one GPU shows each rank that GPU alone, as number 0.
    one_gpu_each = environment.launcher == _C.Launcher.SLURM and gpus == 1
    own = 0 if one_gpu_each else environment.local_rank
    index = own if wanted.index is None else wanted.index
    if index >= gpus:
        refuse(
            f"device is cuda:{index}, expected one of {gpus} GPUs",
            "Start at most one rank per GPU, or pass a device.",
            **where,
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _share_cpus(environment: Any) -> None:
    threads = _C.threads_per_rank(environment, _C.usable_cpus())
    if threads is not None:
        torch.set_num_threads(threads)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
