"""What cannot be a pipeline, or a batch of one: refused on all ranks, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, message_of, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, Both, rows, tanh_layers

Pipeline = trireme.Pipeline


class OwnForward(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def hooked() -> nn.Sequential:
    module = tanh_layers()
    module.register_forward_hook(lambda *_: None)
    return module


def with_parameter() -> nn.Sequential:
    module = tanh_layers()
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return module


def on_meta() -> nn.Sequential:
    return tanh_layers().to("meta")


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no Sequential": (lambda: nn.Linear(2, 2), {}, TypeError, "expected a torch.nn.Sequential"),
    "own forward": (lambda: OwnForward(nn.Tanh()), {}, TypeError, "a forward of its own"),
    "hooks": (hooked, {}, ValueError, "a Sequential with hooks"),
    "parameter": (with_parameter, {}, ValueError, "'scale' beside its layers"),
    "empty": (nn.Sequential, {}, ValueError, "without layers"),
    "meta": (on_meta, {}, ValueError, "on device meta"),
    "balance adds up": (tanh_layers, {"balance": [4, 3]}, ValueError, "adds up to 7, expected 8"),
    "balance of zero": (tanh_layers, {"balance": [8, 0]}, ValueError, "from 1 on"),
    "ranks and stages": (tanh_layers, {"balance": [8]}, ValueError, "more ranks than stages"),
    "balance divides": (tanh_layers, {"balance": [4, 2, 2]}, ValueError, "do not divide"),
    "balance named": (tanh_layers, {"balance": "size"}, ValueError, "expected 'time', 'bytes'"),
    "no sample": (tanh_layers, {"balance": "time"}, ValueError, "without sample="),
    "sample unused": (tanh_layers, {"sample": 1}, ValueError, "a balance that is not measured"),
    "bad sample": (tanh_layers, {"balance": "time", "sample": rows(0)[:, :2]}, Exception, "shapes"),
    "few layers": (nn.Tanh, {"schedule": "looped-bfs"}, TypeError, "torch.nn.Sequential"),
    "too few layers": (
        lambda: tanh_layers(3), {"schedule": "looped-bfs"}, ValueError, "3 layers for 4 stages"
    ),
    "schedule": (tanh_layers, {"schedule": "2f2b"}, ValueError, "interleaved-1f1b"),
    "no stage for a rank": (
        tanh_layers, {"schedule": "0F0,0B0\n\n", "chunks": 1}, ValueError, "rank"
    ),
    "chunks": (tanh_layers, {"chunks": 0}, ValueError, "[pipeline]"),
    "kind of chunks": (tanh_layers, {"chunks": 2.0}, TypeError, "chunks is float"),
    "devices": (tanh_layers, {"devices": ["cpu"]}, ValueError, "devices="),
    "checkpoint": (tanh_layers, {"checkpoint": "often"}, ValueError, "checkpoint='often'"),
    "checkpoint named": (tanh_layers, {"checkpoint": "often"}, ValueError, "expected 'always'"),
    "loss": (tanh_layers, {"loss": 3}, TypeError, "got int as loss"),
    "mesh": (tanh_layers, {"mesh": "dp"}, TypeError, "expected a DeviceMesh"),
    "costs": (
        tanh_layers, {"costs": {"forwards": 1}, "schedule": "zb-auto"}, ValueError, "forwards"
    ),
}  # fmt: skip


@on_shm_and_gloo_ranks(2)
def test_pipelines_that_are_refused(rank: int) -> None:
    """Each on both ranks alike; the group works afterwards."""
    for name, (make, options, kind, part) in REFUSED.items():
        with pytest.raises(kind) as caught:
            Pipeline(make(), **{"chunks": 4, "ranks": True, "loss": mse_loss, **options})
        text = message_of(caught.value)
        assert text.startswith("[") or kind is Exception, (name, text)
        assert part in text or rank > 0, (name, text)
    Both(tanh_layers).train(0)


@on_shm_ranks(4)
def test_meshes_that_are_refused(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"))
    with raises(ValueError, "a mesh with 'dp', 'tp' beside 'pp'", form=RANKLESS_FORM):
        Pipeline(tanh_layers(), 4, mesh=mesh, loss=mse_loss)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with raises(ValueError, "without a dimension 'pp'", form=RANKLESS_FORM):
        Pipeline(tanh_layers(), 4, mesh=mesh, loss=mse_loss)


@on_shm_and_gloo_ranks(2)
def test_ranks_that_disagree(rank: int) -> None:
    for options, part in (
        ({"chunks": 2 + rank}, "micro-batches 2 on rank 0, 3 on rank 1"),
        ({"chunks": 2, "schedule": ("gpipe", "1f1b")[rank]}, "schedule "),
        ({"chunks": 2, "balance": [4 + rank, 4 - rank]}, "balance [4, 4] on rank 0"),
        ({"chunks": 2, "dim": rank}, "dim 0 on rank 0, 1 on rank 1"),
    ):
        with raises(ValueError, "that differs between ranks", part):
            Pipeline(tanh_layers(), **options, ranks=True, loss=mse_loss)
    with raises(ValueError, "layers "):
        Pipeline(tanh_layers(6 + 2 * rank), 2, ranks=True, loss=mse_loss)
    with pytest.raises(ValueError, match="more ranks than stages"):
        Pipeline(tanh_layers(), 2, ranks=True, loss=mse_loss, balance=[8] if rank else [4, 4])


def assert_refused(pipe: Any, kind: type[Exception], part: str, *args: Any, **kwargs: Any) -> None:
    for call in (pipe.step, pipe.eval_step) if "target" in kwargs else (pipe.step,):
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        assert part in message_of(caught.value), message_of(caught.value)


@on_shm_and_gloo_ranks(2)
def test_batches_that_are_refused(rank: int) -> None:
    """On both ranks alike, before anything has run; the next step works."""
    both = Both(tanh_layers)
    pipe, x, y = both.pipe, rows(0), rows(1)
    assert_refused(pipe, ValueError, "got no target, which loss= takes", x)
    assert_refused(pipe, TypeError, "a target goes into target= alone", x, y, target=y)
    assert_refused(pipe, TypeError, "expected keywords that the forward", x, mask=y, target=y)
    assert_refused(pipe, ValueError, "3 rows for 4 micro-batches", x[:3], target=y[:3])
    assert_refused(pipe, ValueError, "0 rows for 4 micro-batches", x[:0], target=y[:0])
    assert_refused(pipe, ValueError, "10 in input 0, 9 in the target", x, target=y[:9])
    assert_refused(pipe, ValueError, "no tensor", 3, target=4)
    assert_refused(pipe, ValueError, "rows 10 on rank 0, 9 on rank 1", x[rank:], target=y[rank:])
    call = pipe.step if rank == 0 else pipe.eval_step
    with raises(ValueError, "call step on rank 0, eval_step on rank 1"):
        call(x, target=y)
    with pytest.raises(ValueError, match="8 in the target" if rank else "that rank 1 cannot use"):
        pipe.step(x, target=y[: 10 - 2 * rank])
    with raises(TypeError, "Call step(), or eval_step()"):
        pipe(x)
    both.train(0)
    without = Pipeline(tanh_layers(), 2, ranks=True, schedule="gpipe")
    assert_refused(without, ValueError, "a target and a pipeline without a loss", x, target=y)
    alone = Pipeline(tanh_layers(), 2, ranks=True, loss=lambda output: output.mean())
    assert_refused(alone, ValueError, "a loss that takes none", x, target=y)
    assert alone.step(x).dim() == 0


@on_shm_ranks(2)
def test_a_loss_that_is_none(rank: int) -> None:
    """The last layer's output, or what loss= returns, is not a number."""
    for loss, part in (
        (None, "the last layer returned a tensor of sizes [5, 6]"),
        (lambda output: output, "loss= returned a tensor of sizes [5, 6]"),
        (lambda output: 3.0, "loss= returned a float"),
    ):
        pipe = Pipeline(tanh_layers(), 2, ranks=True, loss=loss)
        with pytest.raises(RuntimeError) as caught:
            pipe.step(rows(0))
        assert part in message_of(caught.value)


