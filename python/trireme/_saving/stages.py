"""Optimizers of a pipeline: each rank has one, over the parameters of its stages."""

from __future__ import annotations

import itertools
import json

from torch import nn
from torch.optim import Optimizer

from trireme._core.owners import group_of_stages
from trireme._saving.optimizer import OptimizerParts
from trireme._saving.parts import Ranks, plain_model


def some_rank_has(optimizer: Optimizer | None, model: nn.Module, ranks: Ranks) -> bool:
    """Whether a rank was given an optimizer. Those of a pipeline ask each other, since one whose
    stages have nothing to train can make none.

    Raises:
        ValueError: a rank with something to train has none, and another one has; on all ranks.
    """
    plain = plain_model(model)
    if group_of_stages(plain) is None:
        return optimizer is not None
    trains = any(parameter.requires_grad for parameter in plain.parameters())
    return ranks.core.some_rank_has_optimizer(optimizer is not None, trains)


def names_of_all(parts: OptimizerParts | None, model: nn.Module, ranks: Ranks) -> list[set[str]]:
    """The parameters that the optimizers of all ranks step, by group. Collective for a pipeline."""
    own = [] if parts is None else parts.names()
    if group_of_stages(plain_model(model)) is None:
        return own
    everybody = map(json.loads, ranks.say_to_all(json.dumps([sorted(names) for names in own])))
    return [set().union(*of_ranks) for of_ranks in itertools.zip_longest(*everybody, fillvalue=[])]
