"""Optimizers of a pipeline: each rank has one, over the parameters of its stages."""

from __future__ import annotations

import itertools
import json

from torch import nn
from torch.optim import Optimizer

from trireme._core.owners import group_of_stages
from trireme._saving.parts import Ranks, plain_model

_AN, _NONE = "an optimizer", "none"


def has_stages(model: nn.Module) -> bool:
    """Whether each rank has other layers of it."""
    return group_of_stages(plain_model(model)) is not None


def some_rank_has(optimizer: Optimizer | None, model: nn.Module, ranks: Ranks) -> bool:
    """Whether a rank was given an optimizer. Ranks ask each other, since one whose stages have
    nothing to train can make none. Collective.

    Raises:
        ValueError: a rank with something to train has none, and another one has; on all ranks.
    """
    plain = plain_model(model)
    own = _NONE if any(parameter.requires_grad for parameter in plain.parameters()) else ""
    said = ranks.say_to_all(own if optimizer is None else _AN)
    if _AN not in said:
        return False
    if _NONE in said:
        what = "stages have" if has_stages(plain) else "module has"
        got = (
            f"got an optimizer on rank {said.index(_AN)}, and none on rank {said.index(_NONE)}, "
            f"whose {what} parameters to train"
        )
        ranks.refuse(got, "Pass each rank's optimizer, or leave it out on all ranks.")
    return True


def names_of_all(own: list[set[str]], ranks: Ranks) -> list[set[str]]:
    """The parameters that the optimizers of all ranks step, by group. Collective."""
    everybody = map(json.loads, ranks.say_to_all(json.dumps([sorted(names) for names in own])))
    return [set().union(*of_ranks) for of_ranks in itertools.zip_longest(*everybody, fillvalue=[])]
