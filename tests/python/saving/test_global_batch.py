"""A step is the same rows on any number of ranks, in Python and C++."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import GlobalBatch
from trireme._C import rank_seed

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_ranks

KNOWN = ([8, 9, 5, 6, 7], [3, 9, 1, 5, 0])
"""Steps 0 and 5 of 11 rows by 5, seed 3."""


def _shares(size: int, weights: list[float]) -> list[int]:
    """The largest remainder, written plainly."""
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in order[: size - sum(counts)]:
        counts[rank] += 1
    return counts


def test_steps_are_torch_permutations() -> None:
    batches = GlobalBatch(10, 4, seed=7)
    for step in range(6):
        epoch = step // 2
        generator = torch.Generator().manual_seed(rank_seed(7, epoch))
        expected = torch.randperm(10, generator=generator)[step % 2 * 4 :][:4]
        assert torch.equal(batches.whole(step), expected)
        assert batches.part(step).epoch == epoch
    assert batches.whole(0).dtype == torch.int64
    in_order = GlobalBatch(5, 2, shuffle=False)
    assert [in_order.whole(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_rows_that_are_known() -> None:
    """The same numbers stand in tests/cpp/saving/global_batch_test.cpp."""
    batches = GlobalBatch(11, 5, seed=3, rank=1, world=3)
    assert batches.whole(0).tolist() == KNOWN[0]
    assert batches.whole(5).tolist() == KNOWN[1]
    assert batches.part(5).rows.tolist() == KNOWN[1][2:4]


def test_parts_of_any_world_are_the_batch() -> None:
    drawn = random.Random(0)
    for _ in range(60):
        rows = drawn.randint(1, 40)
        size = drawn.randint(1, rows)
        world = drawn.randint(1, 7)
        weights: Any = "even"
        expected = [size // world + (rank < size % world) for rank in range(world)]
        if drawn.random() < 0.5:
            weights = [drawn.choice([0, 1, 2, 0.5, 3.25, 1e-3]) for _ in range(world)]
            weights[drawn.randrange(world)] = 1
            expected = _shares(size, weights)
        ranks = [
            GlobalBatch(rows, size, seed=5, balance=weights, rank=rank, world=world)
            for rank in range(world)
        ]
        step = drawn.randint(0, 5 * (rows // size))
        parts = [batches.part(step) for batches in ranks]
        whole = ranks[0].whole(step)
        assert torch.equal(torch.cat([part.rows for part in parts]), whole)
        assert torch.equal(whole, GlobalBatch(rows, size, seed=5).whole(step))
        assert [len(part.rows) for part in parts] == expected
        assert [part.weight for part in parts] == [count * world / size for count in expected]
        for rank in range(world):
            other = ranks[0].part(step, rank, world)
            assert torch.equal(other.rows, parts[rank].rows)


def test_rows_left_over_come_later() -> None:
    batches = GlobalBatch(7, 4)
    assert {row for step in range(12) for row in batches.whole(step).tolist()} == set(range(7))
    assert len(set(batches.whole(3).tolist())) == 4


def test_a_state_has_nothing_of_ranks() -> None:
    batches = GlobalBatch(20, 6, seed=2, rank=0, world=2)
    assert [part.number for part in batches.steps(2, 5)] == [2, 3, 4]
    state = batches.state_dict()
    assert state == {"rows": 20, "size": 6, "shuffle": True, "seed": 2, "next_step": 5}
    batches.part(0, 1, 2)  # what another rank takes is no step of this one
    assert batches.state_dict() == state
    other = GlobalBatch(20, 6, seed=2, rank=2, world=3)
    other.load_state_dict(state)
    assert other.state_dict() == state
    for changed, parts in (
        ({"rows": 21}, ("rows=20", "rows=21")),
        ({"size": 5}, ("size=6", "size=5")),
        ({"seed": 3}, ("seed=2", "seed=3")),
        ({"shuffle": False}, ("shuffle=true", "shuffle=false")),
    ):
        with raises(ValueError, *parts):
            GlobalBatch(**{"rows": 20, "size": 6, "seed": 2, **changed}).load_state_dict(state)
    with raises(ValueError, "no state of a GlobalBatch"):
        other.load_state_dict({"rows": 20})
    with raises(ValueError, "whose next step is -1"):
        other.load_state_dict({**state, "next_step": -1})


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"size": 0}, ValueError, "got rows=10 and size=0"),
        ({"size": 11}, ValueError, "got rows=10 and size=11, expected 1 <= size <= rows"),
        ({"size": 2.0}, TypeError, "size is float, expected int"),
        ({"size": 2**63}, ValueError, "expected 64 bits"),
        ({"balance": "fair"}, ValueError, "got balance='fair'"),
        ({"balance": []}, TypeError, "got a balance of list"),
        ({"balance": [1, -1]}, ValueError, "got -1 in the balance"),
        ({"balance": [1, float("nan")]}, ValueError, "got nan in the balance"),
        ({"balance": [0.0]}, ValueError, "got a balance whose sum is 0"),
        ({"balance": ["1"]}, TypeError, "got str in the balance"),
        ({"balance": [1, 2, 3]}, ValueError, "got a balance of 3 numbers for 1 ranks"),
        ({"rank": 0}, ValueError, "got rank=0 and world=None"),
        ({"rank": 2, "world": 2}, ValueError, "got rank=2 and world=2"),
    ],
)
def test_bad_input(options: dict[str, Any], kind: Any, part: str) -> None:
    with pytest.raises(kind, match=re.escape(part)):
        GlobalBatch(**{"rows": 10, "size": 4, **options})


def test_bad_steps() -> None:
    batches = GlobalBatch(10, 4)
    with raises(ValueError, "got step -1"):
        batches.part(-1)
    with raises(ValueError, "the part of rank 3 of 3"):
        batches.part(0, 3, 3)
    with raises(TypeError, "a step is float", form=RANKLESS_FORM):
        batches.whole(0.5)  # type: ignore[arg-type]


@on_shm_ranks(3)
def test_gradients_are_those_of_the_whole_batch(rank: int) -> None:
    """Under an averaging strategy, with parts of 0, 1 and 4 rows."""
    data, target = torch.randn(9, 3), torch.randn(9, 1)
    dist.broadcast(data, 0)
    dist.broadcast(target, 0)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    net = trireme.DistributedDataParallel(model)
    batches = GlobalBatch(9, 5, balance=[0, 1, 4])
    for step in range(3):
        model.zero_grad()
        whole = batches.whole(step)
        weight = model.weight.detach().clone().requires_grad_()
        bias = model.bias.detach().clone().requires_grad_()
        nn.functional.mse_loss(data[whole] @ weight.t() + bias, target[whole]).backward()
        part = batches.part(step)
        assert len(part.rows) == (0, 1, 4)[rank]
        output = net(data[part.rows])
        loss = nn.functional.mse_loss(output, target[part.rows]) if len(part.rows) else output.sum()
        (loss * part.weight).backward()
        assert model.weight.grad is not None and model.bias.grad is not None
        torch.testing.assert_close(model.weight.grad, weight.grad)
        torch.testing.assert_close(model.bias.grad, bias.grad)
