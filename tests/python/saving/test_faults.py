"""What is not whole, or another model's, is refused by name; a failed save costs nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from saving.file_limit import failing_behind
from saving.ranks import assert_holds, held, load, make, on_disk, save

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def _refused(rank: int, path: str, *parts: str, damage: Any) -> None:
    """``damage`` is done by rank 0; all ranks raise, and the model is as it was."""
    for strategy in ("ddp", "fsdp"):
        training = make(strategy, make_model=mlp)
        training.train(0)
        save(training, path, max_file_bytes=400)
        training.train(1)
        before = held(training)
        if rank == 0:
            damage(Path(path))
        dist.barrier()
        with raises(ValueError, *parts):
            load(training, path)
        assert_holds(training, before)
        training.train(2)  # the group is whole, too
        if rank == 0:
            shutil.rmtree(path)
        dist.barrier()


@on_shm_ranks(2)
def test_files_missing_cut_and_swapped(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")

    def cut(folder: Path) -> None:
        with (folder / SECOND).open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 8)

    def damage_index(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')

    held_first = ("'0.bias' and ", " more")
    _refused(rank, path, "no file", FIRST, *held_first, damage=lambda at: (at / FIRST).unlink())
    _refused(rank, path, SECOND, "which holds '", "bytes", "expected", damage=cut)
    _refused(rank, path, "got no usable JSON", damage=damage_index)
    if rank == 0:  # alone: `other` is saved by one rank
        alone = tmp_path / "alone"
        group = dist.new_group([0], use_local_synchronization=True)
        model = mlp()
        trireme.save_checkpoint(alone, model, max_file_bytes=400, process_group=group)
        trireme.save_checkpoint(tmp_path / "other", model, max_file_bytes=400, process_group=group)
        shutil.copy(tmp_path / "other" / FIRST, alone / FIRST)
        try:
            trireme.load_checkpoint(alone, model, process_group=group)
        except ValueError as error:
            text = str(error)
        assert "a file of another save" in text and FIRST in text and "'0.bias'" in text


@on_shm_ranks(2)
def test_a_file_that_one_rank_does_not_see(rank: int, tmp_path: Path) -> None:
    """Its own disk: both ranks are told, and by which rank."""
    mine = tmp_path / "host0"
    trireme.save_checkpoint(mine, mlp())
    other = tmp_path / "host1"
    if rank == 0:
        shutil.copytree(mine, other)
        (other / "model-00001-of-00001.safetensors").unlink()
    dist.barrier()
    told = "no file" if rank == 1 else "rank 1 could not go on"
    with raises(ValueError, told, "'0.bias'", "(rank 1 of 2)"):
        trireme.load_checkpoint(mine if rank == 0 else other, mlp())
    again = tmp_path / "again"
    trireme.save_checkpoint(again, mlp())
    with raises(ValueError, "another checkpoint on rank 1 than on rank 0"):
        trireme.load_checkpoint(mine if rank == 0 else again, mlp())


@on_shm_ranks(2)
def test_the_checkpoint_of_another_model(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    save(make("ddp", make_model=mlp), path)

    def other(**changed: nn.Module) -> nn.Module:
        model = mlp()
        for name, module in changed.items():
            setattr(model, name, module)
        return model

    for model, parts in (
        (other(**{"4": nn.Linear(5, 4)}), ("'4.weight' as Float of sizes [3, 5]", "[4, 5]")),
        (other(**{"2": nn.Linear(13, 5)}), ("without '2.bias'",)),
        (other(**{"4": nn.Tanh()}), ("'4.bias'", "which the model does not have")),
        (mlp(torch.bfloat16), ("'0.weight' as Float", "expected BFloat16")),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with raises(ValueError, *parts):
            trireme.load_checkpoint(path, model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])


@on_shm_ranks(2)
def test_the_optimizer_of_other_groups(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    save(make("ddp", make_model=mlp), path)
    model = mlp()
    some = torch.optim.AdamW(list(model.parameters())[:-1])
    with raises(ValueError, "got an optimizer with '4.bias' in group 0"):
        trireme.load_checkpoint(path, model, some)
    two = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    with raises(ValueError, "'0.bias' in group 0"):
        trireme.load_checkpoint(path, model, two)
    with raises(ValueError, "is no parameter of the model"):
        trireme.save_checkpoint(path, mlp(), some)


@on_shm_ranks(2)
def test_ranks_of_different_models(rank: int, tmp_path: Path) -> None:
    with raises(ValueError, "'2.weight'", "on rank 1 and as", "on rank 0"):
        model = mlp()
        if rank == 1:
            model[2] = nn.Linear(13, 4, bias=False)
        trireme.save_checkpoint(tmp_path / "checkpoint", model)
    assert not (tmp_path / "checkpoint").exists()


@on_shm_ranks(3)
def test_a_rank_that_cannot_write(rank: int, tmp_path: Path) -> None:
    """The one that makes the files, and one that writes its part: the one before is there."""
    path = str(tmp_path / "checkpoint")
    training = make("zero2", make_model=mlp)
    training.train(0)
    save(training, path)
    expected = held(training)
    training.train(1)
    for culprit in (0, 2):
        told = "cannot " if rank == culprit else f"rank {culprit} could not go on: "
        parts = (told, "File too large", ".safetensors", f"rank {culprit} of 3")
        disk = failing_behind(1000) if rank == culprit else nullcontext()
        with disk, raises(RuntimeError, *parts):
            save(training, path)
        dist.barrier()  # rank 0 has cleaned up
        assert os.listdir(tmp_path) == ["checkpoint"]
        assert on_disk(path).keys() == expected.keys()
    load(training, path)
    assert_holds(training, expected)
    training.train(1)
    save(training, path)
    assert_holds(training, held(training))


@on_shm_ranks(2, dying=[1])
def test_a_rank_that_dies_in_a_save(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    trireme.save_checkpoint(path, mlp())
    dist.barrier()
    if rank == 1:
        os._exit(1)
    with raises(dist.DistBackendError, "rank 1"):
        trireme.save_checkpoint(path, nn.Linear(2, 2))
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert "0.weight" in on_disk(path)


def test_two_saves_into_one_path(tmp_path: Path) -> None:
    """What another process, here this one, is writing is not what an interrupted save has left."""
    path = tmp_path / "checkpoint"
    for is_there in (False, True):
        folder = path if is_there else tmp_path / "checkpoint.saving"
        if not is_there:
            folder.mkdir()
        other = os.open(folder, os.O_RDONLY)
        fcntl.flock(other, fcntl.LOCK_EX)
        for asynchronous in (False, True):
            with raises(ValueError, f"'{path}', into which another save is writing"):
                trireme.save_checkpoint(path, mlp(), asynchronous=asynchronous).wait()
        os.close(other)
        trireme.save_checkpoint(path, mlp())
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_two_threads_save_into_one_path(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    done: list[int] = []
    other_errors: list[BaseException] = []

    def save_often(value: float) -> None:
        model = nn.Linear(30, 30)
        with torch.no_grad():
            model.weight.fill_(value)
        while len(done) < 20 and not other_errors:
            try:
                trireme.save_checkpoint(path, model)
                done.append(1)
                weight = on_disk(str(path))["weight"]
                assert torch.equal(weight, torch.full_like(weight, float(weight[0, 0])))
            except ValueError as error:
                if "into which another save is writing" not in str(error):
                    other_errors.append(error)
            except BaseException as error:
                other_errors.append(error)

    threads = [threading.Thread(target=save_often, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not other_errors, other_errors
    trireme.save_checkpoint(path, nn.Linear(30, 30))
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_path_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with raises(ValueError, "found 'notes.txt' in it"):
        trireme.save_checkpoint(tmp_path, mlp())
    with raises(ValueError, "found a file"):
        trireme.save_checkpoint(tmp_path / "notes.txt", mlp())
    with raises(ValueError, "got no folder"):
        trireme.load_checkpoint(tmp_path / "nothing", mlp())
    with raises(ValueError, "got no file", "model.safetensors.index.json"):
        trireme.load_checkpoint(tmp_path, mlp())
    assert (tmp_path / "notes.txt").read_text() == "mine"


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}


def test_modules_and_states_that_are_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with raises(ValueError, "got '0' with a get_extra_state()"):
        trireme.save_checkpoint(path, nn.Sequential(Extra(2, 2)))
    model = mlp().requires_grad_(False)
    model[0].to(torch.complex128)
    with raises(ValueError, "'0.weight' as ComplexDouble", "safetensors has no name"):
        trireme.save_checkpoint(path, model)
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    optimizer.param_groups[0]["odd"] = json
    with raises(TypeError, "'odd' of a parameter group"):
        model = mlp()
        optimizer.param_groups[0]["params"] = list(model.parameters())
        trireme.save_checkpoint(path, model, optimizer)
    with raises(ValueError, "on the meta device"):
        trireme.save_checkpoint(path, mlp())
        trireme.load_checkpoint(path, mlp().to("meta"))
