"""A save beside training is one of the moment of its call, and costs training nothing else."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
import trireme.ps
from torch import nn

from harness.deaths import Death, assert_seen_soon, die, run_deaths
from harness.faults import RANKLESS_FORM, note_death, raises
from harness.interpreters import Interpreter, run_interpreters
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from saving.file_limit import die_behind, failing_behind
from saving.ranks import CASES, assert_holds, held, load, make, on_disk, run_on_ranks, save

FILE = "model-00001-of-00001.safetensors"


def _big() -> nn.Module:
    """Some blocks of 1 MiB, so that steps meet a save on its way."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 700), nn.BatchNorm1d(700), nn.Linear(700, 900))


def _same_as_a_synchronous_save(
    rank: int, strategy: str, optimizer_class: Any, tmp_path: Path
) -> None:
    defaults = {} if optimizer_class is not torch.optim.SGD else {"momentum": 0.9}
    one = make(strategy, optimizer_class, **defaults)
    two = make(strategy, optimizer_class, **defaults)
    pending = []
    for step in range(6):
        if step % 2 == 0:
            beside = str(tmp_path / f"beside{step}")
            pending.append(save(one, beside, asynchronous=True, extra={"step": step}))
            save(two, str(tmp_path / f"now{step}"))
        one.train(step)
        two.train(step)
    for at in pending:
        at.wait()
        assert at.done() and at.stall_ms > 0
    assert_holds(one, held(two))  # a save changes nothing of training
    if dist.is_initialized():
        dist.barrier()
    for step in (0, 2, 4):
        saved, expected = (
            on_disk(str(tmp_path / f"beside{step}")),
            on_disk(str(tmp_path / f"now{step}")),
        )
        assert saved.keys() == expected.keys()
        for name, value in expected.items():
            assert_bits(saved[name], value, f"{name} of step {step}")
    other = make(strategy, optimizer_class, elsewhere=True, **defaults)
    assert load(other, str(tmp_path / "beside4")) == {"step": 4}


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_it_has_the_bits_of_a_synchronous_save(strategy: str, world: int, tmp_path: Path) -> None:
    for optimizer_class in (torch.optim.AdamW, trireme.optim.AdamW, torch.optim.SGD):
        if strategy == "plain" and optimizer_class is not torch.optim.AdamW:
            continue
        case = {
            "strategy": strategy,
            "optimizer_class": optimizer_class,
            "tmp_path": tmp_path / optimizer_class.__module__ / optimizer_class.__name__,
        }
        case["tmp_path"].mkdir(parents=True)
        run_on_ranks(world=world, program=_same_as_a_synchronous_save, case=case)


def test_what_follows_the_call_is_not_saved(tmp_path: Path) -> None:
    model = _big()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    group = optimizer.param_groups[0]
    extra = {"epoch": 1}
    pending = trireme.save_checkpoint(
        tmp_path / "ck", model, optimizer, extra=extra, asynchronous=True
    )
    extra["epoch"] = 2
    group["lr"] = 7.0
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    with trireme.writing(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.to(torch.float64)
    del model, parameter
    gc.collect()
    pending.wait()
    other = _big()
    stepping = torch.optim.AdamW(other.parameters())
    assert trireme.load_checkpoint(tmp_path / "ck", other, stepping) == {"epoch": 1}
    assert stepping.param_groups[0]["lr"] == 0.1
    for name, value in other.state_dict().items():
        assert_bits(value, expected[name], name)
    assert pending.written_bytes > sum(value.nbytes for value in expected.values())
    assert pending.path == str(tmp_path / "ck")


def test_a_load_waits_for_what_is_read(tmp_path: Path) -> None:
    model = _big()
    trireme.save_checkpoint(tmp_path / "before", model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
    trireme.load_checkpoint(tmp_path / "before", model)
    pending.wait()
    saved = on_disk(str(tmp_path / "ck"))
    for name, value in expected.items():
        assert_bits(saved[name], value, name)


def test_an_unannounced_write_fails_the_save(tmp_path: Path) -> None:
    model = _big()
    trireme.save_checkpoint(tmp_path / "ck", model)
    before = on_disk(str(tmp_path / "ck"))
    failed = 0
    for _ in range(50):
        pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
        with torch.no_grad():
            for parameter in reversed(list(model.parameters())):
                parameter.add_(1)
        try:
            pending.wait()
        except RuntimeError as error:
            assert "was written while it was being saved" in str(error)
            failed += 1
            break
        before = on_disk(str(tmp_path / "ck"))
    assert failed == 1
    after = on_disk(str(tmp_path / "ck"))
    for name, value in before.items():
        assert_bits(after[name], value, name)
    pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
    pending.wait()  # that error was fetched


def test_errors_come_by_wait_and_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model = mlp()
    pending = trireme.save_checkpoint(tmp_path / "file", model, asynchronous=True)
    for _ in range(2):
        with raises(ValueError, "found a file"):
            pending.wait()
    assert pending.done()
    trireme.save_checkpoint(tmp_path / "file", model, asynchronous=True)
    with raises(ValueError, "found a file"):
        trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
    trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True).wait()
    trireme.save_checkpoint(tmp_path / "file", model, asynchronous=True)
    with raises(ValueError, "found a file"):
        trireme.save_checkpoint(tmp_path / "ck", model)
    with raises(TypeError, "`extra`"):
        trireme.save_checkpoint(tmp_path / "ck", model, extra={1: 2}, asynchronous=True)  # type: ignore[dict-item]
    trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True).wait()


