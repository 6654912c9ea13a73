"""A stage raises, is interrupted or stopped: all ranks raise in time, and may go on."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.deaths import Death, assert_seen_soon, run_deaths
from harness.faults import message_of, note_death, raises
from harness.meeting import process_of, say, set_timeout, state_of, stay_until, until, until_inside
from harness.memory import mapped_bytes
from harness.on_ranks import AGES_S, on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import FORMS, WIDTH, Both, rows, tanh_layers


class Breaks(nn.Module):
    """Calls what it is told to, in the forward of one micro-batch or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Any] = {}
        self.in_backward = False
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls.get(self.count)
        self.count += 1
        if call is None:
            return x
        if not self.in_backward:
            call()
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda _: call())
        return y

    def arm(self, micro_batch: int, call: Any, in_backward: bool = False) -> None:
        self.count, self.calls, self.in_backward = 0, {micro_batch: call}, in_backward

    def disarm(self) -> None:
        self.calls = {}


def broken() -> None:
    raise ArithmeticError("the data are broken")


def fragile_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(
        layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), Breaks())
    ))  # fmt: skip


def breaks_of(pipe: Any) -> list[Breaks]:
    return [module for module in pipe.modules() if isinstance(module, Breaks)]


@contextmanager
def fails(own: bool, *parts: str) -> Iterator[None]:
    """All ranks raise an error with these parts; that of the failing one has its exception."""
    with pytest.raises(RuntimeError) as caught:
        yield
    text = message_of(caught.value)
    missing = [part for part in (*parts, "the data are broken") if part not in text]
    assert not missing, f"{missing} not in: {text}"
    assert isinstance(caught.value.__cause__, ArithmeticError) == own, text


@pytest.mark.parametrize("world", [1, 2, 4])
@on_shm_ranks("world", timeout=60, patience_s=AGES_S)
def test_a_stage_raises(rank: int, world: int) -> None:
    """In forwards and backwards of any stage, under every form; the next step is right."""
    for form in FORMS:
        both = Both(fragile_layers, schedule=form)
        both.train(0)
        for number in sorted({0, both.pipe.schedule.stages - 1}):
            holder = both.pipe.schedule.stage_rank[number]
            for micro_batch, in_backward in ((0, False), (2, False), (1, True)):
                before = [parameter.grad.clone() for parameter in both.pipe.parameters()]
                if rank == holder:
                    held = [stage for stage in both.pipe.stages if stage.rank == rank]
                    layers = next(stage.layers for stage in held if stage.number == number)
                    last = both.pipe.get_submodule(layers[-1])
                    assert isinstance(last, Breaks)
                    last.arm(micro_batch, broken, in_backward)
                parts = [f"stage {number}", f"(rank {holder} of {world})"]
                what = "backward" if in_backward else "forward"
                parts += [f"the {what} of micro-batch {micro_batch} of stage {number}"]
                # The exception of a hook passes through autograd, and is no cause.
                with fails(rank == holder and not in_backward, *parts):
                    both.pipe.step(rows(0), target=rows(1))
                for layer in breaks_of(both.pipe):
                    layer.disarm()
                after = [parameter.grad for parameter in both.pipe.parameters()]
                assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
                both.train(1)


@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_sums_of_a_step_that_failed_are_dropped(rank: int) -> None:
    """Without a division, too, .grad is as it was, though some backwards had added to it."""
    options: dict[str, Any] = {"schedule": "1f1b", "loss": mse_loss, "scale_grads": False}
    pipe = trireme.Pipeline(fragile_layers(), 4, ranks=True, **options)
    pipe.step(rows(0), target=rows(1))
    before = [(parameter.grad, parameter.grad.clone()) for parameter in pipe.parameters()]
    if rank == 1:
        breaks_of(pipe)[-1].arm(3, broken, False)
    with fails(rank == 1, "the forward of micro-batch 3 of stage 1"):
        pipe.step(rows(0), target=rows(1))
    for parameter, (grad, copy) in zip(pipe.parameters(), before, strict=True):
        assert parameter.grad is grad and torch.equal(grad, copy)


