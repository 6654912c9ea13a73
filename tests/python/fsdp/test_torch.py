"""torch's own pipelining and checkpoint code over modules that trireme.fully_shard has sharded."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.optim import SGD, AdamW

from fsdp.ranks import in_training, shard_layers
from harness.models import batch
from harness.on_ranks import on_shm_ranks
from harness.ranks import run_ranks

MICRO_BATCHES = 4
ROWS = 16


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.LayerNorm(5), nn.Linear(5, 1)]
    return nn.Sequential(*layers)


def training(seed: int = 0) -> Any:
    return in_training(shard_layers(model(seed)), AdamW, lr=0.1)


def assert_same_shards(one: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local()), name
    for (name, ours), theirs in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def state_of(one: Any) -> dict[str, Any]:
    parts = get_state_dict(one.model, one.optimizer)
    return dict(zip(("model", "optimizer"), parts, strict=True))


def shared_folder() -> str:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


# pipelining


def stages(*, halves: bool) -> list[nn.Module]:
    """Four stages, or two."""
    torch.manual_seed(8)
    four = [
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)),
        nn.Linear(5, 7),
        nn.Sequential(nn.Tanh(), nn.Linear(7, 4)),
        nn.Linear(4, 3),
    ]
    return [nn.Sequential(*four[:2]), nn.Sequential(*four[2:])] if halves else four


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("schedule_type", [Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B])
@on_shm_ranks(4, timeout=90)
def test_two_pipelines_whose_stages_are_sharded(rank: int, schedule_type: Any) -> None:
    """Ranks 0 and 1 are one pipeline, 2 and 3 another; 0 and 2 share their stages, so do 1 and 3.
    The schedule turns gradient sync off, and finalizes when all micro batches have come by."""
    index, pipeline = rank % 2, rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    is_interleaved = schedule_type is ScheduleInterleaved1F1B
    everything = stages(halves=not is_interleaved)
    places = [index, index + 2] if is_interleaved else [index]
    mine = [trireme.fully_shard(everything[place], mesh=mesh["dp"]) for place in places]
    share_comm_ctx(mine)
    count = len(everything)
    built = [
        PipelineStage(part, place, count, torch.device("cpu"), group=mesh["pp"].get_group())
        for part, place in zip(mine, places, strict=True)
    ]
    one_or_all = built if is_interleaved else built[0]
    schedule = schedule_type(one_or_all, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = SGD([param for part in mine for param in part.parameters()], lr=0.1)
    reference = nn.Sequential(*stages(halves=not is_interleaved))
    one = SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step, ROWS), batch(step + 50, ROWS, 3)
        if index == 0:
            schedule.step(x[pipeline::2].contiguous())
        else:
            schedule.step(target=y[pipeline::2].contiguous())
        loss_of(reference(x), y).backward()
        for part, place in zip(mine, places, strict=True):
            for ours, theirs in zip(part.parameters(), reference[place].parameters(), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for each in (optimizer, one):
            each.step()
            each.zero_grad()


# state dicts


@pytest.mark.parametrize("world", [1, 2, 3])
@on_shm_ranks("world", timeout=90)
def test_state_dicts_full_and_sharded(rank: int, world: int) -> None:
    """What is taken out of one training and put into another makes them the same, to the bit."""
    ours = training()
    ours.train(0)
    ours.train(1)
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        other = training(seed=5)
        other.train(3)
        set_model_state_dict(
            other.model, get_model_state_dict(ours.model, options=options), options=options
        )
        state = get_optimizer_state_dict(ours.model, ours.optimizer, options=options)
        state = copy.deepcopy(state)  # loading takes tensors as they are
        set_optimizer_state_dict(other.model, other.optimizer, state, options=options)
        assert_same_shards(ours.model, other.model)
        ours.train(4)
        other.train(4)
        assert_same_shards(ours.model, other.model)
    full = get_model_state_dict(ours.model, options=StateDictOptions(full_state_dict=True))
    plain = model(9)
    plain.load_state_dict(full)  # names and shapes are those of the plain model
    alone = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    last = training(seed=6)
    set_model_state_dict(last.model, full if rank == 0 else {}, options=alone)
    assert_same_shards(ours.model, last.model)


@on_shm_ranks(2, timeout=90)
def test_distributed_checkpoint_saves_and_loads(rank: int) -> None:
    """save, load and async_save, which goes on while training writes the parameters."""
    ours = training()
    ours.train(0)
    folder = shared_folder()
    kept = {name: param.full_tensor() for name, param in ours.model.named_parameters()}
    parts = state_of(ours)
    dcp.save(parts, checkpoint_id=f"{folder}/now")
    saved = dcp.async_save(parts, checkpoint_id=f"{folder}/later")
    ours.train(1)
    (saved if hasattr(saved, "result") else saved.upload_completion).result()
    for name in ("now", "later"):
        other = training(seed=5)
        other.train(3)
        state = state_of(other)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_state_dict(
            other.model,
            other.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for key, param in other.model.named_parameters():
            assert torch.equal(param.full_tensor(), kept[key]), (name, key)
        other.train(1)
        assert_same_shards(ours.model, other.model)


def _save_at(rank: int, folder: str) -> None:
    dist.init_process_group("trireme")
    ours = training()
    ours.train(0)
    dcp.save(state_of(ours), checkpoint_id=folder)
    dist.destroy_process_group()


def _load_at(rank: int, folder: str) -> dict[str, torch.Tensor]:
    dist.init_process_group("trireme")
    other = training(seed=5)
    state = state_of(other)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    full = get_optimizer_state_dict(
        other.model, other.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    whole = {name: param.full_tensor() for name, param in other.model.named_parameters()}
    dist.destroy_process_group()
    return {
        **whole,
        **{
            f"{name}.{key}": value
            for name, state in full["state"].items()
            for key, value in state.items()
        },
    }


def test_a_checkpoint_fits_another_world_size() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_save_at, 2, folder, timeout=60)
        (alone,) = run_ranks(_load_at, 1, folder, timeout=60)
        three = run_ranks(_load_at, 3, folder, timeout=60)[0]
    assert alone.keys() == three.keys() and len(alone) > 20
    for name, value in alone.items():
        assert torch.equal(value, three[name]), name


# other functions


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


@on_shm_ranks(2)
def test_a_registered_method_is_a_forward(rank: int) -> None:
    net = trireme.fully_shard(TwoWays())
    assert isinstance(net, FSDPModule)
    register_fsdp_forward_method(net, "double")
    net.double(batch(0)[rank::2]).square().mean().backward()
    one = TwoWays()
    one.double(batch(0)).square().mean().backward()
    torch.testing.assert_close(net.inner.weight.grad.full_tensor(), one.inner.weight.grad)


@on_shm_ranks(2)
def test_clipping_what_torch_has_sharded(rank: int) -> None:
    theirs, ours, one = model(), shard_layers(model()), model()
    torch_fully_shard(theirs)
    one(batch(0, rows=ROWS)).square().mean().backward()
    for sharded in (theirs, ours):
        sharded(batch(0, rows=ROWS)[rank::2]).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    torch.testing.assert_close(trireme.clip_grad_norm_(theirs.parameters(), 0.01), expected)
    for clipped, whole in zip(theirs.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(clipped.grad.full_tensor(), whole.grad)
    with pytest.raises(ValueError, match="beside such that Trireme has"):
        trireme.clip_grad_norm_([*theirs.parameters(), *ours.parameters()], 0.01)