@on_shm_ranks(2)
def test_a_relative_path_is_that_of_the_call(rank: int, tmp_path: Path) -> None:
    """Wherever the process works when the save begins to write, which it does with rank 1's."""
    model, before = mlp(), Path.cwd()
    trireme.save_checkpoint(tmp_path / "first", model, asynchronous=True).wait()
    if rank == 1:
        dist.barrier()
    os.chdir(tmp_path)
    try:
        pending = trireme.save_checkpoint("ck", model, asynchronous=True)
    finally:
        os.chdir(before)
    if rank == 0:
        dist.barrier()
    pending.wait()
    assert on_disk(str(tmp_path / "ck")).keys() == on_disk(str(tmp_path / "first")).keys()


def test_a_synchronous_save_is_done(tmp_path: Path) -> None:
    pending = trireme.save_checkpoint(tmp_path / "ck", mlp())
    assert isinstance(pending, trireme.PendingSave)
    assert pending.done() and pending.written_bytes > 0 and "done=True" in repr(pending)
    pending.wait(timeout=0)


@on_shm_ranks(2)
def test_a_wait_that_is_over(rank: int, tmp_path: Path) -> None:
    model = mlp()
    trireme.save_checkpoint(tmp_path / "first", model, asynchronous=True).wait()
    if rank == 0:
        pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
        with raises(TimeoutError, "is not done after 0.05 s", form=RANKLESS_FORM):
            pending.wait(0.05)
        assert not pending.done()
    dist.barrier()
    if rank == 1:
        pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
    pending.wait()


@on_shm_ranks(2)
def test_a_rank_that_cannot_save_tells_the_others(rank: int, tmp_path: Path) -> None:
    model = mlp()
    extra: Any = {1: 2} if rank == 0 else None
    if rank == 0:
        with raises(TypeError, "`extra`"):
            trireme.save_checkpoint(tmp_path / "ck", model, extra=extra, asynchronous=True)
    else:
        pending = trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True)
        with raises(ValueError, "rank 0 could not go on", "`extra`"):
            pending.wait()
    trireme.save_checkpoint(tmp_path / "ck", model, asynchronous=True).wait()


