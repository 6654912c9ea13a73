"""The states of this rank's random generators, in a checkpoint and back."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from trireme._C import CheckpointSource, CheckpointTensor
from trireme._saving.parts import Ranks

KIND = "random"


def random_to_save(ranks: Ranks) -> list[CheckpointTensor]:
    """torch's CPU and CUDA generators, Python's, and numpy's if it is loaded."""
    prefix = _prefix(ranks)
    return [
        CheckpointTensor(prefix + name, torch.uint8, [len(state)], state)
        for name, state in _states().items()
    ]


def load_random(source: CheckpointSource, ranks: Ranks) -> bool:
    """Goes on with the states of this rank. Returns whether there are any, of as many ranks and of
    Python; all ranks return the same. Collective."""
    saved = source.tensors(KIND)
    begins = [f"python/{ranks.world}/{rank}/" for rank in range(ranks.world)]
    if not all(any(name.startswith(begin) for name in saved) for begin in begins):
        return False
    prefix = _prefix(ranks)
    states: dict[str, torch.Tensor] = {}
    needed = []
    for name, tensor in saved.items():
        if name.startswith(prefix):
            states[name[len(prefix) :]] = state = torch.empty(tensor.sizes, dtype=torch.uint8)
            needed.append(CheckpointTensor(name, torch.uint8, tensor.sizes, state))
    source.read(KIND, needed)
    with ranks.together():
        _put(states)
    return True


def _prefix(ranks: Ranks) -> str:
    return f"python/{ranks.world}/{ranks.rank}/"


def _states() -> dict[str, torch.Tensor]:
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": _as_bytes([version, list(internal), gauss]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda{index}"] = state
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = _as_bytes([name, keys.tolist(), *rest])
    return states


def _put(states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "python":
            version, internal, gauss = _from_bytes(state)
            random.setstate((version, tuple(internal), gauss))
        elif name == "numpy":
            import numpy

            name, keys, *rest = _from_bytes(state)
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
        elif name.startswith("cuda") and int(name[4:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name[4:]))


def _as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(values: torch.Tensor) -> Any:
    return json.loads(bytes(values.tolist()))
