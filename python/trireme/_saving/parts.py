"""Which part of which tensor a rank has, as checkpoints want to know it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trireme._C import CheckpointRanks, CheckpointTensor, chunk_rows, gather_texts, has_memory
from trireme._core.agreement import as_bytes, raised_on_all
from trireme._core.errors import Area, text_of
from trireme._core.group_communicator import communicator_of, device_of_numbers
from trireme._core.meshes import is_cut, ranks_of
from trireme._core.owners import (
    ShardedOptimizer,
    StagedModule,
    group_of_stages,
    local_of,
    optimizer_of,
)
from trireme._core.plain_model import plain_model


class Ranks:
    """Who saves or loads together. ``shares_writing``: of what all ranks have, each writes its
    rows; else each lists all of it."""

    def __init__(self, group: dist.ProcessGroup | None, *, shares_writing: bool = True) -> None:
        self.shares_writing = shares_writing
        self.rank = 0 if group is None else group.rank()
        self.world = 1 if group is None else group.size()
        self.members = {0} if group is None else set(dist.get_process_group_ranks(group))
        device = torch.device("cpu") if group is None else device_of_numbers(group)
        communicator = None if group is None else communicator_of(group)
        self.core = CheckpointRanks(communicator, device)
        self.group = group
        self._communicator, self._device = communicator, device

    def any(self, said: bool) -> bool:
        """Whether a rank says so. Collective."""
        return any(self.say_to_all("yes" if said else ""))

    def say_to_all(self, text: str) -> list[str]:
        """Returns what every rank says, by rank. Collective."""
        if self._communicator is None:
            return [text]
        return gather_texts(as_bytes(text), self._communicator, self._device)

    def refuse(self, got: str, next_step: str, kind: type[Exception] = ValueError) -> NoReturn:
        """Raises ``kind`` in the form of all messages."""
        Area("saving").refuse(got, next_step, rank=self.rank, world=self.world, kind=kind)

    @contextmanager
    def together(self) -> Iterator[None]:
        """An exception inside is raised on all ranks: elsewhere as one that names it. Collective
        at the end."""
        if self._communicator is None:
            yield
            return

        def refuse(rank: int, said: str) -> None:
            got = f"rank {rank} could not go on: {said}"
            self.refuse(got, "Mend what it says, and call this again on all ranks.")

        with raised_on_all(self._communicator, self._device, refuse, text_of):
            yield


@dataclass(frozen=True)
class Part:
    """A rank has ``local_shape[d]`` elements of each dimension ``d`` of a tensor of ``shape``, from
    ``first[d]`` on. Where several ranks have the same part, the lowest one writes it."""

    shape: torch.Size
    first: tuple[int, ...]
    local_shape: torch.Size
    is_shared: bool = False
    """Every rank has all of it, and writes some."""

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def rows(self, dim: int, first: int, count: int) -> Part:
        """``count`` of the rows that it has along ``dim``, from ``first`` on."""
        begin, sizes = list(self.first), list(self.local_shape)
        begin[dim] += first
        sizes[dim] = count
        return Part(self.shape, tuple(begin), torch.Size(sizes))

    def chunk(self, dim: int, number: int, chunks: int) -> Part:
        """One of so many along ``dim``, by torch.chunk's rule, as DTensor and fully_shard do."""
        return self.rows(dim, *chunk_rows(self.local_shape[dim], number, chunks))

    def to_load(
        self, name: str, values: torch.Tensor, dtype: torch.dtype | None = None
    ) -> CheckpointTensor:
        """``values``, of the local shape, are to be read; cast from ``dtype``, if that is given."""
        given = values.detach()
        sizes = list(self.shape)
        return CheckpointTensor(name, dtype or values.dtype, sizes, given, first=self.first)

    def to_save(self, name: str, values: torch.Tensor, ranks: Ranks) -> CheckpointTensor:
        """``values`` are to be written; of what all ranks have, each writes its rows."""
        if not (self.is_shared and ranks.shares_writing):
            return self.to_load(name, values)
        if not self.shape:
            own = values if ranks.rank == 0 else None
            return CheckpointTensor(name, values.dtype, [], own)
        begin, count = chunk_rows(self.local_shape[0], ranks.rank, ranks.world)
        rows = values.detach().narrow(0, begin, count)
        first = (self.first[0] + begin, *self.first[1:])
        return CheckpointTensor(name, values.dtype, list(self.shape), rows, first=first)


