"""Checkpoints of what tensor parallelism has cut, and fully_shard again: from any layout to any.

The oracle is one process: what the files hold is what it has, and a rank has the parts of it that
fsdp.model_parallel.part_of() cuts out by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from fsdp.model_parallel import (
    Language,
    build,
    build_torchs,
    grid,
    loss_of,
    own_words,
    part_of,
    plan,
    words,
)
from fsdp.ranks import own
from harness.faults import raises
from harness.on_ranks import BACKENDS, on_shm_ranks
from harness.ranks import run_ranks
from harness.tensors import assert_bits
from saving.ranks import most_allocated, on_disk, state_bytes

WIDTH, LAYERS = 128, 4


def one_process() -> tuple[nn.Module, AdamW]:
    model = Language()
    optimizer = AdamW(model.parameters(), lr=0.1)
    loss_of(model, words(0)).backward()
    optimizer.step()
    return model, optimizer


def layouts() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Returns makers of the model, and of the mesh to train it on, by number of ranks and name."""

    def sharded(*sizes: int, make: Any = build, **options: Any) -> Any:
        mesh = grid(*sizes, **options)
        return make(mesh), mesh

    def cut_only() -> Any:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        return parallelize_module(Language(), mesh, plan()), None

    names = ("replicate", "shard", "tp")
    return {
        "4: dp 2 tp 2": lambda: sharded(2, 2),
        "4: hybrid": lambda: sharded(2, 1, 2, names=names),
        "4: tp": cut_only,
        "4: torch's": lambda: sharded(2, 2, make=build_torchs),
        "3: tp 3": lambda: sharded(1, 3),
        "3: dp 3": lambda: sharded(3, 1),
    }


def made(layout: str) -> tuple[nn.Module, AdamW, Any]:
    """With other values than one process has."""
    model, mesh = layouts()[layout]()
    with torch.no_grad():
        for param in model.parameters():
            own(param).add_(1)
    return model, AdamW(model.parameters(), lr=0.5), mesh


def held_here(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Parameters and states, by their names in the files."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = param
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return found


def assert_holds(model: nn.Module, optimizer: AdamW, files: dict[str, torch.Tensor]) -> None:
    """This rank has its parts of what is in the files, and nothing else."""
    here = held_here(model, optimizer)
    assert here.keys() == files.keys()
    for name, value in here.items():
        whole = files[name]
        expected = part_of(whole, value) if isinstance(value, DTensor) else whole
        assert_bits(own(value), expected, name)


def train(model: Any, optimizer: AdamW, mesh: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, own_words(step, mesh)).backward()
    optimizer.step()


def there_and_back(rank: int, folder: str, layout: str) -> None:
    """From one process, and into the same files."""
    files = on_disk(f"{folder}/plain")
    model, optimizer, _ = made(layout)
    trireme.load_checkpoint(f"{folder}/plain", model, optimizer)
    assert_holds(model, optimizer, files)
    trireme.save_checkpoint(f"{folder}/again", model, optimizer)
    again = on_disk(f"{folder}/again")
    assert again.keys() == files.keys()
    for name, value in files.items():
        assert_bits(again[name], value, layout, name)


def trained(rank: int, folder: str, layout: str) -> None:
    """A fresh model that loads goes on with the same bits."""
    path = f"{folder}/trained"
    model, optimizer, mesh = made(layout)
    train(model, optimizer, mesh, 1)
    trireme.save_checkpoint(path, model, optimizer, extra={"step": 1})
    assert_holds(model, optimizer, on_disk(path))
    fresh, its_optimizer, _ = made(layout)
    assert trireme.load_checkpoint(path, fresh, its_optimizer) == {"step": 1}
    for pair in ((model, optimizer), (fresh, its_optimizer)):
        train(*pair, mesh, 2)
    for (name, value), other in zip(
        held_here(model, optimizer).items(), held_here(fresh, its_optimizer).values(), strict=True
    ):
        assert_bits(own(other), own(value), layout, name)


def loads(rank: int, folder: str, layout: str) -> None:
    model, optimizer, _ = made(layout)
    trireme.load_checkpoint(f"{folder}/trained", model, optimizer)
    assert_holds(model, optimizer, on_disk(f"{folder}/trained"))


def _on_ranks(rank: int, backend: str, folder: str, programs: list[tuple[Any, str]]) -> None:
    dist.init_process_group(backend)
    for program, layout in programs:
        program(rank, folder, layout)
    dist.destroy_process_group()


@BACKENDS
def test_from_any_layout_to_any(backend: str, tmp_path: Path) -> None:
    """Layouts are of one process, of 4 ranks, of 3, of one process again."""
    trireme.save_checkpoint(tmp_path / "plain", *one_process())
    place, four = (backend, str(tmp_path)), "4: dp 2 tp 2"
    others = [name for name in layouts() if name[0] == "4" and name != four]
    there = [(there_and_back, name) for name in others if backend == "trireme"]
    run_ranks(_on_ranks, 4, *place, [(there_and_back, four), (trained, four), *there])
    if backend == "trireme":
        run_ranks(_on_ranks, 3, *place, [(loads, "3: tp 3"), (loads, "3: dp 3")])
    model = Language()
    optimizer = AdamW(model.parameters())
    trireme.load_checkpoint(tmp_path / "trained", model, optimizer)
    assert_holds(model, optimizer, on_disk(str(tmp_path / "trained")))


class Cut(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def cut_twice_from_left_to_right(folder: str) -> None:
    """DTensor's own order, the opposite of fully_shard's; nobody has trained these."""
    whole, mesh = torch.arange(33.0).view(11, 3), grid()
    weight = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    rows = ((0, 3), (3, 6), (6, 9), (9, 11))[dist.get_rank()]
    assert torch.equal(weight.to_local(), whole[slice(*rows)])
    trireme.save_checkpoint(folder, Cut(weight))
    assert torch.equal(on_disk(folder)["weight"], whole)
    model = Cut(torch.zeros_like(weight))
    trireme.load_checkpoint(folder, model)
    assert torch.equal(own(model.weight), whole[slice(*rows)])


def on_several_meshes(folder: str) -> None:
    """On all ranks, on pairs that have the same, and on nobody's mesh."""
    whole, mesh = torch.arange(35.0).view(7, 5), grid()
    cuts = (
        distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)]),
        distribute_tensor(whole, mesh, [Shard(1), Shard(0)]),
        distribute_tensor(whole, mesh["tp"], [Shard(1)]),
        whole,
    )
    trireme.save_checkpoint(folder, nn.Sequential(*map(Cut, cuts)))
    model = nn.Sequential(*(Cut(torch.zeros_like(cut)) for cut in cuts))
    trireme.load_checkpoint(folder, model)
    for (name, value), cut in zip(model.named_parameters(), cuts, strict=True):
        assert torch.equal(on_disk(folder)[name], whole), name
        assert torch.equal(own(value), own(cut)), name


