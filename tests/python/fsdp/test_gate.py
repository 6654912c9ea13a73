"""Who reads and who writes what a host has once: steps, forwards, evaluations."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.optim import SGD, AdamW

from fsdp.ranks import assert_parts, evaluate, own, pair, shard_layers, step_both, train_both
from harness.meeting import until, until_inside
from harness.models import batch, mlp
from harness.on_ranks import on_shm_ranks
from harness.training import alone, scale
from shm.ranks import WORLDS


@pytest.mark.parametrize("world", WORLDS)
@on_shm_ranks("world")
def test_a_host_has_parameters_once(rank: int, world: int) -> None:
    """What a rank writes into its shard all ranks read, without a copy."""
    model = shard_layers(mlp())
    for number, param in enumerate(model.parameters()):
        own(param).fill_(10 * number + rank)
    model(batch(0))
    for unit in (model[0], model[2], model[4]):
        unit.unshard()
    for number, param in enumerate(model.parameters()):
        rows = param.shape[0]
        chunk = -(-rows // world)
        owners = torch.arange(rows) // chunk
        assert torch.equal(param[:, 0] if param.ndim > 1 else param, 10.0 * number + owners)
    dist.barrier()
    if rank == 0:
        model[0].bias.detach().data[0] = 99.0  # behind everybody's back, to see whose memory it is
    dist.barrier()
    assert model[0].bias[0] == 99


@on_shm_ranks(3)
def test_evaluations_that_ranks_do_by_themselves(rank: int) -> None:
    """Between steps, in any number, also with gradients enabled; the others train on."""
    ours, one = pair(mlp)
    for step in range(5):
        train_both(ours, one, step)
        expected = evaluate(one, 9)
        for _ in range((rank + step) % 3):
            torch.testing.assert_close(evaluate(ours, 9), expected)
        if rank == step % 3:
            if step < 4:
                until_inside({0, 1, 2} - {rank})  # the next backward
            torch.testing.assert_close(ours.model(batch(9)), expected)
    evaluate(ours, 9)  # who has left cannot say that it has written


@on_shm_ranks(2)
def test_a_closure_is_the_first_to_read_after_module_to(rank: int) -> None:
    """``Module.to`` swaps the parameters, of which the step still finds who gates them."""
    ours, one = pair(mlp)
    ours.model.to("cpu")
    for step in range(3):
        for training in (ours, one):

            def closure(training: Any = training, step: int = step) -> torch.Tensor:
                training.optimizer.zero_grad()
                training.backward(step)
                return torch.tensor(1.0)

            training.optimizer.step(closure)
        assert_parts(ours, one)


@on_shm_ranks(2)
def test_a_step_waits_for_a_slow_reader(rank: int) -> None:
    """One rank still evaluates with the old parameters when the other comes to its step."""
    ours, one = pair(mlp)

    def evaluate_slowly(*_: Any) -> None:
        if not torch.is_grad_enabled():
            until_inside(1 - rank, "step gate: before writing")

    ours.model[3].register_forward_hook(evaluate_slowly)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        if rank == step % 2:
            torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
        for training in (ours, one):
            training.optimizer.step()
        assert_parts(ours, one)


@on_shm_ranks(2)
def test_a_forward_waits_for_a_slow_writer(rank: int) -> None:
    ours, one = pair(mlp)
    for step in range(4):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(step)
        if rank == step % 2:
            until_inside(1 - rank, "step gate")
        for training in (ours, one):
            training.optimizer.step()
        torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
        ours.model[0].unshard()
        torch.testing.assert_close(ours.model[0].weight, one.model[0].weight)
        ours.model[0].reshard()


@on_shm_ranks(2)
def test_a_thread_that_comes_during_the_pass_of_another_one_waits(rank: int) -> None:
    """One trains and one evaluates, whichever comes first."""
    ours, one = pair(mlp)
    outer, inner = ours.model[1], ours.model[3]
    order: list[str] = []
    outputs: list[torch.Tensor] = []

    def evaluates() -> None:
        outputs.append(evaluate(ours, 9))

    def trains() -> None:
        ours.backward(step)

    def is_waiting() -> bool:
        """For its turn, in front of a forward."""
        assert comer.ident is not None
        return sys._current_frames()[comer.ident].f_code.co_name == "_pre_forward"

    def comes(*_: Any) -> None:
        comer.start()
        until(is_waiting)
        order.append("comes")

    def goes_on(*_: Any) -> None:
        order.append("goes on")

    def follow(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        if threading.current_thread() is comer:
            order.append("begins")
        elif where == "backward":
            output.register_hook(comes if layer is inner else goes_on)
        else:
            (comes if layer is outer else goes_on)()

    handles = [layer.register_forward_hook(follow) for layer in (outer, inner)]
    cases = [
        ("forward", trains, evaluates),
        ("backward", trains, evaluates),
        ("forward", evaluates, trains),
    ]
    for step, case in enumerate(cases):
        where, first, second = case
        comer = threading.Thread(target=second)
        for training in (ours, one):
            training.optimizer.zero_grad()
        one.backward(step)
        order.clear()
        first()
        comer.join()
        assert order[:3] == ["comes", "goes on", "begins"], (step, order)
        torch.testing.assert_close(outputs[step], evaluate(one, 9))
        step_both(ours, one)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("next_unit", [0, 2])
@on_shm_ranks(2)
def test_a_unit_that_is_used_by_itself_after_it_raised(rank: int, next_unit: int) -> None:
    """It, or another one, waits for writers, and its gradients are averaged."""
    ours, one = pair(mlp)
    train_both(ours, one, 0)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours.model[0](torch.ones(2, 5))
    rows = torch.ones(2, ours.model[next_unit].in_features)
    for step in range(2):
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.model[next_unit](rows).square().mean().backward()
        assert_parts(ours, one, grads=True)
        if rank == step:
            until_inside(1 - rank, "step gate")
        for training in (ours, one):
            training.optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(ours.model[next_unit](rows), one.model[next_unit](rows))


@on_shm_ranks(2)
def test_steps_without_much_in_between(rank: int) -> None:
    """Before any forward, twice in a row, without a gradient, of an optimizer of other things."""
    ours, one = pair(mlp, AdamW, lr=0.01)
    other = nn.Linear(2, 2)
    unrelated = SGD(other.parameters(), lr=0.1)
    for training in (ours, one):
        training.optimizer.step()
        training.train(0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.optimizer.step()
        evaluate(training, 9)
        training.optimizer.step()
    if rank == 0:
        unrelated.step()  # waits for nobody
    assert_parts(ours, one)
    train_both(ours, one, 3)


@on_shm_ranks(2)
def test_several_roots(rank: int) -> None:
    """Units without one around them have gates of their own; one writing() is for all of them."""

    def make() -> nn.Module:
        model = mlp()
        for layer in (model[0], model[2], model[4]):
            trireme.fully_shard(layer)
        return model

    model = make()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    one = alone(mlp, SGD, lr=0.1)
    for step in range(3):
        for net, each in ((model, optimizer), (one.model, one.optimizer)):
            each.zero_grad()
            rows = batch(step, rows=12)
            mine = rows[rank::2] if net is model else rows
            net(mine).square().mean().backward()
            each.step()
            with torch.no_grad():
                net(mine)
            with trireme.writing(net):
                scale(net, 0.9)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9)), one.model(batch(9)))
