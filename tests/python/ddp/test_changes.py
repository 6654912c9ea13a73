"""Modules that get other parameters after wrapping: ranks go on together, or all of them raise."""

import copy
import functools
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import trireme
from torch import nn

from ddp.ranks import backward, run_steps, sgd
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import assert_same_on_all_ranks, gradients

Change = Callable[[nn.Module], None]


def assert_step_equals(ddp: nn.Module, alone: nn.Module, step: int, rank: int) -> None:
    """Averages are what one process gets from the whole batch."""
    ddp.zero_grad()
    alone.zero_grad()
    backward(ddp, step, rank)
    alone(batch(step)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone))


def seeded(make: Callable[[], nn.Module], rank: int = 0) -> nn.Module:
    torch.manual_seed(50 + rank)
    return make()


def replace_layer(module: nn.Module) -> None:
    module[4] = seeded(lambda: nn.Linear(5, 7))


def replace_by_the_same_shape(module: nn.Module) -> None:
    module[2] = seeded(lambda: nn.Linear(13, 5, bias=False))


def assign_state(module: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def add_layer(module: nn.Module) -> None:
    module.append(seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))))


def remove_layer(module: nn.Module) -> None:
    module.pop(4)


def write_past_torch(module: nn.Module) -> None:
    """No hook of torch's tells of this; Module.to() does it where it cannot keep a tensor."""
    weight = module[0].weight
    module[0]._parameters["weight"] = nn.Parameter(weight.detach() * 0.5)


def give_other_rows(module: nn.Module) -> None:
    """Transformers resizes embeddings so: the same parameter, other sizes."""
    module[4].weight.data = seeded(lambda: nn.Linear(5, 300)).weight.data
    module[4].bias.data = torch.zeros(300)
    module[4].weight.grad = module[4].bias.grad = None


def give_fewer_rows(module: nn.Module) -> None:
    module[4].weight.data = module[4].weight.data[:1].clone()
    module[4].bias.data = module[4].bias.data[:1].clone()
    module[4].weight.grad = module[4].bias.grad = None


def cast_and_replace(module: nn.Module) -> None:
    module[0].weight.requires_grad_(False)
    replace_layer(module)


CHANGES: list[Change] = [
    replace_layer,
    replace_by_the_same_shape,
    assign_state,
    add_layer,
    remove_layer,
    write_past_torch,
    give_other_rows,
    give_fewer_rows,
    cast_and_replace,
]


def options_of(kind: str) -> dict[str, object]:
    if kind == "mixed":
        return {
            "mixed_precision": torch.nn.parallel.distributed._MixedPrecision(
                param_dtype=torch.float32
            )
        }
    return {"bucket_cap_mb": 0.0003} if kind == "small buckets" else {}


@pytest.mark.parametrize("kind", ["plain", "small buckets", "mixed"])
@on_ranks()
def test_equals_wrapping_anew(rank: int, kind: str) -> None:
    """Each backward has the averages of the one in which the change is seen, and so on."""
    for change in CHANGES:
        ddp = trireme.DistributedDataParallel(mlp(), **options_of(kind))
        run_steps(ddp, sgd(ddp), backward, rank, 2)
        change(ddp.module)
        anew = trireme.DistributedDataParallel(copy.deepcopy(ddp.module), **options_of(kind))
        got = run_steps(ddp, sgd(ddp), backward, rank, 4)
        expected = run_steps(anew, sgd(anew), backward, rank, 4)
        named = functools.partial("{}: {}".format, change.__name__)
        torch.testing.assert_close(got, expected, msg=named)
        assert_same_on_all_ranks(list(ddp.module.parameters()))
        planned = {name for bucket in ddp._core.plan() for name in bucket}
        trained = {
            name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad
        }
        assert planned == trained, change.__name__


