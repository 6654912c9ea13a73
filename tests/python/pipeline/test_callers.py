"""Several threads that call one pipeline: each gets what is its own, or hears by name why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.on_ranks import on_shm_ranks
from pipeline.ranks import WIDTH, rows, tanh_layers
from pipeline.torch_programs import OURS, Block, make_schedule, train_alone

CHUNKS = 4
CALLERS = 4
CALLS = 25


class Scaled(nn.Module):
    """Multiplies by a keyword, and refuses negative ones in its words."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        if (factor < 0).any():
            raise ArithmeticError(f"got {int(factor[0, 0])}")
        return self.linear(x) * factor


def scaled_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Scaled(), nn.Tanh())


def at_once(call: Callable[[int], Any]) -> list[Any]:
    """Calls with the number of each caller, all at the same time."""
    begin = threading.Barrier(CALLERS)

    def run(caller: int) -> Any:
        begin.wait()
        return call(caller)

    with ThreadPoolExecutor(CALLERS) as threads:
        return list(threads.map(run, range(CALLERS)))


def given(caller: int, call: int) -> tuple[Tensor, Tensor]:
    return rows(100 * caller + call, 8), torch.full((8, 1), float(1 + caller))


def test_outputs_are_the_caller_s() -> None:
    pipe = trireme.Pipeline(scaled_layers(), CHUNKS, devices=["cpu"] * 2)
    one = scaled_layers()

    def expected(x: Tensor, factor: Tensor) -> Tensor:
        return one[3](one[2](one[1](one[0](x)), factor))

    def call(caller: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for number in range(CALLS):
            x, factor = given(caller, number)
            ran = pipe if number % 2 else pipe.eval_step
            found.append((ran(x, factor=factor).detach(), expected(x, factor).detach()))
        return found

    for found in at_once(call):
        for got, wanted in found:
            torch.testing.assert_close(got, wanted)


def test_failures_are_the_caller_s() -> None:
    """In micro-batch ``caller``; callers that give what can be used see none of them."""
    pipe = trireme.Pipeline(scaled_layers(), CHUNKS, devices=["cpu"] * 2)

    def call(caller: int) -> list[str]:
        found = []
        for number in range(CALLS):
            x, factor = given(caller, number)
            if caller:
                factor[2 * caller :] = -caller
            try:
                pipe.eval_step(x, factor=factor)
            except ArithmeticError as error:
                found.append("\n".join([str(error), *error.__notes__]))
        return found

    for caller, found in enumerate(at_once(call)):
        assert len(found) == (CALLS if caller else 0)
        for text in found:
            assert text.startswith(f"got {-caller}\n"), text
            assert f"micro-batch {caller}" in text, text


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_are_the_caller_s(checkpoint: Any) -> None:
    """Backwards of several threads: those that compute again find the batch of their forward."""
    pipe = trireme.Pipeline(scaled_layers(), CHUNKS, devices=["cpu"] * 2, checkpoint=checkpoint)
    alone = trireme.Pipeline(scaled_layers(), CHUNKS, devices=["cpu"] * 2, checkpoint=checkpoint)

    def gradients(of: trireme.Pipeline, caller: int) -> list[Tensor]:
        found = []
        for number in range(CALLS):
            x, factor = given(caller, number)
            x.requires_grad_()
            out = of(x, factor=factor)
            found += torch.autograd.grad(out.square().sum(), [x, *of.parameters()])
        return found

    for caller, found in enumerate(at_once(lambda caller: gradients(pipe, caller))):
        for got, wanted in zip(found, gradients(alone, caller), strict=True):
            assert torch.equal(got, wanted)


def test_steps_add_up() -> None:
    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, devices=["cpu"] * 2, loss=mse_loss)
    alone = trireme.Pipeline(tanh_layers(), CHUNKS, devices=["cpu"] * 2, loss=mse_loss)

    def losses(of: trireme.Pipeline, caller: int) -> list[Tensor]:
        return [of.step(rows(caller), target=rows(n)).detach() for n in range(CALLS)]

    found = at_once(lambda caller: losses(pipe, caller))
    for caller in range(CALLERS):
        assert torch.equal(torch.stack(found[caller]), torch.stack(losses(alone, caller)))
    for got, wanted in zip(pipe.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_two_forwards_before_their_backwards() -> None:
    """Each recomputation compares the keywords of its own forward."""
    pipe = trireme.Pipeline(scaled_layers(), CHUNKS, devices=["cpu"] * 2, checkpoint="always")
    x, factor = given(0, 0)
    first = pipe(x, factor=factor.clone())
    changed = factor.clone()
    changed.add_(1)
    second = pipe(x, factor=changed)
    first.sum().backward()
    second.sum().backward()


class Calls(nn.Module):
    """Calls something in one of its forwards."""

    call: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        call, self.call = self.call, None
        if call is not None:
            call()
        return x


def in_thread(call: Callable[[], Any]) -> BaseException | None:
    """Returns what a call in another thread raised."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).exception()


HEARD = "got a call during one of another thread, of a pipeline over ranks"


@on_shm_ranks(2)
def test_over_ranks_a_call_during_another_one_ends_both(rank: int) -> None:
    """Ranks would run batches that do not belong together: threads have an order of their own on
    each rank."""
    layer = Calls()
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pipe = trireme.Pipeline(net, CHUNKS, ranks=True, loss=mse_loss)

    def during() -> None:
        other = in_thread(lambda: pipe.eval_step(rows(2), target=rows(3)))
        assert isinstance(other, RuntimeError)
        assert HEARD in str(other)

    layer.call = during if rank == 0 else None
    with pytest.raises(RuntimeError) as caught:
        pipe.step(rows(0), target=rows(1))
    assert HEARD in str(caught.value)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    loss = pipe.step(rows(0), target=rows(1))
    # One after the other any thread may call.
    assert in_thread(lambda: pipe.eval_step(rows(0), target=rows(1)).sub_(loss).item()) is None


@on_shm_ranks(2)
def test_over_ranks_a_step_of_torchs_names_during_another_one_ends_both(rank: int) -> None:
    layer, block = Calls(), Block(rank)
    schedule = make_schedule(OURS, "GPipe", {rank: nn.Sequential(block, layer)})
    expected = train_alone("GPipe", 2, steps=1)

    def step() -> Tensor | None:
        args, target = ((rows(0, 8),), None) if rank == 0 else ((), rows(1, 8))
        return schedule.step(*args, target=target)

    def during() -> None:
        other = in_thread(step)
        assert isinstance(other, RuntimeError)
        assert HEARD in str(other)

    for _ in range(2):
        layer.call = during if rank == 0 else None
        with pytest.raises(RuntimeError, match=HEARD):
            step()
        assert all(parameter.grad is None for parameter in block.parameters())
        output = step()
        if rank == 1:
            assert torch.equal(output.detach(), expected.outputs[0])
        for name, parameter in block.named_parameters():
            assert torch.equal(parameter.grad, expected.gradients[f"{rank}.{name}"])
        block.zero_grad()