@on_shm_ranks(3, timeout=40, patience_s=AGES_S)
def test_the_loss_raises(rank: int) -> None:
    armed = [False]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if armed[0]:
            broken()
        return mse_loss(output, target)

    pipe = trireme.Pipeline(tanh_layers(), 4, ranks=True, loss=loss, schedule="1f1b")
    expected = pipe.step(rows(0), target=rows(1))
    for call in (pipe.step, pipe.eval_step):
        armed[0] = True
        with fails(rank == 2, "stage 2", "(rank 2 of 3)", "of micro-batch 0 of stage 2"):
            call(rows(0), target=rows(1))
        armed[0] = False
        assert torch.equal(pipe.step(rows(0), target=rows(1)), expected)


@pytest.mark.parametrize("raising", [0, 1])
@on_shm_and_gloo_ranks(2, timeout=40, patience_s=AGES_S)
def test_over_gloo_the_group_must_be_rebuilt(rank: int, raising: int) -> None:
    """Over shared memory the next step works."""
    both = Both(fragile_layers, schedule="1f1b")
    both.train(0)
    if rank == raising:
        breaks_of(both.pipe)[0].arm(0, broken)
    if dist.get_backend() == "gloo" and rank != raising:
        with pytest.raises(dist.DistBackendError):
            both.pipe.step(rows(0), target=rows(1))
    else:
        with fails(rank == raising):
            both.pipe.step(rows(0), target=rows(1))
    for layer in breaks_of(both.pipe):
        layer.disarm()
    if dist.get_backend() == "gloo":
        with pytest.raises(dist.DistBackendError, match="initialise it again"):
            both.pipe.step(rows(0), target=rows(1))
    else:
        both.train(1)


@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_ctrl_c_in_a_stage_and_in_a_wait(rank: int) -> None:
    both = Both(fragile_layers, schedule="1f1b")
    both.train(0)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)  # to this thread: a process may give it to another one

    if rank == 1:
        breaks_of(both.pipe)[0].arm(1, interrupt)
        with pytest.raises(KeyboardInterrupt):
            both.pipe.step(rows(0), target=rows(1))
    else:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            both.pipe.step(rows(0), target=rows(1))
    breaks_of(both.pipe)[0].disarm()
    both.train(1)
    if rank == 0:  # it waits for nobody before its first message is due

        def wake() -> None:
            until_inside(1, "receive of the forward of micro-batch 0 of stage 1")
            os.kill(process_of(1), signal.SIGINT)
            stay_until("rank 1 was interrupted")

        breaks_of(both.pipe)[0].arm(0, wake)
        with pytest.raises(dist.DistBackendError, match="KeyboardInterrupt"):
            both.pipe.step(rows(0), target=rows(1))
    else:
        with pytest.raises(KeyboardInterrupt):
            both.pipe.step(rows(0), target=rows(1))
        say("rank 1 was interrupted")
    breaks_of(both.pipe)[0].disarm()
    both.train(2)


def end_this_rank() -> None:
    note_death()
    os._exit(0)


def outlive(rank: int, in_backward: bool) -> None:
    both = Both(fragile_layers, schedule="1f1b", balance=[2, 12, 2])
    both.train(0)
    if rank == 1:
        breaks_of(both.pipe)[0].arm(1, sys.exit)
        with pytest.raises(SystemExit):
            both.pipe.step(rows(0), target=rows(1))
        breaks_of(both.pipe)[0].disarm()
    else:
        with raises(dist.DistBackendError, "rank 1", f"(rank {rank} of 3)"):
            both.pipe.step(rows(0), target=rows(1))
    both.train(1)
    if rank == 1:
        breaks_of(both.pipe)[0].arm(1, end_this_rank, in_backward)
        both.pipe.step(rows(0), target=rows(1))
    with raises(dist.DistBackendError, "rank 1", "ended", f"(rank {rank} of 3)"):
        both.pipe.step(rows(0), target=rows(1))
    assert_seen_soon()


def test_a_rank_ends_in_mid_step() -> None:
    """sys.exit() in a layer is an interruption, of which the others hear, and the end is seen."""
    run_deaths(outlive, 3, [Death(1, (in_backward,)) for in_backward in (False, True)])


