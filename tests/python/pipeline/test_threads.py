"""Pipelines in one process, whose rows run on threads."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

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
        assert [stage["stage"] for stage in report["stages"]] == list(
            range(both.pipe.schedule.stages)
        )


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
    before = [parameter.grad.clone() for parameter in pipe.parameters()]
    layer.calls, layer.bad_call = 0, 3
    with pytest.raises(ArithmeticError, match="no luck") as caught:
        pipe.step(rows(0), target=rows(1))
    assert "[pipeline] in stage 1 (layer 1), micro-batch 2" in str(caught.getrepr())
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
    assert torch.equal(pipe.eval_step(x), torch.cat([module(part) for part in x.tensor_split(3)]))
    assert torch.isclose(pipe.eval_step(x, target=y), mse_loss(module(x), y))


def test_dropout_is_the_same_from_run_to_run() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()) for _ in "abc"))
    pipe = trireme.Pipeline(module, 4, devices=["cpu"] * 3, loss=mse_loss)
    found = []
    for _ in range(4):
        torch.manual_seed(2)
        found.append(pipe.step(rows(0), target=rows(1)))
    assert all(torch.equal(tensor, found[0]) for tensor in found)
    assert not torch.equal(pipe.step(rows(0), target=rows(1)), found[0])


def test_nothing_is_left_running() -> None:
    def count() -> int:
        return sum(thread.name.startswith("trireme-row") for thread in threading.enumerate())

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


def test_copies_and_pickles() -> None:
    first = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(first, nn.BatchNorm1d(WIDTH), nn.Tanh(), first)
    options: Any = {"schedule": "zb-v", "checkpoint": "always", "deferred_batch_norm": True}
    pipe = trireme.Pipeline(net, 2, devices=["cpu"] * 2, loss=mse_loss, **options)
    pipe.step(rows(0), target=rows(1))
    state = {name: value.clone() for name, value in pipe.state_dict().items()}
    copies = [copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))]
    pipe.zero_grad()  # copies have no .grad
    loss = pipe.step(rows(0), target=rows(1))
    gradients = [parameter.grad for parameter in pipe.parameters()]
    for twin in copies:
        assert twin.schedule == pipe.schedule and twin.stages == pipe.stages
        for name, value in twin.state_dict().items():
            assert torch.equal(value, state[name])
        assert torch.equal(twin.step(rows(0), target=rows(1)), loss)
        assert len(gradients) == len(list(twin.parameters()))  # what is shared stays shared
        for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient) and parameter.grad is not gradient
        twin.eval()
        assert pipe.training
        assert torch.equal(twin(rows(2)), twin.eval_step(rows(2)))
    with pytest.raises(TypeError, match="copy or a pickle of a pipeline that has a GradScaler"):
        pipe.scale_losses(torch.amp.GradScaler("cpu"))
        copy.copy(pipe)


class PressesCtrlC(nn.Module):
    """Its ``where`` says in which half of a pass the signal comes; the handler has run then."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.taken = threading.Event()

    def press(self) -> None:
        self.where = ""
        os.kill(os.getpid(), signal.SIGINT)
        assert self.taken.wait(30)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.press()
        y = x * 1
        if self.where == "backward":
            y.register_hook(lambda _: self.press() if self.where else None)
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c(where: str) -> None:
    layer = PressesCtrlC()

    def interrupt(*_: object) -> None:
        layer.taken.set()
        raise KeyboardInterrupt

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = trireme.Pipeline(net, 4, balance=[2, 2], loss=mse_loss)
    runs: list[Callable[[], object]] = [
        lambda: pipe.step(rows(0), target=rows(1)),
        lambda: mse_loss(pipe(rows(0)), rows(1)).backward(),
    ]
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for run in runs:
            pipe.zero_grad()
            run()
            expected = [parameter.grad.clone() for parameter in pipe.parameters()]
            layer.where = where
            layer.taken.clear()
            with pytest.raises(KeyboardInterrupt):
                run()
            assert layer.taken.is_set()
            pipe.zero_grad()
            run()
            for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
                assert torch.equal(parameter.grad, gradient)
    finally:
        signal.signal(signal.SIGINT, before)


