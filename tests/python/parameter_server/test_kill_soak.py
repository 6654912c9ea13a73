"""A worker is killed at a random moment, whatever it does then: the others go on, or raise."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trireme import ps

from harness.deaths import Death, run_deaths
from harness.meeting import process_of, say, state_of, stay_until, until

CLOCKS = 60
DIM = 500
IDS = torch.arange(40)  # fewer than a table has shares: a torn share is one row


def tables() -> list[ps.Dense | ps.Sparse]:
    return [
        ps.Dense("net", {"w": torch.zeros(70_000)}, optimizer=ps.Sum(), reduction="sum"),
        ps.Sparse("items", DIM, optimizer=ps.Sum(), reduction="sum"),
    ]


def train(server: ps.ParameterServer, drawn: random.Random) -> None:
    """Each worker pushes a one to every element in every clock, in pushes of random size."""
    cuts = sorted(drawn.sample(range(1, len(IDS)), 3))
    for part in IDS.tensor_split(cuts):
        server["items"].push(part, torch.ones(len(part), DIM))
    server["net"].push({"w": torch.ones(70_000)})
    server.clock()
    server["items"].pull(IDS)
    server["net"].pull()


def outlive(rank: int, on_worker_loss: str, seed: int) -> None:
    shared = random.Random(seed)
    options: dict[str, Any] = {"mode": shared.choice(["bsp", "ssp", "async"])}
    if options["mode"] == "ssp":
        options["staleness"] = shared.choice([0, 2])
    after_s = shared.uniform(0.001, 0.15)
    server = ps.ParameterServer(tables(), on_worker_loss=on_worker_loss, **options)
    dist.barrier()
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, after_s)  # SIGALRM ends a process that has no handler
    drawn = random.Random(10 * seed + rank)
    begin = time.monotonic()
    try:
        for _ in range(CLOCKS):
            train(server, drawn)
        while rank == 1:
            time.sleep(1)
        until(lambda: state_of(process_of(1)) == "Z")
        while on_worker_loss == "raise":
            server["net"].pull()
    except dist.DistBackendError as error:
        assert on_worker_loss == "raise" and "worker 1 (rank 1, process" in str(error)
        assert "has died at clock" in str(error)
    assert time.monotonic() - begin < 30
    say(f"rank {rank} is done")
    stay_until("rank 0 is done", "rank 2 is done")
    if on_worker_loss == "raise":
        return
    until(lambda: bool(server["net"].pull()) and server.stats()["lost"] == [1])
    server["net"].pull()  # applies what is closed
    ones = 2 * CLOCKS + min(server.clocks()[1], CLOCKS)
    rows = [set(row.unique().tolist()) for row in server["items"].pull(IDS)]
    net = set(server["net"].pull()["w"].unique().tolist())
    stats = server.stats()
    assert stats["torn"] <= 1
    if options["mode"] == "bsp":
        # A torn block lacks some or all of the clock that the worker was applying: its three ones.
        may_be = {ones - 3, ones}
        torn = [values for values in [net, *rows] if values != {ones}]
    else:
        # What the worker pushed in the clock that it died in is there in part.
        may_be = {ones, ones + 1}
        torn = [values for values in rows if len(values) > 1]
    assert net.union(*rows) <= may_be, f"net has {net}, rows {rows}, expected {may_be}"
    assert len(torn) <= stats["torn"], f"{torn}, but {stats['torn_blocks']}"
    server.close()


@pytest.mark.parametrize("on_worker_loss", ["raise", "continue"])
def test_killed_at_a_random_moment(on_worker_loss: str) -> None:
    deaths = [Death(1, (on_worker_loss, seed)) for seed in range(6)]
    run_deaths(outlive, 3, deaths, timeout=180)