def whole(shape: torch.Size, *, is_shared: bool = False) -> Part:
    return Part(shape, (0,) * len(shape), shape, is_shared)


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer under its name in the plain model."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool
    is_everywhere: bool = True
    """All ranks have it; else those of some stages."""


def part_of(named: NamedTensor, ranks: Ranks) -> Part:
    """Says what this rank has of a parameter: of a DTensor its part, of a plain tensor all.

    Raises:
        ValueError: a DTensor that lies in another way.
    """
    name, tensor = named.name, named.tensor
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape, is_shared=named.is_everywhere)
    mesh = tensor.device_mesh
    coordinate, order = mesh.get_coordinate(), _order_of_cuts(tensor)
    if coordinate is None or order is None or not ranks.members.issuperset(ranks_of(mesh)):
        ranks.refuse(
            f"got '{name}' placed {tensor.placements} on {mesh}, expected Shard or Replicate over "
            f"ranks that save and load, which are {sorted(ranks.members)}",
            "Pass process_group, or save it with torch.distributed.checkpoint.",
        )
    part = whole(tensor.shape, is_shared=not order and mesh.size() == ranks.world)
    for index in order:
        cut: Any = tensor.placements[index]
        part = part.chunk(cut.dim, coordinate[index], mesh.size(index))
    if held_of(tensor).shape != part.local_shape:
        ranks.refuse(
            f"got a part of '{name}' of shape {tuple(held_of(tensor).shape)}, expected "
            f"{tuple(part.local_shape)}, since it is placed {tensor.placements} on {mesh}",
            "Distribute it by distribute_tensor, parallelize_module or fully_shard.",
        )
    return part


def _order_of_cuts(tensor: DTensor) -> list[int] | None:
    """The dimensions of its mesh that cut it, each what those before it have left; None if one does
    otherwise. A Shard comes before those to its right, a _StridedShard behind as many of them as
    make up its split_factor: so fully_shard has cut what tensor parallelism had cut already."""
    placements: Any = tensor.placements
    order: list[int] = []
    for index in reversed(range(len(placements))):
        placement = placements[index]
        if placement.is_replicate():
            continue
        if not is_cut(placement):
            return None
        behind, parts, expected = 0, 1, getattr(placement, "split_factor", 1)
        while parts < expected and behind < len(order):
            if is_cut(placements[order[behind]], placement.dim):
                parts *= tensor.device_mesh.size(order[behind])
            behind += 1
        if parts != expected:
            return None
        order.insert(behind, index)
    return order


class ShardedParts:
    """Which parts of its parameters the ranks of a sharded optimizer own."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._plans = [core.plan() for core in optimizer._cores]

    def part_of(self, param: torch.Tensor) -> Part:
        """Says what this rank owns of a parameter."""
        row = param.shape[1:].numel()
        if row == 0:  # nobody owns a part of what has no elements
            return whole(param.shape)
        begin, numel = self._ranges(param)[self._optimizer.rank]
        own = whole(param.shape)
        return own.rows(0, begin // row, numel // row) if param.shape else own

    def shard_of(self, param: torch.Tensor) -> torch.Tensor:
        """Returns what this rank owns, in the memory of the parameter."""
        return self._optimizer._shards[param]

    def own_of(self, named: NamedTensor) -> CheckpointTensor:
        """Lists what this rank owns of a parameter, in the memory of the parameter."""
        shard = self.shard_of(named.tensor)
        if shard.numel() > 0:
            return self.part_of(named.tensor).to_load(named.name, shard)
        return CheckpointTensor(named.name, named.tensor.dtype, list(named.tensor.shape))

    def first_owner(self, param: torch.Tensor) -> int:
        """The lowest rank that owns elements of it; 0 if it has none."""
        ranges = enumerate(self._ranges(param))
        return next((rank for rank, (_, numel) in ranges if numel > 0), 0)

    def _ranges(self, param: torch.Tensor) -> list[tuple[int, int]]:
        core, index = self._optimizer._places[param]
        return self._plans[core][index]


def held_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor, in the same memory and nothing of autograd's."""
    return local_of(tensor).detach()


