"""Compression between hosts: the ranks of a host send together, each leg its part."""

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import trireme
from trireme import compression as c
from trireme.compression import Compression

from compression.given import SIZES, Given, averaged, drawn
from compression.hosts import hosts_of, of_hosts
from compression.reference import Sender, mean_of
from compression.strategies import ddp, sharded
from fsdp.ranks import local
from harness.deaths import Death, run_deaths
from harness.faults import kill_this_rank, raises
from harness.meeting import say, stay_until
from harness.pretended_hosts import LAYOUTS, on_hosts

METHODS: dict[str, Compression] = {
    "int8": c.Int8(),
    "int4 in odd blocks": c.Int4(block=33),
    "sign": c.Sign(),
    "stochastic": c.Int8(rounding="stochastic"),
    "top 5 %": c.TopK(0.05),
    "top of chunks": c.TopK(0.05, chunk=128),
    "bf16": c.Bf16(error_feedback=True),
}


def train(rank: int, world: int, layout: str, name: str) -> None:
    method = METHODS[name]
    bytes_of = []
    for cap_mb in (25, 0.001):
        ddp = trireme.DistributedDataParallel(
            Given(SIZES), compression=method, bucket_cap_mb=cap_mb
        )
        senders = [{name: Sender(method) for name in SIZES} for _ in hosts_of(layout)]
        for step in range(3):
            got = averaged(ddp, drawn(step, rank))
            for parameter, value in got.items():
                inputs = of_hosts(layout, step, parameter)
                found = value.view(-1).numpy()
                if name in ("stochastic", "bf16"):
                    size = max(np.abs(values).max() for values in inputs)
                    assert np.abs(found - sum(inputs) / len(inputs)).max() <= 4 * size / 127
                    continue
                sent = [senders[host][parameter].send(inputs[host]) for host in range(len(inputs))]
                np.testing.assert_array_equal(found, mean_of(sent))
        bytes_of.append(ddp.last_step()["sent_bytes"])
    legs = min(len(ranks) for ranks in hosts_of(layout))
    place = next(ranks.index(rank) for ranks in hosts_of(layout) if rank in ranks)
    assert all((count > 0) == (place < legs) for count in bytes_of)


@pytest.mark.parametrize("layout", ["2x2", "apart", "1+3", "1+1+2"])
@pytest.mark.parametrize("name", METHODS)
def test_equals_numpy(layout: str, name: str) -> None:
    """Whatever bucket a parameter is in, and however many legs a host has."""
    on_hosts(layout, train, layout, name)


def outlive(rank: int, layout: str, strategy: str) -> None:
    """Ranks of its host see it die; the others are told by them. No parameter has changed. Who says
    so may count ranks within its host."""
    coded = {"ddp": ddp, "fully_shard": sharded}[strategy](c.Sign())
    coded.averaged(drawn(0, rank))

    def die_when_others_come(*_: Any) -> None:
        stay_until(*(f"{other} comes" for other in range(len(LAYOUTS[layout])) if other != 1))
        kill_this_rank()

    def watch(model: Given, _: Any) -> None:
        model.held["matrix"].register_hook(die_when_others_come)

    if rank == 1:
        coded.model.register_forward_pre_hook(watch)
    say(f"{rank} comes")
    saw_it = LAYOUTS[layout][rank] == LAYOUTS[layout][1]
    with raises(dist.DistBackendError, "has died" if saw_it else ""):
        coded.averaged(drawn(1, rank))
    assert not any(local(parameter).any() for parameter in coded.model.parameters())


def test_a_killed_rank() -> None:
    cases = (("2x2", "ddp"), ("1+3", "ddp"), ("2x2", "fully_shard"))
    run_deaths(outlive, 4, [Death(1, case, LAYOUTS[case[0]]) for case in cases])
