"""Parameters that some step does not use, on one rank or on all."""

from typing import Any

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import record_wire
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording
from harness.training import gradients


class Branches(nn.Module):
    """A body, then those of its heads that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = mlp()
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        hidden = self.body(x)
        return sum(self.heads[head](hidden) for head in heads) + hidden.mean()


def average(heads_by_rank: list[tuple[int, ...]], step: int) -> dict[str, Any]:
    """One process's gradients; None where no rank uses the parameter."""
    model = Branches()
    for rank, heads in enumerate(heads_by_rank):
        (model(batch(step)[rank::WORLD], heads).square().mean() / WORLD).backward()
    return gradients(model)


def backward(ddp: nn.Module, heads_by_rank: list[tuple[int, ...]], step: int, rank: int) -> None:
    ddp(batch(step)[rank::WORLD], heads_by_rank[rank]).square().mean().backward()


@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_the_gradient_of_a_parameter_used_nowhere_is_untouched(
    rank: int, as_bucket_view: bool
) -> None:
    """Bit for bit, though ranks hold different ones."""
    ddp = trireme.DistributedDataParallel(Branches(), gradient_as_bucket_view=as_bucket_view)
    everywhere = [(0, 1), (0, 1)]
    for step in range(3):
        backward(ddp, everywhere, step, rank)
    left = ddp.module.heads[0].weight
    left.grad.copy_(torch.tensor([[-0.0, float("nan"), 1e-40], [rank, float("inf"), 3.0]]))
    bits = left.grad.view(torch.int32).clone()
    assert ddp.module.heads[2].weight.grad is None
    for step in range(3):
        backward(ddp, [(1,), (1,)], step, rank)
        assert torch.equal(left.grad.view(torch.int32), bits)
        assert ddp.module.heads[2].weight.grad is None


@on_ranks()
def test_an_assigned_gradient_of_a_parameter_used_nowhere_is_untouched(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Branches())
    assigned = torch.full((2, 3), 10.0 + rank)
    ddp.module.heads[1].weight.grad = assigned
    for step in range(3):
        ddp.module.body.zero_grad()
        backward(ddp, [(0,), (0,)], step, rank)
        assert ddp.module.heads[1].weight.grad is assigned
        assert torch.equal(assigned, torch.full((2, 3), 10.0 + rank))


@on_ranks()
def test_what_did_not_arrive_contributes_what_it_holds(rank: int) -> None:
    """Accumulated under no_sync(), then unused in the step that synchronizes: it is averaged."""
    ddp = trireme.DistributedDataParallel(Branches())
    with ddp.no_sync():
        backward(ddp, [(1,), (2,)], 0, rank)
    backward(ddp, [(0,), (0,)], 1, rank)
    model = Branches()
    for of in range(WORLD):
        for heads, step in (((1 + of,), 0), ((0,), 1)):
            (model(batch(step)[of::WORLD], heads).square().mean() / WORLD).backward()
    torch.testing.assert_close(gradients(ddp), gradients(model))
    # A synchronization later those uses are history: the same gradients are left alone.
    before = gradients(ddp)
    ddp.module.body.zero_grad()
    ddp.module.heads[0].zero_grad()
    backward(ddp, [(0,), (0,)], 1, rank)
    for name in ("heads.1.weight", "heads.2.bias"):
        assert torch.equal(gradients(ddp)[name], before[name])


@on_ranks()
def test_a_backward_that_uses_no_parameter_takes_part(rank: int) -> None:
    """Rank 1's loss ignores everything that the module computed from parameters."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return x * self.weight if use else x * 2

    ddp = trireme.DistributedDataParallel(Sometimes())
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(3, requires_grad=True), rank == 0).sum().backward()
        assert torch.equal(ddp.module.weight.grad, torch.full((3,), 0.5))


@needs_recording
@on_ranks()
def test_parameters_come_back_from_the_trailing_buckets(rank: int) -> None:
    """Left unused for a step they are sent last; used again for some steps, in order again."""
    ddp = trireme.DistributedDataParallel(Branches(), bucket_cap_mb=0.0001)
    wire = record_wire(ddp)

    def last_sent(heads: tuple[int, ...], steps: int) -> str:
        for step in range(steps):
            wire.clear()
            backward(ddp, [heads, heads], step, rank)
        return wire.records[-1].label.rpartition(" ")[2]

    assert last_sent((0, 1, 2), 3) == "body.0.weight"
    assert last_sent((0, 1), 2).startswith("heads.2")
    assert last_sent((0, 1, 2), 1).startswith("heads.2")  # it may be missing again soon
    assert last_sent((0, 1, 2), 12) == "body.0.weight"


@needs_recording
@on_ranks()
def test_bfloat16_buckets_send_the_used_map_apart(rank: int) -> None:
    """16 bits cannot count ranks exactly: the map is an all-reduce of its own."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)}).to(torch.bfloat16)
    model.forward = lambda x: model["used"](x)
    ddp = trireme.DistributedDataParallel(model)
    wire = record_wire(ddp)
    for _ in range(2):
        ddp(torch.full((1, 3), 1.0 + rank, dtype=torch.bfloat16)).sum().backward()
    assert [record.label for record in wire.records[-1:]] == ["used-map"]
    assert wire.records[-1].dtypes == ["Float"]
    assert model["unused"].weight.grad is None
    torch.testing.assert_close(model["used"].weight.grad[0].float(), torch.full((3,), 3.0))
