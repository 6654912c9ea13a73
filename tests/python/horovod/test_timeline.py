"""start_timeline, stop_timeline, HOROVOD_TIMELINE: what rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme.horovod as hvd

from harness.faults import raises
from harness.meeting import say, stay_until
from harness.ranks import run_ranks


def lanes_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of each lane, by its name, in order."""
    events = json.loads(path.read_text(encoding="utf-8"))
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for one in events:
        if one["ph"] == "X":
            spans[names[one["tid"]]].append(one)
    return spans


def write_two(rank: int, folder: str) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(2), name="before")
    hvd.stop_timeline()  # there is none
    hvd.start_timeline(f"{folder}/one.json", mark_cycles=True)
    if rank == 0:
        with raises(ValueError, "got a second timeline beside"):
            hvd.start_timeline(f"{folder}/other.json")
        with pytest.raises(OSError):
            hvd.stop_timeline()
            hvd.start_timeline(f"{folder}/none/such.json")
        hvd.start_timeline(f"{folder}/one.json", mark_cycles=True)
        hvd.start_timeline(f"{folder}/one.json")  # is being written
        handle = hvd.allreduce_async(torch.ones(2), name="first")
        assert not hvd.poll(handle)
        say("rank 0 has issued it")
    else:
        stay_until("rank 0 has issued it")
        handle = hvd.allreduce_async(torch.ones(2), name="first")
    hvd.synchronize(handle)
    hvd.allreduce(torch.ones(2), name="first")
    hvd.broadcast_object([1], name="an object")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allgather(torch.ones(2, 2 + rank), name="differs")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="after")
    if rank == 0:
        look_at(Path(folder) / "one.json")
    hvd.start_timeline(f"{folder}/two.json")
    hvd.grouped_allreduce([torch.ones(2)], name='"quoted" \\ name')
    hvd.shutdown()


def look_at(path: Path) -> None:
    """The file is complete once stop_timeline() has returned."""
    lanes = lanes_of(path)
    first, an_object, differs = "allreduce.first", "broadcast object.an object", "allgather.differs"
    assert list(lanes) == [first, an_object, differs]
    names = [one["name"] for one in lanes[first]]
    assert names == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 2
    for waits, runs in zip(lanes[first][::2], lanes[first][1::2], strict=True):
        assert waits["dur"] >= 0 and runs["dur"] > 0
        assert runs["ts"] == pytest.approx(waits["ts"] + waits["dur"], abs=1)
    assert [one["name"] for one in lanes[an_object]][1] == "BROADCAST_OBJECT"
    assert "got another shape" in lanes[differs][1]["args"]["error"]
    events = json.loads(path.read_text(encoding="utf-8"))
    assert sum(one["name"] == "CYCLE_START" for one in events) == 4
    assert events[0]["args"]["start_time_since_epoch_in_micros"] > 1e15


def test_a_timeline(tmp_path: Path) -> None:
    run_ranks(write_two, 2, str(tmp_path), timeout=60, fresh=True)
    lanes = lanes_of(tmp_path / "two.json")  # shutdown() completes it
    assert list(lanes) == ['allreduce."quoted" \\ name']
    assert sorted(one.name for one in tmp_path.iterdir()) == ["one.json", "two.json"]


def write_all(rank: int) -> None:
    hvd.init()
    for step in range(3):
        hvd.allreduce(torch.ones(2), name=f"step {step}")
    if rank == 0:
        hvd.stop_timeline()
    hvd.shutdown()


def test_the_variable(tmp_path: Path) -> None:
    env = {"HOROVOD_TIMELINE": str(tmp_path / "all.json"), "HOROVOD_TIMELINE_MARK_CYCLES": "0"}
    run_ranks(write_all, 2, timeout=60, env=env)
    lanes = lanes_of(tmp_path / "all.json")
    assert list(lanes) == [f"allreduce.step {step}" for step in range(3)]
    assert "CYCLE_START" not in (tmp_path / "all.json").read_text()
