"""Numbered checkpoints: the last ones stay, damaged ones give way, a run goes on where it was."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import Checkpoints, GlobalBatch

from harness.faults import RANKLESS_FORM, raises
from harness.interpreters import Interpreter
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from saving.ranks import flip, run_on_ranks

FILE = "model-00001-of-00001.safetensors"


def _made(folder: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Checkpoints]:
    torch.manual_seed(1)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, Checkpoints(folder, model, optimizer, **{"every": 2, **options})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_ones_stay(asynchronous: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model, optimizer, saves = _made(folder, asynchronous=asynchronous)
    assert saves.load_latest() is None
    for done in range(1, 10):
        _step(model, optimizer)
        saved = saves.step(done, {"done": done})
        assert (saved is not None) == (done % 2 == 0)
    saves.wait()
    assert _names(folder) == ["step-0000000006", "step-0000000008"]
    _step(model, optimizer)
    pending = saves.save(10)
    assert pending is not None
    pending.wait()
    assert _names(folder) == ["step-0000000008", "step-0000000010"]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    _step(model, optimizer)
    del saves
    model, optimizer, saves = _made(folder)
    start = saves.load_latest()
    assert start is not None and (start.step, start.extra, start.warnings) == (10, {}, [])
    assert start.path == str(folder / "step-0000000010")
    for name, value in model.state_dict().items():
        assert_bits(value, expected[name], name)
    assert trireme.load_checkpoint(folder / "step-0000000008", model)["extra"] == {"done": 8}


def _damage_index(path: Path) -> None:
    flip(path / "model.safetensors.index.json", 60)


def _damage_tensors(path: Path) -> None:
    flip(path / FILE, -1)


def _damage_random(path: Path) -> None:
    flip(path / "random-00001-of-00001.safetensors", -1)


def _damage_missing(path: Path) -> None:
    (path / "optimizer.json").unlink()


DAMAGES = (_damage_index, _damage_tensors, _damage_random, _damage_missing)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_gives_way(damage: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model, optimizer, saves = _made(folder, asynchronous=False)
    for done in (2, 4):
        _step(model, optimizer)
        saves.step(done)
    newest = folder / "step-0000000004"
    damage(newest)
    kept = {path.name: path.read_bytes() for path in newest.iterdir()}
    with pytest.warns(UserWarning, match="step-0000000004' is left out"):
        start = saves.load_latest()
    assert start is not None and start.step == 2
    assert len(start.warnings) == 1 and "step-0000000004" in start.warnings[0]
    _step(model, optimizer)
    saves.step(4)
    _step(model, optimizer)
    saves.step(6)
    aside = folder / "step-0000000004.damaged"
    assert _names(folder) == ["step-0000000004", aside.name, "step-0000000006"]
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == kept
    start = saves.load_latest()
    assert start is not None and (start.step, start.warnings) == (6, [])


def test_none_that_is_whole_is_no_start_at_0(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, _, saves = _made(folder, asynchronous=False)
    saves.save(2)
    flip(folder / "step-0000000002" / FILE, -1)
    (folder / "step-0000000004").mkdir()
    with (
        pytest.warns(UserWarning, match="is left out"),
        raises(ValueError, "got no whole checkpoint", "step-0000000002", "step-0000000004"),
    ):
        saves.load_latest()


def test_a_model_of_other_names_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, _, saves = _made(folder, asynchronous=False)
    saves.save(2)
    saves.save(4)
    del saves
    other = Checkpoints(folder, nn.Linear(2, 2), every=1)
    with raises(ValueError, "step-0000000004", "a checkpoint without 'weight'"):
        other.load_latest()
    assert _names(folder) == ["step-0000000002", "step-0000000004"]


def test_only_folders_of_ours_are_deleted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    _, _, saves = _made(folder, asynchronous=False, keep=1)
    saves.save(2)
    (folder / "step-0000000002" / "notes.txt").write_text("mine")
    shutil.copytree(folder / "step-0000000002", tmp_path / "copy")
    saves.save(4)
    assert "an old checkpoint stays" in capfd.readouterr().err
    assert (folder / "step-0000000002" / "notes.txt").read_text() == "mine"
    saves.save(5)
    assert _names(folder) == ["notes.txt", "step-0000000002", "step-0000000005"]
    (folder / "step-0000000002" / "notes.txt").unlink()
    (folder / "step-0000000006.saving").mkdir()  # what an interrupted save has left
    saves.save(8)
    assert _names(folder) == ["notes.txt", "step-0000000008"]
    (folder / "step-0000000010").mkdir()
    (folder / "step-0000000010" / "other.bin").write_text("another program's")
    with raises(ValueError, "found 'other.bin' in it"):
        saves.save(10)
    assert (folder / "step-0000000010" / "other.bin").exists()
    (tmp_path / "link").symlink_to(folder)
    with raises(ValueError, "got a second Checkpoints"):
        _made(tmp_path / "link")
    del saves
    _, _, saves = _made(tmp_path / "link", asynchronous=False)
    saves.save(12)
    assert "step-0000000012" in _names(folder)


class NoJson:
    def state_dict(self) -> dict[str, Any]:
        return {"a": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_bad_input(tmp_path: Path) -> None:
    for options, kind, part in (
        ({"every": 0}, ValueError, "got every=0"),
        ({"every": 1.5}, TypeError, "every is float"),
        ({"keep": 0}, ValueError, "got keep=0"),
        ({"on_error": "print"}, ValueError, "got on_error='print'"),
        ({"stateful": {"a": 3}}, TypeError, "got 'a' of int"),
        ({"batches": 3}, TypeError, "got 'batches' of int"),
    ):
        with pytest.raises(kind, match=part):
            _made(tmp_path / "run", **options)
    (tmp_path / "file").write_text("mine")
    with raises(ValueError, "which is no folder"):
        _made(tmp_path / "file")
    _, _, saves = _made(tmp_path / "run", stateful={"it": NoJson()})
    with raises(ValueError, "got n=-1", form=RANKLESS_FORM):
        saves.step(-1)
    with raises(TypeError, "the state of 'it'", "which JSON cannot say"):
        saves.save(2)
    assert not (tmp_path / "run").exists()
    with raises(ValueError, "got a second Checkpoints"):
        _made(tmp_path / "run")


def test_states_and_batches(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def make() -> tuple[Any, Any, GlobalBatch, Checkpoints]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        batches = GlobalBatch(10, 3, seed=4)
        parts = {"scheduler": scheduler}
        saves = Checkpoints(folder, model, optimizer, batches, every=3, stateful=parts)
        return optimizer, scheduler, batches, saves

    optimizer, scheduler, batches, saves = make()
    for part in batches.steps(0, 5):
        optimizer.step()
        scheduler.step()
        saves.step(part.number + 1)
    saves.wait()
    del saves
    optimizer, scheduler, batches, saves = make()
    start = saves.load_latest()
    assert start is not None and start.step == 3
    assert batches.state_dict()["next_step"] == 3
    assert scheduler.last_epoch == 3 and optimizer.param_groups[0]["lr"] == 0.1
    del saves
    model = mlp()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with raises(ValueError, "stateful ['scheduler'], expected []"):
        Checkpoints(folder, model, plain, every=3).load_latest()
    with raises(ValueError, "seed=4", "seed=5"):
        other = GlobalBatch(10, 3, seed=5)
        parts = {"scheduler": torch.optim.lr_scheduler.StepLR(plain, 2)}
        Checkpoints(folder, model, plain, other, every=3, stateful=parts).load_latest()


def _draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]


@on_shm_ranks("world")
def _save_random(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)
    saves = Checkpoints(folder, trireme.DistributedDataParallel(mlp()), every=1)
    _draw()
    saves.save(1)
    saves.wait()
    told = json.dumps(_draw())
    (folder / f"draw{rank}").write_text(told)


@on_shm_ranks("world")
def _load_random(rank: int, world: int, folder: Path, same: bool) -> None:
    saves = Checkpoints(folder, trireme.DistributedDataParallel(mlp()), every=1)
    if same:
        start = saves.load_latest()
        assert start is not None and start.warnings == []
        assert _draw() == json.loads((folder / f"draw{rank}").read_text())
        return
    if rank == 0:
        with pytest.warns(UserWarning, match="random numbers begin anew"):
            start = saves.load_latest()
    else:
        start = saves.load_latest()
    assert start is not None and "random numbers begin anew" in start.warnings[0]


def test_random_states_of_all_ranks(tmp_path: Path) -> None:
    _save_random(world=2, folder=tmp_path)
    _load_random(world=2, folder=tmp_path, same=True)
    _load_random(world=3, folder=tmp_path, same=False)


class Dropped(nn.Module):
    """Uneven rows, dropout, a buffer that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x))))