def test_clipping_and_new_parameters() -> None:
    module = tanh_layers()
    pipe = trireme.Pipeline(module, 2, devices=["cpu"] * 2, loss=mse_loss)
    pipe.step(rows(0), target=rows(1))
    grads = [parameter.grad.clone() for parameter in pipe.parameters()]
    norm = trireme.clip_grad_norm_(pipe.parameters(), 0.01)
    expected = torch.nn.utils.get_total_norm(grads)
    torch.testing.assert_close(norm, expected)
    pipe.load_state_dict({k: v.clone() for k, v in pipe.state_dict().items()}, assign=True)
    pipe.zero_grad()
    pipe.step(rows(0), target=rows(1))
    for parameter, grad in zip(pipe.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="devices= with meta"):
        trireme.Pipeline(tanh_layers(), 2, devices=["meta"], loss=mse_loss)
    with pytest.raises(ValueError, match="got no devices"):
        trireme.Pipeline(tanh_layers(), 2, devices=[], loss=mse_loss)
    with pytest.raises(ValueError, match="8 layers for 9 stages"):
        trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 9, loss=mse_loss)
    pipe = trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, loss=mse_loss)
    with pytest.raises(ValueError, match="batch of 1 rows for 2 micro-batches"):
        pipe.step(rows(0, 1), target=rows(1, 1))
    pipe.step(rows(0), target=rows(1))


# --- pipe(x): the loss outside


def pair(checkpoint: str = "never", count: int = 3, chunks: int = 4, **options: Any) -> Any:
    pipe = trireme.Pipeline(
        tanh_layers(), chunks, devices=["cpu"] * count, checkpoint=checkpoint, **options
    )
    return pipe, tanh_layers()


def assert_equal_grads(pipe: nn.Module, one: nn.Module) -> None:
    for got, expected in zip(pipe.parameters(), one.parameters(), strict=True):
        assert (got.grad is None) == (expected.grad is None)
        assert got.grad is None or torch.equal(got.grad, expected.grad)


def accumulated(one: nn.Module, x: Tensor, chunks: int, weights: Tensor) -> Tensor:
    """Forwards of micro-batches, and their backwards in order, as a pipeline runs them."""
    outputs = [one(piece) for piece in x.tensor_split(chunks)]
    for output, weight in zip(outputs, weights.tensor_split(chunks), strict=True):
        output.backward(weight)
    return torch.cat([output.detach() for output in outputs])


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always", "auto"])
def test_a_forward_with_a_graph(checkpoint: str) -> None:
    for count in (1, 2, 3):
        pipe, one = pair(checkpoint, count)
        for step in range(3):  # gradients add up
            x, weights = rows(2 * step), rows(2 * step + 1)
            output = pipe(x)
            output.backward(weights)
            assert torch.equal(output, accumulated(one, x, 4, weights)) and output.requires_grad
            if step == 0:
                assert_equal_grads(pipe, one)
        for got, expected in zip(pipe.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)


def test_fewer_rows_than_chunks() -> None:
    pipe, one = pair(chunks=4)
    for count in (1, 2, 3, 4, 9):
        assert torch.equal(pipe(rows(0, count)), torch.cat([
            one(piece) for piece in rows(0, count).tensor_split(min(4, count))
        ]))  # fmt: skip


