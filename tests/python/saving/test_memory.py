"""What loading allocates: the state that was not there, and no more than a parameter beside it.

Counted are the bytes that torch's allocator has given out, by torch's own profiler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.faults import raises
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from harness.training import Training
from saving.ranks import held, load, make, most_allocated, run_on_ranks, save, state_bytes

WIDTH, UNITS = 128, 8
UNIT_BYTES = 8 * WIDTH * WIDTH


def _units() -> nn.Module:
    """float64, so that ranks.make() takes each layer as a unit."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(UNITS))
    return nn.Sequential(*layers)


def _bf16() -> nn.Module:
    return _units().to(torch.bfloat16)


def _step(training: Training) -> None:
    parameters = list(training.model.parameters())
    rows = torch.ones(2, WIDTH, dtype=parameters[0].dtype)
    training.net(rows).square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def _load_counting(rank: int, path: str, strategy: str, options: dict[str, Any]) -> None:
    expected = None
    training = make(strategy, elsewhere=True, **options)
    for is_fresh in (True, False):
        most = most_allocated(lambda: load(training, path))
        made = state_bytes(training.optimizer) if is_fresh else 0
        assert made <= most <= made + UNIT_BYTES, (is_fresh, most, made)
        expected = expected or held(training)
        for name, value in held(training).items():
            assert_bits(value, expected[name], name)
        _step(training)
        assert state_bytes(training.optimizer) > 2 * UNIT_BYTES


@on_shm_ranks(2)
def test_loading_allocates_the_state_that_is_missing(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    options: dict[str, Any] = {"make_model": _units}
    source = make("fsdp", **options)
    _step(source)
    save(source, path)
    for strategy in ("fsdp", "zero1", "zero2", "ddp"):
        _load_counting(rank, path, strategy, options)


@on_shm_ranks(2)
def test_loading_casts_states_one_by_one(rank: int, tmp_path: Path) -> None:
    """Parameters are bf16: fp32 states go into torch's class and ours, rounded ones into ours."""
    path = str(tmp_path / "checkpoint")
    for source_class, target_class in (
        (trireme.optim.AdamW, trireme.optim.AdamW),
        (trireme.optim.AdamW, torch.optim.AdamW),
        (torch.optim.AdamW, trireme.optim.AdamW),
    ):
        source = make("zero2", source_class, _bf16)
        _step(source)
        save(source, path)
        options = {"make_model": _bf16, "optimizer_class": target_class}
        for strategy in ("fsdp", "zero2"):
            _load_counting(rank, path, strategy, options)


@on_shm_ranks(2)
def test_a_graph_kept_over_a_load_raises(rank: int, tmp_path: Path) -> None:
    """Under ZeRO a load writes memory that this rank's autograd does not see written."""
    path = str(tmp_path / "checkpoint")
    training = make("zero1", make_model=_units)
    save(training, path)
    loss = training.net(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    load(training, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _write_outside(rank: int, path: str) -> None:
    training = make("zero2", make_model=_units)
    save(training, path)
    with torch.no_grad():
        next(training.model.parameters()).add_(1)
    with raises(RuntimeError, "was changed outside step()"):
        load(training, path)
    load(training, path)  # it was said once
    dist.barrier()


def test_a_write_before_a_load_is_noticed(tmp_path: Path) -> None:
    case = {"path": str(tmp_path / "checkpoint")}
    run_on_ranks(world=2, program=_write_outside, case=case)
