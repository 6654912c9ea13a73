"""fully_shard over Gloo, where ranks share no memory: each unit is gathered when it is needed.

What holds wherever parameters lie is tested over shared memory; here a part of those programs runs
once more, and what is said about the order of gathers and about memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from fsdp.models import Skipping, frozen_front
from fsdp.ranks import (
    assert_locals,
    has_memory,
    in_training,
    own,
    pair,
    rows_of,
    shard_layers,
    sharded,
    sharded_in,
    step_both,
    torch_pair,
    train_both,
    train_by_rank,
)
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import on_gloo_ranks
from harness.ranks import run_ranks

# --- What runs over shared memory, too -----------------------------------------------------------

EQUALITY = ("optimizers", "two_optimizers", "methods_that_are_no_forward")
GRADIENTS = ("accumulation_as_torch", "hooks", "hooks_of_modules", "manual_finalization")
PROGRAMS: dict[tuple[str, int], Sequence[str]] = {
    ("equality", 2): (*EQUALITY, "structures_in_and_out", "two_models_on_one_group"),
    ("equality", 3): ("as_one_process", "as_torch_over_gloo", "modules_that_make_one_unit"),
    ("modules", 2): ("casts_before_the_first_forward", "a_first_forward_without_gradients"),
    ("modules", 3): ("meta_device", "other_dimensions", "memory_that_is_not_contiguous"),
    ("gradients", 2): (*GRADIENTS, "units_run_by_themselves"),
    ("gradients", 3): ("what_some_or_all_ranks_skip",),
    ("precision", 2): ("policies_as_torch", "accumulation_in_reduce_dtype", "autocast"),
    ("checkpointing", 2): ("checkpointing", "checkpointing_the_root"),
    ("partial_sync", 2): ("as_torch",),
    ("partial_sync", 3): ("the_root_alone",),
    ("copies", 2): ("a_deep_copy_trains_by_itself", "averaged_weights_follow_the_model"),
    ("torch", 2): ("state_dicts_full_and_sharded", "a_registered_method_is_a_forward"),
}


@pytest.mark.parametrize(("theme", "world"), PROGRAMS)
def test_programs_of_shared_memory(theme: str, world: int) -> None:
    run_ranks(one_after_another, world, f"fsdp.test_{theme}", PROGRAMS[theme, world])


def one_after_another(rank: int, module: str, names: Sequence[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    programs = importlib.import_module(module)
    for name in names:
        test = getattr(programs, name, None) or getattr(programs, f"test_{name}")
        program = test.__wrapped__
        torch.manual_seed(0)
        case = {"world": dist.get_world_size(), "counts": (3, 1, 2)}
        asked = program.__code__.co_varnames[: program.__code__.co_argcount]
        program(rank, **{key: case[key] for key in asked if key != "rank"})
    dist.destroy_process_group()


# --- In which order units are used ---------------------------------------------------------------


@on_gloo_ranks(3)
def test_ranks_that_use_different_units(rank: int) -> None:
    """In the first forward, of which the order is learned, and in later ones."""
    begins = [
        ("abc", "abc", "abc"),
        ("cba", "abc", "bac"),
        ("s", "b", "ac"),
        ("abab", "ba", "c"),
    ]
    goes_on = [("b", "cs", "a"), ("c", "b", "a"), ("s", "s", "s"), ("ab", "bc", "ca")]
    for first in begins:
        ours, one = pair(Skipping, AdamW, lr=0.01)
        for step, ways in enumerate([first, *goes_on, first]):
            train_by_rank(ours, one, step, ways)
            assert all(sharded_in(ours.model))


@on_gloo_ranks(2)
def test_a_unit_that_is_kept_comes_again_on_some_ranks(rank: int) -> None:
    kept, one = pair(Skipping)
    kept.model.a.set_reshard_after_forward(False)
    for step, ways in enumerate((("abc", "abc"), ("abca", "aba"), ("cab", "bca"))):
        train_by_rank(kept, one, step, ways)


@on_gloo_ranks(2)
def test_ranks_that_use_whatever_they_like(rank: int) -> None:
    ours, one = pair(Skipping, AdamW, lr=0.01)
    ours.model.set_dynamic_gather(True)
    order = torch.Generator().manual_seed(1)
    for step in range(6):
        picks = torch.randint(0, 4, (2, 6), generator=order)
        ways = ["".join("abcs"[pick] for pick in row[: 3 + step]) for row in picks.tolist()]
        train_by_rank(ours, one, step, ways)
        with torch.no_grad():
            expected = one.model(batch(9), ways[rank])
            torch.testing.assert_close(ours.model(batch(9), ways[rank]), expected)
    ours.model.set_dynamic_gather(False)
    for step in range(2):
        train_by_rank(ours, one, step, ("cab", "ab"))
    with raises(RuntimeError, "got set_dynamic_gather() of an inner unit"):
        ours.model.a.set_dynamic_gather(True)


class Backwards(nn.Module):
    """Units that are used in another order than they are registered, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last, self.middle, self.first = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(self.middle(x).tanh()).tanh()).tanh())