def named_tensors(model: nn.Module, ranks: Ranks) -> list[NamedTensor]:
    """Parameters and persistent buffers, each once, under the first of its names; of a pipeline
    those of this rank's stages, under the first of their names in the whole module.

    Raises:
        ValueError: a module keeps extra state, which is no tensor; stages are on other ranks, too.
    """
    found: dict[int, NamedTensor] = {}
    plain = resharded_model(model)
    stages = group_of_stages(plain)
    is_staged = stages is not None
    names = _names_in_whole(plain, stages, ranks) if isinstance(plain, StagedModule) else {}
    for prefix, owner in plain.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            ranks.refuse(
                f"got '{prefix}' with a get_extra_state(), expected parameters and buffers",
                "Keep it in buffers, or save it as `extra`.",
            )
        kept = owner._non_persistent_buffers_set
        for is_buffer, members in ((False, owner._parameters), (True, owner._buffers)):
            for name, tensor in members.items():
                if tensor is None or id(tensor) in found or (is_buffer and name in kept):
                    continue
                if is_staged and not has_memory(tensor):
                    continue  # other ranks have it
                full_name = f"{prefix}.{name}" if prefix else name
                full_name = plain_name(names.get(full_name, full_name))
                if _has_half_a_pair(full_name):
                    got = f"got a tensor called {full_name!a}, which has half of a surrogate pair"
                    ranks.refuse(got, "Give it a name of characters.")
                found[id(tensor)] = NamedTensor(full_name, tensor, is_buffer, not is_staged)
    return list(found.values())


def _has_half_a_pair(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


def _names_in_whole(
    model: StagedModule, stages: dist.ProcessGroup | None, ranks: Ranks
) -> dict[str, str]:
    holders = set() if stages is None else set(dist.get_process_group_ranks(stages))
    if not ranks.members.issuperset(holders):
        got = f"got a pipeline on ranks {sorted(holders)}, of which {sorted(ranks.members)} save"
        ranks.refuse(f"{got} and load, expected all", "Leave process_group out.")
    return model.names_in_whole()


def resharded_model(model: nn.Module) -> nn.Module:
    """Takes off DistributedDataParallel and torch.compile; reshards what can be."""
    plain = plain_model(model)
    for module in plain.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return plain


def plain_name(name: str) -> str:
    """Leaves out what wrappers in the model have added."""
    added = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in added)


def model_to_save(
    named: Iterable[NamedTensor], ranks: Ranks, *, copies: bool = False
) -> list[CheckpointTensor]:
    """This rank's part. Buffers are rank 0's, of a pipeline those of the lowest rank that has them:
    ranks need not have the same. ``copies``: of buffers, and of what other ranks step in memory
    that they share with this one."""
    tensors = []
    sharded: dict[ShardedOptimizer, ShardedParts] = {}
    for tensor in named:
        optimizer = optimizer_of(tensor.tensor)
        if copies and optimizer is not None and _saves_all_of(optimizer, ranks):
            if optimizer not in sharded:
                sharded[optimizer] = ShardedParts(optimizer)
            tensors.append(sharded[optimizer].own_of(tensor))
            continue
        own = tensor_to_save(tensor, ranks)
        is_copied = copies and (tensor.is_buffer or optimizer is not None)
        tensors.append(own.copied() if is_copied else own)
    return tensors


def _saves_all_of(optimizer: ShardedOptimizer, ranks: Ranks) -> bool:
    """Whether its ranks are those that save: each then writes what it owns."""
    group = optimizer.process_group
    return group is not None and set(dist.get_process_group_ranks(group)) == ranks.members


def tensor_to_save(named: NamedTensor, ranks: Ranks) -> CheckpointTensor:
    name, tensor = named.name, named.tensor
    part = part_of(named, ranks)
    if named.is_buffer and part.is_shared and ranks.shares_writing:
        own = tensor.detach() if ranks.rank == 0 else None
        return CheckpointTensor(name, tensor.dtype, list(tensor.shape), own)
    return part.to_save(name, held_of(tensor), ranks)


def tensor_to_load(named: NamedTensor, ranks: Ranks) -> CheckpointTensor:
    """For one that no optimizer shards."""
    return part_of(named, ranks).to_load(named.name, held_of(named.tensor))


def model_to_load(model: nn.Module, ranks: Ranks) -> list[CheckpointTensor]:
    """Lists what this rank needs, in the model's memory: of what others write for it nothing."""
    tensors = []
    sharded: dict[ShardedOptimizer, ShardedParts] = {}
    for tensor in named_tensors(model, ranks):
        if tensor.tensor.is_meta:
            ranks.refuse(
                f"got '{tensor.name}' on the meta device, expected memory",
                "Call model.to_empty(device='cpu') before.",
            )
        optimizer = optimizer_of(tensor.tensor)
        if optimizer is None:
            tensors.append(tensor_to_load(tensor, ranks))
            continue
        if optimizer not in sharded:
            sharded[optimizer] = ShardedParts(optimizer)
        tensors.append(sharded[optimizer].own_of(tensor))
    return tensors
