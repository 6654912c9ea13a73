"""Ranks that die, wait, or ask for what cannot be done."""

import os
import sys
import time
from typing import Any

import pytest
import torch
import trireme
import trireme.horovod as hvd

from harness.deaths import assert_seen_soon
from harness.faults import kill_this_rank, note_death, raises
from harness.meeting import say, stay_until
from harness.ranks import run_ranks


def outlive(rank: int, what: str) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    if rank == 1:
        stay_until("rank 0 waits")
        note_death()
        kill_this_rank()
    programs = {
        "allreduce": lambda: hvd.allreduce(torch.ones(3), name="lost"),
        "join": hvd.join,
        "barrier": hvd.barrier,
    }
    handle = hvd.allgather_async(torch.ones(2), name="pending")
    say("rank 0 waits")
    with raises(hvd.HorovodInternalError, what, "rank 1", "has died"):
        programs[what]()
    assert_seen_soon()
    with raises(hvd.HorovodInternalError, "'pending'", "rank 1"):
        hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce(torch.ones(1))


@pytest.mark.parametrize("what", ["allreduce", "join", "barrier"])
def test_a_killed_rank(what: str) -> None:
    run_ranks(outlive, 2, what, timeout=60, fresh=True, dying=(1,))


def wait_long(rank: int, folder: str) -> None:
    if rank == 0:  # what the thread of the engine prints
        sys.stderr = open(f"{folder}/said", "w", buffering=1)  # noqa: SIM115
    trireme.init(device="cpu", timeout=5)
    hvd.init()
    if rank == 0:
        began = time.monotonic()
        with raises(hvd.HorovodInternalError, "'alone'", "for too long", "missing on rank 1"):
            hvd.allreduce(torch.ones(3), name="alone")
        assert time.monotonic() - began >= 5
        say("given up")
    else:
        stay_until("given up")
    hvd.barrier()
    total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
    assert total.tolist() == [2.0, 2.0]
    hvd.shutdown()


def test_a_name_that_a_rank_lacks(tmp_path: Any) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3"}
    run_ranks(wait_long, 2, str(tmp_path), timeout=60, env=env)
    said = (tmp_path / "said").read_text()
    assert "allreduce 'alone': issued by rank 0, missing on rank 1" in said
    assert said.count("alone") == 1


def ask_for_nonsense(rank: int) -> None:
    for program in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
        with pytest.raises(ValueError, match=r"before hvd\.init"):
            program()
    hvd.init()
    gone = hvd.ProcessSet([0, 1])
    cases: dict[str, tuple[type[BaseException], Any]] = {
        "op=9": (ValueError, lambda: hvd.allreduce(torch.ones(1), op=9)),
        "average= beside op=": (
            ValueError,
            lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
        ),
        "add up": (ValueError, lambda: hvd.alltoall(torch.ones(4), [1, 2])),
        "integers": (ValueError, lambda: hvd.alltoall(torch.ones(4), [1.5, 2.5])),
        "a multiple": (ValueError, lambda: hvd.alltoall(torch.ones(3))),
        "registered": (ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=gone)),
        "of ranks": (ValueError, lambda: hvd.add_process_set([0, 7])),
        "as tensor": (TypeError, lambda: hvd.allreduce(3.0)),
        "a dense one": (ValueError, lambda: hvd.allreduce(torch.ones(2).to_sparse())),
    }
    for part, (kind, program) in cases.items():
        with raises(kind, part):
            program()
    if rank == 0:
        with raises(ValueError, "handle"):
            hvd.poll(10_000)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"after hvd\.shutdown"):
        hvd.rank()


def test_bad_input() -> None:
    run_ranks(ask_for_nonsense, 2, timeout=60, fresh=True)


def begin(rank: int) -> tuple[Any, ...]:
    for name, horovods in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE"), ("LOCAL_RANK", "LOCAL_RANK")):
        os.environ[f"HOROVOD_{horovods}"] = os.environ.pop(name)
    os.environ["HOROVOD_LOCAL_SIZE"] = os.environ.pop("LOCAL_WORLD_SIZE")
    assert not hvd.is_initialized()
    with pytest.warns(UserWarning, match="HOROVOD_CYCLE_TIME") if rank == 0 else _nothing():
        hvd.init()
    hvd.init()  # once more is nothing
    assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ddl_built() or hvd.ccl_built())
    found = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    found += (hvd.cross_rank(), hvd.cross_size())
    hvd.shutdown()
    hvd.shutdown()
    return found


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_horovods_variables() -> None:
    env = {"HOROVOD_CYCLE_TIME": "5"}
    found = run_ranks(begin, 2, timeout=60, env=env)
    assert found == [(rank, 2, rank, 2, 0, 1) for rank in range(2)]
