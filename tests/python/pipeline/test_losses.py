"""Parts of the loss in any stage; inputs and targets for any stage that asks for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, rows, tanh_layers

CHUNKS = 4
FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")


class Expert(nn.Module):
    """A layer with a part of the loss."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        trireme.pipeline_loss(y.square().mean(), self.weight)
        return y.tanh()


def experts() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(Expert(0.1), nn.Linear(WIDTH, WIDTH), Expert(0.2), Expert(0.3))


def accumulate(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = []
    for part, wanted in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
        with trireme.collect_losses() as collected:
            loss = mse_loss(module(part), wanted)
        loss = loss + collected.total()
        (loss / CHUNKS).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("schedule", FORMS)
@on_shm_and_gloo_ranks(2, timeout=60)
def test_parts_of_the_loss(rank: int, schedule: str) -> None:
    one = experts()
    pipe = trireme.Pipeline(experts(), CHUNKS, ranks=True, schedule=schedule, loss=mse_loss)
    for step in range(2):
        one.zero_grad()
        pipe.zero_grad()
        x, y = rows(2 * step), rows(2 * step + 1)
        expected = accumulate(one, x, y)
        torch.testing.assert_close(pipe.step(x, target=y), expected)
        whole = dict(one.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[name].grad)
    torch.testing.assert_close(pipe.eval_step(x, target=y), expected)
    assert (pipe.eval_step(x) is None) == (pipe.stages[-1].rank != rank)


@on_shm_ranks(2, timeout=60)
def test_a_frozen_front_and_a_recomputation(rank: int) -> None:
    """A stage whose input needs no gradient has a part; a recomputed one does not count twice."""

    class Recomputed(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    def make() -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), Recomputed(0.5))

    one, pipe = make(), trireme.Pipeline(make(), CHUNKS, ranks=True, loss=mse_loss)
    expected = accumulate(one, rows(1), rows(2))
    torch.testing.assert_close(pipe.step(rows(1), target=rows(2)), expected)
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad)


def test_outside_of_pipelines() -> None:
    layer, x = Expert(2.0), rows(3)
    with raises(ValueError, "a part of the loss outside of a pipeline's step", form=RANKLESS_FORM):
        layer(x)
    with torch.no_grad():
        layer(x)
    with trireme.collect_losses() as outer, trireme.collect_losses() as inner:
        layer(x)
    assert outer.total() == 0.0
    torch.testing.assert_close(inner.total(), 2 * layer.linear(x).square().mean())
    with raises(ValueError, "that is no real number", form=RANKLESS_FORM):
        trireme.pipeline_loss(torch.zeros(2))


