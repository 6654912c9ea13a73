"""Parameters frozen, unfrozen or cast while training runs; torch's DDP has to be wrapped anew."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import run_steps
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients

Change = Callable[[nn.Module], None]


def step_fn(model: nn.Module, step: int, rank: int) -> None:
    dtype = next(model.parameters()).dtype
    model(batch(step, dtype=dtype)[rank::WORLD]).square().mean().backward()


def freeze(*names: str) -> Change:
    def change(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.requires_grad_(False)

    return change


def train(wrap: Callable[[nn.Module], nn.Module], changes: list[Change], rank: int) -> list[object]:
    """Three steps after each change; ``wrap`` is called before the first or before all of them."""
    module = mlp()
    seen: list[object] = []
    for change in changes:
        change(module)
        model = wrap(module)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for parameter in module.parameters():
            parameter.grad = None
        seen += run_steps(model, optimizer, step_fn, rank, 3)
    return seen


def wrap_once() -> Callable[[nn.Module], nn.Module]:
    wrapped: list[nn.Module] = []

    def wrap(module: nn.Module) -> nn.Module:
        wrapped.extend([] if wrapped else [trireme.DistributedDataParallel(module)])
        return wrapped[0]

    return wrap


def nothing(module: nn.Module) -> None:
    pass


SEQUENCES: dict[str, list[Change]] = {
    "to double and back": [nothing, nn.Module.double, nn.Module.float],
    "there and back between two forwards": [nothing, lambda module: module.double().float()],
    "freeze and cast at once": [nothing, lambda m: (freeze("0.bias")(m), m.double())],
}


@pytest.mark.parametrize("name", SEQUENCES)
@on_ranks()
def test_equals_torch_wrapped_anew(rank: int, name: str) -> None:
    got = train(wrap_once(), SEQUENCES[name], rank)
    torch.testing.assert_close(got, train(TorchDDP, SEQUENCES[name], rank))


@on_ranks()
def test_a_frozen_gradient_stays(rank: int) -> None:
    """What .grad held when the parameter was frozen is the user's; nobody averages it."""
    ddp = trireme.DistributedDataParallel(mlp())
    step_fn(ddp, 0, rank)
    weight = ddp.module[0].weight
    weight.requires_grad_(False)
    weight.grad.fill_(10.0 + rank)
    for step in range(3):
        step_fn(ddp, step, rank)
        assert torch.equal(weight.grad, torch.full_like(weight, 10.0 + rank))


@pytest.mark.parametrize("begins_frozen", [False, True])
@on_ranks()
def test_ranks_that_freeze_apart_raise(rank: int, begins_frozen: bool) -> None:
    module = mlp()
    module[2].weight.requires_grad_(not begins_frozen)
    ddp = trireme.DistributedDataParallel(module)
    step_fn(ddp, 0, rank)
    if rank == 1:
        module[2].weight.requires_grad_(begins_frozen)
    parts = ("[ddp]", "'2.weight'", f"requires_grad={not begins_frozen} on rank 0", "on rank 1")
    with raises(ValueError, *parts, f"(rank {rank} of 2)"):
        step_fn(ddp, 1, rank)


@on_ranks()
def test_ranks_that_cast_apart_raise(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    step_fn(ddp, 0, rank)
    if rank == 1:
        ddp.module.double()
    with raises(ValueError, "'0.weight'", "Double", "on rank 1"):
        step_fn(ddp, 1, rank)


@on_ranks()
def test_another_memory_format_after_wrapping(rank: int) -> None:
    torch.manual_seed(3)
    module = nn.Conv2d(3, 4, 3)
    ddp = trireme.DistributedDataParallel(module)
    for step in range(4):
        if step == 2:
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad()
        images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        ddp(images[rank : rank + 1]).square().mean().backward()
        expected = nn.Conv2d(3, 4, 3)
        expected.load_state_dict(module.state_dict())
        expected(images).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(expected))
        assert module.weight.grad.stride() == module.weight.stride()
    if rank == 1:
        ddp.to(memory_format=torch.contiguous_format)
    was = "'weight' was Float [4, 3, 3, 3] of strides [27, 1, 9, 3], is Float [4, 3, 3, 3]"
    with raises(ValueError, "on rank 0: nothing changed; on rank 1: " + was):
        ddp(images[rank : rank + 1]).square().mean().backward()


@on_ranks()
def test_new_data_of_the_same_dtype(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    alone = mlp()
    for step in range(3):
        for module in (ddp.module, alone):
            for parameter in module.parameters():
                parameter.data = parameter.detach() * 0.5
            module.zero_grad()
        step_fn(ddp, step, rank)
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))
