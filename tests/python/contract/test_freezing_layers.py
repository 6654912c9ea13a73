"""Layers that Freeze freezes while training runs: as one process that freezes alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from contract.strategies import Strategy, on_every_strategy
from harness.training import Training

LAYERS = ["0", "2", "4", "6", "8"]


def deep() -> nn.Module:
    """Five layers, of which some may be dealt out to another rank."""
    torch.manual_seed(11)
    widths = [6, 13, 7, 5, 9, 3]
    layers: list[nn.Module] = []
    for before, behind in pairwise(widths):
        layers += [nn.Linear(before, behind), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(
    strategy: Strategy,
    trainings: tuple[Training, Training],
    freezes: list[trireme.Freeze],
    number: int,
) -> None:
    for training, freeze in zip(trainings, freezes, strict=True):
        training.optimizer.zero_grad()
        training.backward(number)
        freeze.step()
    strategy.step_both(*trainings)


def frozen_values(training: Training, count: int) -> list[torch.Tensor]:
    names = tuple(f"{name}." for name in LAYERS[:count])
    return [
        parameter.detach().clone()
        for name, parameter in training.model.named_parameters()
        if name.startswith(names)
    ]


@on_every_strategy(timeout=120)
def test_layers_freeze_as_in_one_process(rank: int, strategy: Strategy) -> None:
    """By both rules; frozen layers stay, bit for bit, whatever the optimizer does beside."""
    options: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
        (AdamW, {"lr": 0.02, "weight_decay": 0.3}, {"rule": "gradient", "measure_every": 2}),
        (SGD, {"lr": 0.1, "momentum": 0.9}, {"rule": "schedule", "alpha": 0.4, "layers": LAYERS}),
    ]
    for optimizer, defaults, given in options:
        trainings = strategy.pair(deep, optimizer, **defaults)
        freezes = [
            trireme.Freeze(training.net, optimizer=training.optimizer, **given)
            for training in trainings
        ]
        for interval in range(5):
            before = frozen_values(trainings[0], freezes[0].frozen)
            for step in range(3):
                train(strategy, trainings, freezes, 3 * interval + step)
            after = frozen_values(trainings[0], freezes[0].frozen)
            assert all(map(torch.equal, before, after)), "a frozen layer has moved"
            assert len({freeze.advance() for freeze in freezes}) == 1, freezes[0].history
        assert freezes[0].history == freezes[1].history
        assert freezes[0].frozen == 4, "nothing else is trained, so the last layer stays"
        for freeze in freezes:
            freeze.unfreeze(1)
        for step in range(2):
            train(strategy, trainings, freezes, 20 + step)
        parameters = dict(trainings[0].model.named_parameters())
        assert all(one.requires_grad != name.startswith("0.") for name, one in parameters.items())
