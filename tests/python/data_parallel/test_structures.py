"""What goes into DataParallel and what comes out: every structure, every number of rows."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from data_parallel.cases import DP, TIME_LIMIT, Called, assert_close, pair, square_mean
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT

ROWS = 7


class Two(NamedTuple):
    a: Any
    b: Any


@dataclass
class Fields:
    a: Any
    b: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


class Output(OrderedDict[str, Any]):
    """A dictionary whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def default_dict(a: Any, b: Any) -> Any:
    value = defaultdict(list)
    value["a"], value["b"] = a, b
    return value


# Two tensors put into something, and the way to find them there.
STRUCTURES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda a, b: (a, b), tuple),
    "list": (lambda a, b: [a, b], tuple),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda v: (v["a"], v["b"])),
    "OrderedDict": (lambda a, b: OrderedDict(b=b, a=a), lambda v: (v["a"], v["b"])),
    "defaultdict": (default_dict, lambda v: (v["a"], v["b"])),
    "subclass of dict": (lambda a, b: Output(a=a, b=b), lambda v: (v.a, v.b)),
    "namedtuple": (Two, lambda v: (v.a, v.b)),
    "dataclass": (Fields, lambda v: (v.a, v.b)),
    "frozen dataclass": (Frozen, lambda v: (v.a, v.b)),
    "nested": (
        lambda a, b: {"x": [a, {"y": (b, None, "text")}], "z": Two(1, 2.5)},
        lambda v: (v["x"][0], v["x"][1]["y"][0]),
    ),
    "with other things": (lambda a, b: (None, a, 3, "text", b, True, ()), lambda v: (v[1], v[4])),
}


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0, rows: int = ROWS) -> Tensor:
    return batch(step, rows=rows, dtype=torch.float64).requires_grad_()


def same_types(got: Any, expected: Any) -> bool:
    if type(got) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(got) == list(expected) and all(map(same_types, got.values(), expected.values()))
    if isinstance(expected, (list, tuple)):
        return len(got) == len(expected) and all(map(same_types, got, expected))
    return isinstance(expected, (Tensor, Fields, Frozen)) or got == expected


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", STRUCTURES)
def test_inputs_in(name: str, replicas: int) -> None:
    build, read = STRUCTURES[name]
    given: list[Any] = []

    def forward(module: Any, value: Any, named: Any) -> Tensor:
        given.append(value)
        (a, b), (c, _) = read(value), read(named)
        return module.net(a) * b[:, :3] + c[:, 3:]

    seen = []
    modules = pair(lambda: Called(forward, net=make()), replicas)
    for module in modules:
        tensors = [data(i) for i in range(3)]
        value = build(tensors[0], tensors[1])
        square_mean(module(value, named=build(tensors[2], tensors[2]))).backward()
        seen.append([[t.grad for t in tensors], gradients(module)])
        assert read(value)[0] is tensors[0], "what the caller gave was changed"
    assert_close(*seen)
    assert len(given) == replicas + 1
    for value in given:
        assert same_types(value, given[-1])


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_in(name: str, replicas: int) -> None:
    build, read = STRUCTURES[name]
    seen, outputs = [], []
    modules = pair(
        lambda: Called(lambda m, x: build(m.first(x), m.second(x)), first=make(), second=make()),
        replicas,
    )
    for module in modules:
        output = module(data())
        a, b = read(output)
        square_mean(a * b).backward()
        outputs.append(output)
        seen.append([a, b, gradients(module)])
    assert_close(*seen)
    assert same_types(*outputs)


def test_one_tensor_twice_in_the_outputs() -> None:
    modules = pair(lambda: Called(lambda m, x: (y := m.net(x), [y, y]), net=make()))
    for module in modules:
        y, (again, _) = module(data())
        square_mean(y * again).backward()
    assert_close(gradients(modules[0]), gradients(modules[1]))


def test_objects_go_to_all_replicas_as_they_are() -> None:
    thing = object()
    seen: list[Any] = []
    ours = DP(Called(lambda m, x, other: (seen.append(other), x)[1]), replicas=3)
    assert torch.equal(ours(data(), thing), data())
    assert [found is thing for found in seen] == [True] * 3


def test_named_inputs_only() -> None:
    ours, one = pair(lambda: Called(lambda m, *, x, scale=1.0: m.net(x) * scale, net=make()))
    for module in (ours, one):
        square_mean(module(x=data(), scale=2.0)).backward()
    assert_close(gradients(ours), gradients(one))


def test_no_inputs() -> None:
    """One replica is called."""
    calls: list[int] = []
    ours, one = pair(
        lambda: Called(lambda m: (calls.append(0), m.w * 2)[1], w=nn.Parameter(torch.randn(3, 2)))
    )
    for module in (ours, one):
        square_mean(module()).backward()
    assert len(calls) == 2
    assert_close(gradients(ours), gradients(one))


