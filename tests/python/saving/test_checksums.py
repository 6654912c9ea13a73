"""A byte that a disk has turned over is found before anything is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from saving.ranks import assert_holds, flip, held, load, make, save

INDEX = "model.safetensors.index.json"
FILE = "model-00001-of-00001.safetensors"
STATES = "optimizer-00001-of-00001.safetensors"
CHUNK = 4 << 20


def _saved(path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    trireme.save_checkpoint(path, model, optimizer, extra={"epoch": 3})
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.state_dict().values(), *states)]


@pytest.mark.parametrize(
    ("file", "place", "parts"),
    [
        (FILE, -1, ("than were saved", FILE, "which hold '")),
        (STATES, -2, ("than were saved", STATES, "which hold '")),
        (FILE, 3, ("a damaged header", FILE, "which holds '0.bias' and ")),
        (FILE, 40, (FILE,)),
        (INDEX, 30, (INDEX,)),
        ("optimizer.safetensors.index.json", 40, ("optimizer.safetensors.index.json",)),
        ("optimizer.json", 20, ("optimizer.json",)),
        ("extra.json", -2, ("extra.json", "not those that were saved")),
    ],
)
def test_one_turned_over_bit(file: str, place: int, parts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = _saved(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    before = _values(model, optimizer)
    flip(path / file, place)
    with raises(ValueError, *parts):
        trireme.load_checkpoint(path, model, optimizer)
    for value, was in zip(_values(model, optimizer), before, strict=True):
        assert torch.equal(value, was)


def test_every_bit_of_an_index_counts(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, _ = _saved(path)
    text = (path / INDEX).read_bytes()
    for place in range(len(text)):
        flip(path / INDEX, place, bit=place % 7)
        with pytest.raises(ValueError, match="saving"):
            trireme.load_checkpoint(path, model)
        (path / INDEX).write_bytes(text)
    trireme.load_checkpoint(path, model)


def test_whoever_wants_it_loads_without_a_look(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, _ = _saved(path)
    last = list(model.parameters())[-1].detach().clone()
    flip(path / FILE, -1)
    trireme.load_checkpoint(path, model, verify=False)
    assert sum(torch.equal(value, last) for value in model.parameters()) <= 1
    with raises(ValueError, "than were saved"):
        trireme.load_checkpoint(path, model, read_once=True)


def test_an_index_has_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    _saved(path)
    index = json.loads((path / INDEX).read_text())
    ours = index["metadata"]["trireme"]
    assert list(ours)[-1] == "checksum" and ours["chunk_bytes"] == CHUNK
    assert list(ours["chunk_checksums"]) == [FILE]
    assert set(ours["other_file_checksums"]) == {
        *("optimizer.safetensors.index.json", "optimizer.json", "extra.json")
    }


def test_folders_without_checksums_load(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, optimizer = _saved(path)
    for name in (INDEX, "optimizer.safetensors.index.json"):
        index = json.loads((path / name).read_text())
        ours = index["metadata"]["trireme"]
        for key in ("checksum", "chunk_bytes", "chunk_checksums", "other_file_checksums"):
            ours.pop(key, None)
        (path / name).write_text(json.dumps(index))
    index = json.loads((path / INDEX).read_text())
    others = index["metadata"]["trireme"]["other_file_bytes"]
    for name in others:
        others[name] = (path / name).stat().st_size
    (path / INDEX).write_text(json.dumps(index))
    before = _values(model, optimizer)
    flip(path / FILE, -1)
    assert trireme.load_checkpoint(path, model, optimizer) == {"epoch": 3}
    assert not all(
        torch.equal(value, was)
        for value, was in zip(_values(model, optimizer), before, strict=True)
    )


class Wide(nn.Module):
    """Chunks whose borders lie in tensors; an empty one; rows that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(CHUNK // 4 + 77, dtype=torch.float32))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.second = nn.Parameter(torch.arange(3.0 * 5000 * 301).view(-1, 301))
        self.bytes = nn.Parameter(torch.arange(99, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first.sum() + self.second.sum() * x


@on_shm_ranks("world")
def _turn_over_every_chunk(rank: int, world: int, strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "ck"
    training = make(strategy, torch.optim.SGD, make_model=Wide)
    save(training, path)
    load(training, path)
    before = held(training)
    file = path / FILE
    bytes_ = file.stat().st_size
    for begin in range(0, bytes_, CHUNK):
        dist.barrier()
        if rank == 0:
            flip(file, min(begin + CHUNK, bytes_) - 1, bit=5)
        dist.barrier()
        told = f"in bytes {begin} to {min(begin + CHUNK, bytes_)}, which hold '"
        for read_once in (False, True):
            with raises(ValueError, told, FILE):
                trireme.load_checkpoint(path, training.net, read_once=read_once)
        dist.barrier()
        if rank == 0:
            flip(file, min(begin + CHUNK, bytes_) - 1, bit=5)
    dist.barrier()
    assert_holds(training, before)
    load(training, path)


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 3), ("zero2", 2), ("fsdp", 2)])
def test_every_chunk_is_hashed(strategy: str, world: int, tmp_path: Path) -> None:
    _turn_over_every_chunk(world=world, strategy=strategy, tmp_path=tmp_path)


def test_files_of_another_save_are_named_as_such(tmp_path: Path) -> None:
    model, _ = _saved(tmp_path / "one")
    _saved(tmp_path / "two")
    shutil.copy(tmp_path / "two" / FILE, tmp_path / "one" / FILE)
    with raises(ValueError, "a file of another save"):
        trireme.load_checkpoint(tmp_path / "one", model)
