"""Tensors in nested inputs and outputs: found, replaced, and matched between replicas."""

import dataclasses
import enum
from collections import defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from trireme._data_parallel.nested import (
    first_tensor,
    matching_tensors,
    tensors_in,
    with_tensors,
)

from harness.containers import KINDS, LossOutput, Pair, Record, own_list, tagged

NAMES = ["replica 0 of 2 (cpu)", "replica 1 of 2 (cpu)"]


@pytest.mark.parametrize("kind", KINDS)
def test_found_in_order(kind: str) -> None:
    pack, _ = KINDS[kind]
    left, right = torch.zeros(2), torch.ones(2)
    found = tensors_in(pack(left, right))
    assert [id(tensor) for tensor in found] == [id(left), id(right)]


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_in_a_new_container_of_the_same_type(kind: str) -> None:
    pack, unpack = KINDS[kind]
    left, right = torch.zeros(2), torch.ones(2)
    value = pack(left, right)
    others = torch.zeros(1), torch.ones(1)
    changed = with_tensors(value, iter(others))
    assert changed is not value and type(changed) is type(value)
    assert all(a is b for a, b in zip(unpack(changed), others, strict=True))
    assert all(a is b for a, b in zip(unpack(value), (left, right), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_matched_between_replicas(kind: str) -> None:
    pack, _ = KINDS[kind]
    rows = [(torch.zeros(i), torch.ones(i)) for i in range(2)]
    outputs = [pack(*row) for row in rows]
    found = matching_tensors(outputs, NAMES)
    assert [[id(tensor) for tensor in row] for row in found] == [[id(a), id(b)] for a, b in rows]


def test_what_else_containers_hold_is_kept() -> None:
    value = tagged(torch.zeros(1), [3])
    value["factory"] = defaultdict(list, x=torch.zeros(1))
    changed = with_tensors(value, iter([torch.ones(1), torch.ones(1)]))
    assert changed.tag == "x"
    assert changed["factory"].default_factory is list
    assert own_list(0, 1).tag == with_tensors(own_list(0, 1), iter(())).tag
    record = Record(torch.zeros(1), "x", torch.zeros(1))
    record.late = "set"
    assert with_tensors(record, iter([torch.ones(1)] * 2)).late == "set"


class Opaque:
    def __init__(self) -> None:
        self.tensor = torch.zeros(1)


@dataclasses.dataclass(eq=False)
class RecordModule(nn.Module):
    width: int

    def __post_init__(self) -> None:
        super().__init__()
        self.register_buffer("tensor", torch.zeros(self.width))


@pytest.mark.parametrize(
    "leaf",
    [3, "x", None, Opaque(), {torch.zeros(1)}, torch.Size([2, 3]), Record, torch.float32, print,
     RecordModule(2), [], {}, ()],
    ids=lambda leaf: type(leaf).__name__,
)  # fmt: skip
def test_others_are_handed_on_by_reference(leaf: Any) -> None:
    """Empty containers, too: what a forward puts into an empty list reaches the caller."""
    tensor = torch.zeros(1)
    assert tensors_in(leaf) == []
    assert with_tensors(leaf, iter(())) is leaf
    assert with_tensors((leaf, tensor), iter([tensor]))[0] is leaf


def test_tensor_alone_and_twice() -> None:
    tensor, other = nn.Parameter(torch.zeros(2)), torch.ones(2)
    assert tensors_in(tensor)[0] is tensor
    assert with_tensors(tensor, iter([other])) is other
    assert len(tensors_in((tensor, [tensor]))) == 2


def test_packed_sequence_is_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    for value in (packed, {"x": packed}):
        with pytest.raises(TypeError, match=r"\[data_parallel\] got a PackedSequence, expected .*"):
            tensors_in(value)
    with pytest.raises(TypeError, match="Pack and unpack inside forward"):
        matching_tensors([(packed,), (packed,)], NAMES)


def test_first_tensor() -> None:
    tensor = torch.zeros(3)
    packed = nn.utils.rnn.pack_sequence([tensor])
    assert first_tensor((3, {"x": [tensor]}, torch.zeros(1))) is tensor
    assert first_tensor(("x", packed)) is packed.data
    assert first_tensor((3, "x", Opaque())) is None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


SHARED = Opaque()


@pytest.mark.parametrize(
    "value",
    [None, 3, 3.5, "x", b"x", 2j, True, float("nan"), Color.RED, torch.float32, torch.Size([2]),
     torch.device("cpu"), Opaque, SHARED, [], {}, ()],
    ids=lambda value: "SHARED" if value is SHARED else repr(value),
)  # fmt: skip
def test_equal_values_fit(value: Any) -> None:
    tensor = torch.zeros(1)
    matching_tensors([value, value], NAMES)
    copies = [(tensor, {"n": float("nan") if value != value else value}) for _ in range(2)]
    matching_tensors(copies, NAMES)


def test_class_made_in_forward_fits() -> None:
    def forward() -> Any:
        return namedtuple("Local", ["x"])(torch.zeros(1))

    matching_tensors([forward(), forward()], NAMES)


t = torch.zeros(1)


@pytest.mark.parametrize(
    ("first", "second", "error", "text"),
    [
        (t, None, TypeError, "got None for output from {1}, expected a tensor as from {0}"),
        (None, t, TypeError, "got a tensor for output from {1}, expected None as from {0}"),
        ((t, t), [t, t], TypeError, "got list for output from {1}, expected tuple"),
        ((t, t), t, TypeError, "got a tensor for output from {1}, expected tuple"),
        ((t, 3), (t, 3.0), TypeError, "got float for output[1] from {1}, expected int"),
        ((t, 1), (t, True), TypeError, "got bool for output[1] from {1}, expected int"),
        ([t], [t, t], ValueError, "got 2 items for output from {1}, expected 1"),
        ([t, {"a": (t, 3)}], [t, {"a": (t, 4)}], ValueError,
         "got 4 for output[1]['a'][1] from {1}, expected 3"),
        ([{"logits": t}], [{"hidden": t}], ValueError,
         "got keys ['hidden'] for output[0] from {1}, expected ['logits']"),
        (Pair(t, "x"), Pair(t, "y"), ValueError, "got 'y' for output.right from {1}"),
        (Record(t, "x", t), Record(t, "y", t), ValueError, "got 'y' for output.note from {1}"),
        (LossOutput(loss=t), LossOutput(logits=t), ValueError, "got keys ['logits'] for output"),
        (Color.RED, Color.BLUE, ValueError, "BLUE"),
        ({"a": Opaque()}, {"a": Opaque()}, TypeError,
         "got Opaque, which cannot be compared, for output['a'] from {1}, expected the same obj"),
    ],
)  # fmt: skip
def test_other_structure_is_refused(
    first: Any, second: Any, error: type[Exception], text: str
) -> None:
    """Naming the place and the replica."""
    with pytest.raises(error) as caught:
        matching_tensors([first, second], NAMES)
    assert str(caught.value).startswith("[data_parallel] got ")
    assert text.format(*NAMES) in str(caught.value)


def test_unset_field_is_refused() -> None:
    first, second = Record(t, "x", t), Record(t, "x", t)
    first.late = 1
    with pytest.raises(ValueError, match=r"got fields \['left', 'note', 'right'\] for output"):
        matching_tensors([first, second], NAMES)


def test_third_replica_is_named() -> None:
    with pytest.raises(ValueError, match="from c, expected 2 as from a"):
        matching_tensors([(t, 2), (t, 2), (t, 3)], ["a", "b", "c"])


def test_keys_in_another_order_are_matched() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    found = matching_tensors([{"a": a, "b": b}, {"b": b, "a": a}], NAMES)
    assert [[id(tensor) for tensor in row] for row in found] == [[id(a), id(b)]] * 2
