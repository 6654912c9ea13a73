"""What the tests of DistributedDataParallel share: torch's class as the oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from trireme._core.group_communicator import communicator_of

from harness.models import ModelMaker, batch
from harness.on_ranks import WORLD
from harness.recording import recording
from harness.training import assert_same_on_all_ranks, gradients, values

Step = Callable[[nn.Module, int, int], None]
"""Forward and backward of one step: (model, step, rank)."""


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of the rows that one of two ranks has of a batch."""
    return model(batch(step)[rank::WORLD]).square().mean()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """The Step of most tests."""
    loss_of(model, step, rank).backward()


def run_steps(model: nn.Module, optimizer: Any, step_fn: Step, rank: int, steps: int) -> list[Any]:
    """The gradients after every backward, then the values after the last step."""
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        step_fn(model, step, rank)
        seen.append(gradients(model))
        optimizer.step()
    return [*seen, values(model)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equals_torch(
    make_model: ModelMaker,
    step_fn: Step,
    rank: int,
    *,
    steps: int = 4,
    make_optimizer: Callable[[nn.Module], Any] = sgd,
    torch_options: dict[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Trains with torch's class and with ours and compares gradients and values after every step.

    ``options`` go to both, ``torch_options`` are what torch needs to be told in addition.
    """
    theirs = TorchDDP(make_model(), **{**options, **(torch_options or {})})
    expected = run_steps(theirs, make_optimizer(theirs), step_fn, rank, steps)
    ours = trireme.DistributedDataParallel(make_model(), **options)
    got = run_steps(ours, make_optimizer(ours), step_fn, rank, steps)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    assert_same_on_all_ranks(list(ours.parameters()))


def record_wire(ddp: trireme.DistributedDataParallel) -> Any:
    """What the module sends from now on. Builds its core anew, as if it had just been wrapped.
    Tests that call it are marked ``needs_recording``."""
    recorder = recording(communicator_of(ddp.process_group))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trireme._ddp.module.communicator_of", lambda group: recorder)
        ddp._rebuild_core()
    return recorder
