"""Where our class takes torch's place it raises torch's type in torch's cases, with our text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from contract.bad_arguments import OURS, TABLES, THEIRS, net
from ddp.ranks import on_gloo_ranks
from distributed import RankFailed, run_ranks


def type_of(case: Callable[[Any], object], api: Any) -> type[Exception] | None:
    try:
        case(api)
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize("table", TABLES)
@on_gloo_ranks(2)
def test_bad_arguments(rank: int, table: str) -> None:
    got = {}
    for name, case in TABLES[table].items():
        theirs = type_of(case, THEIRS)
        assert theirs is not None, f"torch takes {name!r}"
        got[name] = (type_of(case, OURS), theirs)
    wrong = {name: pair for name, pair in got.items() if pair[0] is not pair[1]}
    assert not wrong, f"ours, torch's: {wrong}"


@on_gloo_ranks(1)
def test_without_a_group(rank: int) -> None:
    dist.destroy_process_group()
    for make in (lambda api: api.DDP(net()), TABLES["zero"]["no class"]):
        assert type_of(make, OURS) is type_of(make, THEIRS) is ValueError
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


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
