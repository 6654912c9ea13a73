"""Tensors found in what a forward returned, in containers of each kind and behind other objects."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trireme._core.find_tensors import find_tensors
from trireme._core.nested import map_tensors

from harness.containers import KINDS

LEFT, RIGHT = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize("kind", KINDS)
def test_found_in_containers_of_each_kind(kind: str) -> None:
    pack, _ = KINDS[kind]
    found, certain = find_tensors(pack(LEFT, RIGHT))
    assert {id(tensor) for tensor in found} == {id(LEFT), id(RIGHT)}
    assert certain


@pytest.mark.parametrize(
    "pack",
    [lambda a, b: {a, b}, lambda a, b: frozenset({a, b}), lambda a, b: deque([a, b]),
     lambda a, b: SimpleNamespace(left=a, more=[b, torch.Size([2]), torch.float32, None])],
    ids=["set", "frozenset", "deque", "attributes"],
)  # fmt: skip
def test_found_where_others_do_not_look(pack: Any) -> None:
    value = pack(LEFT, RIGHT)
    found, certain = find_tensors(value)
    assert {id(tensor) for tensor in found} == {id(LEFT), id(RIGHT)}
    assert certain
    assert map_tensors(value, torch.neg) is value


@pytest.mark.parametrize("other", [nn.Linear(1, 1), print, object(), int])
def test_not_certain_beside_what_may_hide_tensors(other: Any) -> None:
    assert find_tensors((LEFT, other)) == ([LEFT], False)


def test_what_holds_itself_is_looked_at_once() -> None:
    value: list[Any] = [LEFT]
    value.append(value)
    assert find_tensors(value) == ([LEFT], True)


def test_packed_sequence_keeps_its_type() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)])
    changed = map_tensors(packed, torch.Tensor.clone)
    assert type(changed) is type(packed)
    assert torch.equal(changed.data, packed.data) and changed.data is not packed.data
