"""Random numbers in DataParallel's replicas on the CPU: the same in every run of one seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from data_parallel.cases import (
    DP,
    EXACT,
    HOUSE_FORM,
    TIME_LIMIT,
    Called,
    assert_same_backward,
    pair,
)
from harness.faults import message_of
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT

# Functions of rows that draw.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.5, inplace=True),
    "feature dropout": lambda x: functional.dropout1d(x.unsqueeze(2), 0.5).squeeze(2),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel": lambda x: functional.gumbel_softmax(x),
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(len(x), 1),
    "randint": lambda x: x * torch.randint(0, 9, x.shape),
    "randperm": lambda x: x * torch.randperm(x.shape[1]),
    "normal_": lambda x: x * torch.empty_like(x).normal_(),
    "normal": lambda x: torch.normal(x.detach(), 1.0) * x,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: x * torch.multinomial(x.detach().abs(), 6),
    "distribution": lambda x: torch.distributions.Gamma(x.detach().abs() + 1, 1.0).sample() * x,
    "poisson": lambda x: x * torch.poisson(x.detach().abs() * 3),
}


def data(step: int = 0, rows: int = 8) -> Tensor:
    return batch(step, rows=rows)


def random_module(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    return Called(lambda m, x: draw(m.net(draw(x)).repeat(1, 2)), net=mlp())


def run(ours: nn.Module, seed: int) -> list[Any]:
    """Two steps."""
    torch.manual_seed(seed)
    seen: list[Any] = []
    for step in range(2):
        ours.zero_grad()
        output = ours(data(step))
        output.sum().backward()
        seen += [output.detach(), gradients(ours)]
    return seen


@pytest.mark.parametrize("name", DRAWS)
def test_one_seed_is_one_run(name: str) -> None:
    """Whoever of the replicas draws first; another seed is another run."""
    ours = DP(random_module(DRAWS[name]), replicas=3)
    expected = run(ours, 5)
    for _ in range(3):
        torch.testing.assert_close(run(ours, 5), expected, **EXACT)
    assert not torch.equal(run(ours, 6)[0], expected[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_replicas_and_steps_draw_different_numbers(mode: Any) -> None:
    ours = DP(Called(lambda m, x: torch.rand(len(x), 50)), replicas=3)
    with mode():
        rows = torch.cat([ours(torch.ones(6, 1)) for _ in range(2)])
    assert len({tuple(row.tolist()) for row in rows}) == 12
    assert 0.3 < rows.mean() < 0.7


def test_masks_are_those_of_the_forward() -> None:
    ours = DP(nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.2)), replicas=2)
    x = torch.ones(64, 50, requires_grad=True)
    output = ours(x)
    output.sum().backward()
    assert torch.equal(x.grad, output)


def test_numbers_of_the_process() -> None:
    """What a forward that draws takes does not depend on how much it draws; others take none."""
    states = []
    for draw in (lambda x: x, lambda x: x * torch.rand(1), lambda x: x * torch.rand(999).sum()):
        torch.manual_seed(3)
        DP(Called(lambda m, x, draw=draw: draw(x)), replicas=2)(data())
        states.append(torch.get_rng_state())
    torch.manual_seed(3)
    assert torch.equal(states[0], torch.get_rng_state())
    assert not torch.equal(states[1], states[0])
    assert torch.equal(states[1], states[2])


def test_a_generator_that_is_given() -> None:
    """Is drawn from as it is."""
    given = torch.Generator().manual_seed(3)
    ours = DP(Called(lambda m, x: torch.rand(len(x), 6, generator=given)), replicas=2)
    drawn = ours(data()[:1])
    torch.testing.assert_close(
        drawn, torch.rand(1, 6, generator=torch.Generator().manual_seed(3)), **EXACT
    )


def test_a_transformer_trains_with_dropout() -> None:
    ours = DP(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=True), replicas=2)
    seen = []
    for _ in range(2):
        torch.manual_seed(9)
        ours.zero_grad()
        ours(data(0, 8 * 5).view(8, 5, 6)).square().sum().backward()
        seen.append(gradients(ours))
    torch.testing.assert_close(*seen, **EXACT)
    assert all(grad is not None and grad.isfinite().all() for grad in seen[0].values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_would_draw_again(reentrant: bool) -> None:
    """Torch's cannot draw the same numbers, so they say so."""

    def forward(module: Any, x: Tensor) -> Tensor:
        def part(rows: Tensor) -> Tensor:
            rows = module.net(rows)
            return functional.dropout(rows, 0.5) if module.training else rows

        return checkpoint(part, x * module.scale, use_reentrant=reentrant)

    ours, one = pair(lambda: Called(forward, net=mlp(), scale=nn.Parameter(torch.ones(1))).double())
    x = data().double()
    loss = ours(x).sum()
    with pytest.raises(NotImplementedError, match="a random operator in the backward") as caught:
        loss.backward()
    assert HOUSE_FORM.match(message_of(caught.value).split("\n")[0])
    assert_same_backward(ours.eval(), one.eval(), x)


def test_our_checkpoints_draw_what_the_forward_drew() -> None:
    """Each replica draws its own numbers, and draws them again; checkpoints are nested."""

    def forward(module: Any, x: Tensor) -> Tensor:
        def inner(rows: Tensor) -> Tensor:
            return functional.dropout(module.net(rows), 0.5)

        def outer(rows: Tensor) -> Tensor:
            return functional.dropout(module.again(inner, rows), 0.3) * torch.rand(len(rows), 1)

        return module.again(outer, x * module.scale)

    seen = []
    for again in (lambda part, rows: part(rows), trireme.checkpoint):
        torch.manual_seed(5)
        parts = {"net": mlp(), "scale": nn.Parameter(torch.ones(1)), "again": again}
        ours = DP(Called(forward, **parts), replicas=2)
        for step in range(2):
            torch.manual_seed(7 + step)
            ours(data(step)).square().sum().backward()
            seen.append([gradients(ours), torch.rand(1)])
    torch.testing.assert_close(seen[:2], seen[2:], **EXACT)
