"""What crosses between stages, and how batches are cut and outputs put together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme._core.nested import tensors_in
from trireme._pipeline.micro_batches import BatchCut, merge
from trireme._pipeline.values import put_together, take_apart

from harness.containers import KINDS, Record
from harness.faults import message_of
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import FORMS, WIDTH, accumulate, rows


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Hidden:
    state: Tensor
    scale: float = 1.0
    more: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scale *= 2  # must not happen again on the other side


@dataclass(frozen=True)
class Fixed:
    value: Any


@dataclass
class Beside:
    value: int


def same(one: Any, other: Any) -> bool:
    """Equal, of equal types at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(vars(one), vars(other))
    return repr(one) == repr(other)


T = torch.ones(2)
VALUES = [
    (T,),
    [T, T, torch.zeros(1)],
    {"a": T, 3: [1, True, 1.0, None, "ä\udc80", (), {}], (1, "x"): -0.0},
    OrderedDict(b=T, a=2 + 3j),
    Pair(T, Pair(1, [T])),
    Hidden(T, 0.5, [Fixed((T, float("nan"))), float("-inf"), 10**40]),
    torch.Size([2, 3]),
    None,
    7,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    taken = take_apart(value, "stage 0")
    assert isinstance(taken, tuple) and taken[1]
    for _ in range(2):  # the second time the text is known
        assert same(put_together(take_apart(value, "stage 0")), value)


def test_equal_numbers_of_other_types_are_told_apart() -> None:
    for value in ([1], [True], [1.0], [0.0], [-0.0], [1 + 0j], ["1"]):
        assert same(put_together(take_apart(value, "")), value)


def test_one_tensor_has_no_text_and_one_that_comes_twice_goes_once() -> None:
    assert take_apart(T, "") is T
    assert len(take_apart((T, [T]), "")[0]) == 1


def _inner() -> Any:
    @dataclass
    class Inner:
        value: int

    return Inner(1)


def _beside() -> Any:
    made = Beside(1)
    made.hidden = 2  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([object()], "returned a object"),
        (torch.float32, "returned a dtype"),
        ({T: 1}, "a dict with a Tensor as key"),
        (_inner(), "which another rank cannot find by its name"),
        (_beside(), "attributes that are no fields (hidden)"),
        (torch.ones(2, 2).max(dim=1), "returned a max"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_other_objects_are_refused(value: Any, part: str) -> None:
    with pytest.raises(TypeError) as caught:
        take_apart(value, "stage 2 (layer 5)")
    assert part in str(caught.value) and "[pipeline] stage 2 (layer 5) returned" in str(
        caught.value
    )


def test_a_text_makes_only_dataclasses_and_named_tuples() -> None:
    for text in ('["c","os","_Environ",["data",["N"]]]', '["n","builtins","list"]'):
        with pytest.raises(TypeError, match="from another stage, expected a"):
            put_together(([], text))


def test_batches_are_cut_as_tensor_split_cuts() -> None:
    batch = {"x": (rows(0, 10), [torch.tensor(3.0)]), "y": {"a": torch.arange(10), "b": "word"}}
    cut = BatchCut(batch, 4, 0)
    pieces = cut.cut(batch)
    assert [len(piece["y"]["a"]) for piece in pieces] == [3, 3, 2, 2]
    for number, piece in enumerate(pieces):
        assert torch.equal(piece["x"][0], rows(0, 10).tensor_split(4)[number])
        assert piece["y"]["b"] == "word" and piece["x"][1][0].item() == 3
    columns = BatchCut({"x": torch.ones(2, 5)}, 5, -1)
    assert columns.rows == 5 and columns.cut(torch.ones(2, 5))[0].shape == (2, 1)
    for value in (Pair(T, 1), Hidden(T), Fixed(T), OrderedDict(a=T)):
        first, second = BatchCut({"x": value}, 2, 0).cut(value)
        assert type(first) is type(second) is type(value)
        (joined,) = tensors_in(merge([first, second], 0))
        assert torch.equal(joined, T)


@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_each_kind_are_cut_and_put_together(kind: str) -> None:
    pack, unpack = KINDS[kind]
    left, right = rows(0, 4), rows(1, 4)
    value = pack(left, right)
    pieces = BatchCut({"x": value}, 2, 0).cut(value)
    assert all(type(piece) is type(value) for piece in pieces)
    for number, piece in enumerate(pieces):
        for part, whole in zip(unpack(piece), (left, right), strict=True):
            assert torch.equal(part, whole.chunk(2)[number])
    merged = merge(pieces, 0)
    assert type(merged) is type(value)
    assert all(map(torch.equal, unpack(merged), (left, right)))


def test_each_micro_batch_has_empty_containers_of_its_own() -> None:
    """What a layer puts into one is of one micro-batch."""
    value = (rows(0, 2), [], {})
    first, second = BatchCut({"x": value}, 2, 0).cut(value)
    assert first[1:] == second[1:] == ([], {})
    assert len({id(value[1]), id(first[1]), id(second[1])}) == 3
    assert len({id(value[2]), id(first[2]), id(second[2])}) == 3


def _late() -> Record:
    made = Record(T, "x", T)
    made.late = 1
    return made


@pytest.mark.parametrize(
    ("outputs", "part"),
    [
        ([torch.tensor(1.0)] * 2, "the output has 0 dims"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "the output has sizes [(1, 2), (1, 3)]"),
        ([(T,), (T, T)], "lengths [1, 2]"),
        ([(T,), [T]], "types list, tuple"),
        ([{"a": 1}, {"a": 2}], "the output['a'] has values 1"),
        ([{"a": 1}, {"b": 1}], "keys"),
        ([[T], [T.double()]], "the output[0] has dtypes"),
        ([Pair(T, 1), Pair(T, 2)], "the output.right has values 1"),
        ([Record(T, "x", T), _late()], "the output has fields"),
    ],
)
def test_outputs_that_cannot_be_merged(outputs: Any, part: str) -> None:
    with pytest.raises(ValueError, match="cannot be put together") as caught:
        merge(outputs, 0)
    assert part in str(caught.value)


class Nested(nn.Module):
    """Takes and returns values of one kind after the other; its output depends on all of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any, mask: Tensor | None = None) -> Any:
        x, count, extra = self.read(given)
        y = self.linear(x).tanh()
        if mask is not None:
            y = y * mask
        kinds = [
            lambda: (y, count + 1, x),
            lambda: {"y": y, "count": count + 1, "nothing": None, 5: [x]},
            lambda: Hidden(y, float(count), [{"x": x}]),
            lambda: Pair(y, (count + 1, [extra])),
        ]
        return kinds[self.number % 4]()

    @staticmethod
    def read(given: Any) -> tuple[Tensor, int, Tensor]:
        if isinstance(given, tuple) and not isinstance(given, Pair):
            return given[0] + given[2], given[1], given[2]
        if isinstance(given, dict):
            assert given["nothing"] is None
            return given["y"] * given[5][0], given["count"], given[5][0]
        if isinstance(given, Hidden):
            return given.state - given.more[0]["x"], int(given.scale), given.state
        if isinstance(given, Pair):
            return given.left + given.right[1][0], given.right[0], given.left
        return given, 0, given


class Last(nn.Module):
    def forward(self, given: Any) -> Tensor:
        x, count, _ = Nested.read(given)
        return x * count


def nested_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Nested(number) for number in range(7)), Last())


@pytest.mark.parametrize("world", [1, 2, 4])
@on_shm_and_gloo_ranks("world")
def test_nested_values_between_stages(rank: int, world: int) -> None:
    for form in FORMS:
        one = nested_layers()
        pipe = trireme.Pipeline(nested_layers(), 4, ranks=True, schedule=form, loss=mse_loss)
        for step in range(2):
            for module in (one, pipe):
                module.zero_grad()
            expected = accumulate(one, rows(step), rows(9), chunks=4, loss=mse_loss)
            assert torch.equal(pipe.step(rows(step), target=rows(9)), expected)
            whole = dict(one.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert torch.equal(parameter.grad, whole[name].grad), name


class FirstOfTwo(nn.Module):
    def forward(self, x: Tensor, words: dict[str, Any], scale: float = 1.0) -> Tensor:
        assert words["word"] == "as it is" and len(words["more"][0]) == len(x)
        return x * scale + words["more"][0]


@on_shm_ranks(2)
def test_several_inputs_nested_targets_and_keywords(rank: int) -> None:
    """A keyword reaches every layer that names it, on whichever rank."""
    torch.manual_seed(2)
    module = nn.Sequential(FirstOfTwo(), Nested(0), Nested(1), Nested(3), Last())

    def loss(output: Tensor, target: dict[str, Any]) -> Tensor:
        return (output - target["y"][0]).square().mean() * target["weight"]

    pipe = trireme.Pipeline(module, 3, ranks=True, loss=loss, balance=[2, 3])
    words, mask = {"word": "as it is", "more": (rows(1),)}, rows(4)
    got = pipe.step(rows(0), words, target={"y": [rows(2)], "weight": 0.5}, mask=mask, scale=2.0)
    torch.manual_seed(2)
    FirstOfTwo()
    expected = []
    given = (rows(0), rows(1), mask, rows(2))
    for a, b, m, y in zip(*(tensor.tensor_split(3) for tensor in given)):  # noqa: B905
        value: Any = a * 2.0 + b
        with torch.no_grad():
            for layer in one_layers():
                value = layer(value, mask=m) if isinstance(layer, Nested) else layer(value)
        expected.append((value - y).square().mean() * 0.5)
    torch.testing.assert_close(got, sum(expected) / 3)


def one_layers() -> list[nn.Module]:
    torch.manual_seed(2)
    return [Nested(0), Nested(1), Nested(3), Last()]


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return [x, object()]


@on_shm_ranks(2)
def test_other_objects_are_refused_by_stage(rank: int) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Opaque(), nn.Linear(WIDTH, WIDTH))
    pipe = trireme.Pipeline(module, 2, ranks=True, loss=mse_loss, balance=[2, 1])
    with pytest.raises(RuntimeError) as caught:
        pipe.step(rows(0), target=rows(1))
    text = message_of(caught.value)
    assert "stage 0" in text and "returned a object" in text
    assert isinstance(caught.value.__cause__, TypeError) == (rank == 0)
