"""Skips: what one layer stashes and a later one pops, in pipelines and outside of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme import Namespace, pop, skippable, stash

from harness.faults import HOUSE_FORM, RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import FORMS, WIDTH, Both, accumulate, rows


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        stash("skip", x)
        return x


@skippable(pop=["skip"])
class Up(nn.Module):
    """It is written as torchgpipe wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Iterator[Any]:
        skip = yield pop("skip")
        return self.linear(x * skip).tanh()


def u_net(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(3)
    spaces = [Namespace() for _ in range(depth)]
    down = [Down().isolate(space) for space in spaces]
    up = [Up().isolate(space) for space in reversed(spaces)]
    return nn.Sequential(*down, nn.Linear(WIDTH, WIDTH), nn.Tanh(), *up)


@pytest.mark.parametrize("world", [1, 2, 4])
@on_shm_and_gloo_ranks("world", timeout=120)
def test_a_u_net_trains_as_in_one_process(rank: int, world: int) -> None:
    for schedule in (*FORMS, "zb-h1", "zb-v", "dualpipe-v"):
        both = Both(u_net, schedule=schedule)
        for step in range(2):
            both.train(step)


@skippable(stash=["mask", "nothing", "twice"], pop=[])
class Several(nn.Module):
    """It stashes what has no gradient, nothing at all, and its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        stash("mask", x > 0)
        stash("nothing", None)
        stash("twice", x)
        return x.sin(), 3


@skippable(pop=["mask", "twice"])
class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, int]) -> tuple[Tensor, int]:
        x, number = given
        masked = torch.where(pop("mask"), x, pop("twice"))
        return self.linear(masked) * number, number


@skippable(pop=["nothing"])
class Ends(nn.Module):
    def forward(self, given: tuple[Tensor, int]) -> Tensor:
        assert pop("nothing") is None
        return given[0]


def several() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Several(), nn.Identity(), Takes(), nn.Identity(), Ends()
    )


@pytest.mark.parametrize("world", [1, 2, 3])
@on_shm_ranks("world", timeout=60)
def test_anything_may_be_stashed(rank: int, world: int) -> None:
    for schedule in ("1f1b", "zb-h1", "interleaved-1f1b"):
        both = Both(several, schedule=schedule)
        both.train(0)
        x = rows(9)
        got = both.pipe.eval_step(x)
        last = both.pipe.stages[-1].rank
        assert (got is None) == (rank != last)
        whole = torch.cat([both.one(part) for part in x.tensor_split(4)])
        assert got is None or torch.equal(got, whole)


@on_shm_ranks(3, timeout=60)
def test_frozen_layers_get_gradients_of_skips_all_the_same(rank: int) -> None:
    """Nothing goes back along the chain past a frozen front; what was stashed behind it does."""

    def make() -> nn.Sequential:
        module = u_net()
        for layer in (module[3], module[5]):
            layer.requires_grad_(False)
        module[0].requires_grad_(False)
        return module

    for schedule in ("1f1b", "zb-h1", "zb-v"):
        both = Both(make, schedule=schedule)
        for step in range(2):
            both.train(step)


@on_shm_ranks(2, timeout=60)
def test_copies_and_uneven_numbers_of_namespaces(rank: int) -> None:
    """Ranks that have made other namespaces before agree all the same."""
    for _ in range(rank):
        u_net()
    module = u_net()
    pipe = trireme.Pipeline(copy.deepcopy(module), 4, ranks=True, loss=mse_loss)
    x, y = rows(1), rows(2)
    expected = accumulate(module, x, y, chunks=4, loss=mse_loss)
    assert torch.equal(pipe.step(x, target=y), expected)


@on_shm_ranks(2, timeout=60)
def test_a_balance_is_measured(rank: int) -> None:
    module = u_net()
    pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss, balance="time", sample=rows(1, 5))
    pipe.step(rows(1), target=rows(2))


def refused(kind: type[Exception], *parts: str) -> AbstractContextManager[None]:
    return raises(kind, *parts, form=RANKLESS_FORM)


def test_outside_of_pipelines() -> None:
    module = u_net()
    x = rows(1)
    value, kept = x, []
    for layer in module[:3]:
        value = layer.linear(value).tanh()
        kept.append(value)
    value = module[4](module[3](value))
    for layer in module[5:]:
        value = layer.linear(value * kept.pop()).tanh()
    assert torch.equal(module(x), value)
    assert torch.equal(module(x), value)
    with refused(ValueError, "got a pop of 'skip of ", "which nothing has stashed"):
        module[5](x)


@skippable(stash=["a"])
class StashesOther(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        stash("b", x)
        return x


@skippable(stash=["a"])
class StashesNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        stash("a", 3)  # type: ignore[arg-type]
        return x


@skippable(stash=["a"])
class StashesNever(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@skippable(pop=["a"])
class PopsNever(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@skippable(stash=["a"])
class StashesA(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        stash("a", x)
        return x


@skippable(pop=["a"])
class PopsA(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + pop("a")


@skippable(pop=["a"])
class PopsTwice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + pop("a") + pop("a")


@skippable(stash=["a"])
class Yields(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("a", x)
        yield x


def test_bad_declarations() -> None:
    with refused(TypeError, "got stash='skip', expected a list of names"):
        skippable(stash="skip")
    with refused(TypeError, "expected a class of modules"):
        skippable(stash=["a"])(mse_loss)  # type: ignore[type-var]
    with refused(TypeError, "got a str as namespace"):
        StashesA().isolate("one")
    with refused(ValueError, "got 'b' to isolate, which StashesA does not declare"):
        StashesA().isolate(Namespace(), only=["b"])
    with refused(ValueError, "got a stash of 'b', which StashesOther does not declare"):
        StashesOther()(rows(1))
    for kind in (ValueError, RuntimeError):  # torchgpipe's is the latter
        with refused(kind, "got no stash of 'a' in the forward of a StashesNever"):
            StashesNever()(rows(1))
    with refused(RuntimeError, "got no pop of 'a' in the forward of a PopsNever that declares it"):
        PopsNever()(rows(1))
    with refused(RuntimeError, "got a pop of 'a', which nothing has stashed"):
        PopsA()(rows(1))
    with refused(TypeError, "got a int to stash as 'a', expected a tensor or None"):
        StashesNumber()(rows(1))
    with refused(TypeError, "got a Tensor out of a forward that yields"):
        Yields()(rows(1))


@on_shm_ranks(2, timeout=60)
def test_modules_whose_skips_do_not_fit_are_refused(rank: int) -> None:
    def refuses(layers: list[nn.Module], *parts: str, form: Any = RANKLESS_FORM) -> None:
        with raises(ValueError, *parts, form=form):
            trireme.Pipeline(nn.Sequential(*layers), 2, ranks=True, loss=mse_loss)

    linear = nn.Linear(WIDTH, WIDTH)
    refuses([StashesA(), linear], "'a', which layer 0 stashes and no layer pops")
    refuses([linear, PopsA()], "'a', which layer 1 pops and no layer stashes")
    refuses([PopsA(), linear, StashesA()], "which layer 0 pops before layer 2 stashes it")
    refuses([StashesA(), StashesA(), PopsA()], "'a' that is stashed in layers 0 and 1")
    refuses([StashesA(), PopsA(), PopsA()], "'a' that is popped in layers 1 and 2")
    if rank == 0:
        refuses([StashesA(), linear, PopsA()], "differs between ranks: skips", form=HOUSE_FORM)
    else:
        refuses([linear, StashesA(), PopsA()], "differs between ranks: skips", form=HOUSE_FORM)


@on_shm_ranks(2, timeout=60, fresh=True)  # what was received lives as long as the errors
def test_forwards_that_do_otherwise_fail_on_all_ranks(rank: int) -> None:
    def fails(layers: list[nn.Module], *parts: str) -> None:
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
        pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss, schedule="1f1b")
        for _ in range(2):
            with raises(RuntimeError, "stage", *parts):
                pipe.step(rows(1), target=rows(2))

    fails(
        [StashesNever(), nn.Tanh(), PopsA()], "got no stash of 'a' in the forward of a StashesNever"
    )
    fails([StashesA(), nn.Tanh(), PopsTwice()], "got a pop of 'a' twice in a micro-batch")
    dist.barrier()


def test_the_class_stays_what_it_is() -> None:
    assert isinstance(u_net()[0], Down)
    assert Down.forward.__name__ == "forward"
    names: Callable[..., Any] = u_net().state_dict
    assert "0.linear.weight" in names()
