"""Gradients of all stages are clipped by their common norm."""

from __future__ import annotations

import math

import pytest
import torch
import trireme
from torch import nn
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, Both, rows, tanh_layers


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@on_shm_and_gloo_ranks(2, timeout=60)
def test_norms_are_those_of_one_process(rank: int, norm_type: float) -> None:
    both = Both(tanh_layers, schedule="1f1b")
    for step in range(2):
        both.train(step)
        expected = torch.nn.utils.clip_grad_norm_(both.one.parameters(), 0.01, norm_type)
        given = both.pipe if step == 0 else both.pipe.parameters()
        norm = trireme.clip_grad_norm_(given, 0.01, norm_type)
        torch.testing.assert_close(norm, expected)
        whole = dict(both.one.named_parameters())
        for name, parameter in both.pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[name].grad)


@on_shm_ranks(2, timeout=60)
def test_a_rank_without_parameters(rank: int) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss)
    pipe.step(rows(1), target=rows(2))
    assert (len(list(pipe.parameters())) == 0) == (rank == 1)
    assert trireme.clip_grad_norm_(pipe, 0.01) > 0.01


@on_shm_ranks(2, timeout=60)
def test_a_norm_that_is_not_finite_is_raised_on_all_ranks(rank: int) -> None:
    both = Both(tanh_layers)
    both.train(0)
    if rank == 1:
        next(both.pipe.parameters()).grad[0] = math.nan
    with raises(RuntimeError, "not finite", form=RANKLESS_FORM):
        trireme.clip_grad_norm_(both.pipe, 0.01, error_if_nonfinite=True)


def test_in_one_process() -> None:
    """Given the pipeline, which no ranks share, as with its parameters."""
    pipe = trireme.Pipeline(tanh_layers(), 4, devices=["cpu"] * 2, loss=mse_loss)
    assert pipe.process_group is None
    pipe.step(rows(1), target=rows(2))
    expected = torch.nn.utils.clip_grad_norm_(pipe.parameters(), 100.0)
    torch.testing.assert_close(trireme.clip_grad_norm_(pipe, 100.0), expected)


def test_other_modules_are_refused() -> None:
    with raises(TypeError, "got a Linear, expected parameters", form=RANKLESS_FORM):
        trireme.clip_grad_norm_(nn.Linear(2, 2), 1.0)  # type: ignore[arg-type]
