"""Random pipelines equal plain accumulation, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn

from harness.on_ranks import on_shm_ranks
from pipeline.ranks import WIDTH, accumulate, rows

_PER_WORLD = 25
_FORMS = (
    *("gpipe", "1f1b", "zb-h1", "looped-bfs", "interleaved-1f1b"),
    *("zb-v", "dualpipe-v", "zb-auto"),
)


class Wrap(nn.Module):
    """Hands a tensor on within a value of some kind, beside one that needs no gradient."""

    def __init__(self, kind: int, draws: random.Random) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, bias=draws.random() < 0.5)

    def forward(self, given: Any) -> Any:
        x, skipped = _opened(given)
        y = torch.sin(self.linear(x))
        if skipped is not None:
            y = y + skipped
        kinds = [y, (y, x), [y, 3, None], {"y": y, "skipped": x.detach()}]
        return kinds[self.kind]


def _opened(given: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(given, Tensor):
        return given, None
    if isinstance(given, dict):
        return given["y"], given["skipped"]
    return given[0], given[1] if isinstance(given[1], Tensor) else None


class Activation(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, given: Any) -> Tensor:
        x, _ = _opened(given)
        return x.tanh_() if self.in_place and x.grad_fn is not None else x.tanh()


def _random_layers(draws: random.Random, count: int, dtype: torch.dtype) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(count - 1):
        if draws.random() < 0.7:
            layers.append(Wrap(draws.randrange(4), draws))
        else:
            layers.append(Activation(False))
        if draws.random() < 0.25:
            for parameter in layers[-1].parameters():
                parameter.requires_grad_(draws.random() < 0.5)
    layers.append(Wrap(0, draws))
    return nn.Sequential(*layers).to(dtype)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


def _one_case(seed: int, world: int) -> None:
    draws = random.Random(seed)
    form = draws.choice(_FORMS)
    chunks = draws.randint(1, 6)
    if form == "dualpipe-v":
        chunks = max(chunks, 2 * world)
    dtype = draws.choice([torch.float32, torch.float64, torch.bfloat16])
    schedule = trireme.pipeline_schedule(form, ranks=world, micro_batches=chunks)
    count = schedule.stages + draws.randint(0, 4)
    balance = [1] * schedule.stages
    for _ in range(count - schedule.stages):
        balance[draws.randrange(len(balance))] += 1
    modules = []
    for _ in range(2):
        torch.manual_seed(seed)
        modules.append(_random_layers(random.Random(seed), count, dtype))
    one, given = modules
    pipe = trireme.Pipeline(
        given, chunks, ranks=True, schedule=schedule, loss=_loss, balance=balance
    )
    case = (seed, form, world, chunks, balance, dtype)
    for step in range(2):
        for module in (one, pipe):
            module.zero_grad()
        total = chunks + draws.randint(0, 7)  # another number of rows in each step
        x, y = rows(step, total).to(dtype), rows(7, total).to(dtype)
        expected = accumulate(one, x, y, chunks=chunks, loss=_loss)
        got = pipe.step(x, target=y)
        assert torch.equal(got, expected), (case, got, expected)
        whole = dict(one.named_parameters())
        for name, parameter in pipe.named_parameters():
            ours, its = parameter.grad, whole[name].grad
            assert (ours is None) == (its is None), (case, name)
            assert ours is None or torch.equal(ours, its), (case, name)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_shm_ranks("world", timeout=120)
def test_random_pipelines(rank: int, world: int) -> None:
    for number in range(_PER_WORLD):
        _one_case(1000 * world + number, world)
