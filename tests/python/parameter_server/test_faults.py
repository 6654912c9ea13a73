"""Workers that die, stop, raise or are interrupted: the others name them in time, or go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trireme import ps

from harness.deaths import Death, assert_seen_soon, die, die_when_awaited, run_deaths
from harness.faults import HOUSE_FORM, kill_this_rank, raises
from harness.forks import in_child
from harness.interpreters import Interpreter, run_interpreters
from harness.meeting import process_of, say, state_of, stay_until, until, until_inside
from harness.models import mlp
from harness.on_ranks import AGES_S, on_shm_ranks
from parameter_server.counts import counts, push_and_clock
from parameter_server.faults import gradient_that_kills


def outlive_a_worker(rank: int, mode: str) -> None:
    """Who waits names it; under async nobody waits, and the next pull does."""
    server = counts(mode=mode)
    push_and_clock(server)
    server["counts"].pull()
    if rank == 1:
        die() if mode == "async" else die_when_awaited()
    if mode == "async":
        until(lambda: state_of(process_of(1)) == "Z")
    else:
        push_and_clock(server)
    text = f"worker 1 (rank 1, process {process_of(1)}) has died"
    if mode != "async":
        text = f"[ps] pull of table 'counts' at clock 2: {text} at clock 1"
    with raises(dist.DistBackendError, text):
        while True:
            server["counts"].pull()
            assert mode == "async"
    assert_seen_soon()
    say(f"rank {rank} has raised")
    stay_until("rank 0 has raised", "rank 2 has raised")
    assert server.stats()["lost"] == [1] and server.clocks()[1] == 1


def go_on_without_a_worker(rank: int, mode: str) -> None:
    """A push of the open clock is dropped under bsp; nothing later is collective."""
    server = counts(mode=mode, on_worker_loss="continue")
    push_and_clock(server)
    if rank == 1:
        server["counts"].push({"x": torch.full((1,), 100.0)})
        die_when_awaited() if mode == "bsp" else die()
    begin = time.monotonic()
    for _ in range(5):
        push_and_clock(server)
        server["counts"].pull()
    if mode == "bsp":
        assert time.monotonic() - begin < 5
    say(f"rank {rank} is done")
    stay_until("rank 0 is done", "rank 2 is done")
    until(lambda: state_of(process_of(1)) == "Z")
    until(lambda: bool(server["counts"].pull()) and server.stats()["lost"] == [1])
    expected = 3 + 5 * 2 + (0 if mode == "bsp" else 100)
    assert server["counts"].pull()["x"].item() == expected
    server.close()


@pytest.mark.parametrize("outlive", [outlive_a_worker, go_on_without_a_worker])
def test_a_killed_worker(outlive: Any) -> None:
    run_deaths(outlive, 3, [Death(1, (mode,)) for mode in ("bsp", "ssp", "async")])


def outlive_a_holder(rank: int, on_worker_loss: str) -> None:
    table = ps.Dense("big", {"w": torch.zeros(100_000)}, optimizer=ps.Sum())
    server = ps.ParameterServer([table], mode="ssp", staleness=9, on_worker_loss=on_worker_loss)
    if rank == 1:
        server["big"].push({"w": gradient_that_kills(100_000)})
        raise AssertionError("the gradient could be read")
    until(lambda: state_of(process_of(1)) == "Z")
    ones = {"w": torch.ones(100_000)}
    # Worker 1 of 2 begins in the middle of 4 blocks.
    block = "block 2 of table 'big' ('w')"
    if on_worker_loss == "raise":
        with raises(dist.DistBackendError, "worker 1 (rank 1, process", f"while it held {block}"):
            server["big"].push(ones)
    else:
        server["big"].push(ones)
        assert torch.equal(server["big"].pull()["w"], torch.ones(100_000))
    stats = server.stats()
    assert stats["torn"] == 1 and stats["torn_blocks"] == [block]
    server.close()


def test_a_worker_dies_while_it_holds_a_block() -> None:
    """Nobody hangs; the block is named, and counted as torn."""
    run_deaths(outlive_a_holder, 2, [Death(1, ("raise",)), Death(1, ("continue",))])


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_a_stopped_worker_is_alive(rank: int, mode: str) -> None:
    server = counts(mode=mode, timeout=2)
    for _ in range(3):
        push_and_clock(server)
        server["counts"].pull()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        until(lambda: state_of(process_of(1)) == "T")
        push_and_clock(server)
        text = "has not come within 2 s; it is alive, at clock 3 (its process is stopped)"
        with raises(dist.DistBackendError, "pull of table 'counts' at clock 4: worker 1", text):
            server["counts"].pull()
        os.kill(process_of(1), signal.SIGCONT)
    if rank == 1:
        push_and_clock(server)
    dist.barrier()
    server["counts"].pull()  # it has come after all
    dist.barrier()
    server.close()


@pytest.mark.parametrize("on_worker_loss", ["raise", "continue"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_an_exception_between_push_and_clock(rank: int, on_worker_loss: str) -> None:
    """Whoever catches it goes on; one that leaves the server is told to the others."""
    try:
        with counts(on_worker_loss=on_worker_loss) as server:
            for clock in range(4):
                try:
                    server["counts"].push({"x": torch.ones(1)})
                    if rank == 1 and clock == 1:
                        raise ArithmeticError("a broken sample")
                except ArithmeticError:
                    pass
                server.clock()
                assert server["counts"].pull()["x"].item() == 2 * (clock + 1)
            server["counts"].push({"x": torch.ones(1)})
            if rank == 1:
                raise ArithmeticError("the data are broken")
            server.clock()
            if on_worker_loss == "continue":
                assert server["counts"].pull()["x"].item() == 9
                return
            text = "has left at clock 4, ended by ArithmeticError: the data are broken"
            with raises(dist.DistBackendError, "worker 1 (rank 1", text):
                server["counts"].pull()
    except ArithmeticError:
        assert rank == 1


@pytest.mark.parametrize(
    ("code", "told"),
    [((), ""), ((0,), ""), ((3,), "SystemExit: 3"), (("no data",), "SystemExit: no data")],
)
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_sys_exit_is_a_failure_by_its_code(rank: int, code: tuple[Any, ...], told: str) -> None:
    """Who ends a program well leaves as others do."""
    if rank == 1:
        with pytest.raises(SystemExit), counts():
            sys.exit(*code)
        return
    with counts() as server:
        push_and_clock(server)
        if told:
            with raises(dist.DistBackendError, f"has left at clock 0, ended by {told} (rank 0 of"):
                server["counts"].pull()
        else:
            assert server["counts"].pull()["x"].item() == 1
            assert server.stats()["left"] == [1]


ENDS = """
import sys, torch, torch.distributed as dist, trireme
from trireme import ps
rank = int(sys.argv[1])
dist.init_process_group("trireme", init_method=sys.argv[2], rank=rank, world_size=2)
server = ps.ParameterServer([ps.Dense("counts", {"x": torch.zeros(1)}, optimizer=ps.Sum())])
if rank == 1:
    exec(sys.argv[3])
