"""Callees and callers that die, stop, fork or are interrupted: only what needs them ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trireme import ps, remote

from harness.deaths import SEEN_S, assert_seen_soon
from harness.faults import kill_this_rank, note_death
from harness.forks import in_child
from harness.interpreters import Interpreter, run_interpreters
from harness.meeting import process_of, say, state_of, stay_until, store, until
from harness.models import batch
from harness.on_ranks import AGES_S, on_shm_ranks
from remote import networks
from remote.functions import FREED_S, add, entered, gate, gated, open_gate
from remote.networks import TOKENS, count_graphs, make_chain, make_counted, make_mlp, make_waiting
from remote.objects import ALIVE, Box, Counter, count_alive
from remote.ranks import (
    on_remote_ranks,
    on_remote_shm_and_gloo_ranks,
    raised,
    refused,
)

PATIENCE_S = 30.0


@remote.function
def die() -> None:
    note_death()
    kill_this_rank()


@remote.function
def make_dying() -> nn.Module:
    def program() -> None:
        note_death()
        kill_this_rank()

    return networks.Raising(program)


class Observer(remote.Object):
    @remote.method
    def act(self, state: int) -> int:
        return state + 1


def kill(rank: int) -> None:
    note_death()
    os.kill(process_of(rank), signal.SIGKILL)


def until_dead(rank: int) -> None:
    until(lambda: state_of(process_of(rank)) == "Z")


on_dying_ranks = {"patience_s": AGES_S, "timeout": 40}


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_the_owner_of_a_module_dies_in_a_call(rank: int, where: str) -> None:
    if rank == 0:
        net = remote.Module("p1", make_dying, optimizer=ps.SGD(0.1))
        x = torch.ones(2, 4, requires_grad=True)
        with refused(dist.DistBackendError, "p1 (rank 1)", f"{where} of make_dying", "died"):
            net(x, where).sum().backward()
        assert_seen_soon()
        for verb in (net.step, net.zero_grad, net.state_dict, lambda: net(x)):
            with raised(dist.DistBackendError, "p1 (rank 1)"):
                verb()
        assert remote.call("p2", add, 1, 2) == 3


@on_remote_ranks(2, dying=[1], **on_dying_ranks)
def test_the_owner_of_a_module_dies_between_calls(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_mlp, optimizer=ps.SGD(0.1))
    losses = [net(batch(0).requires_grad_()).sum() for _ in range(2)]
    kill(1)
    with refused(dist.DistBackendError, "p1 (rank 1)", "backward of make_mlp"):
        losses[0].backward()
    assert_seen_soon()
    until_dead(1)
    began = time.monotonic()
    with refused(dist.DistBackendError, "p1 (rank 1)", "backward of make_mlp", "died"):
        losses[1].backward()
    with refused(dist.DistBackendError, "p1 (rank 1)", "forward of make_mlp", "died"):
        net(batch(0))
    with refused(dist.DistBackendError, "p1 (rank 1)", "died"):
        net.step()
    with refused(dist.DistBackendError, "p1 (rank 1)", "died"):
        remote.Module("p1", make_mlp)
    assert time.monotonic() - began < SEEN_S
    del losses  # what they held has gone


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_remote_ranks(3, dying=[2], **on_dying_ranks)
def test_the_owner_of_a_nested_module_dies(rank: int, where: str) -> None:
    """The one between raises, and so does the first caller: by the name of the one that died."""
    if rank == 0:
        net = remote.Module("p1", make_deadly_chain, "p2")
        x = torch.ones(2, 4, requires_grad=True)
        with raised(dist.DistBackendError, "p2 (rank 2)", f"{where} of make_dying", "p1 (rank 1)"):
            net(x, where).sum().backward()
        assert_seen_soon()
        assert remote.call("p1", add, 1, 2) == 3


class Deadly(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, where: str) -> torch.Tensor:
        return self.inner(x, where)


@remote.function
def make_deadly_chain(to: str) -> nn.Module:
    return Deadly(remote.Module(to, make_dying))


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_death_ends_only_calls_with_that_rank(rank: int) -> None:
    if rank != 0:
        return
    observer, survivor = remote.create("p1", Observer), remote.create("p2", Observer)
    lost = [remote.call_async("p1", gated, number) for number in range(20)]
    others = [remote.call_async("p2", gated, number) for number in range(3)]
    kill(1)
    for pending in lost:
        with refused(dist.DistBackendError, "p1 (rank 1)", "function gated", "died"):
            pending.wait()
    assert_seen_soon()
    assert not any(pending.is_completed() for pending in others)
    remote.call("p2", open_gate)
    assert [pending.wait() for pending in others] == [0, 1, 2]
    for verb in (
        lambda: remote.call("p1", add, 1, 2),
        lambda: observer.act(1),
        lambda: remote.create("p1", Observer),
    ):
        with refused(dist.DistBackendError, "p1 (rank 1)", "died"):
            verb()
    assert survivor.act(1) == 2
    assert remote.names() == ["p0", "p1", "p2"]


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_callee_that_kills_itself(rank: int) -> None:
    if rank == 0:
        with refused(dist.DistBackendError, "p1 (rank 1)", "function die", "died"):
            remote.call("p1", die)
        assert_seen_soon()
    assert remote.call(f"p{rank}", add, 1, 2) == 3


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_caller_dies(rank: int) -> None:
    """The owner frees graphs, modules and objects that it had for it, and serves others."""
    if rank == 1:
        net = remote.Module("p0", make_counted)
        kept = [net(batch(0)) for _ in range(5)]
        objects = [remote.create("p0", Counter) for _ in range(5)]
        remote.create("p0", Observer).act.start(1)
        assert len(kept) == len(objects) == 5
        say("1 holds all")
        signal.pause()
    stay_until("1 holds all")
    if rank == 0:
        stay_until("2 holds its own")
        assert len(TOKENS) == len(ALIVE) == 6
        kill(1)
        until_dead(1)
        until(lambda: count_graphs() == 1 and len(ALIVE) == 1, FREED_S)
        say("all are gone")
    else:
        net, own = remote.Module("p0", make_counted), remote.create("p0", Counter)
        loss = net(batch(0)).sum()
        own.add(1)
        say("2 holds its own")
        while not store().check(["all are gone"]):
            own.add(1)
        loss.backward()
        assert own.get() > 0


def leave_when_served() -> None:
    stay_until("it is served")
    os._exit(0)


@pytest.mark.parametrize("where", ["call", "forward", "backward"])
@on_remote_shm_and_gloo_ranks(3, dying=[1], **on_dying_ranks)
def test_a_caller_ends_in_the_middle_of_a_call(rank: int, where: str) -> None:
    """In a way that the kernel calls normal."""
    if rank == 1:
        net, objects = remote.Module("p0", make_counted), [remote.create("p0", Counter)]
        kept = net(batch(0).requires_grad_())
        late = remote.call_async("p2", gated, 1)
        say("1 holds all")
        threading.Thread(target=leave_when_served, daemon=True).start()
        if where == "call":
            late.wait()
        elif where == "forward":
            remote.Module("p2", make_waiting)(batch(0)[:, :4], "forward")
        else:
            networks.Calling.apply(kept, late.wait).sum().backward()
        assert objects
    if rank == 2:
        assert entered.wait(PATIENCE_S)
        say("it is served")
    if rank == 0:
        stay_until("1 holds all")
        until_dead(1)
        until(lambda: count_graphs() == len(ALIVE) == 0, FREED_S)
        remote.call("p2", open_gate)


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_caller_dies_whose_call_is_served(rank: int) -> None:
    if rank == 1:
        pending = remote.call_async("p0", gated, 1)
        stay_until("it is served")
        kill(1)
        pending.wait()
    if rank == 0:
        assert entered.wait(PATIENCE_S)
        say("it is served")
        until_dead(1)
        gate.set()  # there is nobody to answer
    else:
        stay_until("it is served")
        assert remote.call("p0", gated, 2) == 2


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_dead_rank_held_the_last_ref_of_another(rank: int) -> None:
    if rank != 0:
        return
    box = remote.create("p1", Box, remote.create("p0", Counter))
    assert box.use() == 1 and len(ALIVE) == 1
    kill(1)
    until_dead(1)
    until(lambda: len(ALIVE) == 0, FREED_S)
    with refused(dist.DistBackendError, "p1 (rank 1)"):
        remote.call("p1", add, box, 1)
    with raised(dist.DistBackendError, "p1"):
        box.take()


@on_remote_ranks(2, **on_dying_ranks)
def test_a_stopped_callee_is_alive(rank: int) -> None:
    if rank == 1:
        stay_until("0 is ready")
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    observer = remote.create("p1", Observer)
    net = remote.Module("p1", make_mlp, timeout=1)
    loss = net(batch(0)).sum()
    say("0 is ready")
    until(lambda: state_of(process_of(1)) == "T")
    for verb, what in (
        (lambda: observer.act(1, timeout=1), "method act of Observer"),
        (lambda: remote.call("p1", add, 1, 2, timeout=1), "function add"),
        (loss.backward, "backward of make_mlp"),
        (lambda: net(batch(0)), "forward of make_mlp"),
    ):
        began = time.monotonic()
        with refused(dist.DistBackendError, "p1 (rank 1)", "within 1 s", "alive", "stopped", what):
            verb()
        assert 0.9 < time.monotonic() - began < 4
    os.kill(process_of(1), signal.SIGCONT)
    assert observer.act(5) == 6  # late answers are dropped


@on_remote_shm_and_gloo_ranks(2, timeout=40)
def test_ctrl_c_ends_a_wait_and_no_more(rank: int) -> None:
    if rank == 1:
        for word in ("a call", "a wait"):
            assert entered.wait(PATIENCE_S)
            entered.clear()
            if word == "a wait":  # it has what it waits for
                stay_until("a call is under way")
            os.kill(process_of(0), signal.SIGINT)
            stay_until(f"{word} was interrupted")
        return
    with pytest.raises(KeyboardInterrupt):
        remote.call("p1", gated, 1)
    say("a call was interrupted")
    with pytest.raises(KeyboardInterrupt):
        pending = remote.call_async("p1", gated, 2)
        say("a call is under way")
        pending.wait()
    say("a wait was interrupted")
    assert remote.call("p1", add, 1, 2) == 3
    remote.call("p1", open_gate)
    assert pending.wait() == 2
    assert remote.call("p1", gated, 3) == 3


@on_remote_shm_and_gloo_ranks(2, timeout=40, fresh=True)
def test_a_forked_child_does_not_call(rank: int) -> None:
    """In fresh ranks: autograd refuses children once a deep backward has started threads."""
    if rank == 1:
        return
    counter, net = remote.create("p1", Counter), remote.Module("p1", make_mlp)
    kept: list[Any] = [counter, remote.create("p0", Counter), net(batch(0))]
    pending = remote.call_async("p1", gated, 3)

    def in_the_child() -> bool:
        verbs: list[Callable[[], Any]] = [
            *(lambda: remote.call("p1", add, 1, 2), lambda: remote.call("p0", add, 1, 2)),
            *(lambda: counter.add(1), lambda: net(batch(0)), pending.wait),
            *(lambda: remote.create("p1", Counter), kept[2].sum().backward, remote.stop),
        ]
        for verb in verbs:
            with refused(RuntimeError, "fork"):
                verb()
        kept.clear()
        return True

    for _ in range(2):
        assert in_child(in_the_child)
    remote.call("p1", open_gate)
    assert pending.wait() == 3 and counter.add(1) == 1
    kept[2].sum().backward()
    assert kept[1].add(2) == 2


@pytest.mark.parametrize("way", ["exits", "is killed"])
@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_rank_goes_without_stop(rank: int, way: str) -> None:
    """stop() of the others returns."""
    if rank == 1:
        stay_until("0 is about to stop", "2 is about to stop")
        os._exit(0) if way == "exits" else kill_this_rank()
    assert remote.call("p1", add, 1, rank) == 1 + rank
    say(f"{rank} is about to stop")


ENDS = """
import sys, threading, torch, torch.distributed as dist, trireme
from trireme import remote
over = threading.Event()
@remote.function
def wait():
    over.wait(90)
