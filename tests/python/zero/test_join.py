"""What Join does that is ZeroRedundancyOptimizer's alone, under stage 2 and stage 1 in DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme.optim
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from harness.faults import raises
from harness.joins import OPTIONS, by_torchs_ddp, inputs, loop
from harness.models import mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import assert_same_on_all_ranks, values
from zero.ranks import DDP, Zero, whole_state


def sharded(stage: int, model: nn.Module) -> tuple[nn.Module, Zero, list[Any]]:
    """What is called, the optimizer, and who joins."""
    net = DDP(model) if stage == 1 else model
    optimizer = Zero(model.parameters(), SGD, stage=stage, **OPTIONS)
    return net, optimizer, [net, optimizer] if stage == 1 else [optimizer]


@on_shm_ranks(2)
def test_with_a_fused_step(rank: int) -> None:
    counts = (2, 5)
    right = by_torchs_ddp(rank, counts, AdamW)
    for zero_first in (True, False):
        model = mlp()
        optimizer = Zero(model.parameters(), trireme.optim.AdamW, stage=2, fused_step=True)
        with Join([optimizer]):
            loop(model, optimizer, inputs(rank, counts[rank]), zero_first)
        torch.testing.assert_close(values(model), right)
        assert_same_on_all_ranks(list(model.parameters()))


@on_shm_and_gloo_ranks(2)
def test_training_goes_on_after_a_join(rank: int) -> None:
    """Afterwards the average is over all ranks again, of nothing but their gradients."""
    for stage in (1, 2):
        model, one = mlp(), mlp()
        net, optimizer, joinables = sharded(stage, model)
        with Join(joinables, divide_by_initial_world_size=False):
            loop(net, optimizer, inputs(rank, 1 + 2 * rank), zero_first=False)
        one.load_state_dict(values(model))
        state = whole_state(optimizer)
        plain = SGD(one.parameters(), **OPTIONS)
        plain.load_state_dict(state)
        loop(net, optimizer, inputs(rank, 2), zero_first=False)
        for pair in zip(inputs(0, 2), inputs(1, 2), strict=True):
            loop(one, plain, [torch.cat(pair)], zero_first=False)
        torch.testing.assert_close(values(model), values(one))


@on_shm_ranks(2)
def test_stage_1_alone(rank: int) -> None:
    """A rank that has joined steps its shards with the gradients of the others."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Zero(model.parameters(), SGD, lr=1.0)
    with Join([optimizer]):
        for _ in range(1 + 2 * rank):
            model.weight.grad = torch.ones(4, 4)
            optimizer.step()
    assert torch.equal(model.weight, torch.full((4, 4), -3.0))


@on_shm_and_gloo_ranks(2)
def test_clipping_by_the_optimizer_is_followed(rank: int) -> None:
    for stage in (1, 2):
        ddp, model = TorchDDP(mlp()), mlp()
        plain = SGD(ddp.parameters(), **OPTIONS)
        net, optimizer, joinables = sharded(stage, model)
        for trained, its, join in ((ddp, plain, [ddp]), (net, optimizer, joinables)):
            with Join(join):
                for x in inputs(rank, 2 + 3 * rank):
                    its.zero_grad()
                    trained(x).square().mean().backward()
                    if its is optimizer:
                        optimizer.clip_grad_norm_(0.01)
                    else:
                        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
                    its.step()
        torch.testing.assert_close(values(model), values(ddp), msg=f"stage {stage}")


@on_shm_and_gloo_ranks(2)
def test_options_that_a_cycle_changes_are_followed(rank: int) -> None:
    """Learning rates and betas of each group, after a rank has run out."""

    def train(net: nn.Module, optimizer: Any) -> None:
        schedule = OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=6)
        for x in inputs(rank, 1 + 4 * rank):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            schedule.step()

    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": model[:3].parameters()}, {"params": model[3:].parameters()}]

    for stage in (1, 2):
        ddp, model = TorchDDP(mlp()), mlp()
        with ddp.join():
            train(ddp, AdamW(groups(ddp.module)))
        net = DDP(model) if stage == 1 else model
        optimizer = Zero(groups(model), AdamW, stage=stage)
        with Join([net, optimizer] if stage == 1 else [optimizer]):
            train(net, optimizer)
        torch.testing.assert_close(values(model), values(ddp), msg=f"stage {stage}")