server.clock()
try:
    server["counts"].pull()
    print("clocks are committed without", server.stats()["left"])
except dist.DistBackendError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            "raise ArithmeticError('the data are broken')",
            "at clock 0, ended by ArithmeticError: the data are broken (rank 0 of 2)",
        ),
        ("sys.exit(0)", "clocks are committed without [1]"),
    ],
)
def test_what_ends_the_program_is_told(tmp_path: Path, end: str, said: str) -> None:
    """Also without a with block."""
    store = f"file://{tmp_path / 'store'}"
    (_, text, _), _ = run_interpreters([Interpreter(ENDS, rank, store, end) for rank in range(2)])
    assert said in text


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_ctrl_c_ends_a_wait_and_no_more(rank: int, mode: str) -> None:
    with counts(mode=mode) as server:
        if rank == 0:
            push_and_clock(server)
            with pytest.raises(KeyboardInterrupt):
                server["counts"].pull()
            say("interrupted")
            assert server["counts"].pull()["x"].item() == 2
        else:
            until_inside(0, "pull of table 'counts' at clock 1")
            os.kill(process_of(0), signal.SIGINT)
            stay_until("interrupted")
            push_and_clock(server)
        dist.barrier()


class Interrupted:
    """Closes the server, and raises then, as where Ctrl-C comes meanwhile."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def close(self, error: str) -> None:
        self._core.close(error)
        raise KeyboardInterrupt


@on_shm_ranks(1, timeout=40)
def test_ctrl_c_in_close_leaves_nothing_open(rank: int) -> None:
    """It comes out of close(), and the module is free."""
    net = mlp()
    server = ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))])
    server["net"].pull()
    server.clock()
    server._core = Interrupted(server._core)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    assert not net[0]._forward_pre_hooks
    net(torch.ones(1, 6))
    ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))]).close()


@on_shm_ranks(2, timeout=40)
def test_a_forked_child_only_reads(rank: int) -> None:
    net = mlp()
    with ps.ParameterServer([ps.Dense("net", net, optimizer=ps.SGD(0.1))]) as server:
        server["net"].pull()
        before = net[0].weight.detach().clone()

        def in_the_child() -> bool:
            for verb in (server["net"].pull, server["net"].push, server.clock, server.stats):
                with raises(RuntimeError, "got a forked child of the process that made the server"):
                    verb()
            with torch.no_grad():
                net[0].weight.zero_()  # its own
            server.close()
            return bool((net[0].weight == 0).all())

        assert in_child(in_the_child)
        dist.barrier()
        assert torch.equal(net[0].weight, before)
        server.clock()
        server["net"].pull()


@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[0])
def test_a_rank_that_serves_names_a_worker_that_died(rank: int) -> None:
    server = counts(servers=1)
    if rank == 0:
        until_inside(1, "serve")
        kill_this_rank()
    with raises(dist.DistBackendError, "[ps] serve: worker 0 (rank 0, process", form=HOUSE_FORM):
        server.serve()


def raises_in_a_pull(server: ps.ParameterServer, *texts: str) -> None:
    """Pulls until it raises."""
    with raises(dist.DistBackendError, "[ps] pull of table 'counts' at clock ", *texts):
        while True:
            server["counts"].pull()


def outlive_who_serves(rank: int, mode: str) -> None:
    server = counts(mode=mode, servers=1)
    if rank == 2:
        stay_until("worker 0 has pulled")
        if mode != "async":
            until_inside(1, "pull of")
        die()
    if rank == 1:
        push_and_clock(server)
    if rank == 0:
        server["counts"].pull()
        say("worker 0 has pulled")
    raises_in_a_pull(server, f": server of rank 2 (process {process_of(2)}) has died", "SIGKILL")
    assert_seen_soon()
    say(f"rank {rank} has raised")
    stay_until("rank 0 has raised", "rank 1 has raised")


def test_a_killed_rank_that_serves_is_named() -> None:
    """By the worker that waits for another one, and by the other's next pull."""
    run_deaths(outlive_who_serves, 3, [Death(2, (mode,)) for mode in ("bsp", "ssp", "async")])


