"""What the tests of fully_shard share: models in units, one process and torch's class as oracles.

    @on_shm_ranks(2)
    def test_something(rank: int) -> None:
        ours, one = pair(mlp)
        for step in range(3):
            train_both(ours, one, step)

Every rank's part of every gradient and parameter is compared with what one process has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD

from harness.faults import message_of
from harness.meeting import group_of_ranks
from harness.models import batch
from harness.ranks import run_ranks
from harness.training import ROWS, Training, alone, assert_close, backward_by_rank

FullyShard = Callable[..., Any]
ModelMaker = Callable[[], nn.Module]
SGD_OPTIONS = {"lr": 0.1, "momentum": 0.9}


class Sharded(Training):
    """A model of fully_shard on rows ``rank::world`` of every batch."""

    def backward(self, *numbers: int, sync: bool = True) -> None:
        """One backward for each batch. Without ``sync`` ranks only accumulate."""
        self.model.set_requires_gradient_sync(sync)
        for number in numbers:
            self.loss(number).backward()
        self.model.set_requires_gradient_sync(True)


def shard_layers(model: nn.Module, shard: FullyShard = trireme.fully_shard, **options: Any) -> Any:
    """Each child that has parameters, and what is left of the model, is a unit."""
    taken: set[nn.Parameter] = set()
    for child in model.children():
        own = set(child.parameters())
        if own and not own & taken and not _shared_outside(model, child):
            shard(child, **options)
        taken |= own
    return shard(model, **options)


def _shared_outside(model: nn.Module, child: nn.Module) -> bool:
    own = set(child.parameters())
    others = (sibling for sibling in model.children() if sibling is not child)
    return any(own & set(other.parameters()) for other in others)


def in_training(model: nn.Module, optimizer_class: Any = SGD, **defaults: Any) -> Sharded:
    """``model``, which is sharded, with its optimizer."""
    optimizer = optimizer_class(model.parameters(), **(defaults or SGD_OPTIONS))
    return Sharded(model, model, optimizer, dist.get_rank(), dist.get_world_size())


def sharded(
    make: ModelMaker,
    optimizer_class: Any = SGD,
    shard: FullyShard = shard_layers,
    options: dict[str, Any] | None = None,
    **defaults: Any,
) -> Sharded:
    """This rank's part."""
    model = make()
    shard(model, **(options or {}))
    return in_training(model, optimizer_class, **defaults)


def pair(
    make: ModelMaker,
    optimizer_class: Any = SGD,
    shard: FullyShard = shard_layers,
    options: dict[str, Any] | None = None,
    **defaults: Any,
) -> tuple[Sharded, Training]:
    """Sharded training, and one process on whole batches."""
    ours = sharded(make, optimizer_class, shard, options, **defaults)
    return ours, alone(make, optimizer_class, **(defaults or SGD_OPTIONS))


def torch_pair(
    make: ModelMaker, optimizer_class: Any = SGD, lr: float = 0.1, **options: Any
) -> tuple[Sharded, Sharded]:
    """Ours, and torch's fully_shard over Gloo; ``options`` go to both."""
    ours = sharded(make, optimizer_class, shard_layers, options, lr=lr)
    model = make()
    shard_layers(model, torch_fully_shard, mesh=gloo_mesh(), **options)
    return ours, in_training(model, optimizer_class, lr=lr)


def gloo_mesh() -> DeviceMesh:
    """All ranks, over what torch uses on CPU."""
    return DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank has of it, by torch.chunk's rule, drawn by hand.

    It may be a replica, but for the last dimension of the mesh.
    """
    *replicas, placement = like.placements
    assert all(isinstance(replica, Replicate) for replica in replicas)
    if not isinstance(placement, Shard):
        return whole
    last = like.device_mesh.ndim - 1
    rank, world = like.device_mesh.get_local_rank(last), like.device_mesh.size(last)
    rows = whole.shape[placement.dim]
    chunk = -(-rows // world)
    begin = min(rank * chunk, rows)
    return whole.narrow(placement.dim, begin, min(chunk, rows - begin))


def own_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: all, where ``like`` is no DTensor."""
    return part_of(whole, like) if isinstance(like, DTensor) else whole


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A DTensor's part of this rank; a copy."""
    if tensor is None:
        return None
    one = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return one.detach().clone()


