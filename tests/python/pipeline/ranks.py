"""What the tests of trireme.Pipeline share: models, batches, and one process as the oracle.

    @on_shm_and_gloo_ranks(2)
    def test_something(rank: int) -> None:
        both = Both(tanh_layers, chunks=4, schedule="1f1b", loss=mse_loss)
        for step in range(3):
            both.train(step)

Every step is compared, bit for bit, with that of one process which runs the same micro-batches in
order, adds up their gradients and divides them at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.models import batch
from harness.training import ROWS, Training

FORMS = ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b")
WIDTH = 6
CHUNKS = 4  # a step of Staged has so many


def tanh_layers(count: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    made = [nn.Linear(WIDTH, WIDTH) if i % 2 == 0 else nn.Tanh() for i in range(count)]
    return nn.Sequential(*made)


def tied_layers(count: int = 8) -> nn.Sequential:
    """The weights of all Linear layers are one; two of their biases are another."""
    module = tanh_layers(count)
    for i in range(2, count, 2):
        module[i].weight = module[0].weight
    module[6].bias = module[2].bias
    return module


def rows(seed: int, count: int = 10) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def accumulate(
    module: nn.Module, inputs: Tensor, targets: Any, *, chunks: int, loss: Callable[..., Tensor]
) -> Tensor:
    """One step of one process; returns the mean loss."""
    losses = []
    for x, y in zip(inputs.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
        one = loss(module(x), y)
        one.backward()
        losses.append(one.detach())
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= chunks
    return sum(losses[1:], losses[0]) / chunks


def assert_same_on_all_ranks(tensor: Tensor, ranks: list[int]) -> None:
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor.detach().contiguous())
    for rank in ranks:
        assert torch.equal(everybody[rank], everybody[ranks[0]])


class Both:
    """A pipeline, and one process with the whole module."""

    ranks = True

    def __init__(
        self,
        make: Callable[[], nn.Sequential],
        chunks: int = 4,
        loss: Any = mse_loss,
        **options: Any,
    ) -> None:
        self.one = make()
        self.pipe = trireme.Pipeline(make(), chunks, ranks=self.ranks, loss=loss, **options)
        self.chunks, self.loss = chunks, loss
        own = list(self.pipe.parameters())
        self.optimizers = [
            torch.optim.AdamW(parameters, lr=0.01)
            for parameters in (list(self.one.parameters()), own)
            if parameters
        ]

    def train(self, step: int, count: int = 10) -> None:
        """One step of both, and the comparison."""
        x, y = rows(2 * step, count), rows(2 * step + 1, count)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        expected = accumulate(self.one, x, y, chunks=self.chunks, loss=self.loss)
        got = self.pipe.step(x, target=y)
        assert got.dim() == 0 and not got.requires_grad
        assert torch.equal(got, expected), (got, expected)
        self.assert_equal()
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_equal()

    def assert_equal(self) -> None:
        whole = dict(self.one.named_parameters())
        for name, parameter in self.pipe.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            got, expected = parameter.grad, whole[name].grad
            assert (got is None) == (expected is None), name
            assert got is None or torch.equal(got, expected), (name, got, expected)


class Staged(Training):
    """A pipeline over all ranks, which takes whole batches."""

    def loss(self, number: int) -> torch.Tensor:
        """Without a graph: step() has the backward."""
        whole = batch(number, rows=ROWS)
        return self.model.eval_step(whole, target=whole)

    def backward(self, *numbers: int, sync: bool = True) -> None:
        """One step() for each batch. Without ``sync`` ranks only accumulate."""
        with nullcontext() if sync else self.model.no_sync():
            for number in numbers:
                whole = batch(number, rows=ROWS)
                self.model.step(whole, target=whole)

    def counterparts(self, one: Training) -> list[nn.Parameter]:
        """Those of this rank's layers; what layers share has a name in each of them."""
        theirs = dict(one.model.named_parameters(remove_duplicate=False))
        return [theirs[name] for name, _ in self.model.named_parameters()]


def square_mean(output: Tensor, target: Tensor) -> Tensor:
    """The loss of a Training, which has no target."""
    return output.square().mean()


def staged(make: Callable[[], nn.Module], optimizer_class: Any, **defaults: Any) -> Staged:
    """This rank's stage: of a Sequential, or of what is traced and cut in front of its children."""
    model, world = make(), dist.get_world_size()
    options = {"ranks": True, "schedule": "1f1b", "loss": square_mean, **cut(model, world)}
    pipe = trireme.Pipeline(model, CHUNKS, **options)
    optimizer = optimizer_class(pipe.parameters(), **defaults)
    return Staged(pipe, pipe, optimizer, dist.get_rank(), world)


def in_threads(make: Callable[[], nn.Module], optimizer_class: Any, **defaults: Any) -> Training:
    """Two stages in one process, which is called like the model."""
    model = make()
    pipe = trireme.Pipeline(model, CHUNKS, devices=["cpu"] * 2, **cut(model, 2))
    return Training(pipe, pipe, optimizer_class(pipe.parameters(), **defaults))


def cut(model: nn.Module, stages: int) -> dict[str, Any]:
    """Options by which each stage has parameters, where there are enough layers with some."""
    children = dict(model.named_children())
    if not isinstance(model, nn.Sequential):
        sample = batch(0, rows=ROWS // CHUNKS)
        return {"split": list(children)[1:stages], "sample": sample}
    begins = [at for at, layer in enumerate(children.values()) if list(layer.parameters())]
    if len(begins) < stages:
        return {}
    borders = [0, *begins[1:stages], len(children)]
    return {"balance": [end - begin for begin, end in pairwise(borders)]}
