"""fully_shard over Gloo where forwards use units in other orders than the first one did, more
often, or some of them only: all ranks alike, as torch's class and one process; else an error says
who differs, and where.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from fsdp.ranks import (
    assert_locals,
    gloo_mesh,
    in_training,
    pair,
    rows_of,
    sharded_in,
    step_both,
    train_by_rank,
)
from harness.faults import kill_this_rank, raises
from harness.meeting import store
from harness.models import batch
from harness.on_ranks import AGES_S, on_gloo_ranks, on_ranks
from harness.training import ROWS

Path = Sequence[int]


class Deep(nn.Module):
    """Residual layers, of which a call says which it uses, in which order."""

    def __init__(self, reentrant: bool | None = None, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.reentrant = reentrant  # None: nothing is computed again

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:
        for index in path:
            layer = self.layers[index]
            if self.reentrant is None or not torch.is_grad_enabled():
                x = x + layer(x).tanh()
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x


class Sections(Deep):
    """Is computed again in backward three layers at a time."""

    def forward(self, x: torch.Tensor, path: Path) -> torch.Tensor:
        assert self.reentrant is not None
        for first in range(0, len(path), 3):
            some = functools.partial(self._run, path[first : first + 3])
            x = checkpoint(some, x, use_reentrant=self.reentrant)
        return x

    def _run(self, path: Path, x: torch.Tensor) -> torch.Tensor:
        for index in path:
            x = x + self.layers[index](x).tanh()
        return x


def shard_deep(model: Any, shard: Any = trireme.fully_shard, **options: Any) -> Any:
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


def has_memory(model: Any) -> bool:
    """Whether unsharded parameters of any layer have any."""
    leaves = [layer._get_fsdp_state().params[0].unsharded for layer in model.layers]
    return any(leaf.untyped_storage().nbytes() > 0 for leaf in leaves)


def stochastic_depth(chance: random.Random, step: int) -> Path:
    return [layer for layer in range(5) if chance.random() < 0.7]


def any_order(chance: random.Random, step: int) -> Path:
    return [chance.randrange(5) for _ in range(chance.randint(1, 7))]


def loops(chance: random.Random, step: int) -> Path:
    return [0, *([1, 2] * (1 + step % 3)), 4]


def early_exit(chance: random.Random, step: int) -> Path:
    return range(chance.randint(1, 5))


PATTERNS = (stochastic_depth, any_order, loops, early_exit)


def loss_of(training: Any, step: int, path: Path) -> torch.Tensor:
    return training.model(rows_of(step, training).requires_grad_(), path).float().square().mean()


def train_as_torch(make: Callable[[], nn.Module], pattern: Any, **options: Any) -> None:
    """``options`` go to both classes; ``mesh`` is ours, and torch's over Gloo is like it."""
    mesh = options.pop("mesh", None)
    tolerance = {"rtol": 2**-6, "atol": 1e-2} if options.get("mp_policy") else {}
    ours = in_training(
        shard_deep(make(), **options, **({"mesh": mesh} if mesh else {})), SGD, lr=0.1
    )
    theirs_mesh = gloo_mesh() if mesh is None else mesh
    theirs = in_training(
        shard_deep(make(), torch_fully_shard, mesh=theirs_mesh, **options), SGD, lr=0.1
    )
    chance = random.Random(pattern.__name__)
    for step in range(6):
        path = pattern(chance, step)
        evaluated = pattern(chance, step)
        for training in (ours, theirs):
            training.optimizer.zero_grad()
            loss_of(training, step, path).backward()
        assert_locals(ours.model, theirs.model, **tolerance)
        for training in (ours, theirs):
            training.optimizer.step()
        with torch.no_grad():
            results = [loss_of(training, step, evaluated) for training in (ours, theirs)]
        torch.testing.assert_close(*results, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))
        assert not has_memory(ours.model) or options.get("reshard_after_forward") is False
        assert all(sharded_in(ours.model.layers)) or options.get("reshard_after_forward") is False


# --- All ranks alike -----------------------------------------------------------------------------


