"""Calls of functions: how they are named, served, ended and raised."""

from __future__ import annotations

import math
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from trireme import remote

from harness.meeting import say, stay_until, until
from harness.memory import available_bytes
from harness.on_ranks import on_shm_ranks
from remote.functions import add, gate, gated, open_gate, rank_there
from remote.ranks import (
    full_text,
    on_remote_ranks,
    on_remote_shm_and_gloo_ranks,
    raised,
    refused,
)

PATIENCE_S = 30.0
LARGE = 300 * 2**20
HUGE = 2**31 + 64
HUGE_NEEDS = 4 * HUGE + 2**30  # on both sides, what lies between them, and the result

lock = threading.Lock()


@remote.function
def scale(x: Any, by: int = 2, *, plus: int = 0) -> Any:
    return x * by + plus


@remote.function
def nothing() -> None:
    pass


@remote.function
def slow() -> str:
    """Returns when somebody has opened the gate of that process."""
    assert gate.wait(PATIENCE_S)
    return "late"


@remote.function
def hop(depth: int) -> list[int]:
    """Goes from rank 0 to rank 1 and back, so many times."""
    own = dist.get_rank()
    return [own] if depth == 0 else [own, *remote.call(f"p{1 - own}", hop, depth - 1)]


@remote.function
def to_itself(depth: int) -> int:
    return 0 if depth == 0 else 1 + remote.call(f"p{dist.get_rank()}", to_itself, depth - 1)


@remote.function
def both(tensor: torch.Tensor) -> tuple[float, torch.Tensor]:
    return float(tensor[0]) + float(tensor[-1]), tensor


@remote.function
def ends_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.numel(), int(tensor[0]), int(tensor[-1])


@remote.function
def fail(text: str) -> None:
    raise ValueError(text)


class Batcher(remote.Object):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    @remote.method(batch=3)
    def act(self, states: list[Any], scales: list[int]) -> list[Any]:
        self.batches.append(states)
        return [state * scale for state, scale in zip(states, scales, strict=True)]

    @remote.method(batch=2)
    def count_wrongly(self, values: list[int]) -> list[int]:
        return values[:1]

    @remote.method(batch=2)
    def refuse(self, values: list[int]) -> list[int]:
        raise ValueError(f"got {len(values)} values")

    @remote.method
    def seen(self) -> list[Any]:
        return self.batches


batchers: list[Batcher] = []


@remote.function
def shared_batcher() -> remote.Ref:
    with lock:
        if not batchers:
            batchers.append(Batcher())
    return remote.here(batchers[0])


@on_remote_shm_and_gloo_ranks(3)
def test_calls_with_all_ways_to_pass(rank: int) -> None:
    assert remote.names() == ["p0", "p1", "p2"]
    for to, name in enumerate(remote.names()):
        assert remote.call(name, rank_there) == to  # to oneself, too
        assert remote.call(name, add, 1, b=rank) == 1 + rank
        assert remote.call(name, add, a="x", b="y") == "xy"
        assert remote.call(name, scale, 3) == 6
        assert remote.call(name, scale, 3, 4, plus=1) == 13
        assert remote.call(name, scale, x=3, plus=1) == 7
        assert remote.call(name, "scale", 3, by=5) == 15  # a name will do
        assert remote.call(name, nothing) is None
        assert remote.call(name, add, 1, 2, timeout=30) == 3
        pending = remote.call_async(name, add, torch.ones(3), torch.ones(3), timeout=30)
        assert torch.equal(pending.wait(), torch.full((3,), 2.0))
    assert add(1, 2) == 3  # it stays what it is