@on_shm_and_gloo_ranks(2)
def test_a_norm_that_is_not_finite_is_told_to_all(rank: int) -> None:
    model = mlp()
    optimizer = Zero(model.parameters(), SGD, stage=2, **OPTIONS)
    with pytest.raises(RuntimeError, match="whose norm is not finite"), Join([optimizer]):
        for step, x in enumerate(inputs(rank, 1 + rank)):
            optimizer.zero_grad()
            model(x * (float("inf") if step == 1 else 1)).square().mean().backward()
            trireme.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()


@on_shm_and_gloo_ranks(2)
def test_what_is_clipped_in_a_join_is_one_optimizers(rank: int) -> None:
    model = mlp()
    optimizer = Zero(model.parameters(), SGD, stage=2, **OPTIONS)
    with raises(ValueError, "[grad_norm] got other parameters than"), Join([optimizer]):
        for x in inputs(rank, 1):
            model(x).square().mean().backward()
            trireme.clip_grad_norm_(list(model.parameters())[:2], 0.01)


@on_shm_and_gloo_ranks(2)
def test_ranks_of_which_some_clip_in_a_join(rank: int) -> None:
    model = mlp()
    optimizer = Zero(model.parameters(), SGD, stage=2, **OPTIONS)
    with raises(RuntimeError, "[join] got clip_grad_norm_() on some ranks"), Join([optimizer]):
        for x in inputs(rank, 1):
            model(x).square().mean().backward()
            if rank == 1:
                optimizer.clip_grad_norm_(0.01)
            optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("replaced", [False, True])
@on_shm_and_gloo_ranks(2)
def test_gradients_with_a_graph_under_stage_1(rank: int, replaced: bool) -> None:
    """create_graph=True: a rank that has joined steps with the values, without their graph."""

    def train(net: nn.Module, optimizer: Any) -> None:
        for x in inputs(rank, 1 + 3 * rank):
            optimizer.zero_grad()
            net(x).square().mean().backward(create_graph=net is not ddp)
            if net is not ddp:
                assert all(one.grad.requires_grad for one in net.parameters())
            for parameter in net.parameters() if replaced else ():
                parameter.grad = parameter.grad.detach().clamp(-0.01, 0.01)
            optimizer.step()

    ddp, model = TorchDDP(mlp()), mlp()
    with ddp.join():
        train(ddp, SGD(ddp.parameters(), **OPTIONS))
    net, optimizer, joinables = sharded(1, model)
    with Join(joinables):
        train(net, optimizer)
    torch.testing.assert_close(values(model), values(ddp))
    assert_same_on_all_ranks(list(model.parameters()))
    optimizer.zero_grad()  # parameters in graphs of their own gradients would stay


@on_shm_and_gloo_ranks(2)
def test_no_sync_and_a_later_group_inside_a_join(rank: int) -> None:
    def accumulate(net: Any, optimizer: Any, averaging: Any) -> None:
        for x in inputs(rank, 2 + 2 * rank):
            optimizer.zero_grad()
            with averaging.no_sync():
                net(x).square().mean().backward()
            net(2 * x).square().mean().backward()
            optimizer.step()

    theirs = TorchDDP(mlp())
    with theirs.join():
        accumulate(theirs, SGD(theirs.parameters(), **OPTIONS), theirs)
    model = mlp()
    optimizer = Zero(model[:3].parameters(), SGD, stage=2, **OPTIONS)
    optimizer.add_param_group({"params": model[3:].parameters()})
    with Join([optimizer]):
        accumulate(model, optimizer, optimizer)
    torch.testing.assert_close(values(model), values(theirs))
    assert_same_on_all_ranks(list(model.parameters()))


class Partly(nn.Module):
    """The last layer is used in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(hidden) if step == 0 else hidden


@on_shm_ranks(2)
def test_what_nobody_uses_any_more_is_not_stepped(rank: int) -> None:
    """A rank that has joined owns some of it, and still has its gradient of the step before."""
    for stage in (1, 2):
        model = Partly()
        net, optimizer, joinables = sharded(stage, model)
        with Join(joinables):
            for step, x in enumerate(inputs(rank, 1 + 2 * rank)):
                optimizer.zero_grad()
                net(x, step).square().mean().backward()
                optimizer.step()
                if step == 0:
                    once = model.last.weight.detach().clone()
        assert torch.equal(model.last.weight, once), stage
