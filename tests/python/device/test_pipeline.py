"""Pipelines in one process whose rows are on devices (devices.py)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme.pipelining import GPipe

from device.devices import device_type, moved, on_device_ranks, two_devices
from pipeline.ranks import WIDTH, rows

CHUNKS, BATCH = 4, 8  # micro-batches are equal


class Scaled(nn.Module):
    """Is a layer that asks for a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x).tanh() * scale


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = (nn.Linear(WIDTH, WIDTH) for _ in "ab")
    return nn.Sequential(first, nn.Tanh(), nn.Tanh(), Scaled(), last)


def placed() -> nn.Sequential:
    """The same, where the pipeline has it: torch cannot move parameters to such a device."""
    made = net()
    for number, layer in enumerate(made):
        moved(layer, torch.device(two_devices()[number >= 2]))
    return made


def check_gradients(pipe: nn.Module, whole: nn.Module) -> None:
    for own, expected in zip(pipe.parameters(), whole.parameters(), strict=True):
        assert own.grad is not None and own.grad.device == own.device
        torch.testing.assert_close(own.grad.cpu(), expected.grad)


def trained(scale: Tensor) -> tuple[nn.Sequential, Tensor]:
    whole = net()
    first, a, b, scaled, last = whole
    loss = mse_loss(last(scaled(b(a(first(rows(0, BATCH)))), scale)), rows(1, BATCH))
    loss.backward()
    return whole, loss.detach()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@on_device_ranks(1)
def test_steps_and_passes_on_devices(rank: int, schedule: str, checkpoint: Any) -> None:
    scale = torch.rand(BATCH, 1)
    whole, expected = trained(scale)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": checkpoint, "loss": mse_loss}
    pipe = trireme.Pipeline(placed(), CHUNKS, balance=[2, 3], devices=two_devices(), **options)
    for _ in range(3):
        pipe.zero_grad()
        # The batch, the keyword and the target are brought to where they are needed.
        torch.testing.assert_close(
            pipe.step(rows(0, BATCH), target=rows(1, BATCH), scale=scale).cpu(), expected
        )
        check_gradients(pipe, whole)
    pipe.zero_grad()
    output = pipe(rows(0, BATCH), scale=scale)
    last = two_devices()[1]
    assert output.device == torch.device(last)
    mse_loss(output, rows(1, BATCH).to(last)).backward()
    check_gradients(pipe, whole)
    twin = copy.deepcopy(pipe)
    twin.zero_grad()
    twin.step(rows(0, BATCH), target=rows(1, BATCH), scale=scale)
    check_gradients(twin, whole)
    assert torch.equal(
        pipe.eval_step(rows(0, BATCH), scale=scale), twin.eval_step(rows(0, BATCH), scale=scale)
    )


@on_device_ranks(1)
def test_layers_stay_where_they_are_without_devices(rank: int) -> None:
    scale = torch.rand(BATCH, 1)
    whole, _ = trained(scale)
    pipe = trireme.Pipeline(placed(), CHUNKS, balance=[2, 3], loss=mse_loss)
    pipe.step(rows(0, BATCH), target=rows(1, BATCH), scale=scale)
    check_gradients(pipe, whole)


@on_device_ranks(1)
def test_gpipe_on_devices(rank: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    other = copy.deepcopy(whole)
    for number, layer in enumerate(other):
        moved(layer, torch.device(two_devices()[number >= 2]))
    model = GPipe(other, [2, 2], devices=two_devices(), chunks=CHUNKS)
    mse_loss(whole(rows(0, BATCH)), rows(1, BATCH)).backward()
    first, last = two_devices()
    mse_loss(model(rows(0, BATCH).to(first)), rows(1, BATCH).to(last)).backward()
    check_gradients(model, whole)


@on_device_ranks(1)
def test_what_is_refused_on_devices(rank: int) -> None:
    def refused(module: nn.Module, kind: type[Exception], text: str, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            trireme.Pipeline(module, 2, loss=mse_loss, **options)

    first, last = two_devices()
    shared = nn.Linear(WIDTH, WIDTH)
    twice = nn.Sequential(shared, nn.Tanh(), shared)
    refused(
        twice, ValueError, f"got 'weight' in layers for {first} and {last}", devices=two_devices()
    )
    assert shared.weight.device == torch.device("cpu")
    both = nn.Sequential(placed()[0], placed()[4])
    refused(both, ValueError, f"got '1.weight' of stage 0 on {last}, expected it on {first}",
            balance=[2])  # fmt: skip
    pipe = trireme.Pipeline(placed(), 2, balance=[2, 3], devices=two_devices(), loss=mse_loss)
    moved(pipe.get_submodule("0"), torch.device(last))
    # torch gives a layer that moves to the sim device other parameters, which are refused by name.
    by_name = device_type() == "sim"
    got = f"of stage 0 on {last}" if by_name else rf"got stage 0 \(layers 0..1\) on {last}"
    with pytest.raises(ValueError, match=f"{got}, expected it on {first}"):
        pipe.step(rows(0, BATCH), target=rows(1, BATCH), scale=torch.ones(BATCH, 1))
