"""Who is told when an operation of the backend ``trireme`` ends, and when the group does."""

import json
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.faults import raises
from harness.meeting import say, set_timeout, stay_until, store, until, until_inside
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks
from shm.ranks import TORCH, backend_of

has_hooks = pytest.mark.skipif(TORCH < (2, 15), reason="torch has these hooks since 2.15")
has_errors = pytest.mark.skipif(
    not hasattr(dist.Backend, "get_error") and TORCH < (2, 15), reason="torch cannot ask"
)


def error_of(backend: Any) -> str:
    return str(backend.get_error()).rsplit(".", 1)[-1]


# --- The end of the group -------------------------------------------------------------------------


@has_hooks
@on_shm_ranks(3, timeout=40)
def test_abort_hooks(rank: int) -> None:
    """They run for who aborts and those that hear of it: once each, in order, before the error."""
    backend = backend_of()
    assert backend.supports_abort_hooks
    called: list[str] = []
    backend.register_abort_hook(7, lambda: called.append("seven"))
    backend.register_abort_hook(3, lambda: called.append("three"))
    backend.register_abort_hook(5, lambda: called.append("five"))
    backend.unregister_abort_hook(5)
    backend.unregister_abort_hook(99)  # never registered
    dist.all_reduce(torch.ones(5))
    assert called == [] and error_of(backend) == "SUCCESS"
    say(f"{rank} has looked")
    if rank == 1:
        stay_until("0 has looked", "2 has looked")
        backend.abort()
        assert called == ["three", "seven"]
    for _ in range(2):
        with raises(dist.DistBackendError, "the group was aborted", "(rank 1 of 3)"):
            dist.all_reduce(torch.ones(7))
        assert called == ["three", "seven"]
    assert error_of(backend) == ("COMM_ERROR" if rank == 1 else "REMOTE_ERROR")


@has_hooks
@on_shm_ranks(2, timeout=40, fresh=True)
def test_an_abort_hook_may_abort_and_throw(rank: int) -> None:
    backend = backend_of()
    called = []

    def hook() -> None:
        called.append(1)
        backend.abort()
        raise ValueError("of the hook")

    backend.register_abort_hook(1, hook)
    backend.register_abort_hook(2, lambda: called.append(2))
    if rank == 0:
        backend.abort()
    with raises(dist.DistBackendError, "the group was aborted"):
        dist.all_reduce(torch.ones(7))
    assert called == [1, 2]


@has_hooks
@on_shm_ranks(2, timeout=40)
def test_a_message_that_does_not_come_calls_abort_hooks(rank: int) -> None:
    called: list[int] = []
    backend_of().register_abort_hook(1, lambda: called.append(1))
    if rank == 0:
        set_timeout(1)
        with raises(dist.DistBackendError, "recv of 2 float32 from rank 1"):
            dist.recv(torch.empty(2), 1)
        assert called == [1] and error_of(backend_of()) == "TIMEOUT"
        say("done")
    else:
        stay_until("done")
        assert called == []  # a rank hears of it at its next operation
        assert error_of(backend_of()) == "REMOTE_ERROR"


@has_errors
@on_shm_ranks(3, timeout=40)
def test_what_ended_the_group(rank: int) -> None:
    backend = backend_of()
    dist.all_reduce(torch.ones(5))
    with raises(dist.DistBackendError, "ranks do not agree"):
        dist.all_reduce(torch.ones(5 + rank))
    assert error_of(backend) == "SUCCESS"  # the group goes on
    say(f"{rank} has looked")
    stay_until("0 has looked", "1 has looked", "2 has looked")
    if rank == 1:
        stay_until("0 is done", "2 is done")
        assert error_of(backend) == "REMOTE_ERROR"
        return
    set_timeout(1)
    with raises(dist.DistBackendError, "rank 1 (process"):
        dist.all_reduce(torch.ones(5))
    assert error_of(backend) in ("TIMEOUT", "REMOTE_ERROR")  # the first deadline decides
    say(f"{rank} is done")


# --- The end of an operation ----------------------------------------------------------------------


@on_shm_ranks(2, timeout=40)
def test_a_completion_hook_sees_kind_number_and_duration(rank: int) -> None:
    infos: list[Any] = []
    group = dist.group.WORLD
    began = time.monotonic()
    group._register_on_completion_hook(infos.append)
    dist.all_reduce(torch.ones(5))
    work = dist.broadcast(torch.ones(100_000), 0, async_op=True)
    work.wait()
    with raises(dist.DistBackendError, "ranks do not agree"):
        dist.all_reduce(torch.ones(5 + rank))  # what fails is not reported
    if rank == 0:
        until_inside(1, "barrier")
        seen = time.monotonic()
        until_inside(1, "barrier")
        store().set("rank 1 waited", str(time.monotonic() - seen))
    dist.barrier()
    tensor = torch.ones(3)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    until(lambda: len(infos) == 4)
    # Hooks of two operations may run at once, on two threads.
    infos.sort(key=lambda info: info.time_started)
    elapsed = timedelta(seconds=time.monotonic() - began)
    op = torch._C._distributed_c10d.OpType
    message = op.SEND if rank == 0 else op.RECV
    assert [info.op_type for info in infos] == [op.ALLREDUCE, op.BROADCAST, op.BARRIER, message]
    assert [info.seq for info in infos] == [1, 2, 4, 1]
    assert all(timedelta(0) < info.active_duration < elapsed for info in infos)
    assert all(info.time_started < info.time_finished for info in infos)
    if rank == 1:
        waited = float(store().get("rank 1 waited"))
        assert infos[2].active_duration >= timedelta(seconds=waited)
    with raises(ValueError, "got a second hook"):
        group._register_on_completion_hook(infos.append)


@on_shm_ranks(2, timeout=40)
def test_what_is_in_flight_is_reported_before_the_group_goes(rank: int) -> None:
    infos: list[Any] = []
    dist.group.WORLD._register_on_completion_hook(infos.append)
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.group.WORLD._wait_for_pending_works()
    assert sorted(info.seq for info in infos) == list(range(1, 21))
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.destroy_process_group()
    assert len(infos) == 40
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def recorded(rank: int) -> list[dict[str, Any]]:
    dist.init_process_group("trireme")
    dist.all_reduce(torch.ones(5))
    dist.broadcast(torch.ones(100_000), 0, async_op=True).wait()
    entries: list[dict[str, Any]] = []

    def done() -> bool:
        dump = torch._C._distributed_c10d._dump_fr_trace_json(backend="trireme")
        entries[:] = json.loads(dump).get("entries", [])
        return bool(entries) and all(entry["state"] == "completed" for entry in entries)

    until(done)
    dist.destroy_process_group()
    return entries


@has_hooks
def test_torchs_flight_recorder_sees_operations_complete() -> None:
    for entries in run_ranks(recorded, 2, timeout=40, env={"TORCH_FR_BUFFER_SIZE": "100"}):
        assert [entry["state"] for entry in entries] == ["completed"] * 2, entries
        assert all(entry["duration_ms"] > 0 for entry in entries), entries