@on_gloo_ranks(2)
def test_registration_in_another_order_and_first_an_evaluation(rank: int) -> None:
    for keeps in (True, False, None):
        ours, one = pair(Backwards, AdamW, options={"reshard_after_forward": keeps}, lr=0.01)
        for step in range(3):
            with torch.no_grad():
                torch.testing.assert_close(ours.model(batch(9)), one.model(batch(9)))
            train_both(ours, one, step)


# --- When units are there ------------------------------------------------------------------------


def watch(model: nn.Module) -> tuple[list[list[bool]], list[list[bool]]]:
    """Which units have memory when each of them computes, in forward and in backward."""
    forward: list[list[bool]] = []
    backward: list[list[bool]] = []
    for index in (0, 2, 4):
        model[index].register_forward_pre_hook(lambda *_: forward.append(has_memory(model)))
        leaf = model[index]._get_fsdp_state().params[0].unsharded
        leaf.register_hook(lambda _: backward.append(has_memory(model)))
    return forward, backward


def bits(text: str) -> list[list[bool]]:
    return [[bit == "1" for bit in word] for word in text.split()]


@on_gloo_ranks(2)
def test_what_is_gathered_ahead(rank: int) -> None:
    """The next unit is, by itself; else what is asked for, before the first forward or later."""
    ours, one = pair(mlp)
    forward, backward = watch(ours.model)
    cases: list[tuple[dict[str, list[int]], str, str]] = [
        ({}, "110 011 001", "011 110 100"),
        ({"forward": [], "backward": []}, "100 010 001", "001 010 100"),
        ({"forward": [2, 4], "backward": [2, 0]}, "111 011 001", "111 110 100"),
    ]
    train_both(ours, one, 0)
    for ahead, in_forward, in_backward in cases:
        for name, indices in ahead.items():
            for index in (0, 2, 4):
                later = [
                    place
                    for place in indices
                    if (place > index if name == "forward" else place < index)
                ]
                setter = getattr(ours.model[index], f"set_modules_to_{name}_prefetch")
                setter([ours.model[index] for index in later])
        for step in range(2):
            del forward[:], backward[:]
            train_both(ours, one, step)
            assert forward == bits(in_forward), (ahead, forward)
            assert backward == bits(in_backward), (ahead, backward)
    other, one = pair(mlp)
    other.model[0].set_modules_to_forward_prefetch([other.model[4]])
    for step in range(3):
        train_both(other, one, step)
    with raises(ValueError, "got a unit to prefetch that is not under this root"):
        other.model[0].set_modules_to_forward_prefetch([ours.model[2]])


@on_gloo_ranks(2)
def test_memory_goes_when_flags_say_so(rank: int) -> None:
    """After forward: (asked for, with all parameters in units, in the root)."""
    for asked, inner, root in ((True, False, False), (False, True, True), (None, False, True)):
        for make, expected in ((shard_layers, inner), (trireme.fully_shard, root)):
            ours, one = pair(mlp, shard=make, options={"reshard_after_forward": asked})
            unit = ours.model[0] if make is shard_layers else ours.model
            leaf = unit._get_fsdp_state().params[0].unsharded
            for step in range(2):
                for training in (ours, one):
                    training.optimizer.zero_grad()
                    loss = training.loss(step)
                    if training is ours:
                        assert (leaf.untyped_storage().nbytes() > 0) == expected
                        assert all(shown != expected for shown in sharded_in(ours.model))
                    loss.backward()
                assert leaf.untyped_storage().nbytes() == 0 and all(sharded_in(ours.model))
                step_both(ours, one)