def test_inputs_and_keywords_get_gradients() -> None:
    class First(nn.Linear):
        def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
            a, b = both
            return super().forward(a * b)

    class Last(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    torch.manual_seed(1)
    layers = nn.Sequential(First(WIDTH, WIDTH), nn.Tanh(), Last(WIDTH, WIDTH))
    pipe = trireme.Pipeline(layers, 2, devices=["cpu"] * 3, checkpoint="always")
    given = [rows(number).requires_grad_() for number in range(3)]
    pipe(given[0], given[1], scale=given[2]).square().sum().backward()
    found = [tensor.grad for tensor in given]
    for tensor in given:
        tensor.grad = None
    a, b, scale = given
    layers[2](layers[1](layers[0]((a, b))), scale).square().sum().backward()
    for got, tensor in zip(found, given, strict=True):
        torch.testing.assert_close(got, tensor.grad)


def test_hooks_run_once_and_see_the_whole_gradient() -> None:
    pipe, one = pair()
    seen: list[Tensor] = []
    parameter = next(pipe.parameters())
    parameter.register_hook(lambda grad: seen.append(grad.clone()))
    after: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    pipe(rows(0)).backward(rows(1))
    accumulated(one, rows(0), 4, rows(1))
    expected = next(one.parameters()).grad
    assert len(seen) == len(after) == 1
    assert torch.equal(seen[0], expected) and torch.equal(after[0], expected)


def test_passes_may_overlap_and_steps_come_between() -> None:
    """Two forwards before the first backward, as a GAN has, and a step in between."""
    pipe, one = pair("always", loss=mse_loss)
    first, second = pipe(rows(0)), pipe(rows(2))
    pipe.step(rows(4), target=rows(5))
    pipe.zero_grad()
    first.backward(rows(1))
    accumulated(one, rows(0), 4, rows(1))
    assert_equal_grads(pipe, one)
    pipe.zero_grad()
    one.zero_grad()
    second.backward(rows(3))
    accumulated(one, rows(2), 4, rows(3))
    assert_equal_grads(pipe, one)


def test_a_graph_that_is_kept() -> None:
    for checkpoint in ("never", "always"):
        pipe, one = pair(checkpoint)
        output = pipe(rows(0))
        output.backward(rows(1), retain_graph=True)
        pipe.zero_grad()
        output.backward(rows(1))
        accumulated(one, rows(0), 4, rows(1))
        assert_equal_grads(pipe, one)
        with pytest.raises(RuntimeError, match="a second time"):
            output.backward(rows(1))
        with pytest.raises(NotImplementedError, match="create_graph=True"):
            torch.autograd.grad(pipe(rows(0)).sum(), list(pipe.parameters()), create_graph=True)


def test_autograd_grad_and_frozen_layers() -> None:
    pipe, one = pair()
    for module in (pipe, one):
        for parameter in list(module.parameters())[:2]:
            parameter.requires_grad_(False)
    free = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(pipe(rows(0)), free, rows(1))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    accumulated(one, rows(0), 4, rows(1))
    expected = [parameter.grad for parameter in one.parameters() if parameter.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    pipe.requires_grad_(False)
    assert not pipe(rows(0)).requires_grad
    with torch.no_grad():
        assert not pipe(rows(0)).requires_grad


def test_errors_of_passes_are_the_user_s_own() -> None:
    layer = Luckless()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = trireme.Pipeline(module, 4, devices=["cpu"] * 3, balance=[1, 2, 1], checkpoint="always")
    layer.bad_call = 2
    with pytest.raises(ArithmeticError, match="no luck"):
        pipe(rows(0))
    layer.calls, layer.bad_call = 0, 6  # in a recomputation
    output = pipe(rows(0))
    with pytest.raises(ArithmeticError, match="no luck"):
        output.backward(rows(1))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    pipe(rows(0)).backward(rows(1))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    with pytest.raises(TypeError, match="got str as input"):
        pipe("hello")


def test_deferred_batch_norm_counts_a_batch_once() -> None:
    for checkpoint in ("never", "always"):
        norm, plain = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        pipe = trireme.Pipeline(
            nn.Sequential(norm), 2, devices=["cpu"], checkpoint=checkpoint,
            deferred_batch_norm=True,
        )  # fmt: skip
        pipe(rows(0)).sum().backward()
        plain(rows(0))
        (layer,) = pipe.children()
        torch.testing.assert_close(layer.running_mean, plain.running_mean)
        torch.testing.assert_close(layer.running_var, plain.running_var)


def test_calls_from_within_and_after_a_fork() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return holder[0](x)

    holder: list[Any] = []
    pipe = trireme.Pipeline(nn.Sequential(Inside(), nn.Tanh()), 1, devices=["cpu"] * 2)
    holder.append(pipe)
    with pytest.raises(ValueError, match=r"\[pipeline\] got a call from within a stage"):
        pipe(rows(0))
    holder.clear()
    child = os.fork()
    if child == 0:
        try:
            pipe.eval_step(rows(0))
        except ValueError as error:
            os._exit(0 if "[pipeline] got a call in a forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
