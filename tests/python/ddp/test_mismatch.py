"""Ranks that disagree: every one of them raises, naming parameter and rank, and none waits."""

from collections.abc import Callable

import torch
import trireme
from torch import nn

from harness.faults import in_case, raises
from harness.on_ranks import AGES_S, on_ranks

Make = Callable[[int], nn.Module]


def linears(*sizes: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in sizes))


def another_shape(rank: int) -> nn.Module:
    return linears((3, 4), (4, 5 + rank))


def another_dtype(rank: int) -> nn.Module:
    model = linears((3, 4), (4, 5))
    return model if rank == 0 else nn.Sequential(model[0], model[1].double())


def a_parameter_more(rank: int) -> nn.Module:
    return linears((3, 4), *([(4, 5)] if rank == 1 else []))


def a_parameter_less(rank: int) -> nn.Module:
    return linears((3, 4), *([(4, 5)] if rank == 0 else []))


def another_name(rank: int) -> nn.Module:
    return nn.ModuleDict({"first": nn.Linear(3, 4), f"head_{rank}": nn.Linear(4, 5)})


def another_order(rank: int) -> nn.Module:
    names = ["first", "second"]
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in (names if rank == 0 else names[::-1])})


def frozen_apart(rank: int) -> nn.Module:
    model = linears((3, 4), (4, 5))
    model[1].bias.requires_grad_(rank == 0)
    return model


def sparse_apart(rank: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 5, sparse=rank == 1), nn.Linear(5, 2))


def transposed(rank: int) -> nn.Module:
    """There are as many elements: no collective would have noticed."""
    return linears((3, 4) if rank == 0 else (4, 3))


def in_another_order(rank: int) -> nn.Module:
    """Gradients travel as they lie in memory, so elements of others would be added up."""
    module = nn.Conv2d(2, 3, 2)
    return module.to(memory_format=torch.channels_last) if rank == 1 else module


def all_frozen(rank: int) -> nn.Module:
    """Rank 1 alone would refuse it, as the next one: it must not leave rank 0 waiting."""
    return linears((3, 4)).requires_grad_(rank == 0)


def no_parameters(rank: int) -> nn.Module:
    return linears((3, 4)) if rank == 0 else nn.Tanh()


CASES: list[tuple[Make, list[str]]] = [
    (another_shape, ["'1.weight' Float [6, 4]", "'1.weight' Float [5, 4]"]),
    (another_dtype, ["'1.weight' Double [5, 4]", "'1.weight' Float [5, 4]"]),
    (a_parameter_more, ["4 parameters but rank 0 has 2", "'1.weight'"]),
    (a_parameter_less, ["2 parameters but rank 0 has 4", "'1.weight'"]),
    (another_name, ["'head_1.weight'", "'head_0.weight'"]),
    (another_order, ["'second.weight'", "'first.weight'"]),
    (frozen_apart, ["'1.bias' Float [5] frozen", "'1.bias' Float [5]"]),
    (sparse_apart, ["'0.weight' Float [4, 5] sparse"]),
    (
        in_another_order,
        ["on rank 1: parameter 0 is 'weight' Float [3, 2, 2, 2] of strides [8, 1, 4, 2] but"],
    ),
    (all_frozen, ["'0.weight' Float [4, 3] frozen"]),
    (no_parameters, ["0 parameters but rank 0 has 2"]),
    (transposed, ["'0.weight' Float [3, 4]", "'0.weight' Float [4, 3]"]),
]


@on_ranks(patience_s=AGES_S)
def test_models_that_differ(rank: int) -> None:
    """The group itself is fine: the next module trains."""
    for make, parts in CASES:
        with (
            in_case(make.__name__),
            raises(RuntimeError, "[ddp] got different parameters", "on rank 1: ", *parts),
        ):
            trireme.DistributedDataParallel(make(rank))
        ddp = trireme.DistributedDataParallel(nn.Linear(2, 1))
        ddp(torch.ones(1, 2)).sum().backward()


@on_ranks(3, patience_s=AGES_S)
def test_the_odd_rank_is_named_on_all(rank: int) -> None:
    with raises(RuntimeError, "on rank 2: ", f"(rank {rank} of 3)"):
        trireme.DistributedDataParallel(nn.Linear(3, 5 if rank == 2 else 4))


@on_ranks(3, patience_s=AGES_S)
def test_every_odd_rank_is_named(rank: int) -> None:
    with raises(RuntimeError, "on rank 1: ", "on rank 2: ", "Float [5, 3]", "Float [6, 3]"):
        trireme.DistributedDataParallel(nn.Linear(3, 4 + rank))
