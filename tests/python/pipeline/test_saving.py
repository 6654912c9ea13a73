"""What a pipeline saves is the unsplit module, which any other cut and strategy loads, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from pipeline.ranks import (
    WIDTH,
    accumulate,
    assert_same_on_all_ranks,
    rows,
    tanh_layers,
    tied_layers,
)
from saving.ranks import on_disk, run_on_ranks

CHUNKS = 4
COUNT = 12  # rows of a batch: each rank of DDP gets as many
BREAK, STEPS = 2, 4

# Who trains, on how many ranks, and with which options.
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("pipeline", 2, {"schedule": "1f1b"}),
    ("pipeline", 3, {"schedule": "gpipe", "balance": [1, 5, 3]}),
    ("pipeline", 2, {"schedule": "zb-v"}),
    ("plain", 1, {}),
    ("ddp", 2, {}),
    ("zero2", 2, {}),
    ("fsdp", 2, {}),
)


class Scaled(nn.Module):
    """A scalar, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x * self.scale


def layers() -> nn.Sequential:
    return nn.Sequential(*tanh_layers(8), Scaled())


def tied_with_buffer() -> nn.Sequential:
    """Weights and a buffer of the first layer and of the last one are the same."""
    first, last = Scaled(), Scaled()
    last.scale, last.seen = first.scale, first.seen
    return nn.Sequential(first, *tied_layers(8), last)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Two, of which one may be empty on a rank."""
    named = list(module.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    others = [parameter for name, parameter in named if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]


class Trained:
    """A module under some strategy, with its optimizer."""

    def __init__(
        self,
        strategy: str,
        make: Callable[[], nn.Sequential] = layers,
        *,
        elsewhere: bool = False,
        **options: Any,
    ) -> None:
        self.strategy, self.model = strategy, make()
        if elsewhere:
            with torch.no_grad():
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    tensor.add_(1)
        self.net: Any = self.model
        if strategy == "pipeline":
            self.net = trireme.Pipeline(self.model, CHUNKS, ranks=True, loss=mse_loss, **options)
        elif strategy == "ddp":
            self.net = trireme.DistributedDataParallel(self.model)
        elif strategy == "fsdp":
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    trireme.fully_shard(layer)
            trireme.fully_shard(self.model)
        owned = groups(self.net if strategy == "pipeline" else self.model)
        defaults = {"lr": 0.5 if elsewhere else 0.01}
        self.optimizer: Any
        if strategy == "zero2":
            self.optimizer = trireme.ZeroRedundancyOptimizer(
                owned, torch.optim.AdamW, stage=2, **defaults
            )
        else:
            self.optimizer = torch.optim.AdamW(owned, **defaults)

    def train(self, step: int) -> Tensor:
        """One step; returns the mean loss of the batch."""
        x, y = rows(2 * step, COUNT), rows(2 * step + 1, COUNT)
        self.optimizer.zero_grad()
        if self.strategy == "pipeline":
            loss = self.net.step(x, target=y)
        elif self.strategy == "plain":
            loss = accumulate(self.net, x, y, chunks=CHUNKS, loss=mse_loss)
        else:
            rank, world = dist.get_rank(), dist.get_world_size()
            part = mse_loss(self.net(x.tensor_split(world)[rank]), y.tensor_split(world)[rank])
            part.backward()
            loss = part.detach() / world
            dist.all_reduce(loss)
        self.optimizer.step()
        return loss

    def save(self, path: str, **options: Any) -> trireme.PendingSave:
        return trireme.save_checkpoint(path, self.net, self.optimizer, **options)

    def load(self, path: str, **options: Any) -> dict[str, Any]:
        return trireme.load_checkpoint(path, self.net, self.optimizer, **options)

    @property
    def is_exact(self) -> bool:
        """Its steps have the bits of one process that accumulates micro-batches."""
        return self.strategy in ("pipeline", "plain")


def losses_without_a_break(make: Callable[[], nn.Sequential] = layers) -> list[Tensor]:
    one = Trained("plain", make)
    return [one.train(step) for step in range(STEPS)]


def _save(rank: int, strategy: str, options: dict[str, Any], path: str) -> None:
    trained = Trained(strategy, **options)
    for step in range(BREAK):
        trained.train(step)
    pending = trained.save(path, extra={"step": BREAK}, max_file_bytes=400, asynchronous=True)
    trained.train(BREAK)  # which is not saved
    pending.wait()


def _go_on(rank: int, strategy: str, options: dict[str, Any], path: str, is_exact: bool) -> None:
    trained = Trained(strategy, elsewhere=True, **options)
    assert trained.load(path) == {"step": BREAK}
    expected = losses_without_a_break()
    for step in range(BREAK, STEPS):
        loss = trained.train(step)
        if is_exact and trained.is_exact:
            assert_bits(loss, expected[step], strategy, path, step)
        torch.testing.assert_close(loss, expected[step])


def test_others_go_on_where_a_pipeline_stopped_and_back(tmp_path: Path) -> None:
    """Losses are those of a run without a break: the same bits, where both sides are exact."""
    paths = []
    for number, (strategy, world, options) in enumerate(CASES):
        case = {"strategy": strategy, "options": options, "path": str(tmp_path / str(number))}
        run_on_ranks(world=world, program=_save, case=case)
        paths.append((case["path"], strategy in ("pipeline", "plain")))
    for target, (strategy, world, options) in enumerate(CASES):
        for source, (path, is_exact) in enumerate(paths):
            if "pipeline" in (CASES[source][0], strategy) and source != target:
                case = {"strategy": strategy, "options": options, "path": path}
                run_on_ranks(world=world, program=_go_on, case={**case, "is_exact": is_exact})


@on_shm_ranks(2, timeout=60)
def test_a_pipeline_becomes_another_cut_and_strategy_in_memory(rank: int) -> None:
    """Layers move from rank to rank with the optimizer's state, and back."""
    expected = losses_without_a_break()

    def becomes(source: Trained, strategy: str, **options: Any) -> Trained:
        target = Trained(strategy, elsewhere=True, **options)
        trireme.redistribute(source.net, target.net, source.optimizer, target.optimizer)
        return target

    source = Trained("pipeline", schedule="1f1b")
    for step in range(BREAK):
        source.train(step)
    moved = becomes(source, "pipeline", balance=[2, 7])
    for target in (
        becomes(moved, "pipeline", schedule="zb-v"),
        becomes(becomes(moved, "fsdp"), "pipeline"),
        becomes(source, "zero2"),
        moved,
    ):
        for step in range(BREAK, STEPS):
            loss = target.train(step)
            if target.is_exact:
                assert_bits(loss, expected[step], step)
            torch.testing.assert_close(loss, expected[step])


