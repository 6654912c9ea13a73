"""Hooks for saved tensors around a pipeline in one process: its threads have them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from pipeline.ranks import WIDTH, rows, tanh_layers

CHUNKS = 4


def threads(**options: Any) -> trireme.Pipeline:
    return trireme.Pipeline(tanh_layers(), CHUNKS, devices=["cpu"] * 2, loss=mse_loss, **options)


def by_step(pipe: trireme.Pipeline) -> None:
    pipe.step(rows(0), target=rows(1))


def by_call(pipe: trireme.Pipeline) -> None:
    mse_loss(pipe(rows(0)), rows(1)).backward()


def gradients(pipe: trireme.Pipeline, run: Any) -> list[Tensor]:
    pipe.zero_grad()
    run(pipe)
    return [parameter.grad.clone() for parameter in pipe.parameters()]


@pytest.mark.parametrize("recomputes", ["never", "always"])
@pytest.mark.parametrize("run", [by_step, by_call])
def test_hooks_see_what_rows_save(run: Any, recomputes: Any) -> None:
    pipe = threads(checkpoint=recomputes)
    expected = gradients(pipe, run)
    packed: list[int] = []
    unpacked: list[int] = []
    rows_seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        rows_seen.add(threading.get_ident())
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        found = gradients(pipe, run)
    if recomputes == "never":
        assert len(packed) == len(unpacked) > CHUNKS * 4
        assert len(rows_seen) >= 2
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    with save_on_cpu():
        found = gradients(pipe, run)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
    packed.clear()
    gradients(pipe, run)  # hooks end with their block
    assert packed == []


def test_a_hook_that_raises() -> None:
    pipe = threads()
    expected = gradients(pipe, by_call)

    def pack(tensor: Tensor) -> Tensor:
        raise ArithmeticError("no room")

    with saved_tensors_hooks(pack, lambda it: it), pytest.raises(ArithmeticError, match="no room"):
        pipe(rows(0))
    for got, wanted in zip(gradients(pipe, by_call), expected, strict=True):
        assert torch.equal(got, wanted)


def test_offloaded_to_a_folder(tmp_path: Path) -> None:
    """What rows save is in files; ranges below 64 KiB stay."""
    pipe = threads()
    x = torch.randn(CHUNKS * 4096, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    for options in ({}, {"offload": str(tmp_path)}):
        pipe.zero_grad()
        before = trireme._C.offloaded_bytes()[1]
        out = trireme.checkpoint(pipe, x, **options) if options else pipe(x)
        out.square().mean().backward()
        written = trireme._C.offloaded_bytes()[1] - before
        assert (written > 0) == bool(options)
        found.append([parameter.grad.clone() for parameter in pipe.parameters()])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def test_checkpoints_around() -> None:
    """Their hooks count tensors in the order of one thread, and stay there."""
    pipe = threads()
    expected = gradients(pipe, by_call)

    def by_torchs(pipe: trireme.Pipeline) -> None:
        out = torchs_checkpoint(lambda x: pipe(x).tanh(), rows(0), use_reentrant=False)
        out.sum().backward()

    def by_ours(pipe: trireme.Pipeline) -> None:
        trireme.checkpoint(lambda x: pipe(x).tanh(), rows(0)).sum().backward()

    def plain(pipe: trireme.Pipeline) -> None:
        pipe(rows(0)).tanh().sum().backward()

    wanted = gradients(pipe, plain)
    for run in (by_torchs, by_ours):
        for got, one in zip(gradients(pipe, run), wanted, strict=True):
            assert torch.equal(got, one)
    for got, one in zip(gradients(pipe, by_call), expected, strict=True):
        assert torch.equal(got, one)
