"""deferred_batch_norm=True: running statistics are those of whole batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.modules.batchnorm import _BatchNorm

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import FORMS, WIDTH, Both, rows

NAMES = ["running_mean", "running_var", "num_batches_tracked"]


def normed_layers() -> nn.Sequential:
    """Every kind of layer with running statistics, and one without; the last is frozen."""
    torch.manual_seed(3)
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 8),
        nn.Unflatten(1, (2, 2, 2)),
        nn.BatchNorm2d(2, momentum=None),
        nn.Unflatten(1, (2, 1)),
        nn.BatchNorm3d(2, affine=False, momentum=0.3),
        nn.Flatten(),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Linear(8, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Tanh(),
    )
    layers[10].running_mean.fill_(0.25)
    layers[10].eval()
    return layers


def norms_of(module: nn.Module) -> dict[str, _BatchNorm]:
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


class Watched:
    """One process, whose norms see each batch once more, whole."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.whole = {name: copy.deepcopy(norm) for name, norm in norms_of(module).items()}
        for name, norm in norms_of(module).items():
            norm.register_forward_pre_hook(self._watch(name))

    def _watch(self, name: str) -> Callable[..., None]:
        return lambda _, given: self.seen.setdefault(name, []).append(given[0].detach())

    def end_batch(self) -> None:
        for name, inputs in self.seen.items():
            self.whole[name](torch.cat(inputs))
        self.seen.clear()

    def assert_equal(self, module: nn.Module) -> None:
        for name, norm in norms_of(module).items():
            for buffer in NAMES:
                got, expected = getattr(norm, buffer), getattr(self.whole[name], buffer)
                if expected is None:
                    assert got is None
                else:
                    torch.testing.assert_close(got, expected, msg=f"{name}.{buffer}")


@on_shm_and_gloo_ranks(2, timeout=100)
def test_statistics_are_those_of_whole_batches(rank: int) -> None:
    """Eleven rows in four micro-batches, which are uneven; .grad is that of plain BatchNorm."""
    for form in (*FORMS, "zb-h1", "zb-v", "dualpipe-v"):
        both = Both(normed_layers, chunks=4, schedule=form, deferred_batch_norm=True)
        assert set(both.pipe.state_dict()) <= set(normed_layers().state_dict())
        watched = Watched(both.one)
        for step in range(3):
            both.train(step, 11)
            watched.end_batch()
            watched.assert_equal(both.pipe)


@on_shm_ranks(2)
def test_evaluation_uses_running_statistics(rank: int) -> None:
    both = Both(normed_layers, deferred_batch_norm=True)
    watched = Watched(both.one)
    both.train(0)
    watched.end_batch()
    for name, norm in norms_of(both.one).items():
        for buffer, value in watched.whole[name].named_buffers():
            setattr(norm, buffer, value.clone())
    both.one.eval()
    both.pipe.eval()
    got = both.pipe.eval_step(rows(5))
    if rank == 1:
        expected = [both.one(part) for part in rows(5).tensor_split(4)]
        torch.testing.assert_close(got, torch.cat(expected))
    watched.assert_equal(both.pipe)


class Breaks(nn.Module):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            raise ArithmeticError("the data are broken")
        return x


@on_shm_ranks(2)
def test_a_step_that_failed_leaves_statistics_as_they_were(rank: int) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*normed_layers(), Breaks())

    both = Both(make, schedule="gpipe", deferred_batch_norm=True)
    watched = Watched(both.one)
    both.train(0)
    watched.end_batch()
    both.pipe.zero_grad()
    broken = [module for module in both.pipe.modules() if isinstance(module, Breaks)]
    for layer in broken:
        layer.breaks = True
    with pytest.raises(RuntimeError, match="the data are broken"):
        both.pipe.step(rows(8), target=rows(9))
    watched.assert_equal(both.pipe)
    for layer in broken:
        layer.breaks = False
    both.train(1)
    watched.end_batch()
    watched.assert_equal(both.pipe)


class Recomputed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return trireme.checkpoint(self.norm, x)


