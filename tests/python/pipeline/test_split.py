"""Modules that are no Sequential, cut in front of named modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, rows

CHUNKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.linear(x) * mask + self.shift).tanh()


class Residual(nn.Module):
    """Its embedding goes past all blocks to the head, and each block takes the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = first = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden + first)


SAMPLE = (rows(1, 2), rows(2, 2))


def pipe_of(module: nn.Module, split: Any, **options: Any) -> trireme.Pipeline:
    options = {"loss": mse_loss, "sample": SAMPLE, "ranks": True, **options}
    return trireme.Pipeline(module, CHUNKS, split=split, **options)


def accumulate(module: nn.Module, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    losses = []
    for parts in zip(*(tensor.tensor_split(CHUNKS) for tensor in (x, mask, y)), strict=True):
        loss = mse_loss(module(parts[0], parts[1]), parts[2])
        loss.backward()
        losses.append(loss.detach())
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= CHUNKS
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("schedule", "split"),
    [
        ("gpipe", ["layers.2"]),
        ("1f1b", ["layers.2"]),
        ("zb-h1", ["head"]),
        ("interleaved-1f1b", ["layers.1", "layers.2", "head"]),
        ("zb-v", ["layers.0", "layers.2", "layers.3"]),
    ],
)
@on_shm_and_gloo_ranks(2, timeout=100)
def test_equals_the_whole_module(rank: int, schedule: str, split: list[str]) -> None:
    whole, pipe = Residual(), pipe_of(Residual(), split, schedule=schedule)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (whole, pipe)]
    expected = dict(whole.named_parameters())
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, mask, y = rows(3 * step), rows(3 * step + 1).sign(), rows(3 * step + 2)
        torch.testing.assert_close(pipe.step(x, mask, target=y), accumulate(whole, x, mask, y))
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)
        for optimizer in optimizers:
            optimizer.step()
    names: list[Any] = [None] * 2
    dist.all_gather_object(names, list(pipe.state_dict()))
    assert sorted(names[0] + names[1]) == sorted(whole.state_dict())
    torch.testing.assert_close(
        pipe.eval_step(x, mask, target=y), accumulate(whole, x, mask, y), atol=1e-5, rtol=1e-5
    )
    output = pipe.eval_step(x, mask=mask)
    assert output is None or torch.allclose(output, whole(x, mask), atol=1e-5)


@on_shm_ranks(2, timeout=60)
def test_states_load_and_layers_are_the_modules(rank: int) -> None:
    pipe = pipe_of(Residual(), ["layers.1", "layers.2", "head"], schedule="interleaved-1f1b")
    twice = {name: 2 * tensor for name, tensor in Residual().state_dict().items()}
    pipe.load_state_dict({name: twice[name] for name in pipe.state_dict()})
    whole = Residual()
    whole.load_state_dict(twice)
    x, mask, y = rows(1), rows(2), rows(3)
    torch.testing.assert_close(pipe.step(x, mask, target=y), accumulate(whole, x, mask, y))
    pipe.double()
    whole.double()
    x, mask, y = x.double(), mask.double(), y.double()
    got = pipe.eval_step(x, mask, target=y)
    assert got.dtype == torch.float64
    whole.zero_grad()
    torch.testing.assert_close(got, accumulate(whole, x, mask, y))


@on_shm_ranks(2, timeout=60)
def test_tied_weights_are_refused(rank: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.last.weight = self.first.weight

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(self.first(x).tanh() * mask)

    what = "got 'last.weight' of a module that is traced, which is another parameter, too"
    with raises(NotImplementedError, what, form=RANKLESS_FORM):
        pipe_of(Tied(), ["last"])


@on_shm_ranks(2, timeout=60)
def test_bad_input(rank: int) -> None:
    for split, options, part in (
        (["blocks.0"], {}, "it has no 'blocks.0'"),
        (["head", "head"], {}, "expected each name once"),
        (["head"], {"sample": None}, "split= without sample="),
        (["head"], {"balance": [1, 1]}, "balance= beside split="),
    ):
        with raises(ValueError, part, form=RANKLESS_FORM):
            pipe_of(Residual(), split, **options)
    with raises(NotImplementedError, "for a module that is traced", form=RANKLESS_FORM):
        pipe_of(Residual(), ["head"], deferred_batch_norm=True)
    with raises(TypeError, "expected a torch.nn.Sequential", form=RANKLESS_FORM):
        trireme.Pipeline(Residual(), CHUNKS, ranks=True)
