"""Optimizers of a pipeline: each rank has one, over the parameters of its stages."""

from __future__ import annotations

import itertools
import json

from torch import nn
from torch.optim import Optimizer

from trireme._core.owners import group_of_stages
from trireme._saving.parts import Ranks, resharded_model


def has_stages(model: nn.Module) -> bool:
    """Whether each rank has other layers of it."""
    return group_of_stages(resharded_model(model)) is not None


def some_rank_has(optimizer: Optimizer | None, model: nn.Module, ranks: Ranks) -> bool:
    """Whether a rank was given an optimizer. Ranks ask each other, since one whose stages have
    nothing to train can make none. Collective.

    Raises:
        ValueError: a rank with something to train has none, and another one has; on all ranks.
    """
    return ranks.core.some_rank_has_optimizer(optimizer is not None, trains(model))


def trains(model: nn.Module) -> bool:
    """Whether this rank has something to train of it."""
    return any(parameter.requires_grad for parameter in resharded_model(model).parameters())


def names_of_all(own: list[set[str]], ranks: Ranks) -> list[set[str]]:
    """The parameters that the optimizers of all ranks step, by group. Collective."""
    everybody = map(json.loads, ranks.say_to_all(json.dumps([sorted(names) for names in own])))
    return [set().union(*of_ranks) for of_ranks in itertools.zip_longest(*everybody, fillvalue=[])]
