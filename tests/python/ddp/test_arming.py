"""Which backward synchronizes: one that reaches an output, whatever else it does."""

import threading
from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import assert_equals_torch
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients

Gradients = dict[str, torch.Tensor | None]


Backward = Callable[[nn.Module, int], None]
"""A rank's backward: (model, rank)."""


def local_gradients(backward: Backward, rank: int) -> Gradients:
    """Computes those of one rank, alone in this process."""
    model = mlp()
    backward(model, rank)
    return gradients(model)


def averaged(backward: Backward) -> Gradients:
    parts = [local_gradients(backward, rank) for rank in range(WORLD)]
    return {name: sum(part[name] for part in parts) / WORLD for name in parts[0]}


def check(backward: Backward, rank: int, steps: int = 3) -> None:
    """On the wrapped model ``backward`` gives averages, step after step."""
    ddp = trireme.DistributedDataParallel(mlp())
    for _ in range(steps):
        ddp.zero_grad()
        backward(ddp, rank)
        torch.testing.assert_close(gradients(ddp), averaged(backward))


def inner(model: nn.Module) -> nn.Sequential:
    return model.module if isinstance(model, trireme.DistributedDataParallel) else model


@on_ranks()
def test_a_parameter_in_the_loss_beside_the_output(rank: int) -> None:
    def backward(model: nn.Module, rank: int) -> None:
        loss = model(batch(0)[rank::WORLD]).square().mean()
        (loss + (1 + rank) * inner(model)[0].weight.square().sum()).backward()

    check(backward, rank)


@on_ranks()
def test_layers_called_outside_forward(rank: int) -> None:
    """The wrapped forward ends early; its caller runs the last layer by hand."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[:4](x)

    def step(model: nn.Module, number: int, rank: int) -> None:
        hidden = model(batch(number)[rank::WORLD])
        model.module.layers[4](hidden).square().mean().backward()

    assert_equals_torch(Early, step, rank)


@on_ranks()
def test_a_loss_without_any_output_stays_local(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    ddp(batch(0)[rank::WORLD])
    ((1 + rank) * ddp.module[0].bias.sum()).backward()
    assert torch.equal(ddp.module[0].bias.grad, torch.full((13,), 1.0 + rank))
    check(lambda model, rank: model(batch(0)[rank::WORLD]).square().mean().backward(), rank)


@on_ranks()
def test_autograd_grad_does_not_synchronize(rank: int) -> None:
    """Not even on one rank alone, where a collective would hang."""
    ddp = trireme.DistributedDataParallel(mlp())
    if rank == 1:
        x = batch(0).requires_grad_()
        loss = ddp(x).sum()
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        of_parameters = torch.autograd.grad(loss, list(ddp.parameters()))
        alone = mlp()
        alone(x).sum().backward()
        torch.testing.assert_close(list(of_parameters), list(gradients(alone).values()))
        assert of_input.abs().sum() > 0
        assert all(grad is None for grad in gradients(ddp).values())
    ddp(batch(0)[rank::WORLD]).sum().backward()


@on_ranks()
def test_backward_to_inputs_does_not_synchronize(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    if rank == 1:
        x = batch(0).requires_grad_()
        ddp(x).sum().backward(inputs=[x])
        assert x.grad.abs().sum() > 0
        assert all(grad is None for grad in gradients(ddp).values())
    ddp(batch(0)[rank::WORLD]).sum().backward()


@on_ranks()
def test_backward_to_some_parameters_averages_those(rank: int) -> None:
    def backward(model: nn.Module, rank: int) -> None:
        weights = [inner(model)[0].weight, inner(model)[4].bias]
        model(batch(0)[rank::WORLD]).square().mean().backward(inputs=weights)

    ddp = trireme.DistributedDataParallel(mlp())
    for _ in range(3):
        ddp.zero_grad()
        backward(ddp, rank)
        got = gradients(ddp)
        assert {name for name, grad in got.items() if grad is not None} == {"0.weight", "4.bias"}
        parts = [local_gradients(backward, of) for of in range(WORLD)]
        for name in ("0.weight", "4.bias"):
            torch.testing.assert_close(got[name], (parts[0][name] + parts[1][name]) / WORLD)


@on_ranks()
def test_gradient_penalty(rank: int) -> None:
    """autograd.grad(create_graph=True) inside the loss is differentiable as ever."""

    def backward(model: nn.Module, rank: int) -> None:
        x = batch(0)[rank::WORLD].requires_grad_()
        output = model(x)
        (of_input,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (output.square().mean() + of_input.square().mean()).backward()

    check(backward, rank)


class NoGradient(torch.autograd.Function):
    """Multiplies; its backward keeps the weight's gradient to itself when told so."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, silent: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.silent = silent
        return x * weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, weight = ctx.saved_tensors
        return grad * weight, None if ctx.silent else (grad * x).sum(0), None


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, silent: bool) -> torch.Tensor:
        return NoGradient.apply(x * self.scale, self.weight, silent)


@pytest.mark.parametrize("silent", [(True, True), (False, True), (True, False)])
@on_ranks()
def test_a_function_that_returns_no_gradient(rank: int, silent: tuple[bool, bool]) -> None:
    """Such a parameter counts as unused on that rank."""
    ddp = trireme.DistributedDataParallel(Silent())
    x = torch.full((2, 3), 1.0 + rank)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x, silent[rank]).sum().backward()
        torch.testing.assert_close(ddp.module.scale.grad, torch.full((3,), 3.0))
        if all(silent):
            assert ddp.module.weight.grad is None
        else:
            mean = sum(2.0 * (1 + of) for of in range(WORLD) if not silent[of]) / WORLD
            torch.testing.assert_close(ddp.module.weight.grad, torch.full((3,), mean))


@on_ranks()
def test_tensor_hooks_change_what_is_averaged(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    ddp.module[4].bias.register_hook(lambda grad: grad * (1 + rank))
    seen: list[float] = []
    ddp.module[4].bias.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter.grad.sum().item())
    )
    rows = len(batch(0)) / WORLD
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step)[rank::WORLD]).sum().backward()
        torch.testing.assert_close(ddp.module[4].bias.grad, torch.full((3,), 1.5 * rows))
    assert seen == [3 * rows * (1 + rank)] * 3  # that hook runs before the averaging


@on_ranks()
def test_backward_on_another_thread(rank: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        loss = model(batch(number)[rank::WORLD]).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_equals_torch(mlp, step, rank)


@on_ranks()
def test_gradients_are_final_when_backward_returns(rank: int) -> None:
    """An accumulated hook of the input runs in between and must not see half of a sum as final."""
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
    for step in range(4):
        ddp.zero_grad()
        x = batch(step)[rank::WORLD].requires_grad_()
        ddp(x).square().mean().backward()
        first = gradients(ddp)
        torch.distributed.barrier()
        assert all(torch.equal(first[name], grad) for name, grad in gradients(ddp).items())
        alone = mlp()
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(first, gradients(alone))
