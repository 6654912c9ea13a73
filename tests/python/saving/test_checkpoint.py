"""What one strategy saves, every other loads, at another number of ranks, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_gloo_ranks, on_shm_ranks
from harness.tensors import assert_bits
from harness.training import assert_close
from saving.ranks import CASES, Net, assert_holds, held, load, make, on_disk, run_on_ranks, save


def _save(rank: int, strategy: str, path: str) -> None:
    """Trains, saves; a fresh model that loads goes on with the same bits."""
    training = make(strategy)
    for step in range(2):
        training.train(step)
    training.optimizer.param_groups[0]["lr"] = 0.02
    # Several files, of which one tensor is larger than it may be.
    save(training, path, extra={"epoch": 3}, max_file_bytes=2000)
    expected = held(training)
    files = on_disk(path)
    assert files.keys() == expected.keys()
    for name, value in expected.items():
        assert_bits(files[name], value, name)
    fresh = make(strategy, elsewhere=True)
    assert load(fresh, path) == {"epoch": 3}
    assert fresh.optimizer.param_groups[0]["lr"] == 0.02
    assert fresh.optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert_holds(fresh, expected)
    for side in (training, fresh):
        side.train(2)
    assert_holds(fresh, held(training))


def _load_all(rank: int, strategy: str, paths: list[str]) -> None:
    for path in paths:
        files = on_disk(path)
        training = make(strategy, elsewhere=True)
        load(training, path)
        assert_holds(training, files)
        one = make("plain", elsewhere=True)
        trireme.load_checkpoint(path, one.model, one.optimizer, process_group=dist.group.WORLD)
        for each in (training, one):
            each.train(2)
        got, expected = held(training), held(one)
        for name, _ in one.model.named_parameters():
            assert_close(f"{path} {name}", got[name], expected[name])


def test_every_strategy_loads_what_every_other_saves(tmp_path: Path) -> None:
    paths = []
    for strategy, world in CASES:
        paths.append(str(tmp_path / f"{strategy}_{world}"))
        run_on_ranks(world=world, program=_save, case={"strategy": strategy, "path": paths[-1]})
    for strategy, world in CASES:
        run_on_ranks(world=world, program=_load_all, case={"strategy": strategy, "paths": paths})


def test_alone_without_a_group(tmp_path: Path) -> None:
    training, fresh = make("plain"), make("plain", elsewhere=True)
    training.train(0)
    save(training, tmp_path / "deep" / "er" / "checkpoint")
    assert load(fresh, tmp_path / "deep" / "er" / "checkpoint") == {}
    assert_holds(fresh, held(training))
    index = json.loads((tmp_path / "deep/er/checkpoint/model.safetensors.index.json").read_text())
    assert "again.weight" not in index["weight_map"]  # tied: it is there once
    assert "scratch" not in index["weight_map"]
    sizes = sum(value.nbytes for value in training.model.state_dict().values())
    assert index["metadata"]["total_size"] == sizes - training.model.again.weight.nbytes


def test_a_model_without_its_optimizer(tmp_path: Path) -> None:
    training, fresh = make("plain"), make("plain", elsewhere=True)
    training.train(0)
    save(training, tmp_path / "both")
    trireme.save_checkpoint(tmp_path / "model", training.model)
    for name in ("both", "model"):
        trireme.load_checkpoint(tmp_path / name, fresh.model)
        for key, value in fresh.model.state_dict().items():
            assert_bits(value, training.model.state_dict()[key], key)
    with raises(ValueError, "got a checkpoint without an optimizer"):
        load(fresh, tmp_path / "model")


@on_shm_ranks(2)
def test_states_of_other_optimizers(rank: int, tmp_path: Path) -> None:
    """bf16 parameters with fp32 states, momentum, none, amsgrad; from sharded to sharded."""
    path = str(tmp_path / "checkpoint")
    cases = (
        (trireme.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"amsgrad": True}),
    )
    for optimizer_class, defaults in cases:
        for source, target in (("zero2", "fsdp"), ("fsdp", "zero1"), ("ddp", "fsdp")):
            training = make(source, optimizer_class, **defaults)
            training.train(0)
            save(training, path)  # in place of the one before
            files = on_disk(path)
            fresh = make(target, optimizer_class, elsewhere=True, **defaults)
            load(fresh, path)
            assert_holds(fresh, files)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


@on_shm_ranks(2)
def test_buffers_are_those_of_rank_0(rank: int, tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        path = str(tmp_path / strategy)
        training = make(strategy, make_model=Normed)
        training.train(0)  # each rank has its own running mean
        save(training, path)
        mean = training.model.norm.running_mean
        of_rank_0 = mean.clone()
        dist.broadcast(of_rank_0, 0)
        fresh = make(strategy, make_model=Normed)
        load(fresh, path)
        assert_bits(fresh.model.norm.running_mean, of_rank_0)


@on_shm_ranks(2)
def test_parameters_sharded_along_another_dimension(rank: int, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    path = str(tmp_path / "checkpoint")
    model = mlp()
    trireme.fully_shard(model, shard_placement_fn=lambda one: Shard(one.dim() - 1))
    trireme.save_checkpoint(path, model)
    plain = mlp().requires_grad_(False)
    for name, value in plain.state_dict().items():
        assert_bits(on_disk(path)[name], value, name)
        value.add_(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    trireme.load_checkpoint(path, model)
    trireme.load_checkpoint(path, plain)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_bits(one.full_tensor(), other, name)


@on_gloo_ranks(2)
def test_over_gloo_and_from_torchs_own_classes(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    theirs = make("plain", make_model=mlp)
    torch_fully_shard(theirs.model)
    theirs.optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=0.02)
    theirs.train(0)
    save(theirs, path)
    for strategy in ("ddp", "zero1", "zero2"):
        fresh = make(strategy, make_model=mlp, elsewhere=True)
        load(fresh, path)
        assert_holds(fresh, held(theirs))
        fresh.train(1)
        save(fresh, path)
        expected = held(fresh)
        load(theirs, path)
        assert_holds(theirs, expected)


@on_shm_ranks(1)
def test_names_of_a_compiled_model(rank: int, tmp_path: Path) -> None:
    path, model = str(tmp_path / "checkpoint"), Net()
    model.wide = torch.compile(model.wide)
    trireme.save_checkpoint(path, torch.compile(model))
    expected = {name for name, _ in Net().named_parameters()} | {"seen"}
    assert on_disk(path).keys() == expected


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def training(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(rate))

    trireme.save_checkpoint(tmp_path / "checkpoint", *training(0.25))
    model, optimizer = training(0.5)
    trireme.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert_bits(optimizer.param_groups[0]["lr"], torch.tensor(0.25))


@pytest.mark.parametrize("value", [{1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": nn.Tanh()}])
def test_what_json_cannot_say(value: object, tmp_path: Path) -> None:
    with raises(TypeError, "`extra`", "which JSON cannot say"):
        trireme.save_checkpoint(tmp_path / "checkpoint", mlp(), extra=value)
    assert not list(tmp_path.iterdir())
