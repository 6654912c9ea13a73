"""A DistributedDataParallel inside another one, and scripted modules, train as under torch's."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from ddp.ranks import backward, run_steps, sgd
from harness.faults import RANKLESS_FORM, raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks, on_shm_and_gloo_ranks
from harness.training import gradients

Ours = trireme.DistributedDataParallel
Api = Callable[..., Any]


def assert_alike(got: list[Any], expected: list[Any]) -> None:
    """Under whatever names: wrappers inside add to them."""
    for mine, others in zip(got, expected, strict=True):
        torch.testing.assert_close(list(mine.values()), list(others.values()))


def two_inside(wrap: Api) -> nn.Module:
    model: Any = mlp()
    model[0], model[4] = wrap(model[0]), wrap(model[4])
    return wrap(model)


def all_of_it(wrap: Api) -> nn.Module:
    return wrap(wrap(wrap(mlp())))


def over_fewer_ranks(wrap: Api) -> nn.Module:
    """What the outer one averages is what stays."""
    model: Any = mlp()
    groups = [dist.new_group([rank]) for rank in range(WORLD)]
    model[0] = wrap(model[0], process_group=groups[dist.get_rank()])
    return wrap(model)


def rest_frozen(wrap: Api) -> nn.Module:
    model: Any = mlp().requires_grad_(False)
    model[0] = wrap(model[0].requires_grad_())
    return wrap(model)


def recomputed(wrap: Api) -> nn.Module:
    """The inner forward runs once more, in backward."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(mlp())
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=False))

    torch.manual_seed(5)
    return wrap(Recomputed())


MODELS = (two_inside, all_of_it, over_fewer_ranks, rest_frozen, recomputed)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@on_shm_and_gloo_ranks(WORLD)
def test_the_outer_one_averages(rank: int, make: Callable[[Api], nn.Module]) -> None:
    gloo = dist.new_group(backend="gloo")
    theirs: Any
    if make is over_fewer_ranks:
        theirs = TorchDDP(mlp(), process_group=gloo)
    else:
        theirs = make(functools.partial(TorchDDP, process_group=gloo))
    expected = run_steps(theirs, sgd(theirs), backward, rank, 4)
    ours = make(Ours)
    assert_alike(run_steps(ours, sgd(ours), backward, rank, 4), expected)


@on_shm_and_gloo_ranks(WORLD)
def test_an_inner_forward_by_itself_averages(rank: int) -> None:
    """Beside the outer one, in one backward with it, in a copy, and when that is gone."""
    outer: Any = two_inside(Ours)
    for model in (outer, copy.deepcopy(outer)):
        inner, x = model.module[0], batch(0)[rank::WORLD]
        whole: Any = mlp()
        inner(x).sum().backward()
        whole[0](batch(0)).sum().div(WORLD).backward()
        torch.testing.assert_close(inner.module.weight.grad, whole[0].weight.grad)
        model.zero_grad()
        whole.zero_grad()
        (model(x).sum() + inner(x).sum()).backward()
        (whole(batch(0)).sum() + whole[0](batch(0)).sum()).div(WORLD).backward()
        for mine, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, of_whole.grad)
        model.zero_grad()
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        whole.zero_grad()
        whole(batch(0)).sum().mul(2 / WORLD).backward()
        for mine, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, of_whole.grad)
    inner = outer.module[0]
    del outer, model
    inner.zero_grad()
    whole.zero_grad()
    inner(x).sum().backward()
    whole[0](batch(0)).sum().div(WORLD).backward()
    torch.testing.assert_close(inner.module.weight.grad, whole[0].weight.grad)


@pytest.mark.parametrize("wrappers", [(TorchDDP, Ours), (Ours, TorchDDP)], ids=["in", "around"])
@on_ranks(backend="gloo")
def test_torchs_class(rank: int, wrappers: tuple[Api, Api]) -> None:
    """Inside of ours, and around it."""
    inner, outer = wrappers
    model: Any = mlp()
    model[0], model[2] = inner(model[0]), inner(model[2])
    model = outer(model)
    alone = TorchDDP(mlp())
    expected = run_steps(alone, sgd(alone), backward, rank, 4)
    assert_alike(run_steps(model, sgd(model), backward, rank, 4), expected)