def assert_parts(ours: Training, one: Training, *, grads: bool = False, **tolerance: Any) -> None:
    """This rank's parts of parameters, or of their gradients, are those of one process."""
    theirs = ours.counterparts(one)
    for (name, param), other in zip(ours.model.named_parameters(), theirs, strict=True):
        whole = other.grad if grads else other.detach()
        got = param.grad if grads else param
        if whole is not None and isinstance(param, DTensor):
            whole = part_of(whole, param)
        assert_close(name, local(got), whole, **tolerance)


def assert_locals(ours: nn.Module, theirs: nn.Module, **tolerance: Any) -> None:
    """Parameters and gradients of two sharded models, rank by rank."""
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(name, local(one), local(other), **tolerance)
        assert_close(f"{name}.grad", local(one.grad), local(other.grad), **tolerance)


def step_both(ours: Training, one: Training, **tolerance: Any) -> None:
    """After backward: compares gradients, steps, compares parameters."""
    assert_parts(ours, one, grads=True, **tolerance)
    for training in (ours, one):
        training.optimizer.step()
    assert_parts(ours, one, **tolerance)


def train_both(ours: Training, one: Training, *numbers: int, **tolerance: Any) -> None:
    for training in (ours, one):
        training.optimizer.zero_grad()
        training.backward(*numbers)
    step_both(ours, one, **tolerance)


def train_by_rank(ours: Training, one: Training, number: int, given: Sequence[Any]) -> None:
    """The forward of rank r gets ``given[r]`` beside its rows."""
    for training in (ours, one):
        training.optimizer.zero_grad()
    backward_by_rank(ours, one, number, given)
    step_both(ours, one)


def own(param: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, in its memory."""
    return (param.to_local() if isinstance(param, DTensor) else param).detach()


def evaluate(training: Training, number: int) -> torch.Tensor:
    """Evaluates the same rows on whoever calls."""
    with torch.no_grad():
        return training.model(batch(number))


def sharded_in(model: nn.Module) -> list[bool]:
    """Which parameters the modules show as DTensors."""
    return [isinstance(param, DTensor) for param in model.parameters()]


def rows_of(number: int, training: Training, dtype: torch.dtype = torch.float32) -> Any:
    """This rank's rows of a batch."""
    return batch(number, rows=ROWS, dtype=dtype)[training.rank :: training.world]


def units_of(model: nn.Module) -> Sequence[TorchFSDPModule]:
    return [module for module in model.modules() if isinstance(module, TorchFSDPModule)]


def error_of_training(training: Sharded) -> str | None:
    """What a survivor says of a rank that dies meanwhile."""
    try:
        for step in range(3):
            training.train(step)
    except dist.DistBackendError as error:
        return message_of(error)
    return None


def run_programs(
    backend: str, world: int, *programs: Callable[[int], None], timeout: float = 60
) -> None:
    """Each on all ranks, one after another, from one seed."""
    run_ranks(_one_after_another, world, backend, programs, timeout=timeout)


def _one_after_another(rank: int, backend: str, programs: Sequence[Callable[[int], None]]) -> None:
    with group_of_ranks(backend):
        for program in programs:
            torch.manual_seed(0)
            program(rank)


def has_memory(model: nn.Module) -> list[bool]:
    """Tells of the units of ``mlp`` whether their unsharded parameters have any."""
    leaves = [model[index]._get_fsdp_state().params[0].unsharded for index in (0, 2, 4)]
    return [leaf.untyped_storage().nbytes() > 0 for leaf in leaves]
