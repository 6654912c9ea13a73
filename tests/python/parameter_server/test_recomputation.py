"""Rows in checkpoints, ours and torch's: a recomputation reads what its forward has read, also
where the table has moved meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme import ps

from harness.on_ranks import on_shm_ranks

DIM = 4
IDS = torch.tensor([1, 2, 1, 3])
LATER = [("rows", IDS + 50), ("dense",)]
Function = Callable[..., Any]

torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
reentrant = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


def nested(outer: Function, inner: Function) -> Function:
    return lambda function, x: outer(lambda y: inner(function, y), x)


CHECKPOINTS: dict[str, Function] = {
    "ours": trireme.checkpoint,
    "torch's": torchs,
    "reentrant": reentrant,
    "ours in torch's": nested(torchs, trireme.checkpoint),
    "torch's in ours": nested(trireme.checkpoint, torchs),
    "ours in ours": nested(trireme.checkpoint, trireme.checkpoint),
    "torch's in torch's": nested(torchs, torchs),
    "ours in reentrant": nested(reentrant, trireme.checkpoint),
}


def tables() -> list[Any]:
    return [
        ps.Sparse("rows", DIM, optimizer=ps.Sum(), init=ps.Normal(1.0)),
        ps.Dense("dense", {"x": torch.ones(DIM)}, optimizer=ps.Sum()),
    ]


class Layer(nn.Module):
    """Rows in two ways, and what is pulled by hand. Its exp() wants what rows were."""

    def __init__(self, server: ps.ParameterServer) -> None:
        super().__init__()
        self.server = server
        self.embedding = ps.Embedding(server["rows"])
        self.bag = ps.EmbeddingBag(server["rows"], mode="sum")
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(IDS).mul_(0.5) * self.weight
        rows = rows.exp_() + self.bag(IDS.view(2, 2)).sum(0).sin() * self.weight
        pulled = self.server["rows"].pull(IDS + 100) + self.server["dense"].pull()["x"]
        later = [self.server[name].pull(*ids, async_op=True) for name, *ids in LATER]
        pulled = pulled + later[0].wait() * later[1].wait()["x"]
        return x * rows.exp() + pulled * self.weight


def move(server: ps.ParameterServer) -> None:
    server["rows"].push(torch.arange(200), torch.ones(200, DIM))
    server["dense"].push({"x": torch.ones(DIM)})
    server.clock()


def gradients(server: ps.ParameterServer, call: Function, backwards: int) -> list[Tensor]:
    """Those of the layer and its input, what came out, and what its rows have got."""
    torch.manual_seed(1)
    layer, x = Layer(server), torch.rand(4, DIM, requires_grad=True)
    out = call(layer, x)
    move(server)
    before = server["rows"].pull(torch.arange(10))
    for backward in range(backwards):
        out.sum().backward(retain_graph=backward + 1 < backwards)
    server.clock()
    return [out, x.grad, layer.weight.grad, server["rows"].pull(torch.arange(10)) - before]


@pytest.mark.parametrize("mode", ps.server.MODES)
@on_shm_ranks(1)
def test_a_recomputation_reads_the_rows_of_its_forward(rank: int, mode: str) -> None:
    for name, checkpoint in CHECKPOINTS.items():
        for backwards in (1, 2):
            with ps.ParameterServer(tables(), mode=mode) as server:
                expected = gradients(server, lambda layer, x: layer(x), backwards)
            with ps.ParameterServer(tables(), mode=mode) as server:
                found = gradients(server, checkpoint, backwards)
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                torch.testing.assert_close(one, other, msg=f"{name}, {backwards}: value {place}")


@on_shm_ranks(1)
def test_what_is_kept_goes_with_its_graph(rank: int) -> None:
    with ps.ParameterServer(tables(), mode="async") as server:
        layer = Layer(server)
        for checkpoint in CHECKPOINTS.values():
            pulls = server.stats()["pulls"]
            out = checkpoint(layer, torch.rand(4, DIM, requires_grad=True))
            out.sum().backward()
            assert server.stats()["pulls"] == pulls + 6  # the forward's
        with torch.no_grad():
            layer(torch.rand(4, DIM))
        assert server.stats()["pulls"] == pulls + 12


def through_pipeline(mode: str, checkpoint: Any) -> list[Tensor]:
    """Rows and gradients after a step, whose micro-batches all read the same rows, and after a
    forward whose rows have moved before its backward."""
    torch.manual_seed(1)
    ids = torch.arange(2).repeat(4)
    with ps.ParameterServer(tables(), mode=mode) as server:
        linear = nn.Linear(DIM, DIM)
        net = nn.Sequential(ps.Embedding(server["rows"]), nn.Tanh(), linear, nn.Tanh())
        pipe = trireme.Pipeline(
            net, 4, devices=["cpu"] * 2, schedule="1f1b", checkpoint=checkpoint, loss=mse_loss
        )
        losses = [pipe.step(ids, target=torch.ones(8, DIM))]
        server.clock()
        losses.append(pipe(ids).square().mean())
        move(server)
        losses[1].backward()
        server.clock()
        rows = server["rows"].pull(torch.arange(3))
        return [rows, *losses, linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("mode", ["bsp", "async"])
@on_shm_ranks(1)
def test_a_pipeline_recomputes_with_the_rows_of_its_forward(rank: int, mode: str) -> None:
    expected = through_pipeline(mode, "never")
    for checkpoint in ("always", "except_last"):
        found = through_pipeline(mode, checkpoint)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(one, other, msg=f"{checkpoint}: value {place}")
