"""What a caller of ZeroRedundancyOptimizer can get wrong beside its arguments, for which see
contract/bad_arguments.py."""

from __future__ import annotations

import inspect
import resource
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import SGD, AdamW

from harness.faults import raises
from harness.memory import mapped_bytes
from harness.models import batch, mlp
from harness.on_ranks import on_gloo_ranks, on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import alone, assert_equal_parameters
from zero.ranks import DDP, STAGES, Zero, sharded, train_both


def zero(params: Any = None, optimizer_class: Any = SGD, *places: Any, **options: Any) -> Any:
    params = mlp().parameters() if params is None else params
    return Zero(params, optimizer_class, *places, **{"lr": 0.1, **options})


def test_the_signature_is_torchs() -> None:
    ours = list(inspect.signature(Zero).parameters.values())
    theirs = list(inspect.signature(TorchZero).parameters.values())
    for mine, expected in zip(ours, theirs[:-1], strict=False):
        assert (mine.name, mine.kind) == (expected.name, expected.kind)
        assert mine.default == expected.default
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert issubclass(Zero, TorchZero)


# --- Groups and owners ----------------------------------------------------------------------------


@on_shm_ranks(2)
def test_parameters_of_another_group(rank: int) -> None:
    """What one group averages another cannot step."""
    model = mlp()
    ddp = DDP(model)
    pair = dist.new_group([0, 1])
    for stage, parts in (
        (1, ["averages over another group", "Pass the same process_group to both"]),
        (2, ["got stage 2 for", "averages already", "stage=1"]),
    ):
        with raises(ValueError, "[zero] got ", "'0.weight'", *parts):
            zero(ddp.module.named_parameters(), process_group=pair, stage=stage)
    optimizer = zero(model.parameters())  # the parameters are still free
    assert optimizer.process_group is dist.group.WORLD