class Grows(nn.Module):
    """Returns 64 MiB, and may call something behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x.sum() + torch.zeros(16 << 20)
        if self.call is not None:
            self.call()
        return y


class Means(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@on_shm_ranks(2, timeout=60, patience_s=AGES_S)
def test_no_memory_for_a_slot(rank: int) -> None:
    """Both ranks raise, with numbers; once there is room the next step works."""
    grows = Grows()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), grows, Means())
    pipe = trireme.Pipeline(module, 1, ranks=True, balance=[2, 1])

    def leave_no_room() -> None:
        taken = mapped_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), resource.RLIM_INFINITY))

    grows.call = leave_no_room
    what = (
        "send of the forward of micro-batch 0 of stage 0 by channel 'stage 0 to stage 1' to rank 1"
    )
    parts = [what, "got no memory to share"]
    with raises(dist.DistBackendError, *parts, "needs ", " bytes, free are "):
        try:
            pipe.step(rows(0))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    grows.call = None
    assert torch.isfinite(pipe.step(rows(0)))


@pytest.mark.parametrize("moment", ["between steps", "forward"])
@on_shm_ranks(2, timeout=40, patience_s=AGES_S)
def test_a_stopped_rank_is_alive(rank: int, moment: str) -> None:
    both = Both(fragile_layers, schedule="1f1b")
    both.train(0)

    has_stopped = False

    def stop() -> None:
        nonlocal has_stopped
        if not has_stopped:  # its backward calls this, too
            has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 1:
        if moment == "between steps":
            return stop()
        breaks_of(both.pipe)[0].arm(1, stop)
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            both.pipe.step(rows(0), target=rows(1))
        return None

    def shorten() -> None:
        until(lambda: state_of(process_of(1)) == "T")
        set_timeout(1)

    parts = [" of ", "by channel 'stage "]
    if moment == "between steps":
        parts = ["batch of a step"]
        shorten()
    else:  # behind its first backward, while the other one is in its second forward
        breaks_of(both.pipe)[0].arm(2, shorten)
    with raises(dist.DistBackendError, *parts, "rank 1", "alive (stopped)"):
        both.pipe.step(rows(0), target=rows(1))
    os.kill(process_of(1), signal.SIGCONT)
    return None


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@on_shm_ranks(2)
def test_errors_whose_text_cannot_be_sent(rank: int) -> None:
    both = Both(fragile_layers, schedule="1f1b")
    cases: dict[str, Callable[[], Exception]] = {
        r"ValueError: half \udcff": lambda: ValueError("half \udcff"),
        "Unprintable: <its text cannot be made>": Unprintable,
    }
    for text, make in cases.items():

        def fail(make: Callable[[], Exception] = make) -> None:
            raise make()

        if rank == 1:
            breaks_of(both.pipe)[0].arm(1, fail)
        with pytest.raises(RuntimeError) as caught:
            both.pipe.step(rows(0), target=rows(1))
        assert text in message_of(caught.value)
        assert "the forward of micro-batch 1 of stage 1" in message_of(caught.value)
        breaks_of(both.pipe)[0].disarm()
    both.train(0)


@on_shm_ranks(2)
def test_a_batch_that_fails_without_a_text(rank: int) -> None:
    pipe = trireme.Pipeline(tanh_layers(), 2, ranks=True, loss=mse_loss)

    def fail() -> None:
        raise Unprintable

    if rank == 1:
        pipe._look_at_parameters = fail  # type: ignore[method-assign]
    with pytest.raises(Unprintable if rank == 1 else ValueError) as caught:
        pipe.step(rows(0), target=rows(1))
    if rank == 0:
        assert "Unprintable: <its text cannot be made>" in str(caught.value)


@on_shm_and_gloo_ranks(2)
def test_a_loss_without_a_graph_raises_on_all_ranks(rank: int) -> None:
    """As torch's backward does; the next step works."""
    net = tanh_layers()
    pipe = trireme.Pipeline(net, 2, ranks=True, loss=mse_loss)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with raises(RuntimeError, "element 0 of tensors does not require grad"):
        pipe.step(rows(0), target=rows(1))
    pipe.eval_step(rows(0), target=rows(1))
    net[6].requires_grad_()
    pipe.step(rows(0), target=rows(1))
    if rank == 1:
        assert net[6].weight.grad is not None
