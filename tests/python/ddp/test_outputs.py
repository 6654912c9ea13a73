"""Modules may return anything: a backward synchronizes wherever in it the tensors are."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import assert_equals_torch
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    left: torch.Tensor
    right: torch.Tensor


class Opaque:
    """No container: torch does not look into it."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left = left
        self.right = right


class Slotted:
    """Has no ``__dict__`` to look into either."""

    __slots__ = ("left", "right")

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left = left
        self.right = right


# How a module packs its two outputs, and where the right one then is.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda left, right: (left, right), lambda out: out[1]),
    "list in dict": (
        lambda left, right: {"out": [left, {"deep": right}], "name": "x", "n": 3},
        lambda out: out["out"][1]["deep"],
    ),
    "dataclass": (Record, lambda out: out.right),
    "namedtuple": (Pair, lambda out: out.right),
    "object": (Opaque, lambda out: out.right),
    "object without attributes": (Slotted, lambda out: out.right),
    "function": (lambda left, right: lambda: right, lambda out: out()),
    "object beside a tensor": (
        lambda left, right: (left * 1, Opaque(left, right)),
        lambda out: out[1].right,
    ),
    "object without attributes beside a tensor": (
        lambda left, right: (left * 1, Slotted(left, right)),
        lambda out: out[1].right,
    ),
}


class TwoHeads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = mlp()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        pack, _ = KINDS[self.kind]
        return pack(self.left(hidden), self.right(hidden))


def two_heads(kind: str) -> TwoHeads:
    torch.manual_seed(1)
    return TwoHeads(kind)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_loss_of_one_of_two_outputs(rank: int, kind: str) -> None:
    """The other head is unused on every rank: it has no gradient; the used ones are averaged."""
    _, right_of = KINDS[kind]
    ddp = trireme.DistributedDataParallel(two_heads(kind))
    alone = two_heads("tuple")
    for step in range(3):
        ddp.zero_grad()
        right_of(ddp(batch(step)[rank::WORLD])).square().mean().backward()
        alone.zero_grad()
        alone(batch(step))[1].square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_list_output(rank: int) -> None:
    def step(model: nn.Module, number: int, rank: int) -> None:
        output = model(batch(number)[rank::WORLD])
        (output["out"][0].sum() + output["out"][1]["deep"].square().sum()).backward()

    assert_equals_torch(lambda: two_heads("list in dict"), step, rank)


class Conditional(nn.Module):
    """Returns one tensor or two, by its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = mlp()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, both: bool) -> Any:
        hidden = self.body(x)
        return (hidden, self.head(hidden)) if both else hidden


@on_ranks()
def test_outputs_that_depend_on_the_step_and_the_rank(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Conditional())
    for step in range(4):
        both = [step % 2 == 0, step < 2]  # per rank: both, one of them, none
        ddp.zero_grad()
        output = ddp(batch(step)[rank::WORLD], both[rank])
        sum(part.square().mean() for part in (output if both[rank] else [output])).backward()

        alone = Conditional()
        for of in range(WORLD):
            output = alone(batch(step)[of::WORLD], both[of])
            losses = [part.square().mean() for part in (output if both[of] else [output])]
            (sum(losses) / WORLD).backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))


class Loss(nn.Module):
    """Keeps its loss to itself: the output holds no tensor at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor) -> str:
        self.loss = self.body(x).square().mean()
        return "done"


@on_ranks()
def test_an_output_without_tensors(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Loss())
    alone = mlp()
    for step in range(3):
        ddp.zero_grad()
        assert ddp(batch(step)[rank::WORLD]) == "done"
        ddp.module.loss.backward()
        alone.zero_grad()
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(list(gradients(ddp).values()), list(gradients(alone).values()))


class Passes(nn.Module):
    """Hands its input and a parameter through, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, self.weight, self.weight * x


@pytest.mark.parametrize("uses", [(2,), (1,), (0, 1, 2)])
@on_ranks()
def test_inputs_and_parameters_as_outputs(rank: int, uses: tuple[int, ...]) -> None:
    ddp = trireme.DistributedDataParallel(Passes())
    for _ in range(3):
        ddp.zero_grad()
        x = torch.full((6,), 1.0 + rank, requires_grad=True)
        outputs = ddp(x)
        sum((1 + rank) * outputs[use].sum() for use in uses).backward()
        # The means over the ranks of (1 + rank) * x and of 1 + rank.
        expected = torch.full((6,), 2.5 * (2 in uses) + 1.5 * (1 in uses))
        torch.testing.assert_close(ddp.module.weight.grad, expected)
        assert ddp.module.unused.grad is None


@on_ranks()
def test_an_output_changed_in_place(rank: int) -> None:
    """torch clones outputs so that this works; here there is nothing to clone."""

    def step(model: nn.Module, number: int, rank: int) -> None:
        output = model(batch(number)[rank::WORLD])
        output.mul_(2).add_(1)
        output.square().mean().backward()

    assert_equals_torch(mlp, step, rank)
