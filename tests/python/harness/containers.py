"""Containers of two tensors, of each kind that inputs and outputs of a module may be nested in."""

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = namedtuple("Pair", ["left", "right"])


class Typed(NamedTuple):
    left: Tensor
    right: Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Record:
    left: Tensor
    note: str
    right: Tensor
    late: Any = dataclasses.field(init=False, repr=False)  # may stay unset


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Tensor
    right: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    left: Tensor
    right: Tensor


class Output(OrderedDict[str, Any]):
    """Is like Hugging Face's ModelOutput: a mapping whose subclasses are dataclasses."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        kind, _, *remaining = super().__reduce__()
        arguments = tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return (kind, arguments, *remaining)


@dataclasses.dataclass
class LossOutput(Output):
    loss: Any = None
    hidden: Any = None
    logits: Any = None


class Tagged(dict[str, Any]):
    def __init__(self, tag: str) -> None:  # not what dict takes
        super().__init__()
        self.tag = tag


class OwnList(list[Any]):
    tag = ""


class Store(MutableMapping[str, Any]):
    """A mapping of which a shallow copy shares its items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def tagged(left: Any, right: Any) -> Tagged:
    made = Tagged("x")
    made.update(left=left, right=right)
    return made


def own_list(left: Any, right: Any) -> OwnList:
    made = OwnList([left, right])
    made.tag = "x"
    return made


# How two tensors are packed, left before right, and how they are got out again.
KINDS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda a, b: (a, b), lambda v: (v[0], v[1])),
    "list with others": (lambda a, b: ["x", a, 3, b, None], lambda v: (v[1], v[3])),
    "dict": (lambda a, b: {"b": a, "a": b}, lambda v: (v["b"], v["a"])),
    "OrderedDict": (lambda a, b: OrderedDict(b=a, a=b), lambda v: (v["b"], v["a"])),
    "defaultdict": (lambda a, b: defaultdict(list, b=a, a=b), lambda v: (v["b"], v["a"])),
    "UserDict": (lambda a, b: UserDict(b=a, a=b), lambda v: (v["b"], v["a"])),
    "dict with another constructor": (tagged, lambda v: (v["left"], v["right"])),
    "mapping": (lambda a, b: Store({"b": a, "a": b}), lambda v: (v["b"], v["a"])),
    "read-only mapping": (
        lambda a, b: types.MappingProxyType({"b": a, "a": b}),
        lambda v: (v["b"], v["a"]),
    ),
    "namedtuple": (Pair, lambda v: (v.left, v.right)),
    "NamedTuple": (Typed, lambda v: (v.left, v.right)),
    "return type": (
        lambda a, b: torch.return_types.max((a, b)),
        lambda v: (v.values, v.indices),
    ),
    "subclass of list": (own_list, lambda v: (v[0], v[1])),
    "dataclass": (lambda a, b: Record(a, "x", b), lambda v: (v.left, v.right)),
    "frozen dataclass": (Frozen, lambda v: (v.left, v.right)),
    "frozen dataclass with slots": (Slotted, lambda v: (v.left, v.right)),
    "mapping and dataclass": (
        lambda a, b: LossOutput(loss=a, logits=b),
        lambda v: (v.loss, v["logits"]),
    ),
    "nested": (
        lambda a, b: [{"x": (a, 1)}, Record(b, "x", {}), []],  # type: ignore[arg-type]
        lambda v: (v[0]["x"][0], v[1].left),
    ),
}