class CountsLoads(Scaled):
    """Loads in a way of its own."""

    loads = 0

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.loads += 1


@on_shm_ranks(2)
def test_a_layer_of_one_stage_that_loads_in_its_own_way(rank: int, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    trained = Trained("pipeline", lambda: nn.Sequential(CountsLoads(), *tanh_layers(5)))
    trained.save(path)
    for loads in (1, 2):
        trained.load(path)
        own = [layer for layer in trained.net.modules() if isinstance(layer, CountsLoads)]
        assert [layer.loads for layer in own] == ([loads] if rank == 0 else [])
        trained.train(loads)  # the group is whole


def _index(path: Path, kind: str) -> set[str]:
    return set(json.loads((path / f"{kind}.safetensors.index.json").read_text())["weight_map"])


@on_shm_ranks(2, timeout=60)
def test_the_files_are_those_of_one_process(rank: int, tmp_path: Path) -> None:
    for name, make, exact in (("layers", layers, True), ("tied", tied_with_buffer, False)):
        piped, alone = tmp_path / f"{name}_piped", tmp_path / f"{name}_alone"
        pipe, one = Trained("pipeline", make, schedule="1f1b"), Trained("plain", make)
        for step in range(2):
            pipe.train(step)
            one.train(step)
        pipe.save(str(piped))
        one.save(str(alone), process_group=dist.group.WORLD)
        got, expected = on_disk(str(piped)), on_disk(str(alone))
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            if exact:
                assert_bits(got[key], value, key)
            elif key != "0.seen":  # in one process all layers that share it count
                torch.testing.assert_close(got[key], value)
        assert _index(piped, "model") == _index(alone, "model")
        assert _index(piped, "optimizer") == _index(alone, "optimizer")
        texts = [json.loads((path / "optimizer.json").read_text()) for path in (piped, alone)]
        for text in texts:
            for group in text["param_groups"]:
                group["params"] = sorted(group["params"])
        assert texts[0] == texts[1]


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world", timeout=60)
def test_what_is_tied_is_saved_once_and_loaded_into_all_copies(
    rank: int, world: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    pipe = Trained("pipeline", tied_with_buffer, schedule="1f1b")
    for step in range(BREAK):
        pipe.train(step)
    pipe.save(path)
    files = on_disk(path)
    assert {"0.scale", "0.seen", "1.weight"} <= files.keys()
    assert not {"9.scale", "9.seen", "3.weight", "5.weight", "7.weight"} & files.keys()
    assert sum(name.startswith("1.weight.") for name in files) == 3  # step and two moments
    fresh = Trained("pipeline", tied_with_buffer, elsewhere=True, schedule="gpipe")
    fresh.load(path)
    for name, tensor in fresh.net.state_dict().items():
        whole = fresh.net.names_in_whole().get(name, name)
        assert_bits(tensor, files[whole], name)
    other = Trained("plain", tied_with_buffer, elsewhere=True)
    other.load(path, process_group=dist.group.WORLD)
    for step in range(BREAK, STEPS):
        expected = pipe.train(step)
        assert_bits(fresh.train(step), expected)
        torch.testing.assert_close(other.train(step), expected)
    if world == 2:  # both have a copy
        weight = next(parameter for parameter in fresh.net.parameters() if parameter.dim() == 2)
        assert_same_on_all_ranks(weight, [0, 1])


@on_shm_ranks(2, timeout=60)
def test_a_rank_without_parameters_has_no_optimizer(rank: int, tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss)
        return pipe, torch.optim.AdamW(pipe.parameters()) if rank == 0 else None

    torch.manual_seed(1)
    path = str(tmp_path / "checkpoint")
    pipe, optimizer = make()
    fresh, its_optimizer = make()
    pipe.step(rows(1), target=rows(2))
    if optimizer is not None:
        optimizer.step()
    trireme.save_checkpoint(path, pipe, optimizer)
    trireme.load_checkpoint(path, fresh, its_optimizer)
    assert on_disk(path).keys() >= {"0.weight", "0.weight.exp_avg", "0.bias", "0.bias.step"}
    losses = [model.step(rows(3), target=rows(4)) for model in (pipe, fresh)]
    assert_bits(losses[0], losses[1])
    if rank == 0:
        states = [holder.state_dict()["state"][0] for holder in (optimizer, its_optimizer)]
        assert_bits(states[0]["exp_avg"], states[1]["exp_avg"])
    trireme.save_checkpoint(path, pipe)
    trireme.load_checkpoint(path, fresh)
    with raises(ValueError, "a checkpoint without an optimizer"):
        trireme.load_checkpoint(path, fresh, its_optimizer)


@on_shm_ranks(2, timeout=60)
def test_what_cannot_be_saved_is_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    pipe = Trained("pipeline")
    text = "got an optimizer on rank 1, and none on rank 0, which has parameters"
    given = None if rank == 0 else pipe.optimizer
    with raises(ValueError, text):
        trireme.save_checkpoint(path, pipe.net, given)
    pipe.optimizer.param_groups[1]["lr"] = 0.1 * (1 + rank)
    text = "got 'lr' of parameter group 1 as 0.1 on rank 0 and as 0.2 on rank 1"
    with raises(ValueError, text, "same groups"):
        trireme.save_checkpoint(path, pipe.net, pipe.optimizer)
    if rank == 1:
        pipe.optimizer.add_param_group({"params": []})
    with raises(ValueError, "got 2 parameter groups on rank 0 and 3 on rank 1"):
        trireme.save_checkpoint(path, pipe.net, pipe.optimizer)
    groups = [dist.new_group([0]), dist.new_group([1])]
    with raises(ValueError, f"got a pipeline on ranks [0, 1], of which [{rank}] save and load"):
        trireme.save_checkpoint(path, pipe.net, process_group=groups[rank])
    assert not path.exists()
    trireme.save_checkpoint(path, pipe.net)
    with raises(ValueError, "an optimizer on rank 0, and none on rank 1"):
        trireme.load_checkpoint(path, pipe.net, pipe.optimizer if rank == 0 else None)


@on_shm_ranks(2, timeout=60)
def test_the_checkpoint_of_another_module_is_refused(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    pipe = Trained("pipeline")
    pipe.train(0)
    pipe.save(str(path))
    before = {name: tensor.clone() for name, tensor in pipe.net.state_dict().items()}
    longer = Trained("pipeline", lambda: nn.Sequential(*layers(), nn.Linear(WIDTH, WIDTH)))
    with raises(ValueError, "without '9."):
        longer.load(str(path))
    shorter = Trained("pipeline", tanh_layers)
    with raises(ValueError, "got '8.scale' in", "which the model does not have"):
        shorter.load(str(path))
    frozen = Trained("pipeline")
    del frozen.optimizer.param_groups[1]["params"][-1]
    with raises(ValueError, "got an optimizer with", "in group 1 of the checkpoint"):
        frozen.load(str(path))
    for name, tensor in pipe.net.state_dict().items():
        assert_bits(tensor, before[name], name)


@on_shm_ranks(2)
def test_after_the_group_was_destroyed(rank: int, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, mesh=mesh, loss=mse_loss)
    dist.destroy_process_group(group)
    for call in (trireme.save_checkpoint, trireme.load_checkpoint):
        with raises(
            ValueError, "pipeline over ranks whose process group was destroyed", form=RANKLESS_FORM
        ):
            call(tmp_path, pipe)
