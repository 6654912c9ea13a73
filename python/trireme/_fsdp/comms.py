"""What a user of fully_shard brings along for its collectives: torch's AllGather and ReduceScatter,
all-reduce hooks in a stream of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from trireme._C import CustomCommunicator
from trireme._core.rank_log import get_logger
from trireme._fsdp import refuse

if TYPE_CHECKING:
    from trireme._C import Communicator, ParamGroup
    from trireme._fsdp.unit import FsdpUnit


def customizable(communicator: Communicator | None) -> CustomCommunicator | None:
    """One that ``use_all_gather`` and ``use_reduce_scatter`` may change, over ``communicator``."""
    return None if communicator is None else CustomCommunicator(communicator)


def check_one_mesh(name: str, unit: FsdpUnit) -> None:
    """For a collective of the user's for ``unit``, which is of one mesh; as in torch."""
    if unit.others:
        refuse(
            f"got {name}() for a unit with parameters on {len(unit.all)} meshes",
            "Put the modules of other meshes into units of their own: fully_shard(experts, "
            "mesh=...).",
        )


def check_comm(name: str, comm: Any, unit: FsdpUnit) -> None:
    """For ``set_custom_<name>(comm)``."""
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        got = f"got {type(comm).__name__} as {name}"
        expected = "expected something with allocate() and __call__()"
        refuse(
            f"{got}, {expected}",
            "See AllGather and ReduceScatter of torch.",
            kind=TypeError,
        )
    check_one_mesh(f"set_custom_{name}", unit)
    if not unit.mesh.gathers:
        refuse(
            f"got set_custom_{name}() where ranks share the memory of their host, so that nothing "
            "is gathered and gradients go through it",
            "Leave it out, or use another backend than trireme.",
        )


def has_symmetric_memory(device: torch.device) -> bool:
    """Whether NCCL may have some there."""
    return device.type == "cuda"


def symmetric_all_gather(unit: FsdpUnit, backend: str) -> Any:
    """Torch's, for the ranks that share ``unit``; None for one rank. Collective."""
    check_one_mesh("set_symm_mem_for_comm", unit)
    kind = getattr(_fsdp_collectives, "SymmMemAllGather", None)
    got = f"got set_symm_mem_for_comm({backend!r})"
    if kind is None:
        next_step = "Leave it out, or install a newer torch."
        refuse(f"{got}, which this torch has not", next_step, kind=NotImplementedError)
    if not has_symmetric_memory(unit.mesh.device):
        refuse(
            f"{got} for parameters on {unit.mesh.device}, expected GPUs",
            "Leave it out.",
        )
    if unit.all_gather is not None and not isinstance(unit.all_gather, kind):
        refuse(
            f"{got} for a unit with a custom all-gather",
            "Let its allocate() take symmetric memory.",
            kind=AssertionError,
        )
    group = unit.mesh.gather_group
    return None if group is None else kind(group, backend)


def use_all_gather(unit: FsdpUnit, group: ParamGroup | None) -> None:
    """``group``, of ``unit``, is gathered by ``unit.all_gather``, if it has one."""
    communicator = None if group is None else group.gathers_with
    if not isinstance(communicator, CustomCommunicator):  # on one rank
        return
    if unit.all_gather is None:
        communicator.set_all_gather(None, None)
        return
    all_gather = _held_comm(unit, "all_gather")

    def start(output: torch.Tensor, own: torch.Tensor) -> Work | None:
        comm = all_gather()
        return _work(
            comm(output_tensor=output, input_tensor=own, group=gather_group, async_op=True)
        )

    gather_group = unit.mesh.gather_group
    allocate = functools.partial(_allocate, all_gather)
    communicator.set_all_gather(allocate, start)


def use_reduce_scatter(communicator: CustomCommunicator | None, units: list[FsdpUnit]) -> None:
    """Gradients of all ``units`` are scattered by the object that they all have, if they do.

    Raises:
        ValueError: some have another one.
    """
    if communicator is None or not units:
        return
    first = units[0]
    if any(unit.reduce_scatter is not first.reduce_scatter for unit in units):
        refuse(
            "got units of one mesh under one root of which not all have the same object from "
            "set_custom_reduce_scatter(), but gradients of several units travel together",
            "Pass one object to every unit: model.modules() that are FSDPModules.",
        )
    if first.reduce_scatter is None:
        communicator.set_reduce_scatter(None, None)
        return
    reduce_scatter = _held_comm(first, "reduce_scatter")
    group = first.mesh.shard_group

    def start(output: torch.Tensor, gradients: torch.Tensor) -> Work | None:
        comm = reduce_scatter()
        return _work(
            comm(
                output_tensor=output,
                input_tensor=gradients,
                group=group,
                op=ReduceOp.SUM,
                async_op=True,
            )
        )

    communicator.set_reduce_scatter(functools.partial(_allocate, reduce_scatter), start)


def check_scattering(units: list[FsdpUnit]) -> None:
    """For units whose gradients are compressed."""
    for unit in units:
        if unit.reduce_scatter is not None and unit.mesh.replicate_communicator is None:
            refuse(
                "got set_custom_reduce_scatter() beside compression, which scatters nothing",
                "Leave one of them out.",
            )


def _held_comm(unit: FsdpUnit, name: str) -> Callable[[], Any]:
    """What ``unit`` has by that name, which may hold the model, which holds the core."""
    held = weakref.ref(unit)

    def comm() -> Any:
        unit = held()
        assert unit is not None
        return getattr(unit, name)

    return comm


def _allocate(
    comm: Callable[[], Any], numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    made = comm().allocate((numel,), dtype=dtype, device=device)
    assert isinstance(made, torch.Tensor)
    return made


def _work(work: Any) -> Work | None:
    if work is not None and not isinstance(work, Work):
        got = f"got {type(work).__name__} from a custom collective, expected a Work or None"
        refuse(
            got,
            "Return what the collective of torch.distributed returns.",
            kind=TypeError,
        )
    return work


def in_stream(
    hook: Callable[[torch.Tensor], None], stream: Any, device: torch.device
) -> Callable[[torch.Tensor], None]:
    """``hook`` in ``stream``, between what is before and after it in the current one."""
    streams = torch.get_device_module(device)

    def run(gradients: torch.Tensor) -> None:
        current = streams.current_stream()
        stream.wait_stream(current)
        with streams.stream(stream):
            hook(gradients)
        current.wait_stream(stream)

    return run


def hook_of(unit: FsdpUnit) -> Callable[[torch.Tensor], None] | None:
    """What the core calls for ``unit.all_reduce_hook``: that may hold the model, which holds the
    core."""
    if unit.all_reduce_hook is None:
        return None
    held = weakref.ref(unit)

    def run(gradients: torch.Tensor) -> None:
        unit = held()
        if unit is not None and unit.all_reduce_hook is not None:
            unit.all_reduce_hook(gradients)

    return run


def group_of_memory(units: list[FsdpUnit]) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Whose backends give memory: for gathers, and for gradients; None: ordinary memory."""
    mesh = units[0].mesh
    if not any(unit.allocates_from_group for unit in units) or mesh.gather_group is None:
        return None
    return mesh.gather_group, mesh.shard_group


def say_no_memory(groups: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
    backends = dict.fromkeys(dist.get_backend(group) for group in groups)
    get_logger().info(
        "[fully_shard] set_allocate_memory_from_process_group_for_comm: the backend %s has no "
        "memory of its own; ordinary memory is used",
        " and ".join(backends),
    )
