"""What a caller gets wrong is refused; torch's type in torch's cases, with our text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from contract.bad_arguments import OURS, TABLES, THEIRS, Case, net
from contract.refusals import complaint, kind_of
from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_gloo_ranks, on_shm_and_gloo_ranks
from harness.ranks import RankFailed, run_ranks


def error_of(call: Callable[[Any], object], api: Any) -> Exception | None:
    try:
        call(api)
    except Exception as error:
        return error
    return None


def judged(table: str, entry: str, case: Case) -> str:
    """What is wrong with what ours raises; nothing, if it is as it should be."""
    kind = kind_of(table, entry) or type(error_of(case, THEIRS))
    error = error_of(case, OURS)
    if error is None or type(error) is not kind:
        return f"expected {kind.__name__}, got {error!r}"
    return complaint(table, entry, error)


@pytest.mark.parametrize("table", TABLES)
@on_shm_and_gloo_ranks(2)
def test_bad_arguments(rank: int, table: str) -> None:
    """The type is torch's, where it refuses them, too; the text is ours, and the ranks go on."""
    complaints = {name: judged(table, name, case) for name, case in TABLES[table].items()}
    wrong = [f"{name}: {text}" for name, text in complaints.items() if text]
    assert not wrong, "\n".join(wrong)
    dist.barrier()


NO_GROUP = ("got no process group", "Call trireme.init() first.")


@on_gloo_ranks(1)
def test_without_a_group(rank: int) -> None:
    dist.destroy_process_group()
    for make in (lambda api: api.DDP(net()), lambda api: api.Zero(net().parameters(), SGD, lr=0.1)):
        assert type(error_of(make, THEIRS)) is ValueError
        with raises(ValueError, *NO_GROUP, form=RANKLESS_FORM):
            make(OURS)
    with raises(ValueError, form=RANKLESS_FORM):
        OURS.fully_shard(net())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@on_shm_and_gloo_ranks(2)
def test_a_group_of_others(rank: int) -> None:
    """Who is in it goes on."""
    group = dist.new_group([0])
    for area, make in (
        ("ddp", lambda: OURS.DDP(net(), process_group=group)),
        ("zero", lambda: OURS.Zero(net().parameters(), SGD, process_group=group, lr=0.1)),
    ):
        if rank == 1:
            got = f"[{area}] got a process group without rank 1"
            with raises(ValueError, got, form=RANKLESS_FORM):
                make()
        else:
            make()


def models_that_differ(rank: int, kind: str, ours: bool) -> None:
    dist.init_process_group("gloo")
    api = OURS if ours else THEIRS
    if kind == "shape":
        api.DDP(nn.Linear(4, 4 + rank))
    else:
        api.DDP(net() if rank == 0 else net(nn.Linear(4, 4)))


@pytest.mark.parametrize("kind", ["shape", "number"])
def test_models_that_differ(kind: str) -> None:
    """Of torch's ranks one raises, and the other one hears that it is gone."""
    for ours in (False, True):
        with pytest.raises(RankFailed) as caught:
            run_ranks(models_that_differ, 2, kind, ours, timeout=40)
        last = caught.value.text.strip().splitlines()
        assert any(line.startswith("RuntimeError: ") for line in last), caught.value.text
