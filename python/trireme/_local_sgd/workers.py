"""Which ranks are a worker, and which ones hold the same elements on other workers."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trireme._C import Communicator, WorkerRanks, counterparts_on_hosts, ranks_by_host
from trireme._core.group_communicator import communicator_of
from trireme._core.meshes import group_over
from trireme._core.owners import averaging_module_of, optimizer_of
from trireme._local_sgd import AREA, refuse
from trireme._local_sgd.model import RoundModel

_PASS_ACROSS = "Pass across: the ranks that hold the same elements on different workers."


class Workers(NamedTuple):
    """Where this rank is."""

    ranks: WorkerRanks
    inside: dist.ProcessGroup | None
    """The ranks of this worker; None for a rank alone."""
    have_all: bool
    """Whether each of them has all of each parameter."""

    @property
    def place(self) -> str:
        """What its counterparts on other workers say, too."""
        if self.inside is None:
            return "a rank of a worker"
        return f"rank {self.inside.rank()} of a worker of {self.inside.size()}"


def find_workers(model: RoundModel, across: dist.ProcessGroup | DeviceMesh | None) -> Workers:
    """Says who this rank's worker is. Collective.

    Raises:
        TypeError, ValueError: ``across`` is none, or nobody can tell who is across.
    """
    inside = _inside(model)
    have_all = inside is not None and all(_is_averaged(it, model) for it in model.parameters)
    found = _on_hosts(inside) if across is None else _given(across, inside)
    here = None if inside is None else communicator_of(inside)
    return Workers(WorkerRanks(found, here, have_all), inside, have_all)


def _inside(model: RoundModel) -> dist.ProcessGroup | None:
    """The ranks that a strategy keeps at one model together with this one."""
    groups = {_group_of(param, model) for param in model.parameters} - {None}
    by_ranks = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    if len(by_ranks) > 1:
        refuse(
            f"got parameters over ranks {' and '.join(map(str, sorted(by_ranks)))}, expected one "
            "group of ranks for all of them",
            "Shard or average all parameters over the ranks of one worker.",
        )
    found = next(iter(by_ranks.values()), None)
    return None if found is None or found.size() == 1 else found


def _group_of(param: torch.Tensor, model: RoundModel) -> dist.ProcessGroup | None:
    if isinstance(param, DTensor):
        return group_over([param.device_mesh])
    keeper = optimizer_of(param) or averaging_module_of(param)
    if keeper is None and isinstance(model.shown, TorchDDP):
        keeper = model.shown
    return None if keeper is None else keeper.process_group


def _is_averaged(param: torch.Tensor, model: RoundModel) -> bool:
    is_sharded = isinstance(param, DTensor) or optimizer_of(param) is not None
    return not is_sharded and _group_of(param, model) is not None


def _given(
    across: dist.ProcessGroup | DeviceMesh, inside: dist.ProcessGroup | None
) -> Communicator:
    if isinstance(across, DeviceMesh):
        if across.ndim != 1:
            refuse(
                f"got across with {across.ndim} dimensions, expected a DeviceMesh of one",
                "Pass one dimension of it, such as mesh['workers'].",
            )
        across = across.get_group()
    group = AREA.expect_group(across, "Pass across a group that this rank is in.")
    same = set() if inside is None else set(dist.get_process_group_ranks(inside))
    both = same.intersection(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    if both:
        refuse(
            f"got across with rank {min(both)}, which a strategy keeps equal with this one, "
            "expected ranks of different workers",
            "Give the strategy a process group of this worker's ranks.",
            group,
        )
    return communicator_of(group)


def _on_hosts(inside: dist.ProcessGroup | None) -> Communicator:
    world = AREA.expect_group(None, "")
    everybody = communicator_of(world)
    found = counterparts_on_hosts(everybody)
    mine = next(ranks for ranks in ranks_by_host(everybody) if world.rank() in ranks)
    kept = {world.rank()} if inside is None else set(dist.get_process_group_ranks(inside))
    if kept != set(mine):
        refuse(
            f"got across=None and ranks {mine} on this host, of which a strategy keeps "
            f"{sorted(kept)} equal, expected all of them",
            _PASS_ACROSS,
            world,
        )
    return found
