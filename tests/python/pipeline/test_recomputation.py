"""Micro-batches that are computed once more before their backward."""

from __future__ import annotations

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, Both, rows, tanh_layers

FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@pytest.mark.parametrize("checkpoint", ["except_last", "always", "auto"])
@on_shm_and_gloo_ranks(2, timeout=100)
def test_every_form_equals_one_process(rank: int, checkpoint: str) -> None:
    for form in FORMS:
        both = Both(tanh_layers, chunks=4, schedule=form, checkpoint=checkpoint)
        for step in range(2):
            both.train(step)
        kinds = {action.kind for action in both.pipe.schedule.rows[rank] if action is not None}
        stages = both.pipe.last_step()["stages"]
        assert ("R" in kinds) == any(stage["recompute_ms"] > 0 for stage in stages)
        live = both.pipe.schedule.peak_activations(rank)
        assert max(stage["peak_live"] for stage in stages) <= live


class Raises(nn.Module):
    """Raises in a recomputation, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bad_call = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.bad_call:
            raise ArithmeticError("no luck")
        return x.tanh()


@on_shm_ranks(2)
def test_an_exception_in_a_recomputation(rank: int) -> None:
    """It comes out on all ranks, and the next step works."""
    layer = Raises()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    pipe = trireme.Pipeline(
        module, 2, ranks=True, balance=[2, 1], loss=mse_loss, checkpoint="always"
    )
    layer.bad_call = 3 if rank == 0 else 0  # behind two forwards
    with pytest.raises(
        RuntimeError,
        match=r"recomputation of micro-batch 0 of stage 0 \(layers 0..1\) raised in step 1: .*luck",
    ):
        pipe.step(rows(0), target=rows(1))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert torch.isfinite(pipe.step(rows(0), target=rows(1)))


class Masks(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * (mask.mul_(0.5) if self.in_place else mask * 0.5)


@on_shm_ranks(2)
def test_keywords_that_a_layer_changes_in_place(rank: int) -> None:
    for in_place in (False, True):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Masks(in_place))
        pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss, checkpoint="always")
        mask = torch.ones(10, WIDTH)
        if not in_place:
            pipe.step(rows(0), mask=mask, target=rows(1))
            continue
        with pytest.raises(RuntimeError, match=r"a keyword of stage 1 .* changed in place"):
            pipe.step(rows(0), mask=mask, target=rows(1))


def test_inputs_that_a_layer_changes_in_place() -> None:
    """Without a recomputation a first layer may do so."""
    for checkpoint in ("never", "always"):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
        pipe = trireme.Pipeline(module, 2, balance=[1, 1], checkpoint=checkpoint)  # type: ignore[arg-type]
        output = pipe(rows(0))
        if checkpoint == "never":
            output.sum().backward()
            continue
        with pytest.raises(RuntimeError, match=r"an input of stage 1 .* changed in place"):
            output.sum().backward()


@on_shm_ranks(2)
def test_running_statistics_count_once(rank: int) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())

    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(1)
        pipe = trireme.Pipeline(
            make(), 2, ranks=True, balance=[2, 1], loss=mse_loss, checkpoint=checkpoint,
            deferred_batch_norm=True,
        )  # fmt: skip
        pipe.step(rows(0), target=rows(1))
        found.append([buffer.clone() for buffer in pipe.buffers()])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