@on_ranks(backend="gloo")
def test_torchs_class_over_other_ranks(rank: int) -> None:
    groups = [dist.new_group([peer]) for peer in range(WORLD)]
    model: Any = mlp()
    model[0] = TorchDDP(model[0], process_group=groups[rank])
    text = f"got torch's DistributedDataParallel at '0', which averages over ranks [{rank}]"
    with raises(ValueError, "[ddp] ", text):
        Ours(model)


@on_ranks()
def test_fully_shard_inside(rank: int) -> None:
    with raises(ValueError, "[ddp] got a module of fully_shard at '1'"):
        Ours(nn.Sequential(nn.Linear(2, 2), trireme.fully_shard(nn.Linear(2, 2))))


def with_buffers() -> nn.Module:
    model = mlp()
    return nn.Sequential(*model[:2], nn.BatchNorm1d(13), *model[2:])


def script_inside() -> nn.Module:
    model: Any = with_buffers()
    model[0] = torch.jit.script(model[0])
    return model


@pytest.mark.parametrize("kind", ["scripted", "traced", "inside"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_shm_and_gloo_ranks(WORLD)
def test_scripts(rank: int, kind: str) -> None:
    make = {
        "scripted": lambda: torch.jit.script(with_buffers()),
        "traced": lambda: torch.jit.trace(with_buffers(), batch(7)),
        "inside": script_inside,
    }[kind]
    theirs = TorchDDP(make(), process_group=dist.new_group(backend="gloo"))
    ours = Ours(make())
    expected = run_steps(theirs, sgd(theirs), backward, rank, 4)
    torch.testing.assert_close(run_steps(ours, sgd(ours), backward, rank, 4), expected)
    assert gradients(ours).keys() == gradients(theirs).keys()


@on_ranks()
def test_what_lightning_calls_of_a_static_graph(rank: int) -> None:
    """Under manual optimization no forward synchronizes, and its strategy prepares backward."""
    ddp: Any = Ours(mlp(), static_graph=True)
    with ddp.no_sync():
        output = ddp(batch(0)[rank::WORLD]).square().mean()
        text = "[ddp] got _delay_all_reduce() before any backward that averages gradients"
        with raises(RuntimeError, text, form=RANKLESS_FORM):
            ddp.reducer._delay_all_reduce()
        ddp.reducer._rebuild_buckets()
        ddp.reducer.prepare_for_backward([])
        output.backward()
        ddp.reducer._delay_all_reduce()
    alone = mlp()
    alone(batch(0)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone))


class Meeting(nn.Module):
    """A second thread comes in while the first is inside; the one that came first leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.comes = mlp(), threading.Lock()
        self.first_is_in, self.second_is_in, self.first_is_out = (
            threading.Event() for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.comes.acquire(blocking=False):
            self.first_is_in.set()
            assert self.second_is_in.wait(30)
        else:
            self.second_is_in.set()
            assert self.first_is_out.wait(30)
        return self.layer(x)


@pytest.mark.parametrize("modules", [1, 2])
@on_ranks(1)
def test_forwards_of_two_threads_leave_no_module_behind(rank: int, modules: int) -> None:
    """Else torch would take it for the one around all later forwards."""
    assert TorchDDP._get_active_ddp_module() is None, "left by the case before"
    met = Meeting()
    ddps = [Ours(met) for _ in range(modules)]

    def evaluate(ddp: Ours) -> None:
        with torch.no_grad():
            ddp(batch(0))
        met.first_is_out.set()

    first, second = (threading.Thread(target=evaluate, args=(ddps[at],)) for at in (0, -1))
    first.start()
    assert met.first_is_in.wait(30)
    second.start()
    first.join()
    second.join()
    assert TorchDDP._get_active_ddp_module() is None


class Gated(nn.Module):
    """Evaluates until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inside, self.may_go_on = mlp(), threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            self.inside.set()
            assert self.may_go_on.wait(30)
        return self.layer(x)


@on_ranks()
def test_a_step_during_an_evaluation_averages(rank: int) -> None:
    """That of another thread is no forward around this one."""
    gated = Gated()
    ddp = Ours(gated)
    evaluation = threading.Thread(target=torch.no_grad()(lambda: ddp(batch(0))))
    evaluation.start()
    assert gated.inside.wait(30)
    loss = ddp(batch(1)[rank::WORLD]).square().mean()
    gated.may_go_on.set()
    evaluation.join()
    loss.backward()
    alone = mlp()
    alone(batch(1)).square().mean().backward()
    torch.testing.assert_close(gradients(gated.layer), gradients(alone))