@on_remote_ranks(2)
def test_a_pending_call(rank: int) -> None:
    if rank == 1:
        return
    pending = remote.call_async("p1", gated, 3)
    failing = remote.call_async("p1", fail, "the text of it")
    assert not pending.is_completed()
    remote.call("p1", open_gate)
    until(pending.is_completed)
    assert pending.wait() == 3 and pending.wait() == 3
    for _ in range(2):
        with raised(ValueError, "the text of it"):
            failing.wait()
    assert failing.is_completed()
    found: list[Any] = []
    last = remote.call_async("p1", add, 1, 2)
    waiting = [threading.Thread(target=lambda: found.append(last.wait())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert found == [3, 3, 3]
    remote.call_async("p1", add, 1, 2)  # nobody waits for it


@on_remote_ranks(2)
def test_what_there_is_not(rank: int) -> None:
    if rank == 1:
        return
    with refused(ValueError, "'p9'", "'p0'", "'p1'"):
        remote.call("p9", add, 1, 2)
    for to in ("p1", "p0"):
        with refused(ValueError, "nothing_such", "'add'", "'scale'"):
            remote.call(to, "nothing_such", 1)
        with pytest.raises((TypeError, ValueError), match="full_text"):
            remote.call(to, full_text, 1)
        with pytest.raises((TypeError, ValueError), match=r"Batcher\.seen"):
            remote.call(to, "Batcher.seen")
        with pytest.raises((TypeError, ValueError), match="Batcher"):
            remote.call(to, "Batcher")
        with refused(ValueError, "Nobody", "Batcher"):
            remote.create(to, "Nobody")
        assert remote.call(to, add, 1, 2) == 3


@on_remote_ranks(2)
def test_arguments_that_do_not_fit(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for args, kwargs in (((), {}), ((1,), {}), ((1, 2, 3), {}), ((1, 2), {"c": 3})):
            with raised(TypeError, "add"):
                remote.call(to, add, *args, **kwargs)
        with raised(TypeError, "scale"):
            remote.call(to, scale, 1, 2, 3)
        assert remote.call(to, add, 1, 2) == 3


@on_shm_ranks(2, timeout=60)
def test_before_start_and_after_stop(rank: int) -> None:
    def verbs_raise(word: str) -> None:
        for verb in (
            lambda: remote.call("p1", add, 1, 2),
            lambda: remote.call_async("p1", add, 1, 2),
            lambda: remote.create("p1", Batcher),
            lambda: remote.here(Batcher()),
            remote.names,
        ):
            with refused(RuntimeError, word):
                verb()

    verbs_raise("start")
    for name in "ab":
        remote.start(f"{name}{rank}")
        assert remote.names() == [f"{name}0", f"{name}1"]
        assert remote.call(f"{name}{1 - rank}", add, 1, rank) == 1 + rank
        remote.stop()
        verbs_raise("stop")


@on_remote_shm_and_gloo_ranks(2)
def test_who_has_returned_serves_on(rank: int) -> None:
    if rank == 0:
        until(lambda: remote.call("p1", add, 1, 2) == 3)
        for number in range(200):
            assert remote.call("p1", add, number, 1) == number + 1


@pytest.mark.parametrize("depth", [5, 60])
@on_remote_shm_and_gloo_ranks(2, threads=1)
def test_recursion_with_one_thread(rank: int, depth: int) -> None:
    if rank == 0:
        assert remote.call("p1", hop, depth) == [(1 + at) % 2 for at in range(depth + 1)]
        assert remote.call("p0", to_itself, 5) == 5
    assert remote.call(f"p{1 - rank}", add, 1, 2) == 3


@on_remote_ranks(2, threads=1)
def test_recursion_from_both_ends_at_once(rank: int) -> None:
    pending = [remote.call_async(f"p{1 - rank}", hop, 5) for _ in range(20)]
    expected = [(1 - rank + at) % 2 for at in range(6)]
    assert all(call.wait() == expected for call in pending)


def on_threads(count: int, program: Any) -> None:
    """Runs ``program(thread)`` on so many threads, and raises what one has raised."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            program(number)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@on_remote_ranks(2, timeout=100)
def test_ten_thousand_calls_in_flight_from_four_threads(rank: int) -> None:
    if rank == 1:
        stay_until("all are sent")
        gate.set()
        return
    sent = threading.Barrier(4, action=lambda: say("all are sent"))

    def calls(thread: int) -> None:
        numbers = range(thread * 2500, (thread + 1) * 2500)
        pending = [remote.call_async("p1", gated, number) for number in numbers]
        assert not any(call.is_completed() for call in pending[::500])
        sent.wait(PATIENCE_S)
        assert [call.wait() for call in pending] == list(numbers)

    on_threads(4, calls)


@on_remote_shm_and_gloo_ranks(2)
def test_threads_call_while_others_serve(rank: int) -> None:
    dist.barrier()

    def calls(thread: int) -> None:
        for number in range(300):
            value = torch.full((thread + 1,), float(number))
            assert torch.equal(remote.call(f"p{1 - rank}", add, value, 1), value + 1)

    on_threads(2, calls)


@on_remote_shm_and_gloo_ranks(3)
def test_batches(rank: int) -> None:
    if rank != 0:
        return
    batcher = remote.create("p1", Batcher)
    pending = [batcher.act.start(number, 10) for number in range(6)]
    assert [call.wait() for call in pending] == [0, 10, 20, 30, 40, 50]
    assert [len(batch) for batch in batcher.seen()] == [3, 3]
    tensors = [batcher.act.start(torch.full((2,), float(at)), at) for at in range(3)]
    assert [tensor.wait().tolist() for tensor in tensors] == [[0, 0], [1, 1], [4, 4]]
    alone = batcher.act.start(1, 1)
    batcher.seen()
    assert not alone.is_completed()  # it waits for two more
    others = [batcher.act.start(number, 1) for number in (2, 3)]
    assert [call.wait() for call in (alone, *others)] == [1, 2, 3]
    named = [batcher.act.start(scales=number, states=2) for number in range(3)]
    assert [call.wait() for call in named] == [0, 2, 4]
    act = remote.create("p2", Batcher).act
    on_threads(3, lambda thread: act(thread, 2))  # those that wait hold nobody up


@on_remote_ranks(3)
def test_a_batch_of_several_callers(rank: int) -> None:
    batcher = remote.call("p0", shared_batcher)
    assert batcher.act(rank, 5) == 5 * rank
    dist.barrier()
    assert sorted(batcher.seen()[0]) == [0, 1, 2]
    dist.barrier()


@on_remote_ranks(2)
def test_batches_that_fail(rank: int) -> None:
    if rank == 1:
        return
    batcher = remote.create("p1", Batcher)
    for method, kind, text in (
        (batcher.count_wrongly, TypeError, "2"),
        (batcher.refuse, ValueError, "got 2 values"),
    ):
        pending = [method.start(number) for number in range(2)]
        for call in pending:
            with raised(kind, text, "p1 (rank 1)"):
                call.wait()
    with refused(dist.DistBackendError, "p1 (rank 1)", "method act of Batcher"):
        batcher.act(5, 1, timeout=0.3)
    # The call that was given up is in no later batch.
    pending = [batcher.act.start(number, 2) for number in range(3)]
    assert [call.wait() for call in pending] == [0, 2, 4]
    assert batcher.seen() == [[0, 1, 2]]


@on_remote_shm_and_gloo_ranks(2)
def test_a_deadline_passes(rank: int) -> None:
    if rank == 1:
        return
    for begin in (remote.call, lambda *args, **kw: remote.call_async(*args, **kw).wait()):
        began = time.monotonic()
        with refused(dist.DistBackendError, "p1 (rank 1)", "within 0.4 s", "function slow"):
            begin("p1", slow, timeout=0.4)
        assert 0.4 <= time.monotonic() - began < 3
        assert remote.call("p1", add, 1, 2) == 3  # two more threads are there
    pending = remote.call_async("p1", slow, timeout=0.2)
    until(pending.is_completed)
    remote.call("p1", open_gate)
    with refused(dist.DistBackendError, "function slow"):
        pending.wait()
    assert remote.call("p1", slow, timeout=30) == "late"


@on_remote_ranks(2)
def test_a_timeout_is_any_number_of_seconds(rank: int) -> None:
    if rank == 1:
        return
    counter = remote.create("p1", Batcher, timeout=np.int32(30))
    for timeout in (30, 30.5, math.inf, 10**400, Fraction(61, 2), np.float32(30), np.int64(30)):
        assert remote.call("p1", add, 1, 2, timeout=timeout) == 3
        assert remote.call_async("p1", add, 1, 2, timeout=timeout).wait() == 3
        assert counter.seen(timeout=timeout) == counter.seen.start(timeout=timeout).wait() == []
    for timeout in (1e-9, np.float64(1e-3)):
        with refused(dist.DistBackendError, "p1 (rank 1)", "within 0.001 s"):
            remote.call("p1", slow, timeout=timeout)
    remote.call("p1", open_gate)
    for timeout in (True, np.bool_(True), "30", torch.tensor(30.0), 1j, [1]):
        with refused(TypeError, "timeout is"):
            remote.call("p1", add, 1, 2, timeout=timeout)
    for timeout in (0, -1.0, -(10**400), math.nan, np.float32(0)):
        with refused(ValueError, "got timeout="):
            counter.seen(timeout=timeout)


@on_remote_ranks(2)
def test_a_deadline_of_a_call_to_oneself(rank: int) -> None:
    with refused(dist.DistBackendError, f"p{rank} (rank {rank})", "function slow"):
        remote.call(f"p{rank}", slow, timeout=0.3)
    gate.set()
    assert remote.call(f"p{rank}", slow, timeout=30) == "late"


@pytest.mark.skipif(available_bytes() < 6 * LARGE, reason="takes 2 GiB of memory")
@on_remote_shm_and_gloo_ranks(2, timeout=100)
def test_large_messages(rank: int) -> None:
    if rank == 1:
        return
    tensor = torch.arange(LARGE // 4, dtype=torch.float32)
    total, result = remote.call("p1", both, tensor)
    assert total == tensor[-1].item() and torch.equal(result, tensor)


@pytest.mark.skipif(available_bytes() < HUGE_NEEDS, reason=f"takes {HUGE_NEEDS >> 30} GiB")
@on_remote_ranks(2, timeout=110)
def test_a_message_of_two_gib(rank: int) -> None:
    if rank == 1:
        return
    tensor = torch.zeros(HUGE, dtype=torch.uint8)
    tensor[0], tensor[-1] = 3, 5
    assert remote.call("p1", ends_of, tensor) == (HUGE, 3, 5)
