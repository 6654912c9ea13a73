"""How far a model that freezes its layers has come, in a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from trireme._C import CheckpointSource, CheckpointTensor
from trireme._core.owners import FreezesLayers
from trireme._saving.parts import Ranks, resharded_model

KIND = "frozen"
_NAME = "layers"
"""Numbers: how many layers there are, how many are frozen, then the history of that."""


def frozen_to_save(model: nn.Module, ranks: Ranks) -> dict[str, list[CheckpointTensor]]:
    """What this rank saves of it, by kind: rank 0 does."""
    plain = resharded_model(model)
    if not isinstance(plain, FreezesLayers) or ranks.rank != 0:
        return {}
    state = plain._freeze_state()
    numbers = torch.tensor([len(state["layers"]), state["frozen"], *state["history"]])
    own = CheckpointTensor(_NAME, numbers.dtype, list(numbers.shape), numbers)
    return {KIND: [own]}


def has_frozen(source: CheckpointSource, model: nn.Module) -> bool:
    """Whether there is a state for the model."""
    return isinstance(resharded_model(model), FreezesLayers) and _NAME in source.tensors(KIND)


def load_frozen(source: CheckpointSource, model: nn.Module, ranks: Ranks) -> None:
    """Freezes what was frozen, on all ranks. A state without layers, as of another trainer, changes
    nothing. Collective."""
    if not has_frozen(source, model):
        return
    plain = resharded_model(model)
    assert isinstance(plain, FreezesLayers)
    numbers = torch.empty(source.tensors(KIND)[_NAME].sizes, dtype=torch.int64)
    source.read(KIND, [CheckpointTensor(_NAME, numbers.dtype, list(numbers.shape), numbers)])
    with ranks.together():
        layers, frozen, *history = numbers.tolist()
        names = plain._freeze_state()["layers"]
        if layers != len(names):
            got = f"got a checkpoint of {layers} layers that freeze, expected {len(names)}"
            ranks.refuse(got, "Give the layers of the run that was saved.")
        plain._load_freeze_state({"layers": names, "frozen": frozen, "history": history})
