"""Collectives that the user of fully_shard brings along (torch's AllGather and ReduceScatter), and
memory of the process group.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD
from trireme._fsdp import comms as fsdp_comms

from fsdp.models import Skipping
from fsdp.ranks import (
    assert_locals,
    in_training,
    pair,
    shard_layers,
    sharded,
    torch_pair,
    train_both,
    train_by_rank,
    units_of,
)
from harness.faults import raises
from harness.models import Shapes, mlp
from harness.on_ranks import AGES_S, on_gloo_ranks, on_ranks

# Torch gave them other names in 2.15.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Not every torch has it.
NO_SYMMETRIC_MEMORY = (
    ValueError if hasattr(fsdp_comms._fsdp_collectives, "SymmMemAllGather") else NotImplementedError
)


class Gathering:
    """Torch's AllGather, without its class. ``waits``: returns None."""

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        self.calls: list[tuple[int, torch.dtype]] = []
        self.groups: set[dist.ProcessGroup] = set()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        world, rank = group.size(), group.rank()
        own = output_tensor.view(world, -1)[rank]
        assert own.data_ptr() == input_tensor.data_ptr() and own.shape == input_tensor.shape
        self.calls.append((input_tensor.numel(), input_tensor.dtype))
        self.groups.add(group)
        work = ALL_GATHER(output_tensor, input_tensor.clone(), group=group, async_op=async_op)
        return self.done(work)

    def done(self, work: dist.Work | None) -> dist.Work | None:
        if work is None or not self.waits:
            return work
        work.wait()
        return None


class Scattering(Gathering):
    """Torch's ReduceScatter."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        assert input_tensor.numel() == group.size() * output_tensor.numel()
        self.calls.append((output_tensor.numel(), output_tensor.dtype))
        self.groups.add(group)
        work = REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self.done(work)


def bring_along(model: nn.Module, waits: bool = False) -> tuple[Gathering, Scattering]:
    """Every unit of ``model`` uses these."""
    gathering, scattering = Gathering(waits), Scattering(waits)
    for unit in units_of(model):
        unit.set_custom_all_gather(gathering)
        unit.set_custom_reduce_scatter(scattering)
    return gathering, scattering


@pytest.mark.parametrize("waits", [False, True])
@on_gloo_ranks(3)
def test_one_process(rank: int, waits: bool) -> None:
    """Uneven rows, four dtypes, units that some ranks skip."""
    for make in (mlp, Shapes):
        ours, one = pair(make)
        gathering, scattering = bring_along(ours.model, waits)
        for step in range(3):
            train_both(ours, one, step)
        assert gathering.calls and scattering.calls
        (gathers,), (scatters,) = gathering.groups, scattering.groups
        assert gathers is not scatters and gathers.size() == scatters.size() == 3
    assert torch.uint8 in {dtype for _, dtype in gathering.calls}
    ours, one = pair(Skipping)
    bring_along(ours.model, waits)
    for step, ways in enumerate((("abc", "ab", "a"), ("c", "c", "ca"))):
        train_by_rank(ours, one, step, ways)


@on_gloo_ranks(2)
def test_as_torch(rank: int) -> None:
    """Called as often per gather, with as many elements; in bf16, too."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        ours, theirs = torch_pair(mlp, SGD, mp_policy=policy)
        comms = [bring_along(training.model) for training in (ours, theirs)]
        tolerance = {"rtol": 2**-7, "atol": 1e-3} if policy.param_dtype else {}
        for step in range(3):
            for gathering, scattering in comms:
                gathering.calls.clear()
                scattering.calls.clear()
            for training in (ours, theirs):
                training.train(step)
            assert_locals(ours.model, theirs.model, **tolerance)
            if step == 0:  # then the order of units is learned
                continue
            (gathered, scattered), (expected, to_scatter) = (
                (sorted(gathering.calls, key=str), scattering.calls)
                for gathering, scattering in comms
            )
            assert gathered == sorted(expected, key=str)
            assert sum(numel for numel, _ in scattered) == sum(numel for numel, _ in to_scatter)


