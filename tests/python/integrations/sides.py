"""One program of another library, run with torch's classes over Gloo and with ours.

A program is a function of (rank, side, folder, *case) that returns what both sides must have equal:
nested dicts and lists of numbers and tensors. Each side runs it in fresh processes that find
torchrun's variables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from harness.ranks import run_ranks

WORLD = 2
_AS_UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Side:
    backend: str
    ddp: type[TorchDDP]


THEIRS = Side("gloo", TorchDDP)
OUR_BACKEND = Side("trireme", TorchDDP)
OURS = Side("trireme", trireme.DistributedDataParallel)

Program = Callable[..., Any]


def run_on(
    side: Side, program: Program, folder: Path, *case: Any, timeout: float = 90
) -> list[Any]:
    """What each rank returns."""
    folder.mkdir(parents=True, exist_ok=True)
    env = _AS_UNDER_TORCHRUN
    return run_ranks(program, WORLD, side, str(folder), *case, timeout=timeout, env=env)


def assert_equal_to_theirs(
    program: Program, folder: Path, *case: Any, sides: Mapping[str, Side] | None = None
) -> None:
    """Runs ``program`` on torch's side and on ours, and compares what it returns on each rank."""
    expected = run_on(THEIRS, program, folder / "theirs", *case)
    for name, side in (sides or {"backend": OUR_BACKEND, "ours": OURS}).items():
        assert_close(run_on(side, program, folder / name, *case), expected, name)


def assert_close(actual: Any, expected: Any, where: str, tolerance: float = 1e-5) -> None:
    """Compares nested values. Sums over two ranks have one order, so little is left to tolerate."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_close(actual[key], expected[key], f"{where}.{key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_close(one, other, f"{where}[{index}]", tolerance)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, float):
        assert abs(actual - expected) <= tolerance * max(1.0, abs(expected)), (
            f"{where}: {actual} instead of {expected}"
        )
    else:
        assert actual == expected, where


def net(width: int = 16, classes: int = 3) -> nn.Module:
    """A classifier of rows of 6 numbers that has buffers, and one parameter that is frozen."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)
    )
    model[1].bias.requires_grad_(False)
    return model


def rows(count: int, classes: int = 3) -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=made)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :classes].argmax(1))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