@on_gloo_ranks(2)
def test_unshard_and_reshard_by_hand(rank: int) -> None:
    """Before the first forward, after a step, inside of a forward; another unit stays as it is."""
    ours, one = pair(mlp)
    for step in range(2):
        unit = ours.model[2]
        handle = unit.unshard(async_op=True)
        handle.wait()
        torch.testing.assert_close(unit.weight, one.model[2].weight)
        leaf = unit.weight
        assert not isinstance(leaf.detach(), DTensor) and sharded_in(ours.model)[0]
        ours.model[0].unshard()
        unit.reshard()
        assert leaf.untyped_storage().nbytes() == 0 and isinstance(unit.weight, DTensor)
        torch.testing.assert_close(ours.model[0].weight, one.model[0].weight)
        train_both(ours, one, step)
        assert not any(has_memory(ours.model)) and all(sharded_in(ours.model))
    ahead = ours.model[0].register_forward_pre_hook(
        lambda *_: ours.model[4].unshard(async_op=True) and None
    )
    for step in range(2):
        train_both(ours, one, step)
    ahead.remove()
    train_both(ours, one, 2)


# --- Graphs --------------------------------------------------------------------------------------


class Hidden(nn.Module):
    """A unit that returns what nobody can look into: a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layer(x).tanh()
        return lambda: hidden


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.head = Hidden(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)())


@on_gloo_ranks(2)
def test_graphs_that_backward_walks_in_other_ways(rank: int) -> None:
    """Hidden outputs; two forwards before one backward; a graph walked twice; derivatives of
    inputs; a forward whose backward never comes."""
    ours, one = pair(Hiding)
    for step in range(3):
        train_both(ours, one, step)
    for keeps in (True, False):
        ours, one = pair(mlp, options={"reshard_after_forward": not keeps})
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                (training.loss(step) + 2 * training.loss(step + 1)).backward()
                loss = training.loss(step + 2)
                loss.backward(retain_graph=True)
                training.loss(7)
                (3 * loss).backward()
                rows = rows_of(step, training).requires_grad_()
                torch.autograd.grad(training.model(rows).sum(), rows)
            step_both(ours, one)
            assert not any(has_memory(ours.model))


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 6).requires_grad_(False), Adapted(6, 5), Adapted(5, 3))


@on_gloo_ranks(2)
def test_frozen_parameters(rank: int) -> None:
    """In front, and beside trained ones; as torch and as one process."""
    for make in (adapted, frozen_front):
        ours, theirs = torch_pair(make)
        for step in range(3):
            for training in (ours, theirs):
                training.optimizer.zero_grad()
                training.backward(step)
            assert_locals(ours.model, theirs.model)
            for training in (ours, theirs):
                training.optimizer.step()
        with_sync_off, one = pair(make, AdamW, lr=0.01)
        for training in (with_sync_off, one):
            training.backward(0, 1, sync=False)
            training.backward(2)
        step_both(with_sync_off, one)


@on_gloo_ranks(3)
def test_what_is_gathered_in_another_dtype(rank: int) -> None:
    """The unsharded parameters have half the bytes; shards and gradients stay fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ours = sharded(mlp, options={"mp_policy": policy})
    ours.train(0)
    ours.model[0].unshard()
    weight = ours.model[0].weight
    assert weight.dtype == torch.bfloat16 and weight.shape == (13, 6)
    ours.model[0].reshard()
    for param in ours.model.parameters():
        assert own(param).dtype == torch.float32
    whole = in_training(shard_layers(mlp(), mp_policy=policy), lr=0.0)
    whole.backward(0)
    assert {param.grad.dtype for param in whole.model.parameters()} == {torch.float32}
