"""What users' modules may be under fully_shard: with a __setattr__, names or a metaclass of their
own; copied in parts, pickled, unsharded ahead; over Gloo, which gathers, and on shared memory.
"""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import trireme
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor

from fsdp.ranks import assert_parts, in_training, own, pair, run_programs, sharded_in, train_both
from harness.models import batch, mlp
from harness.on_ranks import BACKENDS


@BACKENDS
def test_modules_of_users(backend: str) -> None:
    run_programs(backend, 2, caches, names, metaclasses, copies, odd_copies, pickles, late_waits)


class Cached(nn.Linear):
    """Computes with what it was last given, as nn.LSTM with its list of weights."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.flat = [self.weight, self.bias]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "bias") and "flat" in self.__dict__:
            self.flat = [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.flat)


class Tied(nn.Module):
    """Has a second layer that takes the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Cached(6, 6), Cached(6, 6), Cached(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def tied() -> nn.Module:
    torch.manual_seed(3)
    return Tied()


def caches(rank: int) -> None:
    ours, one = pair(tied, shard=trireme.fully_shard)
    for layer in (ours.model.first, ours.model.second):  # already before the first forward
        assert layer.flat[0] is layer.weight is ours.model.first.weight
    for step in range(2):
        train_both(ours, one, step)
    state = {name: value.detach().clone() for name, value in ours.model.state_dict().items()}
    ours.model.load_state_dict(state, assign=True)
    again = in_training(ours.model)
    one.optimizer.state.clear()
    for step in range(2):
        train_both(again, one, step)


class Named(nn.Module):
    """Has names that we have, too: a method, attributes, a buffer, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.join_hook = nn.Linear(6, 3)
        self.join_process_group = "none"
        self._units = 8
        self._set_prefetch = 9
        self._join_config = {"enable": 10}
        self.register_buffer("set_dynamic_gather", torch.tensor(11.0))

    def last_step(self) -> int:
        return 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.join_device = x.device
        return self.join_hook(x)


def named() -> nn.Module:
    torch.manual_seed(3)
    return Named()


def names(rank: int) -> None:
    ours, one = pair(named, shard=trireme.fully_shard)
    model: Any = ours.model
    model.set_modules_to_forward_prefetch([])
    train_both(ours, one, 0)
    got = (model.last_step(), model._units, model._set_prefetch, model._join_config["enable"])
    assert got == (7, 8, 9, 10)
    assert model.set_dynamic_gather.item() == 11 and isinstance(model.join_hook, nn.Linear)
    assert model.join_process_group == "none" and model.join_device == torch.device("cpu")
    ours, one = pair(mlp, shard=trireme.fully_shard)
    train_both(ours, one, 0)
    assert ours.model.last_step()["buckets"] >= 1
    assert ours.model.join_device == torch.device("cpu")


class Registering(type):
    classes: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, content: Any) -> Any:
        cls.classes.append(name)
        return super().__new__(cls, name, bases, content)


class Registered(nn.Linear, metaclass=Registering):
    pass


def registered() -> nn.Module:
    torch.manual_seed(3)
    return Registered(6, 3)


def metaclasses(rank: int) -> None:
    ours, one = pair(registered, shard=trireme.fully_shard)
    train_both(ours, one, 0)
    assert isinstance(ours.model, Joinable) and isinstance(ours.model, Registered)
    assert Registering.classes == ["Registered", "FSDPRegistered"]


def copies(rank: int) -> None:
    """Copies a plain layer: that only, and by one rank alone."""
    ours, one = pair(mlp, shard=trireme.fully_shard)
    train_both(ours, one, 0)
    ours.optimizer.zero_grad()  # torch copies no DTensor that is a slice, as gradients are
    ours.model.reshard()
    if rank == 0:
        copied = copy.deepcopy(ours.model[0])
        assert type(copied) is nn.Linear
        assert torch.equal(own(copied.weight), own(ours.model[0].weight))
        optimizer = torch.optim.SGD(copied.parameters(), lr=1.0)
        for param in copied.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()  # waits for nobody
        copied.load_state_dict(copied.state_dict())
    assert_parts(ours, one)
    train_both(ours, one, 1)


def odd_copies(rank: int) -> None:
    """The layer is met before the unit that it is in, and follows the unit's copy."""
    model = trireme.fully_shard(mlp())
    layer, made = copy.deepcopy(nn.ModuleList([model[0], model]))
    assert made[0] is layer
    made.unshard()
    assert not isinstance(layer.weight, DTensor)
    layer.state_dict()
    assert isinstance(layer.weight, DTensor) and isinstance(model[0].weight, DTensor)


def pickles(rank: int) -> None:
    ours, one = pair(mlp, shard=trireme.fully_shard)
    train_both(ours, one, 0)
    ours.model.reshard()
    params = dict(ours.model.named_parameters())
    buffer = io.BytesIO()
    torch.save([ours.model.state_dict(keep_vars=True), params], buffer)
    buffer.seek(0)
    for loaded in torch.load(buffer, weights_only=True):
        for name, param in params.items():
            assert torch.equal(loaded[name].to_local(), param.to_local())
    torch.save(ours.optimizer, io.BytesIO())
    train_both(ours, one, 1)


def late_waits(rank: int) -> None:
    """For what a forward has used, or the user has resharded: nothing is unsharded again."""
    ours, one = pair(mlp, shard=trireme.fully_shard)
    ours.model.set_reshard_after_forward(True)
    train_both(ours, one, 0)
    handle = ours.model.unshard(async_op=True)
    with torch.no_grad():
        ours.model(batch(1))
    handle.wait()
    assert all(sharded_in(ours.model))
    handle = ours.model.unshard(async_op=True)
    ours.model.reshard()
    handle.wait()
    assert all(sharded_in(ours.model))
    handle = ours.model.unshard(async_op=True)
    handle.wait()
    assert not any(sharded_in(ours.model))
    ours.model.reshard()
    train_both(ours, one, 1)
