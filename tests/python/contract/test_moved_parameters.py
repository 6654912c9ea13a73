"""What moves or rewrites parameters inside of trireme.writing(): taken over, and the next step is
that of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from contract.strategies import STRATEGIES, Strategy, on_every_strategy, strategies_with
from fsdp.ranks import pair, train_both
from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import Training

Change = Callable[[nn.Module], None]

FACTOR = 0.9
"""By which every program changes parameters; many do so to one model."""


def changed(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: FACTOR * value.detach() for name, value in model.state_dict().items()}


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(FACTOR)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(FACTOR)


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = FACTOR * parameter.detach()


def other_order(model: nn.Module) -> None:
    """As a layout like channels_last does, and back."""
    for parameter in model.parameters():
        value = FACTOR * parameter.detach()
        parameter.data = value.T.contiguous().T if value.is_contiguous() else value.contiguous()


def other_memory(model: nn.Module) -> None:
    """torch::load does so, in C++."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(FACTOR * parameter.detach())


def parts_of_a_vector(model: nn.Module) -> None:
    vector_to_parameters(FACTOR * parameters_to_vector(model.parameters()), model.parameters())


def loaded(model: nn.Module) -> None:
    model.load_state_dict(changed(model))


def loaded_by_assignment(model: nn.Module) -> None:
    model.load_state_dict(changed(model), assign=True)


def replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(FACTOR * parameter.detach()))


def there_and_back(model: nn.Module) -> None:
    model.double()
    in_place(model)
    model.float()


def there_and_back_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach().double()
        parameter.data = (FACTOR * parameter.detach()).float()


def emptied(model: nn.Module) -> None:
    """to_empty() empties gradients, too."""
    model.zero_grad()
    state = changed(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def frozen_meanwhile(model: nn.Module) -> None:
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(FACTOR)
    model.requires_grad_(True)


def swapped(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(FACTOR * parameter.detach()))


CHANGES: list[Change] = [
    in_place,
    through_data,
    other_data,
    other_order,
    other_memory,
    parts_of_a_vector,
    loaded,
    loaded_by_assignment,
    replaced,
    there_and_back,
    there_and_back_through_data,
    emptied,
    frozen_meanwhile,
]

# What an optimizer would not know: inside of writing(), ZeRO's takes over the values.
TAKEN_OVER = (loaded_by_assignment, replaced)

# What a DTensor does not take.
NOT_SHARDED = (
    other_data,
    other_order,
    other_memory,
    parts_of_a_vector,
    there_and_back_through_data,
)


def change_both(strategy: Strategy, ours: Training, one: Training, change: Change) -> None:
    with trireme.writing(ours.model):
        change(ours.model)
    is_taken_over = change in TAKEN_OVER and strategy.name.startswith("zero")
    (in_place if is_taken_over else change)(one.model)


@on_every_strategy(needs=["ranks", "passes"])
def test_next_step_is_right(rank: int, strategy: Strategy) -> None:
    """Before the first step, after one, and between a backward and its step; gradients stay."""
    for change in CHANGES:
        if change in NOT_SHARDED and strategy.name.startswith("fully_shard"):
            continue
        ours, one = strategy.pair(mlp, SGD, lr=0.1, momentum=0.9)
        change_both(strategy, ours, one, change)
        strategy.train_both(ours, one, 0)
        strategy.train_both(ours, one, 1)
        change_both(strategy, ours, one, change)
        for training in (ours, one):
            training.backward(2)
        strategy.step_both(ours, one)
        for training in (ours, one):
            training.backward(3)
        change_both(strategy, ours, one, change)
        strategy.step_both(ours, one)
        strategy.train_both(ours, one, 4)


@on_shm_ranks(2)
def test_what_torch_cannot_do(rank: int) -> None:
    """Its own words, on all ranks; the next step is right."""
    for name in strategies_with("ranks", "passes"):
        strategy = STRATEGIES[name]
        if strategy.backend != "trireme" or name.startswith("fully_shard"):
            continue
        ours, one = strategy.pair(mlp, SGD, lr=0.1, momentum=0.9)
        for step in range(2):
            with pytest.raises(RuntimeError, match=r"Cannot swap t1|use_count of t1"):
                change_both(strategy, ours, one, swapped)
            strategy.train_both(ours, one, step)


@on_shm_and_gloo_ranks(2)
def test_what_a_dtensor_does_not_take_is_refused(rank: int) -> None:
    """`.data =` leaves a DTensor's values as they were. Said once, then all goes on."""
    ours, one = pair(mlp)
    for step in range(2):
        for change in (other_data, other_order):
            with trireme.writing(ours.model):
                change(ours.model)
            with raises(
                RuntimeError, "[fully_shard] got '", "weight' with another .data", "copy_("
            ):
                ours.loss(1)
            train_both(ours, one, step)
