"""The threads of a pipeline in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trireme import _C
from trireme._C import WorkerPool
from trireme._core.worker_threads import start_threads
from trireme._pipeline import refuse
from trireme._pipeline.place import refuse_split
from trireme._pipeline.schedule import PipelineSchedule
from trireme._pipeline.stages import Balance, Stage, modules_of


def checked_devices(devices: Sequence[torch.device | str | int]) -> list[torch.device]:
    """Returns the devices of threads, each with its number."""
    found = []
    for device in map(torch.device, devices):
        if device.type == "meta":
            refuse("got devices= with meta, which computes nothing", "Pass 'cpu', or a GPU.")
        if device.type != "cpu" and device.index is None:
            device = torch.device(
                device.type, torch.get_device_module(device.type).current_device()
            )
        found.append(device)
    if not found:
        refuse("got no devices, expected one for each row", "Pass at least one.")
    kinds = sorted({device.type for device in found} - {"cpu"})
    if len(kinds) > 1:
        refuse(f"got devices= of {' and '.join(kinds)}", "Pass those of one kind.")
    return found


def choose_devices(
    given: Sequence[torch.device], stages: Sequence[Stage], modules: Mapping[str, nn.Module]
) -> list[torch.device]:
    """Returns the device of each thread: those given, to which it moves layers and loss; without
    any where these are."""
    if not given:
        return _where_threads_are(stages, modules)
    _move_to_threads(stages, modules, given)
    return list(given)


def _move_to_threads(
    stages: Sequence[Stage], modules: Mapping[str, nn.Module], devices: Sequence[torch.device]
) -> None:
    """Moves modules to the devices of their threads, or none of them."""
    places = [
        (module, devices[stage.rank])
        for stage in stages
        for module in modules_of(stage, stages, modules).values()
    ]
    refuse_split(places)
    for device in dict.fromkeys(devices):
        torch.empty(0, device=device)  # raises for one that does not exist
    for module, device in places:
        module.to(device)


def _where_threads_are(
    stages: Sequence[Stage], modules: Mapping[str, nn.Module]
) -> list[torch.device]:
    """Returns for each thread where its layers are; without parameters where the first is."""
    found: dict[int, torch.device] = {}
    for stage in stages:
        for module in modules_of(stage, stages, modules).values():
            for parameter in module.parameters():
                found.setdefault(stage.rank, parameter.device)
    first = next(iter(found.values()), torch.device("cpu"))
    return [found.get(rank, first) for rank in range(1 + max(stage.rank for stage in stages))]


def device_of(stage: Stage, devices: Sequence[torch.device]) -> torch.device | None:
    """Returns where what a stage is given has to be; None if all are on the CPU, or on ranks."""
    if all(device.type == "cpu" for device in devices):
        return None
    return devices[stage.rank]


def schedule_ranks(
    devices: Sequence[torch.device],
    balance: Balance,
    schedule: str | PipelineSchedule,
    layers: int,
) -> int:
    """Returns how many ranks the schedule of a pipeline in one process has."""
    if devices:
        return len(devices)
    if isinstance(schedule, PipelineSchedule):
        return schedule.ranks
    if balance is not None and not isinstance(balance, str):
        return len(balance)
    return max(1, min(torch.get_num_threads(), layers))


def refuse_wrapped(held: Iterable[nn.Module]) -> None:
    """Refuses strategies around layers, whose threads would all call their collectives."""
    for layer in held:
        for module in layer.modules():
            if isinstance(module, DistributedDataParallel | FSDPModule) or _synchronizes(module):
                got = (
                    f"got a layer in {type(module).__name__} in a pipeline in one process: several "
                    "threads would call their collectives"
                )
                refuse(got, "Wrap the pipeline, or use ranks.", kind=NotImplementedError)


def _synchronizes(module: nn.Module) -> bool:
    """Whether it normalizes over other ranks, too."""
    if not (isinstance(module, nn.SyncBatchNorm) and dist.is_initialized()):
        return False
    return dist.get_world_size(module.process_group) > 1


def pool_of(devices: Sequence[torch.device]) -> WorkerPool:
    """Returns a thread for each device. They end with the pool."""
    pool = _C.pipeline_pool(list(devices))
    start_threads(pool, len(devices), "trireme-row")
    return pool