rank = int(sys.argv[1])
dist.init_process_group("trireme", init_method=sys.argv[2], rank=rank, world_size=2)
remote.start(f"p{rank}")
if rank == 1:
    pending = remote.call_async("p0", wait)
    raise ArithmeticError("the data are broken")
try:
    remote.call("p1", wait, timeout=60)
except dist.DistBackendError as error:
    print(error, flush=True)
over.set()
remote.stop()
print("has stopped", flush=True)
"""


def test_an_exception_that_ends_a_program(tmp_path: Path) -> None:
    """It hangs nowhere: neither who raises, though calls wait for it, nor the others."""
    place = f"file://{tmp_path / 'store'}"
    first, second = run_interpreters([Interpreter(ENDS, rank, place) for rank in range(2)])
    code, printed, errors = first
    assert code == 0, errors
    assert "p1 (rank 1)" in printed and "has stopped" in printed
    assert second[0] == 1 and "ArithmeticError: the data are broken" in second[2]


@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[1])
def test_a_start_after_a_death_names_it(rank: int) -> None:
    remote.start(f"p{rank}")
    assert remote.call(f"p{1 - rank}", add, 1, 2) == 3
    if rank == 1:
        stay_until("0 has called")
        kill_this_rank()
    say("0 has called")
    until_dead(1)
    remote.stop()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        remote.start("p0")


@on_remote_ranks(3, dying=[1], **on_dying_ranks)
def test_a_chain_ends_with_its_middle(rank: int) -> None:
    """What the last one kept for the middle is freed, too."""
    if rank != 0:
        return
    net = remote.Module("p1", make_chain, "p2", 0.1)
    loss = net(batch(0)).sum()
    box = remote.create("p1", Box, remote.create("p2", Counter))
    assert box.use() == 1
    kill(1)
    until_dead(1)
    with refused(dist.DistBackendError, "p1 (rank 1)", "backward"):
        loss.backward()
    until(lambda: remote.call("p2", count_alive) == 0, FREED_S)
