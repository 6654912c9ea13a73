"""What a caller of DataParallel can get wrong, each with its message in the house form."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils.rnn import pack_sequence

from data_parallel.cases import DP, HOUSE_FORM, TIME_LIMIT, Called, assert_same_backward, pair
from harness.faults import raises
from harness.models import batch, mlp

pytestmark = TIME_LIMIT

TWO = {"replicas": 2}


def data(rows: int = 8) -> Tensor:
    return batch(0, rows=rows)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 3)))


def compiled_in_place() -> nn.Module:
    module = mlp()
    module[0].compile()
    return module


no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is device 0")

# What is wrapped, the options, what is raised and what the text says.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], list[str]]] = {
    "none": (mlp, {"replicas": 0}, ValueError, ["replicas=0", "at least 1"]),
    "fewer": (mlp, {"replicas": -1}, ValueError, ["replicas=-1", "at least 1"]),
    "a truth": (mlp, {"replicas": True}, TypeError, ["replicas=True", "an int"]),
    "a text": (mlp, {"replicas": "2"}, TypeError, ["replicas='2'", "an int"]),
    "a fraction": (mlp, {"replicas": 2.0}, TypeError, ["replicas=2.0", "an int"]),
    "no devices": (mlp, {"device_ids": []}, ValueError, ["device_ids=[]", "at least one device"]),
    "no such device": (mlp, {"device_ids": [99]}, ValueError, ["device"]),
    "no such kind": (mlp, {"device_ids": ["meta"] * 2}, ValueError, ["'meta'", "the CPU or an"]),
    "no device": (mlp, {"device_ids": [None]}, TypeError, ["None as a device"]),
    "a truth as device": (mlp, {"device_ids": [True]}, TypeError, ["True as a device"]),
    "mixed": (mlp, {"device_ids": ["cpu", "meta"]}, ValueError, ["'meta'"]),
    "two counts": (
        mlp,
        {"device_ids": ["cpu"] * 2, "replicas": 3},
        ValueError,
        ["replicas=3 and 2 device_ids", "one number"],
    ),
    "output": (mlp, {**TWO, "output_device": "meta"}, ValueError, ["'meta'"]),
    "on meta": (lambda: mlp().to("meta"), TWO, ValueError, ["'meta'"]),
    "nested": (lambda: nn.Sequential(DP(mlp(), **TWO)), TWO, ValueError, ["a DataParallel at '0'"]),
    "torch's": (lambda: nn.DataParallel(mlp()), TWO, ValueError, ["a DataParallel"]),
    "scripted": (scripted, TWO, ValueError, ["a ScriptModule at '1'"]),
    "compiled": (lambda: torch.compile(mlp()), TWO, ValueError, ["a compiled module"]),
    "compiled in place": (compiled_in_place, TWO, ValueError, ["a compiled module at '0'"]),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), TWO, ValueError, ["a lazy parameter", "'0."]),
    "no module": (lambda: "mlp", TWO, TypeError, ["str", "torch.nn.Module"]),
    "balance": (
        mlp,
        {**TWO, "balance": "fast"},
        ValueError,
        ['balance="fast"', '"auto" or weights'],
    ),
    "no balance": (mlp, {**TWO, "balance": None}, TypeError, ["balance=None"]),
    "texts": (mlp, {**TWO, "balance": ["a", 1]}, TypeError, ["balance=['a', 1]"]),
    "few": (mlp, {**TWO, "balance": [1]}, ValueError, ["[1.0] for 2 replicas"]),
    "many": (mlp, {**TWO, "balance": [1, 2, 3]}, ValueError, ["[1.0, 2.0, 3.0] for 2 replicas"]),
    "negative": (mlp, {**TWO, "balance": [1, -1]}, ValueError, ["[1.0, -1.0]"]),
    "nothing": (mlp, {**TWO, "balance": [0, 0]}, ValueError, ["not all 0"]),
    "nan": (mlp, {**TWO, "balance": [float("nan"), 1]}, ValueError, ["nan"]),
    "infinite": (mlp, {**TWO, "balance": [1, float("inf")]}, ValueError, ["inf"]),
    "loss": (mlp, {**TWO, "loss": 3}, TypeError, ["loss=3", "a function of output and target"]),
    "loss that learns": (
        mlp,
        {**TWO, "loss": nn.Linear(3, 1)},
        ValueError,
        ["a loss with parameters", "in the forward of the module"],
    ),
    "dim": (mlp, {**TWO, "dim": "0"}, TypeError, ["dim='0'"]),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments(name: str) -> None:
    make, options, kind, parts = CASES[name]
    with raises(kind, "[data_parallel] got ", *parts, form=HOUSE_FORM):
        DP(make(), **options)


@no_accelerator
def test_accelerators_that_are_not_there() -> None:
    for device_ids in ([0], [0, 1], ["cuda:0"], ["cpu", 0]):
        with raises(ValueError, "device", form=HOUSE_FORM):
            DP(mlp(), device_ids)


@pytest.mark.parametrize("kind", [trireme.DistributedDataParallel, TorchDDP])
def test_ddp_in_it(kind: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with raises(ValueError, "a DistributedDataParallel at '0'", form=HOUSE_FORM):
        DP(nn.Sequential(kind(mlp())), **TWO)


def test_sharded_in_it(lone_rank: trireme.Context) -> None:
    module = mlp()
    trireme.fully_shard(module)
    with raises(ValueError, "a module of fully_shard at '0'", form=HOUSE_FORM):
        DP(nn.Sequential(module), **TWO)


@dataclasses.dataclass
class Fields:
    x: Any


# Inputs, options, what is raised and what the text says.
INPUTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], list[str]]] = {
    "dim": ((data(),), {"dim": 2}, ValueError, ["2 for an input of 2 dimensions", "-2 to 1"]),
    "negative dim": ((data(),), {"dim": -3}, ValueError, ["-3 for an input of 2 dimensions"]),
    "dim of another": ((data(), data()[:, 0]), {"dim": 1}, ValueError, ["1 for an input of 1 dim"]),
    "meta": ((data().to("meta"),), {}, ValueError, ["'meta'"]),
    "mixed devices": ((data(), data().to("meta")), {}, ValueError, ["'meta'"]),
    "nested meta": (({"x": [data().to("meta")]},), {}, ValueError, ["'meta'"]),
    "too few rows": ((data(), data(1)), {}, ValueError, ["1 rows beside one of 8"]),
    "packed": ((pack_sequence([data()]),), {}, TypeError, ["PackedSequence"]),
    "packed in fields": ((Fields(pack_sequence([data()])),), {}, TypeError, ["PackedSequence"]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    inputs, options, kind, parts = INPUTS[name]
    calls: list[int] = []
    ours = DP(Called(lambda m, *given: calls.append(0), net=mlp()), **TWO, **options)
    for _ in range(2):
        with raises(kind, "[data_parallel] got ", *parts, form=HOUSE_FORM):
            ours(*inputs)
    assert calls == []


def of_the_first(first: Any, other: Any) -> Callable[..., Any]:
    """What a module returns on the replica with the first row, and elsewhere."""
    first_row = data()[0]
    return lambda m, x: (first if torch.equal(x[0], first_row) else other)(m.net(x))


# What replica 0 returns and what replica 1 does, what is raised and what the text says.
OUTPUTS: dict[str, tuple[Any, Any, type[Exception], list[str]]] = {
    "shape": (lambda y: y, lambda y: y[:, :2], ValueError, ["shape [4, 2]", "one like [4, 3]"]),
    "dimensions": (lambda y: y, lambda y: y.sum(1), ValueError, ["shape [4]", "one like [4, 3]"]),
    "0-dim": (lambda y: y, lambda y: y.sum(), ValueError, ["shape []"]),
    "dtype": (lambda y: y, lambda y: y.double(), TypeError, ["Double", "Float"]),
    "integer": (lambda y: y, lambda y: y.long(), TypeError, ["Long", "Float"]),
    "sparse": (lambda y: y, lambda y: y.to_sparse(), TypeError, []),
    "type": (lambda y: [y], lambda y: (y,), TypeError, ["got tuple", "expected list"]),
    "length": (lambda y: [y], lambda y: [y, y], ValueError, ["2 items", "expected 1"]),
    "keys": (lambda y: {"a": y}, lambda y: {"b": y}, ValueError, ["['b']", "expected ['a']"]),
    "more keys": (lambda y: {"a": y}, lambda y: {"a": y, "b": y}, ValueError, ["['a', 'b']"]),
    "no tensor": (lambda y: (y, y), lambda y: (y, None), TypeError, ["None for output[1]"]),
    "nothing": (lambda y: y, lambda y: None, TypeError, ["None for output", "a tensor"]),
    "numbers": (lambda y: [y, 1], lambda y: [y, 2], ValueError, ["2 for output[1]", "expected 1"]),
    "number and text": (lambda y: [y, 1], lambda y: [y, "1"], TypeError, ["str for", "int"]),
    "deep": (
        lambda y: {"a": [0, (y,)]},
        lambda y: {"a": [0, ("text",)]},
        TypeError,
        ["str for output['a'][1][0]", "a tensor"],
    ),
    "objects": (
        lambda y: [y, object()],
        lambda y: [y, object()],
        TypeError,
        ["output[1]", "cannot be compared"],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_do_not_fit(name: str) -> None:
    """The message names the place and the replica; then other outputs are gathered."""
    first, other, kind, parts = OUTPUTS[name]
    ours = DP(Called(of_the_first(first, other), net=mlp()), **TWO)
    for _ in range(2):
        with raises(kind, "[data_parallel] got ", "replica 1 of 2 (cpu)", *parts, form=HOUSE_FORM):
            ours(data())
    ours.module.function = lambda m, x: m.net(x)
    torch.testing.assert_close(ours(data()), mlp()(data()))


def test_outputs_without_the_batch_dimension() -> None:
    ours = DP(Called(lambda m, x: x.sum(1)), **TWO, dim=1)
    with raises(ValueError, "1 for an output of 1 dimensions", form=HOUSE_FORM):
        ours(data())


def test_a_module_that_moves_away() -> None:
    ours, one = pair(lambda: mlp().double())
    x = data().double()
    assert_same_backward(ours, one, x)
    ours.module.to("meta")
    for _ in range(2):
        with raises(ValueError, "'0.weight' on meta", "expected it on cpu", form=HOUSE_FORM):
            ours(x)
    ours.module.to_empty(device="cpu")
    ours.module.load_state_dict(one.state_dict())
    assert_same_backward(ours, one, x)


def test_devices_named_for_a_module_that_is_elsewhere() -> None:
    ours = DP(mlp().to("meta"), ["cpu"] * 2)
    with raises(ValueError, "'0.weight' on meta", "expected it on cpu", form=HOUSE_FORM):
        ours(data())


def test_nesting_after_wrapping() -> None:
    """Layers that come later are looked at, too."""
    ours = DP(nn.Sequential(mlp()), **TWO)
    ours(data())
    ours.module[0] = DP(mlp(), **TWO)
    with raises(ValueError, "a DataParallel at '0'", form=HOUSE_FORM):
        ours(data())