def on_some_of_the_ranks(folder: str) -> None:
    """Each pair has the model: it saves for itself, or all together."""
    mesh, rank = grid()["tp"], dist.get_rank()
    whole = torch.arange(15.0).view(5, 3)
    model = Cut(distribute_tensor(whole, mesh, [Shard(1)]))
    trireme.save_checkpoint(f"{folder}/{rank // 2}", model)
    dist.barrier()
    trireme.save_checkpoint(f"{folder}/all", model, process_group=dist.group.WORLD)
    for name in ("0", "1", "all"):
        assert torch.equal(on_disk(f"{folder}/{name}")["weight"], whole)


def loads_into_what_is_there(folder: str) -> None:
    """No rank has more than its parts at any time, and one parameter."""
    mesh = grid()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for number, layer in enumerate(model):
        style = RowwiseParallel() if number % 2 else ColwiseParallel()
        parallelize_module(layer, mesh["tp"], style)
        trireme.fully_shard(layer, mesh=mesh["dp"])
    trireme.fully_shard(model, mesh=mesh["dp"])
    has_states, has_none = AdamW(model.parameters()), AdamW(model.parameters())
    model(torch.ones(2, WIDTH)).square().mean().backward()
    has_states.step()
    trireme.save_checkpoint(folder, model, has_states)
    for optimizer in (has_states, has_none):
        load = functools.partial(trireme.load_checkpoint, folder, model, optimizer)
        before = state_bytes(optimizer)
        most = most_allocated(load)
        missing = state_bytes(optimizer) - before
        assert missing <= most <= missing + 4 * WIDTH * WIDTH, (before, most, missing)


def what_is_refused(folder: str) -> None:
    mesh = grid()
    model = build(mesh)
    path = f"{folder}/none"
    group = mesh["dp"].get_group()
    with raises(ValueError, "got 'embed.weight' placed", "over ranks that save and load"):
        trireme.save_checkpoint(path, model, process_group=group)
    summand = Cut(DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Partial()]))
    with raises(ValueError, "got 'weight' placed (Partial(sum),)", "expected Shard or Replicate"):
        trireme.save_checkpoint(path, summand, process_group=dist.group.WORLD)
    rows = 3 if dist.get_rank() % 2 == 0 else 1
    uneven = Cut(
        DTensor.from_local(torch.ones(rows, 2), mesh["tp"], [Shard(0)], shape=(4, 2), stride=(2, 1))
    )
    with raises(ValueError, f"a part of 'weight' of shape ({rows}, 2), expected (2, 2)"):
        trireme.save_checkpoint(path, uneven, process_group=dist.group.WORLD)
    assert not Path(path).exists()


@on_shm_ranks(4)
def test_parts_and_what_is_none(rank: int, tmp_path: Path) -> None:
    cut_twice_from_left_to_right(str(tmp_path / "twice"))
    on_several_meshes(str(tmp_path / "several"))
    on_some_of_the_ranks(str(tmp_path / "some"))
    loads_into_what_is_there(str(tmp_path / "there"))
    what_is_refused(str(tmp_path))
