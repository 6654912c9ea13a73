"""A loss with parameters belongs to the last stage: trained, averaged, saved, moved with it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import accumulate, assert_same_on_all_ranks, rows, tanh_layers

CHUNKS = 4
FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")


class Scaled(nn.Module):
    """A learnable temperature, and a weight that may be a layer's."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        if self.weight is not None:
            output = output @ self.weight
        return mse_loss(output * self.scale, target)


def net_and_loss(tied: bool = False) -> tuple[nn.Sequential, Scaled]:
    net = tanh_layers()
    return net, Scaled(net[0].weight if tied else None)


def train(ranks: bool, form: str, tied: bool) -> trireme.Pipeline:
    net, loss = net_and_loss(tied)
    options: dict[str, Any] = {"ranks": True} if ranks else {"devices": ["cpu"] * 2}
    made = net_and_loss(tied)
    pipe = trireme.Pipeline(made[0], CHUNKS, schedule=form, loss=made[1], **options)
    whole = nn.ModuleDict({**dict(net.named_children()), "_loss": loss})
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1)
        for parameters in (list(whole.parameters()), list(pipe.parameters()))
        if parameters
    ]
    for step in range(3):
        x, y = rows(2 * step), rows(2 * step + 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = accumulate(net, x, y, chunks=CHUNKS, loss=loss)
        loss.scale.grad /= CHUNKS
        got = pipe.step(x, target=y)
        torch.testing.assert_close(got, wanted)
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    has_last = any(call.stage is pipe.stages[-1] for call in pipe._calls)
    assert ("_loss.scale" in dict(pipe.named_parameters())) == has_last
    assert ("_loss.scale" in pipe.state_dict()) == has_last
    assert ("_loss.seen" in dict(pipe.named_buffers())) == has_last
    return pipe


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_in_threads(form: str, tied: bool) -> None:
    train(False, form, tied)


@on_shm_and_gloo_ranks(2)
def test_on_ranks(rank: int) -> None:
    for form in FORMS:
        for tied in (False, True):
            train(True, form, tied)


@on_shm_ranks(4)
def test_copies_average_it(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    net, loss = net_and_loss()
    net_loss = copy.deepcopy(loss)
    with torch.no_grad():
        net_loss.scale += mesh.get_local_rank("dp")  # the first copy's is everybody's
    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, mesh=mesh, schedule="1f1b", loss=net_loss)
    for copy_number in range(2):
        x, y = rows(copy_number, 8), rows(copy_number + 5, 8)
        (loss(net(x), y) / 2).backward()
    number = mesh.get_local_rank("dp")
    pipe.step(rows(number, 8), target=rows(number + 5, 8))
    if mesh.get_local_rank("pp") == 1:
        torch.testing.assert_close(net_loss.scale, loss.scale)
        torch.testing.assert_close(net_loss.scale.grad, loss.scale.grad)
    mine = dict(pipe.named_parameters()).get("_loss.scale", torch.zeros(()))
    assert_same_on_all_ranks(mine, [1, 3])


@on_shm_ranks(2)
def test_saved_and_loaded_by_other_cuts(rank: int, tmp_path: Path) -> None:
    for tied in (False, True):
        path = tmp_path / str(tied)
        pipe = train(True, "1f1b", tied)
        trireme.save_checkpoint(path, pipe)
        states: list[Any] = [None, None]
        torch.distributed.all_gather_object(states, pipe.state_dict())
        whole = {**states[0], **states[1]}
        assert whole["_loss.scale"] != 2
        others = [
            trireme.Pipeline(net, CHUNKS, loss=loss, **options)
            for options in ({"ranks": True, "schedule": "zb-v"}, {"devices": ["cpu"] * 2})
            for net, loss in [net_and_loss(tied)]
        ]
        for other in others:
            trireme.load_checkpoint(path, other)
            for name, value in other.state_dict().items():
                assert torch.equal(value, whole[name]), name


def test_moved_copied_and_pickled() -> None:
    net, loss = net_and_loss()
    pipe = trireme.Pipeline(net, CHUNKS, devices=["cpu"] * 2, loss=loss).double()
    assert loss.scale.dtype == torch.float64
    x, y = rows(0).double(), rows(1).double()
    wanted = pipe.step(x, target=y)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        other.zero_grad()
        assert torch.equal(other.step(x, target=y), wanted)
        got, theirs = dict(other.named_parameters()), dict(pipe.named_parameters())
        assert got["_loss.scale"] is not theirs["_loss.scale"]
        assert torch.equal(got["_loss.scale"].grad, theirs["_loss.scale"].grad)
