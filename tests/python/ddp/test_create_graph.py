"""backward(create_graph=True): .grad is the average, and its graph is this rank's part of it."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.derivatives import derived, local, loss_of
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_gloo_ranks, on_ranks, on_shm_ranks
from harness.training import gradients

VIEWS = pytest.mark.parametrize("view", [False, True])
# Sequences of backwards on one .grad: whether each makes a graph, and whether it averages.
ACCUMULATIONS = {
    "one": [(True, True)],
    "two": [(True, True), (True, True)],
    "no_sync first": [(True, False), (True, True)],
    "ordinary first": [(False, True), (True, True)],
    "ordinary later": [(True, True), (False, True)],
    "no_sync, ordinary later": [(True, False), (False, True)],
}


def check_parts(ddp: Any, number: int, rank: int) -> None:
    """Values are those of the average, and derivatives this rank's, divided by the ranks."""
    parts = [local(number, peer) for peer in range(WORLD)]
    for name, grad in gradients(ddp).items():
        torch.testing.assert_close(grad, sum(part[name] for part, _ in parts) / WORLD)
    expected = [None if part is None else part / WORLD for part in parts[rank][1]]
    torch.testing.assert_close(derived(ddp), expected)


def keeping_hook(
    kept: list[torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """As a backend does for a moment after its work is done."""
    kept.append(bucket.buffer())
    return allreduce_hook(None, bucket)


HOOKS = {"no hook": None, "hook": allreduce_hook, "keeping hook": keeping_hook}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ACCUMULATIONS)
@VIEWS
@on_gloo_ranks()
def test_equals_torch(rank: int, view: bool, name: str, hook: str) -> None:
    def run(wrap: Callable[..., Any], **options: Any) -> list[Any]:
        ddp = wrap(mlp(torch.float64), gradient_as_bucket_view=view, **options)
        if HOOKS[hook]:
            ddp.register_comm_hook([] if HOOKS[hook] is keeping_hook else None, HOOKS[hook])
        seen: list[Any] = []
        # Under torch's views an ordinary gradient has the graph of the step before.
        for step in range(1 if view and name == "ordinary first" else 3):
            ddp.zero_grad()
            for number, (graph, sync) in enumerate(ACCUMULATIONS[name]):
                ddp.require_backward_grad_sync = sync
                loss_of(ddp, 10 * step + number, rank).backward(create_graph=graph)
            seen.append([{k: v.detach() for k, v in gradients(ddp).items()}, derived(ddp)])
        return seen

    # torch's raises where one bucket holds two gradients with a graph.
    theirs = run(TorchDDP, find_unused_parameters=True, bucket_cap_mb=1e-5)
    torch.testing.assert_close(run(trireme.DistributedDataParallel), theirs)


def check_steps(rank: int, view: bool) -> bool:
    """Steps with and without a graph. Returns whether gradients were a stream."""
    ddp = trireme.DistributedDataParallel(mlp(torch.float64), gradient_as_bucket_view=view)
    for step in range(6):
        ddp.zero_grad(set_to_none=step % 3 != 2)
        assert all(
            parameter.grad is None or parameter.grad.is_leaf for parameter in ddp.parameters()
        )
        if step == 4:
            loss_of(ddp, step, rank).backward()
            assert derived(ddp) == []
            continue
        loss_of(ddp, step, rank).backward(create_graph=True)
        check_parts(ddp, step, rank)
    return bool(ddp.last_step()["streamed"])


@pytest.mark.filterwarnings("ignore")
@VIEWS
@on_gloo_ranks()
def test_steps_over_gloo(rank: int, view: bool) -> None:
    check_steps(rank, view)


@pytest.mark.filterwarnings("ignore")
@VIEWS
@on_shm_ranks()
def test_steps_over_shared_memory(rank: int, view: bool) -> None:
    streamed = check_steps(rank, view)
    assert streamed or len(os.sched_getaffinity(0)) > WORLD


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [0, 1])
@on_ranks()
def test_training_with_the_diagonal_of_the_hessian(rank: int, stage: int) -> None:
    """AdaHessian's: one sum over the ranks of what each derives gives that of one process."""
    alone, model = mlp(torch.float64), mlp(torch.float64)
    ddp = trireme.DistributedDataParallel(model)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    if stage == 0:
        ours: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        ours = trireme.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(4):
        sgd.zero_grad()
        alone(batch(step, dtype=torch.float64)).square().mean().backward(create_graph=True)
        ours.zero_grad()
        loss_of(ddp, step, rank).backward(create_graph=True)
        parts = derived(model)
        for part in parts:
            dist.all_reduce(part)
        torch.testing.assert_close(parts, derived(alone))
        for net, parameters in ((alone, derived(alone)), (model, parts)):
            for parameter, second in zip(net.parameters(), parameters, strict=True):
                parameter.grad = parameter.grad.detach() / (1 + second.abs())
        sgd.step()
        ours.step()
        torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@pytest.mark.filterwarnings("ignore")
