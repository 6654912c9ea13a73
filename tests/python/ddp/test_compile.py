"""torch.compile around the wrapper, inside it, and block by block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch.aot_autograd import make_boxed_func

from ddp.ranks import record_wire
from harness.faults import RANKLESS_FORM, raises
from harness.models import batch
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording
from harness.training import gradients

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Sequential):
    """Its own forward, because dynamo leaves torch's containers to the eager interpreter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


def blocks() -> Stack:
    torch.manual_seed(9)
    return Stack(*(Block() for _ in range(4)))


class Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return aot_eager(graph, inputs)


def compile_wrapper(backend: Any) -> nn.Module:
    return torch.compile(trireme.DistributedDataParallel(blocks()), backend=backend)


def compile_module(backend: Any) -> nn.Module:
    return trireme.DistributedDataParallel(torch.compile(blocks(), backend=backend))


def compile_in_place(backend: Any) -> nn.Module:
    model = blocks()
    model.compile(backend=backend)
    return trireme.DistributedDataParallel(model)


def compile_blocks(backend: Any) -> nn.Module:
    model = blocks()
    for number, block in enumerate(model):
        model[number] = torch.compile(block, backend=backend)
    return trireme.DistributedDataParallel(model)


def compile_blocks_of_wrapped(backend: Any) -> nn.Module:
    ddp = trireme.DistributedDataParallel(blocks())
    for block in ddp.module:
        block.compile(backend=backend)
    return ddp


Make = Callable[[Any], nn.Module]
WAYS: list[Make] = [
    compile_wrapper,
    compile_module,
    compile_in_place,
    compile_blocks,
    compile_blocks_of_wrapped,
]


def check_steps(model: nn.Module, rank: int, first: int, steps: int) -> None:
    """Gradients are those of one process on the whole batch."""
    for step in range(first, first + steps):
        model.zero_grad()
        model(batch(step)[rank::WORLD]).square().mean().backward()
        alone = blocks()
        alone(batch(step)).square().mean().backward()
        got = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(got, list(gradients(alone).values()))


@pytest.mark.parametrize("make", WAYS)
@on_ranks(timeout=100)
def test_right_and_never_compiled_again(rank: int, make: Make) -> None:
    graphs = Graphs()
    model = make(graphs)
    check_steps(model, rank, 0, 2)
    compiled = graphs.count
    assert compiled > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_steps(model, rank, 2, 3)
        ddp = model if isinstance(model, trireme.DistributedDataParallel) else model._orig_mod
        model.zero_grad()
        with ddp.no_sync():
            model(batch(0)[rank::WORLD]).square().mean().backward()
        model(batch(1)[rank::WORLD]).square().mean().backward()
    assert graphs.count == compiled
    alone = blocks()
    for step in range(2):
        alone(batch(step)).square().mean().backward()
    got = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(got, list(gradients(alone).values()))


@pytest.mark.parametrize(("cap", "graphs_expected"), [(25, 1), (0.0008, 4)])
@pytest.mark.parametrize("outside", [True, False])
@on_ranks(timeout=100, fresh=True)
def test_graphs_are_split_at_buckets(
    rank: int, outside: bool, cap: float, graphs_expected: int
) -> None:
    """Dynamo's DDPOptimizer, so that the backward of one part overlaps the next one's buckets."""
    # Dynamo insists on a first bucket of torch's size, 1 MiB, unless that is made smaller.
    if cap < 1:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # this process ends with the test
    graphs = Graphs()
    if outside:
        ddp = trireme.DistributedDataParallel(blocks(), bucket_cap_mb=cap)
        model = torch.compile(ddp, backend=graphs)
    else:
        module = torch.compile(blocks(), backend=graphs)
        model = trireme.DistributedDataParallel(module, bucket_cap_mb=cap)
    check_steps(model, rank, 0, 2)
    assert graphs.count == graphs_expected


@needs_recording
@on_ranks(timeout=100, fresh=True)
def test_buckets_leave_between_the_parts_of_a_split_graph(rank: int) -> None:
    """What the splitting is for: gradients of later blocks travel while the first computes."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # this process ends with the test
    ddp = trireme.DistributedDataParallel(blocks(), bucket_cap_mb=0.0008)
    wire = record_wire(ddp)
    sent: list[int] = []

    def watch_backward(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            sent.append(len(wire.records))
            return graph(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=watch_backward
    )
    model = torch.compile(ddp, backend=backend)
    for step in range(3):
        wire.clear()
        sent.clear()
        model(batch(step)[rank::WORLD]).square().mean().backward()
    # What had left when the backward of each part began.
    assert len(sent) == 4 and sent[0] == 0
    assert sent == sorted(sent) and sent[-1] >= 2


@on_ranks(timeout=100)
def test_compiled_autograd_is_refused(rank: int) -> None:
    """Its compiled backward would leave the averaging out."""
    ddp = trireme.DistributedDataParallel(blocks())
    loss = ddp(batch(0)[rank::WORLD]).square().mean()
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        raises(
            NotImplementedError,
            "[grad_hook] got a backward under compiled autograd",
            form=RANKLESS_FORM,
        ),
    ):
        loss.backward()


class Conditional(nn.Module):
    """Python between two compiled regions: a graph break, and a head used in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.body, self.head = Block(), Block()

    def forward(self, x: torch.Tensor, use_head: bool) -> torch.Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.head(x) if use_head else x


@on_ranks(timeout=100)
def test_graph_breaks_and_unused_parameters(rank: int) -> None:
    model = torch.compile(trireme.DistributedDataParallel(Conditional()), backend="aot_eager")
    for step, use_head in enumerate([True, False, True, False]):
        model.zero_grad()
        model(batch(step)[rank::WORLD], use_head).square().mean().backward()
        alone = Conditional()
        alone(batch(step), use_head).square().mean().backward()
        got = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(got, list(gradients(alone).values()))


@on_ranks(timeout=110, fresh=True)
def test_inductor(rank: int) -> None:
    check_steps(compile_wrapper("inductor"), rank, 0, 3)