@on_gloo_ranks(2)
def test_set_while_training_runs_and_taken_back(rank: int) -> None:
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    gathering, scattering = bring_along(ours.model)
    train_both(ours, one, 1)
    assert gathering.calls and scattering.calls
    for unit in units_of(ours.model):
        unit.set_custom_all_gather(None)
        unit.set_custom_reduce_scatter(None)
    for one_comm in (gathering, scattering):
        one_comm.calls.clear()
    train_both(ours, one, 2)
    assert not gathering.calls and not scattering.calls
    ours.model[0].set_custom_all_gather(gathering)  # one unit alone
    train_both(ours, one, 3)
    assert {numel for numel, _ in gathering.calls} == {49}  # 7 rows of 6, and 7


class Symmetric(Gathering):
    """In place of torch's class for NCCL."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        super().__init__()
        assert backend == "NCCL"
        self.groups.add(group)


@on_gloo_ranks(2)
def test_symmetric_memory(rank: int) -> None:
    fsdp_comms._fsdp_collectives.SymmMemAllGather = Symmetric
    fsdp_comms.has_symmetric_memory = lambda device: True
    ours, one = pair(mlp)
    for unit in units_of(ours.model):
        unit.set_symm_mem_for_comm()
        unit.set_symm_mem_for_comm()  # again
    train_both(ours, one, 2)
    used = {unit._trireme_unit.all_gather for unit in units_of(ours.model)}
    assert all(comm.calls and len(comm.groups) == 1 for comm in used if comm.calls)
    assert any(comm.calls for comm in used)
    ours.model[0].set_custom_all_gather(Gathering())
    with raises(AssertionError, "for a unit with a custom all-gather"):
        ours.model[0].set_symm_mem_for_comm()
    ours.model[0].set_custom_all_gather(None)
    train_both(ours, one, 3)


@on_gloo_ranks(2, fresh=True)
def test_what_is_refused(rank: int) -> None:
    ours = sharded(mlp)
    model = ours.model
    with raises(TypeError, "got int as all_gather"):
        model.set_custom_all_gather(3)
    model[0].set_custom_reduce_scatter(Scattering())
    with raises(
        ValueError, "got units of one mesh under one root of which not all have the same object"
    ):
        ours.train(0)
    model[0].set_custom_reduce_scatter(None)
    ours.train(0)
    with raises(NO_SYMMETRIC_MEMORY, "got set_symm_mem_for_comm('NCCL')", "Leave it out"):
        model.set_symm_mem_for_comm()

    model[2].set_custom_all_gather(Gathering())
    with raises(AssertionError, "got memory of the process group for a unit with a custom"):
        model[2].set_allocate_memory_from_process_group_for_comm(True)


class TooLittle(Gathering):
    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(size[0] - 1, **options)


class Strange(Gathering):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 3


@pytest.mark.parametrize(
    ("comm", "kind", "text"),
    [
        (TooLittle, ValueError, "from allocate() of a custom collective, expected 98 of Float"),
        (Strange, TypeError, "got int from a custom collective, expected a Work or None"),
    ],
)
@on_gloo_ranks(2)
def test_collectives_that_do_not_fit(rank: int, comm: Any, kind: Any, text: str) -> None:
    ours = sharded(mlp)
    ours.model[0].set_custom_all_gather(comm())
    with raises(kind, text):
        ours.loss(0)


@on_gloo_ranks(2, dying=(1,), timeout=40, patience_s=AGES_S)
def test_a_rank_is_killed(rank: int) -> None:
    """The error says what was gathered, and by whom."""
    ours = sharded(mlp)
    bring_along(ours.model)
    ours.train(0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(dist.DistBackendError, "[comm] custom all_gather of unit 0.weight .. 0.bias"):
        ours.train(1)


@on_ranks(2, backend="trireme")
def test_nothing_is_gathered(rank: int) -> None:
    model = shard_layers(mlp())
    for name in ("all_gather", "reduce_scatter"):
        with raises(ValueError, f"got set_custom_{name}() where ranks share the memory"):
            getattr(model, f"set_custom_{name}")(Gathering())
    model.set_allocate_memory_from_process_group_for_comm(True)
    training = in_training(model)
    training.train(0)


@on_gloo_ranks(2)
def test_memory_of_a_group_that_has_none(rank: int) -> None:
    """Gloo: ordinary memory, as under torch."""
    ours, one = pair(mlp)
    ours.model.set_allocate_memory_from_process_group_for_comm(True)
    for step in range(2):
        train_both(ours, one, step)
    ours.model.set_allocate_memory_from_process_group_for_comm(False)
    train_both(ours, one, 2)
