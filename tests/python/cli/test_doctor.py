"""``python -m trireme doctor``: who hangs and who died, seen from outside."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trireme.__main__ import main

from harness.meeting import process_of, say, state_of, stay_until, tell_process, until
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs it like a user: in a process of its own that has no group."""
    command = [sys.executable, "-m", "trireme", "doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def get_lost(rank: int) -> None:
    dist.init_process_group("trireme")
    dist.all_reduce(torch.ones(5))
    if rank > 0:
        tell_process(rank)
        os.kill(os.getpid(), signal.SIGSTOP if rank == 1 else signal.SIGKILL)
        dist.all_reduce(torch.ones(7))
        return
    stopped, killed = (process_of(other) for other in (1, 2))
    until(lambda: state_of(stopped) == "T" and state_of(killed) == "Z")
    done = doctor("--history", 3, os.getpid())
    assert done.returncode == 1, done
    verdict = next(line for line in done.stdout.splitlines() if "TROUBLE" in line)
    last = "has finished collective 1, all_reduce of 5 float32 by SUM"
    assert f"rank 1 (process {stopped}, stopped) {last}" in verdict
    assert f"rank 2 (process {killed}, gone) has died: it {last}" in verdict
    assert done.stdout.count("finished collective 1") == 5
    assert f"next: kill -CONT {stopped} " in done.stdout
    os.kill(stopped, signal.SIGKILL)


def test_a_stopped_and_a_killed_rank_are_named() -> None:
    run_ranks(get_lost, 3, timeout=60, dying=(1, 2))


@on_shm_ranks(3, timeout=110, patience_s=100)
def test_a_rank_that_holds_up_the_others(rank: int) -> None:
    """Rank 1 is stopped in front of the collective in which the others wait, and two doctors come
    one after the other, which on a busy machine takes a while."""
    dist.all_reduce(torch.ones(5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped = process_of(1)
    if rank == 0:
        until(lambda: state_of(stopped) == "T")
    work = dist.all_reduce(torch.ones(7), async_op=True)
    if rank == 0:
        stay_until("2 is in")
        until(lambda: "ranks 0, 2 wait in it" in doctor(os.getpid()).stdout)
        done = doctor("--json", os.getpid())
        os.kill(stopped, signal.SIGCONT)
        assert done.returncode == 1
        (group,) = json.loads(done.stdout)["groups"]
        assert not group["is_well"]
        assert (
            f"rank 1 (process {stopped}, stopped) has not entered collective 2"
            in (group["verdict"])
        )
        assert [seen["rank"] for seen in group["ranks"]] == [0, 1, 2]
        assert [seen["behind"] for seen in group["ranks"]] == [0, 1, 0]
        assert [seen["process"] for seen in group["ranks"]][1] == "stopped"
        assert [len(seen["operations"]) for seen in group["ranks"]] == [1, 1, 1]
    if rank == 2:
        say("2 is in")
    work.wait()


def stay(rank: int, folder: str) -> None:
    dist.init_process_group("trireme")
    dist.barrier()
    Path(folder, f"{os.getpid()}").touch()
    until(lambda: Path(folder, "done").exists())
    dist.destroy_process_group()


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["trireme", "doctor", *map(str, arguments)])
    return main()


def test_two_jobs_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    with ThreadPoolExecutor() as threads:
        jobs = []
        for folder in folders:
            folder.mkdir()
            jobs.append(threads.submit(run_ranks, stay, 2, str(folder)))
        try:
            until(lambda: all(len(list(folder.iterdir())) == 2 for folder in folders))
            pids = [{int(path.name) for path in folder.iterdir()} for folder in folders]
            assert run_main(monkeypatch, "--json", *set.union(*pids)) == 0
            groups = json.loads(capsys.readouterr().out)["groups"]
            seen = [{rank["pid"] for rank in group["ranks"]} for group in groups]
            assert sorted(map(sorted, seen)) == sorted(map(sorted, pids))
            assert all(group["is_well"] for group in groups)

            assert run_main(monkeypatch, min(pids[0])) == 0
            text = capsys.readouterr().out
            assert "group 1 of 1: 2 of 2 ranks seen on this host" in text
            assert f"(in {Path.cwd()})" in text
            assert "ok: nobody is inside a collective; the last was collective 1, barrier" in text
        finally:
            for folder in folders:
                (folder / "done").touch()
        for job in jobs:
            job.result()


def test_patience_is_a_number_of_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--patience", "inf", os.getpid()) == 0
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, "--patience", "nan", os.getpid())
    assert "--patience: got nan, expected 0 seconds or more" in capsys.readouterr().err


def test_no_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # This process may still hold the group of an earlier test.
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            assert run_main(monkeypatch, other.pid) == 0
        finally:
            other.kill()
    assert capsys.readouterr().out == f"no Trireme group of process {other.pid} on this host\n"


def test_a_process_that_may_not_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trireme import _C

    refused = [{"pid": 1, "why": "Permission denied"}]
    advices = {"hidden": "as the user of the job or as root", "sealed": "kernel.yama"}
    for kind, advice in advices.items():
        found = {"groups": [], "hidden": [], "sealed": [], kind: refused}
        monkeypatch.setattr(_C, "examine_host", lambda *_, found=found: dict(found))
        assert run_main(monkeypatch, 1) == 2
        text = capsys.readouterr().out
        assert "process 1 (Permission denied)" in text and advice in text, text


def test_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trireme import _C

    def seen(rank: int, process: str, command: str) -> dict[str, Any]:
        texts = dict.fromkeys(("failure", "abandoned", "waits_for"), "")
        where = {"rank": rank, "pid": 100 + rank, "process": process, "state": "here"}
        said = {"step": "in step 4", "deposits": "round 3 of deposits, the gradient of 'w'"}
        rest = {"command": command, "folder": "/job", "behind": 0, "waits_s": 0, "operations": []}
        return {**where, **said, **rest, **texts}

    ranks = [
        seen(0, "sleeping", "/usr/bin/python3 train.py --lr 1"),
        seen(1, "stopped", "/usr/bin/python3 train.py --lr 1"),
        seen(2, "running", "./train"),
    ]
    group = {"world": 3, "ranks": ranks, "verdict": "all hang", "is_well": False}
    group["suspects"] = [100, 101, 102]
    found = {"groups": [group], "hidden": [], "sealed": []}
    monkeypatch.setattr(_C, "examine_host", lambda *_: found)
    assert run_main(monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines[1:3]] == [
        "/usr/bin/python3 train.py --lr 1   (in /job)",
        "./train   (in /job)",
    ]
    assert lines[3].endswith("in step 4; round 3 of deposits, the gradient of 'w'")
    assert [line.split("next: ")[1].split("   ")[0] for line in lines if "next: " in line] == [
        "py-spy dump --pid 100",
        "kill -CONT 101",
        "gdb -p 102 -batch -ex 'thread apply all bt'",
    ]


def test_a_command_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trireme"])
    with pytest.raises(SystemExit, match="2"):
        main()