@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[1])
def test_workers_go_on_without_a_rank_that_served(rank: int) -> None:
    """It held nothing that is not in the memory of the host."""
    server = counts(servers=1, on_worker_loss="continue")
    if rank == 1:
        kill_this_rank()
    until(lambda: state_of(process_of(1)) == "Z")
    for _ in range(3):
        push_and_clock(server)
        assert server["counts"].pull()["x"].item() == server.clocks()[0]
    server.close()


@pytest.mark.parametrize("ends_by", ["close", "raise"])
@on_shm_ranks(2, timeout=40)
def test_a_rank_that_serves_may_end_before_workers_do(rank: int, ends_by: str) -> None:
    """A normal end is no loss; an exception is told."""
    server = counts(servers=1)
    if rank == 1:
        with suppress(ValueError), server:
            if ends_by == "raise":
                raise ValueError("no such file")
        say("the server has ended")
        return
    stay_until("the server has ended")
    if ends_by == "raise":
        raises_in_a_pull(
            server, ": server of rank 1 (process", "was ended by ValueError: no such file"
        )
        return
    push_and_clock(server)
    assert server["counts"].pull()["x"].item() == 1
    server.close()


@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[1])
def test_writing_goes_on_without_a_worker_that_died(rank: int) -> None:
    net = nn.Linear(1, 1)
    server = ps.ParameterServer(
        [ps.Dense("net", net, optimizer=ps.SGD(0.1))], on_worker_loss="continue"
    )
    server["net"].pull()
    if rank == 1:
        until_inside(0, "writing of")
        kill_this_rank()
    server["net"].core.begin_writing()
    nn.init.constant_(net.weight, 4)
    server["net"].core.end_writing()
    assert net.weight.item() == 4
    server.close()