DATA = torch.linspace(-2, 2, 6 * 50).view(50, 6).sin()


def _run(folder: Path, last: int, *, keep: int = 2, every: int = 3) -> dict[str, torch.Tensor]:
    """Trains up to ``last`` steps, from the newest checkpoint on."""
    model = Dropped()
    net = trireme.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    batches = GlobalBatch(50, 16, seed=9)
    torch.manual_seed(100 + dist.get_rank())
    saves = Checkpoints(folder, net, optimizer, batches, every=every, keep=keep)
    start = saves.load_latest()
    for part in batches.steps(start.step if start else 0, last):
        optimizer.zero_grad()
        loss = net(DATA[part.rows]).square().mean()
        (loss * part.weight).backward()
        optimizer.step()
        saves.step(part.number + 1)
    saves.wait()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _same_bits(rank: int, tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", 11)
    without = _run(tmp_path / "without", 11, every=1000)
    for last in (2, 5, 9, 11):
        pieces = _run(tmp_path / "pieces", last)
    for name, value in whole.items():
        assert_bits(without[name], value, name)  # a save costs training nothing
        assert_bits(pieces[name], value, name)


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_on_ranks(world=2, program=_same_bits, case={"tmp_path": tmp_path})


SOAK = """
import sys, torch, trireme
from torch import nn
folder = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
saves = trireme.Checkpoints(folder, model, optimizer, every=2, keep=2)
start = saves.load_latest()
print("begun", flush=True)
for step in range(start.step if start else 0, 100000):
    optimizer.zero_grad()
    model(torch.ones(8, 64) * step % 7).square().mean().backward()
    optimizer.step()
    saves.step(step + 1, {"step": step + 1})
    if step % 4 == 3: print(step, flush=True)
"""


def test_a_whole_checkpoint_is_there_after_each_kill(tmp_path: Path) -> None:
    """A soak: killed at any moment, started again, killed again."""
    folder = tmp_path / "run"
    drawn = random.Random(3)
    last = 0
    for _ in range(3):
        process = Interpreter(SOAK, folder)
        for _ in range(drawn.randint(3, 12)):
            process.stdout.readline()
        process.kill()
        process.communicate()
        model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        saves = Checkpoints(folder, model, optimizer, every=2)
        start = saves.load_latest()
        assert start is not None and start.warnings == [] and start.extra == {"step": start.step}
        assert start.step > last
        last = start.step
        del saves


@pytest.mark.parametrize("on_error", ["raise", "log"])
def test_a_save_that_fails(on_error: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model, optimizer, saves = _made(folder, on_error=on_error, every=1)
    saves.step(1)
    saves.wait()
    (folder / "step-0000000002").write_text("in the way")
    _step(model, optimizer)
    saves.step(2)
    if on_error == "raise":
        with raises(ValueError, "found a file"):
            saves.step(3)
        for fails in (False, True):
            if fails:
                saves.step(2)
                with raises(ValueError, "found a file"):
                    saves.wait()
            start = saves.load_latest()  # who has heard of the error goes back
            assert start is not None and start.step == 1
        saves.step(3)
    else:
        with pytest.warns(UserWarning, match="a save has failed, and training goes on"):
            saves.step(3)
    saves.wait()
    assert _names(folder) == ["step-0000000001", "step-0000000002", "step-0000000003"]