def by_hand(
    module: nn.Module, x: Tensor, weights: Tensor, divisor: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of all parts over ``divisor``, and gradients of it and of the weighted outputs, by a
    loop over micro-batches."""
    module.zero_grad()
    total = torch.zeros(())
    for part, weight in zip(x.tensor_split(CHUNKS), weights.tensor_split(CHUNKS), strict=True):
        with trireme.collect_losses() as collected:
            output = module(part)
        parts = collected.total() / divisor
        assert isinstance(parts, Tensor)
        ((output * weight).sum() + parts).backward()
        total += parts.detach()
    return total, {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_parts_of_the_loss_of_a_call(checkpoint: Any, scale_grads: bool) -> None:
    """Who calls the pipeline collects them, as around the module: their mean over micro-batches."""
    pipe = trireme.Pipeline(
        experts(), CHUNKS, balance=[1, 2, 1], checkpoint=checkpoint, scale_grads=scale_grads
    )
    one = experts()
    for step in range(2):
        x, weights = rows(2 * step), rows(2 * step + 1)
        expected, gradients = by_hand(one, x, weights, CHUNKS if scale_grads else 1)
        pipe.zero_grad()
        with trireme.collect_losses() as collected:
            output = pipe(x)
        assert len(collected.parts()) == 3 * CHUNKS
        torch.testing.assert_close(collected.total(), expected)
        ((output * weights).sum() + collected.total()).backward(retain_graph=step == 1)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name])
    # The graph is still there: the parts alone give gradients, and so do the outputs.
    parameters = list(pipe.parameters())
    of_parts = torch.autograd.grad(
        collected.total(), parameters, retain_graph=True, allow_unused=True
    )
    of_outputs = torch.autograd.grad((output * weights).sum(), parameters)
    for first, second, whole in zip(of_parts, of_outputs, gradients.values(), strict=True):
        torch.testing.assert_close(second if first is None else first + second, whole)


def test_the_order_of_parts_is_that_of_a_loop() -> None:
    pipe, one = trireme.Pipeline(experts(), CHUNKS, balance=[1, 2, 1]), experts()
    x = rows(4)
    expected: list[Tensor] = []
    for part in x.tensor_split(CHUNKS):
        with trireme.collect_losses() as collected:
            one(part)
        expected += [value for value, _ in collected.parts()]
    with trireme.collect_losses() as collected, torch.no_grad():
        pipe(x)
    got = collected.parts()
    assert all(torch.equal(value, other) for (value, _), other in zip(got, expected, strict=True))
    assert [weight * CHUNKS for _, weight in got] == pytest.approx([0.1, 0.2, 0.3] * CHUNKS)
    assert not any(value.requires_grad for value, _ in got)


def test_parts_of_a_call_that_nobody_collects() -> None:
    pipe = trireme.Pipeline(experts(), CHUNKS, balance=[1, 2, 1], loss=mse_loss)
    with pytest.raises(ValueError, match="a part of the loss outside of a pipeline's step"):
        pipe(rows(1))
    pipe.eval()
    with torch.no_grad():
        pipe(rows(1))
    with trireme.collect_losses() as collected:
        pipe.train().step(rows(1), target=rows(2))  # has them itself
    assert collected.parts() == []


def test_a_checkpointed_call_has_its_parts_once() -> None:
    pipe, one = trireme.Pipeline(experts(), CHUNKS, balance=[1, 2, 1]), experts()
    x, weights = rows(1), rows(2)
    expected, gradients = by_hand(one, x, weights, CHUNKS)
    with trireme.collect_losses() as collected:
        output = checkpoint(pipe, x, use_reentrant=False)
        ((output * weights).sum() + collected.total()).backward()
    torch.testing.assert_close(collected.total(), expected)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


@on_shm_ranks(2, timeout=60)
def test_parts_of_doubles_stay_what_they_are(rank: int) -> None:
    """A layer may use the number that it gave."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            part = (x * 0.1).exp().mean().exp()  # what exp() returned is saved for its backward
            trireme.pipeline_loss(part, 0.5)
            return x * part

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH)).double()
    one = copy.deepcopy(module)
    pipe = trireme.Pipeline(module, CHUNKS, ranks=True, loss=mse_loss)
    expected = accumulate(one, rows(1).double(), rows(2).double())
    got = pipe.step(rows(1).double(), target=rows(2).double())
    torch.testing.assert_close(got, expected)
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad)


class Masked(nn.Module):
    """Takes two inputs in the first stage, and asks for them again in a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor, target: Tensor | None = None) -> Tensor:
        hidden = self.linear(hidden) * mask
        return hidden if target is None else hidden + target


class AsksForAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, hidden: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        return self.linear(x) * mask + hidden - target


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@on_shm_and_gloo_ranks(2, timeout=60)
def test_any_stage_asks_for_inputs_and_targets(rank: int, schedule: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(9)
        return nn.Sequential(Masked(), nn.Tanh(), AsksForAll())

    one = make()
    pipe = trireme.Pipeline(make(), CHUNKS, ranks=True, schedule=schedule, loss=mse_loss)
    x, mask, y = rows(1), rows(2).sign(), rows(3)
    losses: list[Any] = []
    for a, m, t in zip(*(each.tensor_split(CHUNKS) for each in (x, mask, y)), strict=True):
        losses.append(mse_loss(one[2](one[1](one[0](a, m, t)), a, m, t), t))
        losses[-1].backward()
    got = pipe.step(x, mask, target=y)
    torch.testing.assert_close(got, torch.stack(losses).mean().detach())
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad / CHUNKS)
    torch.testing.assert_close(pipe.step(x, mask=mask, target=y), got)


@on_shm_ranks(2, timeout=60)
def test_the_last_layer_is_the_loss(rank: int) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return mse_loss(x, target)

    x, y = rows(1), rows(2)
    plain = trireme.Pipeline(tanh_layers(4), CHUNKS, ranks=True, loss=mse_loss)
    pipe = trireme.Pipeline(nn.Sequential(*tanh_layers(4), Loss()), CHUNKS, ranks=True)
    assert torch.equal(pipe.step(x, target=y), plain.step(x, target=y))
    assert torch.equal(pipe.eval_step(x, target=y), plain.eval_step(x, target=y))