@on_gloo_ranks(2)
def test_orders_that_change_as_torch(rank: int) -> None:
    for pattern in PATTERNS:
        for reshards in (True, False, None):
            train_as_torch(Deep, pattern, reshard_after_forward=reshards)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    train_as_torch(Deep, any_order, mp_policy=policy)


@on_gloo_ranks(2)
def test_what_is_computed_again(rank: int) -> None:
    """As torch's class, which leaves some units unsharded where this is reentrant; so there as one
    process."""
    for pattern in PATTERNS:
        for kind in (Deep, Sections):
            train_as_torch(functools.partial(kind, False), pattern)
            if pattern in (stochastic_depth, early_exit):  # no layer comes twice
                train_as_one_process(functools.partial(kind, True), pattern, most_forwards=1)


@on_gloo_ranks(4)
def test_replicas_and_parts_of_ranks_as_torch(rank: int) -> None:
    """HSDP, and units that are resharded among two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for pattern in (stochastic_depth, any_order):
        train_as_torch(Deep, pattern, mesh=mesh)
        train_as_torch(Deep, pattern, reshard_after_forward=2)


def train_as_one_process(
    make: Callable[[], nn.Module], pattern: Any, *, prefetch: bool = False, most_forwards: int = 2
) -> None:
    """In every other step two forwards come before one backward, if so many may."""
    ours, one = pair(make, shard=shard_deep)
    layers: Any = ours.model.layers
    for index in (0, 2) if prefetch else ():
        layers[index].set_modules_to_forward_prefetch([layers[index + 1], layers[index + 2]])
        layers[index + 2].set_modules_to_backward_prefetch([layers[index]])
    chance = random.Random(pattern.__name__)
    for step in range(6):
        paths = [pattern(chance, step) for _ in range(min(1 + step % 2, most_forwards))]
        for training in (ours, one):
            training.optimizer.zero_grad()
        torch.stack([loss_of(ours, step, path) for path in paths]).sum().backward()
        for other in range(ours.world):
            rows = batch(step, rows=ROWS)[other :: ours.world].requires_grad_()
            losses = [one.model(rows, path).square().mean() for path in paths]
            (torch.stack(losses).sum() / ours.world).backward()
        step_both(ours, one)
        assert not has_memory(ours.model) and all(sharded_in(layers))


@on_gloo_ranks(3)
def test_orders_that_change_as_one_process(rank: int) -> None:
    """Also with prefetches of one's own, of other units than those that come."""
    for pattern in PATTERNS:
        train_as_one_process(Deep, pattern)
        train_as_one_process(Deep, pattern, prefetch=True)


@on_gloo_ranks(2)
def test_parts_by_themselves_and_generation(rank: int) -> None:
    """Units run without the model around them, and in as many passes as it takes."""
    ours, one = pair(Deep, shard=shard_deep)
    chance = random.Random(3)
    train_by_rank(ours, one, 0, [[0, 1, 3]] * 2)
    for step in range(1, 4):
        with torch.no_grad():
            for index in chance.choices(range(5), k=4):
                results = [training.model.layers[index](batch(step)) for training in (ours, one)]
                torch.testing.assert_close(*results)
            tokens = [batch(step), batch(step)]
            for _ in range(chance.randint(1, 6)):
                path = any_order(chance, step)
                models = (ours.model, one.model)
                tokens = [model(x, path) for model, x in zip(models, tokens, strict=True)]
                torch.testing.assert_close(*tokens)
        train_by_rank(ours, one, step, [any_order(chance, step)] * 2)
    assert not has_memory(ours.model)


# --- Ranks that differ ---------------------------------------------------------------------------