@on_shm_ranks(3)
def test_a_disk_that_is_full_for_one_rank(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    training = make("zero2", make_model=mlp)
    training.train(0)
    save(training, path, asynchronous=True).wait()  # the first one makes memory to share
    expected = held(training)
    for culprit in (0, 2):
        training.train(1)
        told = "cannot " if rank == culprit else f"rank {culprit} could not go on: "
        with failing_behind(1000) if rank == culprit else nullcontext():
            pending = save(training, path, asynchronous=True)
            training.train(2)  # nothing is told before it is asked
            parts = (told, "File too large", "bytes needed", "free", ".safetensors")
            with raises(RuntimeError, *parts):
                pending.wait()
        dist.barrier()
        assert os.listdir(tmp_path) == ["checkpoint"]
    load(training, path)
    assert_holds(training, expected)
    save(training, path, asynchronous=True).wait()


def _die_once_it_is_there(file: Path) -> None:
    while not file.exists():
        pass
    die()


def _outlive(rank: int, culprit: int, moment: str, folder: Path) -> None:
    path = folder / f"rank {culprit}, {moment}"
    model = nn.Linear(200, 200)
    values_bytes = sum(value.nbytes for value in model.parameters())
    extra = {"text": "long " * values_bytes}  # rank 0 writes it when it commits
    nn.init.constant_(model.weight, 1)
    trireme.save_checkpoint(path, model, extra=extra, asynchronous=True).wait()
    nn.init.constant_(model.weight, 2)
    dies = rank == culprit
    if dies and moment == "call":
        die()
    if dies and (moment == "writing" or rank == 0):
        die_behind(values_bytes // 2 if moment == "writing" else 2 * values_bytes)
        note_death()
    elif dies:  # the index is the last file of a commit
        index = path.with_name(f"{path.name}.saving") / "model.safetensors.index.json"
        threading.Thread(target=_die_once_it_is_there, args=(index,)).start()
    pending = trireme.save_checkpoint(path, model, extra=extra, asynchronous=True)
    try:
        pending.wait()
        assert moment == "commit" and culprit > 0, "nobody was missed"
    except dist.DistBackendError as error:
        assert f"rank {culprit}" in str(error), error
        assert_seen_soon()
    if dies:  # the commit was over before its file was seen
        die()
    if moment == "call":
        assert sorted(os.listdir(folder)) == [path.name]
    weight = on_disk(str(path))["weight"]
    assert torch.equal(weight, torch.full_like(weight, float(weight[0, 0])))
    assert trireme.load_checkpoint(path, model, process_group=my_own_group(rank)) == extra


def my_own_group(rank: int) -> Any:
    return dist.new_group([rank], use_local_synchronization=True)


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """Before the call of a save, while it writes, and while rank 0 commits; also rank 0."""
    deaths = [Death(1, (1, moment, tmp_path)) for moment in ("call", "writing", "commit")]
    run_deaths(
        _outlive,
        2,
        [*deaths, Death(0, (0, "writing", tmp_path)), Death(0, (0, "commit", tmp_path))],
    )


@on_shm_ranks(2)
def test_a_save_inside_no_sync_and_of_two_groups(rank: int, tmp_path: Path) -> None:
    training = make("ddp", make_model=mlp)
    alone = my_own_group(rank)
    with training.net.no_sync():  # type: ignore[operator]
        training.net(torch.ones(2, 6)).sum().backward()
        one = save(training, str(tmp_path / "ck"), asynchronous=True)
        mine = str(tmp_path / f"mine{rank}")
        two = trireme.save_checkpoint(mine, mlp(), process_group=alone, asynchronous=True)
    training.train(1)
    one.wait()
    two.wait()
    assert on_disk(mine).keys() == on_disk(str(tmp_path / "ck")).keys() & on_disk(mine).keys()


PROGRAM = """
import os, sys, torch, trireme
from torch import nn
torch.set_num_threads(1)  # a pool of threads is not there in a child
model = nn.Linear(300, 300)
path, how = sys.argv[1:]
trireme.save_checkpoint(path, model)
with torch.no_grad():
    model.weight.fill_(7)
pending = trireme.save_checkpoint(path, model, asynchronous=True)
if how == "fork":
    child = os.fork()
    if child == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
        try:
            pending.wait()
        except ValueError as error:
            os._exit(0 if "in a forked child" in str(error) else 3)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
if how == "error":
    (lambda: 1 / 0)()
if how == "unfetched":
    pending.wait()
    open(path + "x", "w").close()
    trireme.save_checkpoint(path + "x", model, asynchronous=True)
if how == "dropped":
    del pending
"""


@pytest.mark.parametrize("how", ["end", "fork", "dropped", "unfetched", "error"])
def test_the_end_of_a_program_waits(how: str, tmp_path: Path) -> None:
    program = Interpreter(PROGRAM, tmp_path / "ck", how)
    ((code, _, errors),) = run_interpreters([program], timeout=60)
    assert (code == 0) == (how != "error"), errors
    assert not (tmp_path / "ck.saving").exists()
    weight = on_disk(str(tmp_path / "ck"))["weight"]
    if how != "error":
        assert torch.equal(weight, torch.full((300, 300), 7.0))
    assert ("nobody has called its wait()" in errors) == (how == "unfetched")


def test_a_parameter_server_refuses_it(tmp_path: Path) -> None:
    server: Callable[..., Any] = trireme.ps.ParameterServer.save
    with pytest.raises(ValueError, match="asynchronous"):
        server(None, tmp_path, asynchronous=True)
