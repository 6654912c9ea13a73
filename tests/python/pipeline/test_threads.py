"""Pipelines in one process, whose rows run on threads."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipeline.ranks import WIDTH, Both, rows, tanh_layers

FORMS = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v", "zb-auto",
)  # fmt: skip


class Threads(Both):
    """A pipeline in this process, and the whole module."""

    ranks = False


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_plain_accumulation(form: str, count: int) -> None:
    for checkpoint in ("never", "always"):
        both = Threads(
            tanh_layers, chunks=4, schedule=form, devices=["cpu"] * count, checkpoint=checkpoint
        )
        for step in range(3):
            both.train(step)
        report = both.pipe.last_step()
        assert [one["stage"] for one in report["stages"]] == list(range(both.pipe.schedule.stages))


def test_how_many_rows_there_are() -> None:
    def rows_of(**options: object) -> int:
        pipe = trireme.Pipeline(tanh_layers(), 2, loss=mse_loss, **options)  # type: ignore[arg-type]
        return pipe.schedule.ranks

    assert rows_of(devices=["cpu"] * 3) == 3
    assert rows_of(balance=[1, 6, 1]) == 3
    assert rows_of() == max(1, min(torch.get_num_threads(), 8))
    assert rows_of(schedule=trireme.pipeline_schedule("1f1b", ranks=4, micro_batches=2)) == 4


class Luckless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bad_call = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.bad_call:
            raise ArithmeticError("no luck")
        return x


@pytest.mark.parametrize("form", ["gpipe", "1f1b", "zb-h1"])
def test_an_exception_is_the_user_s_own(form: str) -> None:
    layer = Luckless()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    pipe = trireme.Pipeline(module, 4, devices=["cpu"] * 3, schedule=form, loss=mse_loss)
    pipe.step(rows(0), target=rows(1))
    before = [one.grad.clone() for one in pipe.parameters()]
    layer.calls, layer.bad_call = 0, 3
    with pytest.raises(ArithmeticError, match="no luck") as caught:
        pipe.step(rows(0), target=rows(1))
    assert "[pipeline] raised in stage 1 (layer 1) in 1F2" in str(caught.getrepr())
    for parameter, grad in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
    pipe.step(rows(0), target=rows(1))


def test_a_loss_that_raises() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("wrong")

    pipe = trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, loss=loss)
    with pytest.raises(KeyError, match="wrong"):
        pipe.step(rows(0), target=rows(1))


def test_shared_parameters_of_several_rows() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), last)

    for form in ("gpipe", "1f1b", "zb-h1"):
        pipe = trireme.Pipeline(make(), 4, devices=["cpu"] * 3, schedule=form, loss=mse_loss)
        one = make()
        assert len(list(pipe.parameters())) == len(list(one.parameters()))
        for step in range(3):
            x, y = rows(2 * step), rows(2 * step + 1)
            for module in (pipe, one):
                module.zero_grad()
            got = pipe.step(x, target=y)
            parts = zip(x.tensor_split(4), y.tensor_split(4), strict=True)
            losses = [mse_loss(one(a), b) for a, b in parts]
            (sum(losses, torch.zeros(())) / 4).backward()
            torch.testing.assert_close(got, sum(losses, torch.zeros(())).detach() / 4)
            for a, b in zip(pipe.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)


def test_evaluation_needs_no_rank() -> None:
    module = tanh_layers()
    pipe = trireme.Pipeline(module, 3, devices=["cpu"] * 2, loss=mse_loss)
    x, y = rows(0, 9), rows(1, 9)
    assert torch.equal(pipe.eval_step(x), torch.cat([module(one) for one in x.tensor_split(3)]))
    assert torch.isclose(pipe.eval_step(x, target=y), mse_loss(module(x), y))


def test_dropout_is_the_same_from_run_to_run() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in "abc"))
    pipe = trireme.Pipeline(module, 4, devices=["cpu"] * 3, loss=mse_loss)
    found = []
    for _ in range(4):
        torch.manual_seed(2)
        found.append(pipe.step(rows(0), target=rows(1)))
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(pipe.step(rows(0), target=rows(1)), found[0])


def test_nothing_is_left_running() -> None:
    def count() -> int:
        return sum(one.name.startswith("trireme-row") for one in threading.enumerate())

    def wait_for_none() -> None:
        deadline = time.monotonic() + 20
        while count() > 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    gc.collect()  # the tracebacks of other tests
    wait_for_none()
    two = [trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, loss=mse_loss) for _ in "ab"]
    for pipe in two:
        pipe.step(rows(0), target=rows(1))
    assert count() == 4
    gc.disable()
    try:
        del pipe, two
        wait_for_none()
    finally:
        gc.enable()


def test_clipping_and_new_parameters() -> None:
    module = tanh_layers()
    pipe = trireme.Pipeline(module, 2, devices=["cpu"] * 2, loss=mse_loss)
    pipe.step(rows(0), target=rows(1))
    grads = [one.grad.clone() for one in pipe.parameters()]
    norm = trireme.clip_grad_norm_(pipe.parameters(), 0.01)
    expected = torch.nn.utils.get_total_norm(grads)
    torch.testing.assert_close(norm, expected)
    pipe.load_state_dict({k: v.clone() for k, v in pipe.state_dict().items()}, assign=True)
    pipe.zero_grad()
    pipe.step(rows(0), target=rows(1))
    for parameter, grad in zip(pipe.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="devices= with meta"):
        trireme.Pipeline(tanh_layers(), 2, devices=["meta"], loss=mse_loss)
    with pytest.raises(ValueError, match="got no devices"):
        trireme.Pipeline(tanh_layers(), 2, devices=[], loss=mse_loss)
    with pytest.raises(ValueError, match="8 layers for 9 stages"):
        trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 9, loss=mse_loss)
    pipe = trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, loss=mse_loss)
    with pytest.raises(ValueError, match="batch of 1 rows for 2 micro-batches"):
        pipe.step(rows(0, 1), target=rows(1, 1))
    pipe.step(rows(0), target=rows(1))
