"""Who owns the memory of a gradient, and which gradients keep their identity."""

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import assert_equals_torch, backward
from harness.models import mlp
from harness.on_ranks import on_ranks
from harness.training import gradients


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@on_ranks()
def test_fresh_gradients_are_ranges_of_a_bucket_and_no_views(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    grads = grads_of(ddp)
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    for grad, parameter in zip(grads, ddp.parameters(), strict=True):
        assert not grad._is_view() and grad._base is None
        assert not grad.requires_grad and grad.is_leaf
        assert grad.stride() == parameter.stride()
        grad.detach_()  # refused for views


@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_zeroed_gradients_keep_their_identity(rank: int, as_bucket_view: bool) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), gradient_as_bucket_view=as_bucket_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp, 0, rank)
    backward(ddp, 0, rank)  # the learned plan is in force from here on
    objects = grads_of(ddp)
    places = [grad.data_ptr() for grad in objects]
    for step in range(1, 4):
        optimizer.zero_grad(set_to_none=False)
        backward(ddp, step, rank)
        assert all(now is then for now, then in zip(grads_of(ddp), objects, strict=True))
        assert [grad.data_ptr() for grad in grads_of(ddp)] == places


def zeroing_sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad = lambda: torch.optim.SGD.zero_grad(optimizer, set_to_none=False)
    return optimizer


def never_zeroing_sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad = lambda: None
    return optimizer


@pytest.mark.parametrize("as_bucket_view", [False, True])
@pytest.mark.parametrize("make_optimizer", [zeroing_sgd, never_zeroing_sgd])
@on_ranks()
def test_gradients_that_stay_equal_torch(
    rank: int, make_optimizer: Callable[[nn.Module], object], as_bucket_view: bool
) -> None:
    assert_equals_torch(
        mlp,
        backward,
        rank,
        make_optimizer=make_optimizer,
        gradient_as_bucket_view=as_bucket_view,
        bucket_cap_mb=0.0003,
    )


@pytest.mark.parametrize("as_bucket_view", [False, True])
@on_ranks()
def test_a_kept_gradient_is_never_overwritten(rank: int, as_bucket_view: bool) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), gradient_as_bucket_view=as_bucket_view)
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for step in range(5):
        ddp.zero_grad()
        backward(ddp, step, rank)
        # In some steps all of them, in the others a piece of one.
        kept += grads_of(ddp) if step % 2 == 0 else [ddp.module[0].weight.grad[2:3]]
        copies += [grad.clone() for grad in kept[len(copies) :]]
    for grad, copy in zip(kept, copies, strict=True):
        assert torch.equal(grad, copy)


@on_ranks()
def test_buffers_and_tensors_are_used_again(rank: int) -> None:
    """Without anybody holding gradients no step takes memory of its own, or makes tensors."""
    ddp = trireme.DistributedDataParallel(mlp())
    weight = ddp.module[0].weight
    places = set()
    for step in range(6):
        ddp.zero_grad()
        backward(ddp, step, rank)
        places.add(weight.grad.data_ptr())
        if step == 1:  # the learned plan is in force
            weight.grad.mark = "seen"
    assert len(places) == 1
    assert weight.grad.mark == "seen"


HOLD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda grad: grad,
    "an alias": lambda grad: grad.detach(),
    "an array": lambda grad: torch.from_numpy(grad.numpy()),
    "a capsule": torch.from_dlpack,
}


@pytest.mark.parametrize("how", HOLD)
@on_ranks()
def test_a_gradient_that_somebody_holds_is_left_alone(rank: int, how: str) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    weight = ddp.module[0].weight
    for step in range(2):
        ddp.zero_grad()
        backward(ddp, step, rank)
    before = weight.grad.clone()
    held = HOLD[how](weight.grad)
    for step in range(2, 5):
        ddp.zero_grad()
        backward(ddp, step, rank)
        assert weight.grad.data_ptr() != held.data_ptr()
    assert torch.equal(held, before)


@on_ranks()
def test_assigned_gradients_keep_their_identity(rank: int) -> None:
    """A .grad that the user made, dense, transposed or a view, receives the sum in place."""

    def assign(model: nn.Module) -> list[torch.Tensor]:
        pool = torch.ones(5, 100)
        for number, parameter in enumerate(model.parameters()):
            if number % 2 == 0:
                parameter.grad = pool[number, 3 : 3 + parameter.numel()].view_as(parameter)
            elif parameter.dim() == 2:
                parameter.grad = torch.ones(*parameter.shape[::-1]).t()
            else:
                parameter.grad = torch.full_like(parameter, 2.0)
        return grads_of(model)

    expected = TorchDDP(mlp())
    assign(expected)
    backward(expected, 0, rank)
    backward(expected, 1, rank)
    ddp = trireme.DistributedDataParallel(mlp())
    objects = assign(ddp)
    backward(ddp, 0, rank)
    backward(ddp, 1, rank)
    assert all(now is then for now, then in zip(grads_of(ddp), objects, strict=True))
    torch.testing.assert_close(gradients(ddp), gradients(expected))


@on_ranks()
def test_bucket_views_replace_assigned_gradients(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    assigned = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
    for parameter, grad in zip(ddp.parameters(), assigned, strict=True):
        parameter.grad = grad
    backward(ddp, 0, rank)
    assert len({grad.untyped_storage().data_ptr() for grad in grads_of(ddp)}) == 1
    expected = trireme.DistributedDataParallel(mlp())
    backward(expected, 0, rank)
    torch.testing.assert_close(gradients(ddp), gradients(expected))


@on_ranks()
def test_some_gradients_are_dropped_and_others_stay(rank: int) -> None:
    def train(model: nn.Module) -> dict[str, torch.Tensor | None]:
        for step in range(4):
            for number, parameter in enumerate(model.parameters()):
                if (number + step) % 2:
                    parameter.grad = None
            backward(model, step, rank)
        return gradients(model)

    ours = train(trireme.DistributedDataParallel(mlp()))
    torch.testing.assert_close(ours, train(TorchDDP(mlp())))


@pytest.mark.parametrize("norm", [2.0, float("inf")])
@on_ranks()
def test_clipping(rank: int, norm: float) -> None:
    def clipped(model: nn.Module, step: int, rank: int) -> None:
        backward(model, step, rank)
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm)
        assert total > 0.01

    assert_equals_torch(mlp, clipped, rank)


@on_ranks()
def test_scaling_in_place_between_accumulations(rank: int) -> None:
    """What a GradScaler or a user does to .grad is part of what the next backward adds to."""

    def scaled(model: nn.Module, step: int, rank: int) -> None:
        backward(model, step, rank)
        for grad in grads_of(model):
            grad.mul_(0.5)
        backward(model, step + 10, rank)

    assert_equals_torch(mlp, scaled, rank)


@on_ranks()
def test_gradients_may_be_swapped_between_steps(rank: int) -> None:
    """.grad of one parameter given to another of the same shape is still that parameter's."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))

    def train(ddp: nn.Module) -> dict[str, torch.Tensor | None]:
        for step in range(3):
            backward(ddp, step, rank)
            first, second = ddp.module
            first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad
        return gradients(ddp)

    expected = train(TorchDDP(model))
    model.zero_grad()
    torch.testing.assert_close(train(trireme.DistributedDataParallel(model)), expected)