@pytest.mark.parametrize("inputs", [(2.0,), (torch.tensor(2.0),)])
def test_no_rows_to_cut(inputs: Any) -> None:
    """Every replica is given all: as many outputs as replicas, as in torch."""
    ours = DP(Called(lambda m, scale: m.w * scale, w=nn.Parameter(torch.ones(1, 2))), replicas=3)
    output = ours(*inputs)
    assert torch.equal(output, torch.full((3, 2), 2.0))
    output.sum().backward()
    assert torch.equal(ours.module.w.grad, torch.full((1, 2), 6.0))


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_empty_batch(replicas: int) -> None:
    ours, one = pair(make, replicas)
    for module in (ours, one):
        output = module(data(rows=0))
        assert output.shape == (0, 3)
        output.sum().backward()
    assert_close(gradients(ours), gradients(one))


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4, 6, 9])
def test_cuts_are_those_of_chunk(rows: int, replicas: int) -> None:
    """Replicas without rows are not called."""
    shapes: list[Any] = []
    ours, one = pair(
        lambda: Called(lambda m, x: (shapes.append(len(x)), m.net(x))[1], net=make()), replicas
    )
    output = ours(data(rows=rows))
    assert sorted(shapes) == sorted(len(c) for c in torch.chunk(data(rows=rows), replicas))
    square_mean(output).backward()
    square_mean(one(data(rows=rows))).backward()
    assert_close(gradients(ours), gradients(one))


def test_chunks_are_views_of_the_input() -> None:
    pointers: list[int] = []
    ours = DP(Called(lambda m, x: (pointers.append(x.data_ptr()), x + 1)[1]), replicas=2)
    x = torch.arange(8.0).view(4, 2)
    ours(x)
    assert sorted(pointers) == [x.data_ptr(), x[2:].data_ptr()]


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_other_batch_dimensions(dim: int) -> None:
    def forward(module: Any, x: Tensor) -> Any:
        return (module.factor * x).cos(), x * 2

    seen = []
    ours, one = pair(
        lambda: Called(forward, factor=nn.Parameter(torch.randn(1).double())), 3, dim=dim
    )
    for module in (ours, one):
        x = batch(0, rows=4, width=35, dtype=torch.float64).view(4, 5, 7).requires_grad_()
        y, z = module(x)
        square_mean(y * z).backward()
        seen.append([y, z, x.grad, gradients(module)])
    assert_close(*seen)


def test_a_recurrent_network_with_its_states() -> None:
    """The batch is dimension 1 of all inputs and outputs."""
    seen = []
    for module in pair(lambda: nn.LSTM(6, 4, 2).double(), 2, dim=1):
        x = batch(0, rows=5, width=42, dtype=torch.float64).view(5, 7, 6)
        state = tuple(
            batch(i, rows=2, width=28, dtype=torch.float64).view(2, 7, 4).requires_grad_()
            for i in (1, 2)
        )
        y, (h, c) = module(x, state)
        (square_mean(y) + square_mean(h * c)).backward()
        seen.append([y, h, c, *(s.grad for s in state), gradients(module)])
    assert_close(*seen)


def test_0_dim_outputs_become_a_vector() -> None:
    """One element for each replica that was called."""
    ours, one = pair(lambda: Called(lambda m, x: m.net(x).sum(), net=make()), 3)
    output = ours(data())
    assert output.shape == (3,)
    output.sum().backward()
    one(data()).backward()
    assert_close(gradients(ours), gradients(one))
    assert ours(data(rows=1)).shape == (1,)


def test_outputs_of_other_rows_than_inputs() -> None:
    """Even of another number on each replica, as with what a mask leaves."""
    ours, one = pair(lambda: Called(lambda m, x: m.net(x[x[:, 0] > 0]), net=make()))
    for module in (ours, one):
        square_mean(module(data())).backward()
    assert_close(gradients(ours), gradients(one))


def test_inputs_of_other_rows() -> None:
    """Cut in the same proportion: two rows of one for each row of the other."""
    ours, one = pair(
        lambda: Called(
            lambda m, x, pairs: m.net(x) + m.net(pairs).view(-1, 2, 3).sum(1), net=make()
        )
    )
    for module in (ours, one):
        square_mean(module(data(), data(1, rows=2 * ROWS))).backward()
    assert_close(gradients(ours), gradients(one))


def test_keys_in_another_order() -> None:
    """Outputs are matched by key; the order is that of the first replica."""

    def forward(module: Any, x: Tensor) -> dict[str, Tensor]:
        output = {"a": module.net(x), "b": x}
        return output if len(x) == 4 else dict(reversed(output.items()))

    ours, one = pair(lambda: Called(forward, net=make()))
    got, expected = ours(data()), one(data())
    assert list(got) == ["a", "b"]
    assert_close(got, dict(sorted(expected.items())))


def test_integers_booleans_and_no_gradient() -> None:
    ours, one = pair(
        lambda: Called(lambda m, x: (x > 0, x.long(), x.half(), m.net(x).argmax(1)), net=make())
    )
    assert_close(ours(data().detach()), one(data().detach()))


def test_constant_outputs() -> None:
    ours, _ = pair(
        lambda: Called(lambda m, x: {"y": x, "name": "text", "scale": 2.5, "none": None})
    )
    output = ours(data())
    assert {key: output[key] for key in ("name", "scale", "none")} == {
        "name": "text",
        "scale": 2.5,
        "none": None,
    }