@pytest.mark.parametrize("rows", [1, 3000])
@on_ranks(timeout=40)
def test_frozen_at_wrapping_then_given_another_shape(rank: int, rows: int) -> None:
    """Once a segmentation fault, or the end of a neighbour's memory."""
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 300))
    module[1].requires_grad_(False)
    ddp = trireme.DistributedDataParallel(module)
    backward(ddp, 0, rank)
    module[1].weight.data = seeded(lambda: nn.Linear(4, rows)).weight.data
    module[1].bias.data = torch.ones(rows)
    module[1].requires_grad_(True)
    alone = copy.deepcopy(module)
    for step in range(1, 4):
        assert_step_equals(ddp, alone, step, rank)


@on_ranks()
def test_new_layers_begin_with_the_values_of_rank_0(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    ddp.module[4] = seeded(lambda: nn.Linear(5, 2), rank)
    expected = seeded(lambda: nn.Linear(5, 2), 0)
    if rank == 0:
        backward(ddp, 1, rank)
    else:
        with pytest.warns(UserWarning, match=r"\[ddp\] got '4.weight' with other values than"):
            backward(ddp, 1, rank)
    assert torch.equal(ddp.module[4].weight, expected.weight)
    assert_same_on_all_ranks([parameter.grad for parameter in ddp.parameters()])
    run_steps(ddp, sgd(ddp), backward, rank, 3)
    assert_same_on_all_ranks(list(ddp.parameters()))
    ddp.module = seeded(lambda: nn.Linear(6, 3))
    alone = copy.deepcopy(ddp.module)
    backward(ddp, 5, rank)
    alone(batch(5)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_what_is_no_change(rank: int) -> None:
    """A parameter under another name, and tensors that are lent for the length of one forward."""
    ddp = trireme.DistributedDataParallel(mlp())
    alone = mlp()
    for step in range(4):
        if step == 1:
            ddp.module.add_module("another name", ddp.module[4])
            del ddp.module[4]
        lent = {name: nn.Parameter(parameter * 2) for name, parameter in ddp.named_parameters()}
        for tensors in (lent, {name: tensor.detach() for name, tensor in lent.items()}):
            output = torch.func.functional_call(ddp, tensors, batch(step)[rank::WORLD])
            if output.requires_grad:
                output.sum().backward()
        twice = copy.deepcopy(alone)
        with torch.no_grad():
            torch._foreach_mul_(list(twice.parameters()), 2)
        twice.zero_grad()
        twice(batch(step)[rank::WORLD]).sum().backward()
        torch.testing.assert_close(
            [tensor.grad for tensor in lent.values()], list(gradients(twice).values())
        )
        ddp.zero_grad()
        alone.zero_grad()
        backward(ddp, step, rank)
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(list(gradients(ddp).values()), list(gradients(alone).values()))
    planned = [name for bucket in ddp._core.plan() for name in bucket]
    assert "4.weight" in planned  # it was when it was wrapped


@on_ranks()
def test_a_change_waits_for_a_backward_that_synchronizes(rank: int) -> None:
    """Accumulated gradients of new layers are averaged with the others."""
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    replace_layer(ddp.module)
    alone = copy.deepcopy(ddp.module)
    alone.zero_grad()
    ddp.zero_grad()
    with ddp.no_sync():
        backward(ddp, 1, rank)
    inputs = batch(2)[rank::WORLD]
    loss = ddp(inputs).square().mean()
    loss.backward(inputs=list(ddp.module[4].parameters()), retain_graph=True)
    alone(batch(1)).square().mean().backward()
    alone(batch(2)).square().mean().backward(inputs=list(alone[4].parameters()))
    torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_optimizers_in_backward_step_new_layers(rank: int) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward as step_in_backward

    module = mlp()
    step_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = trireme.DistributedDataParallel(module)
    backward(ddp, 0, rank)
    module[2].weight = nn.Parameter(module[2].weight.detach() * 0.5)
    alone = copy.deepcopy(module)
    backward(ddp, 1, rank)  # the average of what has no optimizer yet stays in .grad
    alone(batch(1)).square().mean().backward()
    torch.testing.assert_close(module[2].weight.grad, alone[2].weight.grad)
    assert module[0].weight.grad is None
    torch.testing.assert_close(module[0].weight, alone[0].weight - 0.1 * alone[0].weight.grad)


@on_ranks()
def test_a_joined_rank_takes_over_what_the_others_have(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    replace_layer(ddp.module)
    optimizer = sgd(ddp)
    with ddp.join():
        for step in range(4 if rank == 0 else 0):
            optimizer.zero_grad()
            ddp(batch(step)).square().mean().backward()
            optimizer.step()
    assert_same_on_all_ranks(list(ddp.parameters()))
    backward(ddp, 5, rank)
    assert_same_on_all_ranks([parameter.grad for parameter in ddp.parameters()])


APART: list[tuple[Change, list[str]]] = [
    (replace_layer, ["'4.weight' was Float [3, 5], is another tensor, Float [7, 5]", "1 more"]),
    (replace_by_the_same_shape, ["'2.weight' was Float [5, 13], is another tensor, Float [5, 13]"]),
    (assign_state, ["'0.weight' was Float [13, 6], is another tensor", "4 more"]),
    (add_layer, ["'5.0.weight' Float [4, 3] came in addition", "3 more"]),
    (remove_layer, ["'4.weight' Float [3, 5] is gone"]),
    (give_other_rows, ["'4.weight' was Float [3, 5], is Float [300, 5]"]),
    (give_fewer_rows, ["'4.weight' was Float [3, 5], is Float [1, 5]"]),
    (lambda module: module.append(nn.BatchNorm1d(3, affine=False)), ["buffers changed"]),
]


@pytest.mark.parametrize("change_on", [0, 1])
@on_ranks(timeout=40, backend="trireme")
def test_a_change_on_one_rank_raises_on_all(rank: int, change_on: int) -> None:
    for change, parts in APART:
        ddp = trireme.DistributedDataParallel(mlp())
        run_steps(ddp, sgd(ddp), backward, rank, 2)
        if rank == change_on:
            change(ddp.module)
        where = f"(rank {rank} of 2)"
        named = [f"on rank {1 - change_on}: nothing changed", f"on rank {change_on}: ", *parts]
        with raises(ValueError, "[ddp] got other parameters", where, *named):
            backward(ddp, 3, rank)
        with raises(ValueError, "[ddp] got other parameters", where, *named):  # it still is so
            backward(ddp, 4, rank)
        ddp(batch(5))  # the group recovers


@on_ranks()
def test_other_changes_on_each_rank(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    ddp.module[4] = nn.Linear(5, 3 + rank)
    parts = ["on rank 0: '4.weight' was", "1 more); on rank 1: '4.weight' was", "Float [4, 5]"]
    with raises(ValueError, *parts):
        backward(ddp, 1, rank)


@on_ranks(timeout=40)
def test_meta_parameters_are_refused(rank: int) -> None:
    with raises(RuntimeError, "[ddp] got '0.weight' on the meta device"):
        trireme.DistributedDataParallel(mlp().to("meta"))


def move(module: nn.Module, factor: float = 2.0) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * factor


@on_ranks()
def test_data_in_other_memory(rank: int) -> None:
    """Values that all ranks have alike need no word, and averages stay right."""
    ddp = trireme.DistributedDataParallel(mlp())
    alone = copy.deepcopy(ddp.module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            for module in (ddp.module, alone):
                move(module)
                if step == 1:  # a step that all ranks begin anew for another reason
                    replace_layer(module)
            assert_step_equals(ddp, alone, step, rank)


@on_ranks()
def test_data_with_other_values_on_a_rank(rank: int) -> None:
    """Every rank tells of them, once."""
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    expected = r"\[ddp\] got '0.weight' with other values on rank 1 than on rank 0 since its .data"
    for step in range(1, 3):
        move(ddp.module, 1.0 + rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            backward(ddp, step, rank)
        told = [warning for warning in caught if re.search(expected, str(warning.message))]
        assert len(told) == (1 if step == 1 else 0)
