"""Optimizers that step inside backward, as soon as a gradient is final."""

from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import backward, run_steps, sgd
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import values


class Nothing:
    """The optimizer has stepped already."""

    def zero_grad(self) -> None: ...
    def step(self) -> None: ...


def momentum(parameters: Any, **options: Any) -> None:
    arguments = {"lr": 0.1, "momentum": 0.9}
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, arguments, **options)


def expected_values(rank: int, steps: int = 4) -> dict[str, torch.Tensor]:
    """torch's DDP and the same optimizer after backward. In backward torch needs a GPU stream."""
    theirs = TorchDDP(mlp())
    return run_steps(theirs, sgd(theirs), backward, rank, steps)[-1]


@pytest.mark.parametrize("wrap_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"register_hook": False}], ids=str)
@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_equals_stepping_after_backward(
    rank: int, wrap_first: bool, options: dict[str, bool], as_bucket_view: bool
) -> None:
    module = mlp()
    if not wrap_first:
        momentum(module.parameters(), **options)
    ddp = trireme.DistributedDataParallel(
        module, bucket_cap_mb=0.0003, gradient_as_bucket_view=as_bucket_view
    )
    if wrap_first:
        momentum(module.parameters(), **options)
    for step in range(4):
        backward(ddp, step, rank)
        assert all(parameter.grad is None for parameter in ddp.parameters())
    torch.testing.assert_close(values(ddp), expected_values(rank))


@on_ranks()
def test_some_parameters_in_backward_and_some_after(rank: int) -> None:
    module = mlp()
    early, late = list(module.parameters())[:2], list(module.parameters())[2:]
    momentum(early)
    ddp = trireme.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(late, lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        assert all(parameter.grad is None for parameter in early)
        assert all(parameter.grad is not None for parameter in late)
        optimizer.step()
    torch.testing.assert_close(values(ddp), expected_values(rank))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x))


def headed() -> nn.Module:
    torch.manual_seed(6)
    return Headed()


@pytest.mark.parametrize("heads", [[(0, 0), (0, 0)], [(0, 1), (1, 1)]])
@on_ranks()
def test_unused_parameters_do_not_step(rank: int, heads: list[tuple[int, int]]) -> None:
    """A head that only the other rank uses steps here too, at the end of backward."""
    module, alone = headed(), headed()
    momentum(module.parameters())
    ddp = trireme.DistributedDataParallel(module)
    optimizer = sgd(alone)
    for step in range(4):
        pair = heads[step % len(heads)]
        ddp(batch(step)[rank::WORLD], pair[rank]).square().mean().backward()
        optimizer.zero_grad()
        for of in range(WORLD):
            (alone(batch(step)[of::WORLD], pair[of]).square().mean() / WORLD).backward()
        optimizer.step()
        torch.testing.assert_close(values(ddp), values(alone))


@on_ranks()
def test_fused_optimizer_registration(rank: int) -> None:
    """torch's other way, a communication hook that steps."""
    ddp = trireme.DistributedDataParallel(nn.Linear(6, 3))
    ddp._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    theirs = TorchDDP(nn.Linear(6, 3))
    theirs.load_state_dict(ddp.state_dict())
    for step in range(3):
        ddp.zero_grad()
        backward(ddp, step, rank)
    run_steps(theirs, sgd(theirs), backward, rank, 3)
    torch.testing.assert_close(values(ddp), values(theirs))


@on_ranks()
def test_a_hook_that_takes_the_gradient_is_refused(rank: int) -> None:
    """It would step with this rank's gradient alone."""
    ddp = trireme.DistributedDataParallel(mlp())

    def take(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    ddp.module[2].weight.register_post_accumulate_grad_hook(take)
    with raises(NotImplementedError, "[ddp] got '2.weight' without its gradient"):
        backward(ddp, 0, rank)