@on_shm_ranks(2)
def test_outputs_that_cannot_be_merged(rank: int) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0))
    pipe = Pipeline(module, 2, ranks=True, loss=lambda output: output.mean())
    got = pipe.eval_step(rows(0))
    assert got is None or got.shape == (60,)
    wide = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Flatten(0), nn.Unflatten(0, (1, -1)))
    pipe = Pipeline(wide, 4, ranks=True, balance=[1, 2], loss=lambda output: output.mean())
    if rank == 1:
        with pytest.raises(ValueError, match="cannot be put together"):
            pipe.eval_step(rows(0))
    else:
        assert pipe.eval_step(rows(0)) is None
    assert pipe.step(rows(0)).dim() == 0


@on_shm_ranks(2)
def test_a_layer_in_place_of_another(rank: int) -> None:
    """Stages go on to call what they were made of."""
    pipe = Pipeline(tanh_layers(), 2, ranks=True, loss=mse_loss)
    last = pipe.get_submodule("7") if rank == 1 else None
    if rank == 1:
        pipe.add_module("7", nn.Identity())
    expected = "got Identity in place of layer '7', expected the Tanh" if rank else "that rank 1"
    with raises(ValueError, expected):
        pipe.step(rows(0), target=rows(1))
    if rank == 1:
        pipe.add_module("7", last)
    pipe.step(rows(0), target=rows(1))


@on_shm_ranks(2)
def test_a_stage_that_was_moved(rank: int) -> None:
    both = Both(tanh_layers)
    both.train(0)
    if rank == 1:
        both.pipe.to("meta")
    expected = "got stage 1 (layers 4..7) on meta, expected it on cpu" if rank else "that rank 1"
    with raises(ValueError, expected):
        both.pipe.step(rows(0), target=rows(1))
