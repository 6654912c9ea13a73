"""A parameter that is replaced within a round."""

from __future__ import annotations

import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import SGD

from harness.faults import RANKLESS_FORM, raises
from harness.models import mlp
from harness.on_ranks import on_ranks


@on_ranks()
def test_is_refused_by_name(rank: int) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        raises(ValueError, "'2.weight'", "replaced", form=RANKLESS_FORM),
        trireme.DiLoCo(model, optimizer, sync_every=1, across=dist.group.WORLD),
    ):
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer.step()