@on_shm_ranks(2)
def test_what_a_checkpoint_computes_again_counts_once(rank: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        half = [nn.Linear(WIDTH, WIDTH), Recomputed(nn.BatchNorm1d(WIDTH))]
        return nn.Sequential(*half, *copy.deepcopy(half))

    pipe = trireme.Pipeline(make(), 3, ranks=True, loss=mse_loss, deferred_batch_norm=True)
    plain = nn.BatchNorm1d(WIDTH)
    plain(make()[0](rows(0)))
    pipe.step(rows(0), target=rows(1))
    if rank == 0:
        for name in NAMES:
            torch.testing.assert_close(getattr(pipe.get_submodule("1.norm"), name),
                                       getattr(plain, name))  # fmt: skip


@on_shm_ranks(2)
def test_a_layer_in_several_places_stays_one(rank: int) -> None:
    for loss in (mse_loss, nn.MSELoss()):
        norm = nn.BatchNorm1d(WIDTH)
        layers = nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Tanh(), nn.Tanh())
        pipe = trireme.Pipeline(
            layers, 2, ranks=True, loss=loss, balance=[3, 3], deferred_batch_norm=True
        )
        pipe.step(rows(0), target=rows(1))
        if rank == 0:
            first, _, second = (pipe.get_submodule(name) for name in "012")
            assert first is second and first.num_batches_tracked == 1


class OwnForward(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sync": (lambda: nn.SyncBatchNorm(3), "a SyncBatchNorm as '1.0' to be deferred"),
    "lazy": (nn.LazyBatchNorm1d, "expected it to know its features"),
    "own": (lambda: OwnForward(3), "got a OwnForward as '1.0'"),
}


@on_shm_ranks(2)
def test_what_cannot_be_deferred_is_refused(rank: int) -> None:
    for make, part in REFUSED.values():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(make()))
        with raises(ValueError, part, form=RANKLESS_FORM):
            trireme.Pipeline(module, 2, ranks=True, loss=mse_loss, deferred_batch_norm=True)


def does_nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_pipeline_chunks_forwards_are_a_batch(
    momentum: float | None, dtype: torch.dtype
) -> None:
    plain = nn.BatchNorm1d(WIDTH, momentum=momentum).to(dtype)
    plain.register_forward_hook(does_nothing)
    layer: Any = trireme.convert_deferred_batch_norm(copy.deepcopy(plain), 3)
    assert isinstance(layer, trireme.DeferredBatchNorm) and len(layer._forward_hooks) == 1
    assert list(layer.state_dict()) == list(plain.state_dict())
    close: Any = {"rtol": 0.03, "atol": 0.05} if dtype == torch.bfloat16 else {}
    layer = pickle.loads(pickle.dumps(layer))
    for step in range(3):
        x = (rows(step, 16) * 2 + 50).to(dtype)
        plain(x)
        before = layer.running_mean.clone()
        for number, part in enumerate(x.split([2, 9, 5])):
            assert torch.equal(layer(part), nn.BatchNorm1d(WIDTH).to(dtype)(part))
            assert torch.equal(layer.running_mean, before) == (number < 2)
        for name in NAMES:
            torch.testing.assert_close(getattr(layer, name), getattr(plain, name), **close)
    plain.load_state_dict(layer.state_dict())
    plain.eval(), layer.eval()
    assert torch.equal(layer(x), plain(x))


def test_another_number_of_chunks_makes_another_layer() -> None:
    first: Any = trireme.convert_deferred_batch_norm(nn.BatchNorm1d(WIDTH), 2)
    first(rows(0))  # the first half of a batch
    assert trireme.convert_deferred_batch_norm(first, 2) is first
    other: Any = trireme.convert_deferred_batch_norm(nn.Sequential(first), 1)[0]
    assert other is not first and (first.chunks, other.chunks) == (2, 1)
    assert other.weight is first.weight and other.running_mean is first.running_mean
    other(rows(1))
    expected = nn.BatchNorm1d(WIDTH)
    expected(rows(1))
    torch.testing.assert_close(other.running_mean, expected.running_mean)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        other(torch.ones(2, WIDTH, 2, 2))


def test_bad_arguments_are_refused() -> None:
    layer = trireme.DeferredBatchNorm(3, chunks=2)
    assert "chunks=2" in repr(layer)
    with raises(ValueError, "got an input of shape [3]", form=RANKLESS_FORM):
        layer(torch.ones(3))
    with raises(ValueError, "chunks=0", form=RANKLESS_FORM):
        trireme.DeferredBatchNorm(3, chunks=0)
    with raises(TypeError, "chunks is float", form=RANKLESS_FORM):
        trireme.convert_deferred_batch_norm(nn.BatchNorm1d(3), 2.0)  # type: ignore[arg-type]
    with raises(ValueError, "SyncBatchNorm", form=RANKLESS_FORM):
        trireme.convert_deferred_batch_norm(nn.SyncBatchNorm(3))
    with pytest.raises(ValueError, match="expected 4D input"):
        trireme.convert_deferred_batch_norm(nn.BatchNorm2d(3))(torch.ones(2, 3))