class Again(nn.Module):
    """Computes ``a`` again in backward, where it may use ``b`` or ``c`` in its place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.instead = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self._run, x, use_reentrant=True))

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        return self.get_submodule(self.instead if in_backward else "a")(x)


def errors_of(program: Callable[[], Any]) -> str:
    """What each rank says."""
    try:
        program()
    except dist.DistBackendError as error:
        text = str(error)
    else:
        text = "no error"
    store().set(f"said by {dist.get_rank()}", text)
    return " | ".join(
        store().get(f"said by {rank}").decode() for rank in range(dist.get_world_size())
    )


DIFFERING_WORLDS = pytest.mark.parametrize("world", [2, 3])
on_patient_ranks = functools.partial(on_ranks, backend="gloo", timeout=40, patience_s=AGES_S)


@DIFFERING_WORLDS
@on_patient_ranks("world")
def test_a_rank_that_uses_a_unit_once_more(rank: int, world: int) -> None:
    """The others go on to backward, or wait for it in gathers by plan."""
    ours, _ = pair(Deep, shard=shard_deep)
    loss_of(ours, 0, range(5)).backward()
    path = [0, 1, 2, 3, 4, 0] if rank == 0 else range(5)
    said = errors_of(lambda: loss_of(ours, 1, path).backward())
    assert "no error" not in said, said
    assert "all ranks in a forward that needs unit 'layers.0.weight .. layers.0.bias'" in said, said
    assert "to which rank 0 has not come" in said and "set_dynamic_gather(True)" in said, said


@DIFFERING_WORLDS
@on_patient_ranks("world")
def test_a_rank_that_computes_something_else_again(rank: int, world: int) -> None:
    model: Any = Again()
    for layer in (model.a, model.b, model.c):
        trireme.fully_shard(layer)
    trireme.fully_shard(model)
    x = torch.ones(2, 6, requires_grad=True)
    model(x).sum().backward()
    model.instead = "c" if rank == world - 1 else "a"
    said = errors_of(lambda: model(x).sum().backward())
    assert "no error" not in said, said
    assert "all ranks in a backward that needs unit 'c.weight .. c.bias'" in said, said


@DIFFERING_WORLDS
@on_patient_ranks("world")
def test_a_rank_that_skips_a_forward(rank: int, world: int) -> None:
    """Its gathers meet those of other units, as large as these."""
    ours, _ = pair(Deep, shard=shard_deep)
    for step in range(2):
        loss_of(ours, step, range(5)).backward()

    def differ() -> None:
        if rank == 0:
            loss_of(ours, 2, range(5))
        loss_of(ours, 3, range(5)).backward()

    said = errors_of(differ)
    assert "no error" not in said, said
    assert "to which rank 0 has not come" in said and "layers." in said, said


@DIFFERING_WORLDS
@on_patient_ranks("world")
def test_ranks_that_gather_different_units_at_once(rank: int, world: int) -> None:
    """By plans that they know: it is found in the next backward, before anybody steps."""
    ours, _ = pair(Deep, shard=shard_deep)
    model: Any = ours.model

    def evaluate(*layers: int) -> None:
        with torch.no_grad():
            for layer in layers:
                model.layers[layer](batch(0))

    loss_of(ours, 0, range(5)).backward()
    evaluate(1, 3)
    loss_of(ours, 1, range(5)).backward()
    evaluate(*((1, 3) if rank else (3, 1)))
    said = errors_of(lambda: loss_of(ours, 2, range(5)).backward())
    assert "no error" not in said, said
    unit = "unit 'layers.{0}.weight .. layers.{0}.bias' in a forward"
    one, three = unit.format(1), unit.format(3)
    assert f"rank 0 gathered {three}, rank 1 gathered {one}" in said, said


@on_patient_ranks(2)
def test_a_new_kind_of_pass_on_one_rank(rank: int) -> None:
    """It makes its plan, while the other one gathers by another."""
    ours, _ = pair(Deep, shard=shard_deep)
    loss_of(ours, 0, range(5)).backward()

    def differ() -> None:
        if rank == 0:
            ours.model.layers[2](torch.ones(1, 6)).sum().backward()
        loss_of(ours, 1, range(5)).backward()

    said = errors_of(differ)
    assert "no error" not in said and "all ranks in a forward that has not run before" in said, said


@on_gloo_ranks(2, dying=(1,), timeout=40, patience_s=AGES_S)
def test_a_rank_that_has_gone_is_not_waited_for(rank: int) -> None:
    """Ranks are about to agree about a new kind of pass, and no collective runs that would fail."""
    ours, _ = pair(Deep, shard=shard_deep)
    loss_of(ours, 0, range(5)).backward()
    if rank == 1:
        kill_this_rank()
    with raises(dist.DistBackendError, "a forward that has not run before", "rank 1 has gone"):
        ours.model.layers[2](torch.ones(1, 6))