@on_ranks()
def test_a_backward_through_averages_is_averaged(rank: int) -> None:
    """An outer loss of MAML: no forward of the wrapped module leads to it, but .grad does."""

    def outer(model: nn.Module, grads: list[torch.Tensor], rank: int) -> None:
        module = model.module if isinstance(model, trireme.DistributedDataParallel) else model
        named = zip(module.named_parameters(), grads, strict=True)
        fast = {name: parameter - 0.1 * grad for (name, parameter), grad in named}
        x = batch(7, dtype=torch.float64)[rank::WORLD]
        torch.func.functional_call(module, fast, x).square().mean().backward()

    def alone(rank: int, averages: list[torch.Tensor]) -> dict[str, torch.Tensor | None]:
        model = mlp(torch.float64)
        grads = torch.autograd.grad(loss_of(model, 0, rank), model.parameters(), create_graph=True)
        own = [gradient / WORLD for gradient in grads]  # with the values of the averages
        outer(model, [a + (o - o.detach()) for a, o in zip(averages, own, strict=True)], rank)
        return gradients(model)

    ddp = trireme.DistributedDataParallel(mlp(torch.float64))
    for _ in range(3):
        loss_of(ddp, 0, rank).backward(create_graph=True)
        grads = [parameter.grad for parameter in ddp.parameters()]
        ddp.zero_grad()
        averages = [gradient.detach().clone() for gradient in grads]
        outer(ddp, grads, rank)
        parts = [alone(peer, averages) for peer in range(WORLD)]
        expected = {name: sum(part[name] for part in parts) / WORLD for name in parts[0]}
        torch.testing.assert_close(gradients(ddp), expected)
        ddp.zero_grad()


@pytest.mark.filterwarnings("ignore")
@VIEWS
@on_ranks()
def test_a_gradient_that_the_caller_keeps_stays(rank: int, view: bool) -> None:
    """Where there is a graph autograd adds out of place."""
    ddp = trireme.DistributedDataParallel(mlp(torch.float64), gradient_as_bucket_view=view)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp, 0, rank).backward(create_graph=True)
        kept = [parameter.grad for parameter in ddp.parameters()]
        before = [tensor.detach().clone() for tensor in kept]
        loss_of(ddp, 1, rank).backward(create_graph=True)
        torch.testing.assert_close([tensor.detach() for tensor in kept], before, rtol=0, atol=0)
        assert all(tensor.requires_grad for tensor in kept)


class Mixed(nn.Module):
    """A sparse gradient, a frozen parameter, one that no step uses, one that some do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5, 4, sparse=True)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.layer = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.double()

    def forward(self, rows: torch.Tensor, sometimes: bool) -> torch.Tensor:
        x = self.frozen(self.layer(self.table(rows)).tanh())
        return self.sometimes(x).tanh() if sometimes else x


@pytest.mark.filterwarnings("ignore")
@on_ranks()
def test_sparse_frozen_and_unused(rank: int) -> None:
    def backward(model: nn.Module, step: int, rank: int) -> None:
        rows = torch.tensor([rank, 2, 4 - step])
        model(rows, (step + rank) % 2 == 0).pow(3).mean().backward(create_graph=True)

    def dense(found: Any) -> Any:
        return {k: v.detach().to_dense() for k, v in found.items() if v is not None}

    ddp = trireme.DistributedDataParallel(Mixed(), find_unused_parameters=True)
    for step in range(4):
        ddp.zero_grad()
        backward(ddp, step, rank)
        models = [Mixed() for _ in range(WORLD)]
        for peer, model in enumerate(models):
            backward(model, step, peer)
        expected: dict[str, Any] = {}
        for model in models:
            for name, grad in dense(gradients(model)).items():
                expected[name] = expected.get(name, 0) + grad / WORLD
        assert gradients(ddp)["table.weight"].is_sparse
        torch.testing.assert_close(dense(gradients(ddp)), expected)
        for ours, alone in zip(ddp.parameters(), models[rank].parameters(), strict=True):
            # Another rank's gradient has no graph here.
            has_graph = alone.grad is not None and alone.grad.requires_grad
            assert (ours.grad is not None and ours.grad.requires_grad) == has_graph
        mine, theirs = (
            torch.autograd.grad(net.layer.weight.grad.sum(), net.table.weight)[0].to_dense()
            for net in (ddp.module, models[rank])
        )
        torch.testing.assert_close(mine, theirs / WORLD)


@pytest.mark.filterwarnings("ignore")
@on_shm_ranks()
def test_an_exception_leaves_gradients_that_were_there(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(torch.float64))
    with ddp.no_sync():
        loss_of(ddp, 0, rank).backward(create_graph=True)
    before = derived(ddp)
    first = next(iter(ddp.parameters()))  # the others have theirs by then
    handle = first.register_hook(lambda _: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        loss_of(ddp, 0, rank).backward(create_graph=True)
    handle.remove()
    last = list(ddp.parameters())[-1]
    assert last.grad.requires_grad
    # What came before the exception was added; the first one's gradient is as it was.
    after = torch.autograd.grad(first.grad.sum(), first, retain_graph=True)
    expected = mlp(torch.float64)
    loss_of(expected, 0, rank).backward(create_graph=True)
    weight = next(iter(expected.parameters()))
    torch.testing.assert_close(after, torch.autograd.grad(weight.grad.sum(), weight))
    assert len(before) == len(list(ddp.parameters()))
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp, step, rank).backward(create_graph=True)
        check_parts(ddp, step, rank)


@on_ranks(fresh=True)
def test_it_is_said_once_on_rank_0(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            ddp.zero_grad()
            loss_of(ddp, step, rank).backward(create_graph=True)
    said = [str(warning.message) for warning in caught if "[ddp]" in str(warning.message)]
    assert len(said) == (rank == 0)
    for text in said:
        assert "this rank alone, times 1 / 2 (rank 0 of 2). Sum up" in text


@on_ranks()
def test_a_gradient_taken_by_a_hook_is_refused(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(torch.float64))

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    with raises(NotImplementedError, "[ddp]", "without its gradient"):
        loss_of(ddp, 0, rank).backward(create_graph=True)