@STAGES
@on_shm_ranks(2)
def test_groups_that_come_later(rank: int, stage: int) -> None:
    """Refused for what another optimizer holds, or this one; see test_habits.py."""
    model = mlp()
    first = zero(model[0].named_parameters(), stage=stage)
    second = zero(model[2].parameters(), stage=stage)
    with raises(ValueError, "[zero] got '0.weight', which another ZeroRedundancyOptimizer holds"):
        second.add_param_group({"params": [*model[4].parameters(), model[0].weight]})
    assert len(second.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        second.add_param_group({"params": [model[2].weight]})
    second.add_param_group({"params": model[4].parameters()})
    del first
    third = zero([model[0].weight], stage=stage)
    model(batch(0)[rank::2]).sum().backward()
    second.step()
    third.step()


# --- Ranks that differ ----------------------------------------------------------------------------


def other_shape(rank: int) -> nn.Module:
    return nn.Linear(3, 4 + rank)


def other_dtype(rank: int) -> nn.Module:
    return nn.Linear(3, 4).double() if rank else nn.Linear(3, 4)


def other_number(rank: int) -> nn.Module:
    return nn.Linear(3, 4, bias=rank == 0)


def other_frozen(rank: int) -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(rank == 0)
    return layer


@on_shm_and_gloo_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    """All ranks raise, from the constructor and from add_param_group(), and may go on."""
    ours, one = sharded(mlp, SGD, 2, lr=0.1), alone(mlp, SGD, lr=0.1)
    for make in (other_shape, other_dtype, other_number, other_frozen):
        parameters = list(make(rank).parameters())
        for stage in (1, 2):
            text = "[zero] got different parameters on different ranks"
            with raises(ValueError, text, "on rank 1: ", "param_groups[0]['params']"):
                zero(parameters, stage=stage)
            grown = zero(stage=stage)
            with raises(ValueError, text, "on rank 1: ", "param_groups[1]['params']"):
                grown.add_param_group({"params": parameters})
            assert len(grown.param_groups) == 1
    for options in (
        {"stage": 1 + rank},
        {"host_params": rank == 0},
        {"placement": "whole" if rank else "shards"},
    ):
        with raises(ValueError, "[zero] got options that differ between the ranks"):
            zero(**options)
    train_both(ours, one, 0)


@on_shm_ranks(2)
def test_what_was_refused_is_free_again(rank: int) -> None:
    """While the exception is still held, too."""
    parameters = list(mlp().parameters())
    with pytest.raises(ValueError) as held:
        zero(parameters, stage=1 + rank)
    grown = zero()
    late = [nn.Parameter(torch.ones(3 + rank))]
    with pytest.raises(ValueError, match="different parameters"):
        grown.add_param_group({"params": [*parameters, *late]})
    zero(parameters)
    assert "differ" in str(held.value)


# --- Gradients and state --------------------------------------------------------------------------


@on_shm_and_gloo_ranks(2)
def test_sparse_gradients(rank: int) -> None:
    """AdamW refuses them under stage 1 as it does alone; averaging makes them dense under stage 2.
    For those that take them see test_optimizers.py."""
    torch.manual_seed(1)
    one = nn.Embedding(10, 3)
    ours = nn.Embedding(10, 3, sparse=True)
    ours.load_state_dict(one.state_dict())
    optimizers = [SGD(one.parameters(), lr=0.1), zero(ours.parameters(), stage=2)]
    for step in range(4):
        rows = torch.tensor([0, 5, 1, step + 5])
        for model, its in ((one, rows), (ours, rows[2 * rank : 2 * rank + 2])):
            model.zero_grad()
            model(its).square().mean().backward()
        for each in optimizers:
            each.step()
        assert_equal_parameters(ours, one)
    model = nn.Embedding(10, 3, sparse=True)
    net = DDP(model)
    optimizer = zero(model.named_parameters(), AdamW)
    net(torch.tensor([rank, 5])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@STAGES
@on_shm_ranks(2)
def test_a_state_of_another_model(rank: int, stage: int) -> None:
    """Refused as a whole: nothing of it is taken. One of another number of ranks is welcome."""
    ours = sharded(mlp, AdamW, stage, lr=0.01)
    ours.train(0)
    others = [nn.Linear(6, 13), nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 4))]
    same_number = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5, bias=False), nn.Linear(5, 3))
    states = []
    for model in (*others, same_number):
        other = AdamW(model.parameters(), lr=0.5)
        model(batch(0)).sum().backward()
        other.step()
        states.append(other.state_dict())
    grouped = AdamW(
        [{"params": [parameter]} for parameter in mlp().parameters()], lr=0.5
    ).state_dict()
    for state in (states[0], states[1], grouped):
        with raises(ValueError, "[zero] got a state dict of groups of ", "same model and groups"):
            ours.optimizer.load_state_dict(state)
    with raises(ValueError, "[zero] got state 'exp_avg' of shape [12, 6]", "shape [13, 6]"):
        ours.optimizer.load_state_dict(states[2])
    with raises(ValueError, "[zero] got a state dict without 'param_groups'"):
        ours.optimizer.load_state_dict({"state": {}})
    assert ours.optimizer.param_groups[0]["lr"] == 0.01
    one = alone(mlp, AdamW, lr=0.01)
    one.train(0)
    train_both(ours, one, 1)
    with raises(RuntimeError, "[zero] got state_dict() of a state that was not consolidated"):
        ours.optimizer.state_dict()


# --- No memory to share ---------------------------------------------------------------------------


@on_shm_ranks(2, timeout=40)
def test_a_store_that_cannot_be_allocated(rank: int) -> None:
    """Rank 1 cannot: parameters stay private, rank 0 says so once, and the numbers are the same."""
    dist.all_reduce(torch.ones(5))
    wide = nn.Linear(1 << 12, 1 << 11, bias=False)  # 32 MiB
    if rank == 1:
        room = mapped_bytes() + (8 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = zero(wide.parameters())
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for _ in range(2):
            wide.weight.grad = torch.ones_like(wide.weight)
            optimizer.step()
    said = [str(warning.message) for warning in caught if "[zero]" in str(warning.message)]
    assert len(said) == (1 if rank == 0 else 0), said
    for part in ("parameters stay private to each rank", "rank 1 says: ", "host_params=False"):
        assert all(part in text for text in said), said
    assert not optimizer._cores[0].shares_parameters
    before = wide.weight.detach().clone()
    wide.weight.grad = torch.ones_like(wide.weight)
    optimizer.step()
    torch.testing.assert_close(wide.weight, before - 0.1)


@on_gloo_ranks(2)
def test_private_parameters_that_are_wanted(rank: int) -> None:
    """host_params=False says nothing; without it one warning per optimizer says why."""
    for wanted, expected in ((True, 0), (False, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero(host_params=not wanted)
        said = [
            str(warning.message)
            for warning in caught
            if "parameters stay private" in str(warning.message)
        ]
        assert len(said) == (expected if rank == 0 else 0), said
        assert all("do not share the memory of one host" in text for text in said)
