"""What arguments and results may be, how they arrive, and how others are refused."""

from __future__ import annotations

import collections
import enum
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trireme import remote

from harness.tensors import assert_bits, bits
from remote.functions import echo, type_there
from remote.ranks import on_remote_ranks, on_remote_shm_and_gloo_ranks, raised, refused

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


class Mine:
    pass


class MyInt(int):
    pass


class MyText(str):
    pass


class MyList(list):
    pass


class MyDict(dict):
    pass


class Point(NamedTuple):
    x: int
    y: int


class Color(enum.IntEnum):
    RED = 1


@remote.function
def two(a: Any, b: Any = None, *, k: Any = None) -> list[Any]:
    return [a, b, k]


@remote.function
def catch_all(*args: Any, **kwargs: Any) -> list[Any]:
    return [args, kwargs]


@remote.function
def about_tensor(value: Tensor) -> tuple[Any, ...]:
    is_plain = type(value) is Tensor
    return is_plain, value.requires_grad, value.is_leaf, list(value.shape), str(value.dtype)


@remote.function
def change(numbers: list[Any], tensor: Tensor) -> Tensor:
    numbers.append(len(numbers))
    tensor.fill_(7)
    return tensor


RESULTS: dict[str, Any] = {
    "list in dict": {"out": [Mine()]},
    "itself": Mine(),
    "in tuple": (1, (2, Mine())),
    "text": "\ud800",
}


@remote.function
def result_of(case: str) -> Any:
    return RESULTS[case]


@remote.function
def sum_of(numbers: list[int]) -> int:
    return sum(numbers)


def assert_same(got: Any, expected: Any) -> None:
    """Types are the same, too, to the bottom; so are the order of dicts and the sign of a zero."""
    assert type(got) is type(expected), f"got {got!r}, expected {expected!r}"
    if isinstance(expected, Tensor):
        assert_bits(got, expected.detach())
    elif isinstance(expected, dict):
        assert_same(list(got.items()), list(expected.items()))
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, set):
        assert got == expected and sorted(map(repr, got)) == sorted(map(repr, expected))
    else:
        assert repr(got) == repr(expected)


KEYS: list[Any] = [
    None,
    True,
    0,
    -3,
    2.5,
    "a",
    "",
    b"a",
    (),
    (1, "x", (None, b"y")),
    2**62,
    2**64,
    1j,
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63)),
    *(2**63, -(2**63) - 1, 2**64 - 1, -(2**71), -(2**71) - 1, 3**5000, -(7**999), 10**30),
    *(0j, complex(-0.0, math.inf), complex(math.nan, -2.5)),
    *(0.0, -0.0, 1.5, 5e-324, math.inf, -math.inf, math.nan),
    *("", "plain", "üñ€ 😀", "a\0b", "\n", b"", b"\x00\xff\x80"),
    *([], [None], (), (1,), {}, set()),
    [1, [2.0, ["3", [b"4", (5, {6})]]]],
    {key: index for index, key in enumerate(KEYS)},
    set(KEYS),
    {"z": {"y": {"x": [torch.ones(2), (torch.zeros(1, dtype=torch.int8), None)]}}, "a": ()},
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
    [True, 1, 1.0, "1", b"1", None],
]


@on_remote_shm_and_gloo_ranks(2)
def test_every_kind_arrives_as_it_was(rank: int) -> None:
    for to in ("p1", "p0") if rank == 0 else ():
        for value in VALUES:
            assert_same(remote.call(to, echo, value), value)
            assert remote.call(to, type_there, value) == type(value).__name__
        assert_same(remote.call(to, echo, VALUES), VALUES)
        got = remote.call(to, two, VALUES[3], b=VALUES[-1], k=VALUES[-2])
        assert_same(got, [VALUES[3], VALUES[-1], VALUES[-2]])


@on_remote_ranks(2)
def test_long_values_and_names_of_arguments(rank: int) -> None:
    if rank == 1:
        return
    numbers = list(range(100_000))
    assert remote.call("p1", sum_of, numbers) == sum(numbers)
    text, raw = "€" * 1_000_000, bytes(range(256)) * 20_000
    assert remote.call("p1", echo, text) == text and remote.call("p1", echo, raw) == raw
    table = {index: str(index) for index in range(20_000)}
    assert_same(remote.call("p1", echo, table), table)
    named: dict[str, Any] = {"a b": 1, "": 2, "ü": [3], "class": 4}
    assert_same(remote.call("p1", catch_all, 0, (1,), **named), [(0, (1,)), named])
    assert_same(remote.call("p1", catch_all), [(), {}])


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Random bits; NaNs among them."""
    numel = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,)).to(torch.bool).reshape(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@on_remote_shm_and_gloo_ranks(2)
def test_tensors_of_all_dtypes_and_shapes(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for dtype in DTYPES:
            shapes = ((), (0,), (3, 0, 2), (1,), (7,), (2, 3, 4), (40_000,))
            tensors = [tensor_of(dtype, shape) for shape in shapes]
            assert_same(remote.call(to, echo, tensors), tensors)
            about = remote.call(to, about_tensor, tensors[5])
            assert about == (True, False, True, [2, 3, 4], str(dtype))


@on_remote_shm_and_gloo_ranks(2)
def test_tensors_of_all_layouts(rank: int) -> None:
    if rank == 1:
        return
    whole = torch.randn(4, 6, 2, 2)
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    tensors = {
        "transposed": whole[:, :, 0, 0].t(),
        "every second": whole[::2, 1::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "channels last": whole.to(memory_format=torch.channels_last),
        "a part": whole[2],
        "permuted": whole.permute(3, 1, 0, 2),
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "twice": whole,
        "flipped": whole.flip(0),
    }
    for to in ("p1", "p0"):
        got = remote.call(to, echo, tensors)
        assert list(got) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(bits(got[name]), bits(tensor)), name
            assert got[name].shape == tensor.shape


@on_remote_ranks(2)
def test_tensors_arrive_detached(rank: int) -> None:
    if rank == 1:
        return
    leaf = torch.ones(2, requires_grad=True)
    for to in ("p1", "p0"):
        for tensor in (leaf, leaf * 2, nn.Linear(1, 2).weight):
            about = remote.call(to, about_tensor, tensor)
            assert about[:3] == (True, False, True)
            result = remote.call(to, echo, tensor)
            assert type(result) is Tensor and not result.requires_grad
    assert leaf.requires_grad and leaf.grad is None


@on_remote_ranks(2)
def test_values_are_copies(rank: int) -> None:
    """Also for a call to oneself, and of what comes back."""
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for numel in (3, 100_000):
            numbers, tensor = [1, 2], torch.zeros(numel)
            result = remote.call(to, change, numbers, tensor)
            assert numbers == [1, 2] and not tensor.any()
            assert (result == 7).all()
            result.add_(1)  # it may be written
            again = remote.call(to, echo, result)
            assert again.data_ptr() != result.data_ptr() and torch.equal(again, result)


@on_remote_ranks(2)
def test_what_is_sent_may_be_written_at_once(rank: int) -> None:
    if rank == 1:
        return
    tensor = torch.zeros(50_000)
    pending = []
    for count in range(20):
        tensor.fill_(count)
        pending.append(remote.call_async("p1", echo, tensor))
    tensor.fill_(-1)
    assert [int(call.wait().unique().item()) for call in pending] == list(range(20))


OTHERS: list[tuple[Any, str]] = [
    (Mine(), "Mine"),
    (MyInt(3), "MyInt"),
    (MyText("a"), "MyText"),
    (MyList(), "MyList"),
    (MyDict(), "MyDict"),
    (Point(1, 2), "Point"),
    (Color.RED, "Color"),
    (frozenset({1}), "frozenset"),
    (collections.defaultdict(int), "defaultdict"),
    (collections.Counter("a"), "Counter"),
    (collections.deque(), "deque"),
    (np.float32(1), "float32"),
    (np.float64(1), "float64"),
    (np.int64(1), "int64"),
    (np.bool_(True), "bool"),
    (np.ones(2), "ndarray"),
    (np.complex128(1j), "complex128"),
    (range(3), "range"),
    (bytearray(b"a"), "bytearray"),
    (memoryview(b"a"), "memoryview"),
    (torch.Size([1]), "Size"),
    (torch.float32, "dtype"),
    (torch.device("cpu"), "device"),
    (nn.Linear(1, 1), "Linear"),
    (ValueError("a"), "ValueError"),
    (int, "type"),
    (print, "builtin_function_or_method"),
    (..., "ellipsis"),
]


@on_remote_ranks(2)
def test_other_types_are_refused(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for value, name in OTHERS:
            with refused(TypeError, "args[0]", name):
                remote.call(to, echo, value)
            with refused(TypeError, "args[0]['x'][1]", name):
                remote.call_async(to, echo, {"x": [1, value]})
    assert remote.call("p1", echo, 3) == 3


@on_remote_ranks(2)
def test_an_ordered_dict_arrives_as_a_dict(rank: int) -> None:
    if rank == 1:
        return
    ordered = collections.OrderedDict(a=1, b=torch.ones(2), c=collections.OrderedDict())
    ordered.move_to_end("a")
    expected = {"b": torch.ones(2), "c": {}, "a": 1}
    for to in ("p1", "p0"):
        assert_same(remote.call(to, echo, ordered), expected)
        assert remote.call(to, type_there, ordered) == "dict"
        assert_same(
            remote.call(to, echo, nn.Linear(1, 1).state_dict()).keys(), {"weight", "bias"}
        ) if False else None
        with refused(TypeError, "args[0]['b'][0] is a Mine"):
            remote.call(to, echo, collections.OrderedDict(a=1, b=[Mine()]))
        state = nn.Linear(2, 3).state_dict()
        assert_same(remote.call(to, echo, state), dict(state))


def without_values() -> dict[str, Tensor]:
    """Tensors that cannot be sent, by what is said of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are called deprecated, or a prototype
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    return {
        "the layout Sparse": torch.eye(3).to_sparse(),
        "the layout SparseCsr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(2, device="meta"),
        "quantized": quantized,
        "nested": nested,
    }


@remote.function
def make_tensor_that_cannot_be_sent(kind: str) -> Any:
    return {"out": (1, without_values()[kind])}


@remote.function
def make_identity() -> nn.Module:
    return nn.Identity()


@on_remote_shm_and_gloo_ranks(2)
def test_a_tensor_is_refused_with_its_place(rank: int) -> None:
    """Calls to oneself, too."""
    if rank == 1:
        return
    for to in ("p1", "p0"):
        net = remote.Module(to, make_identity)
        for said, tensor in without_values().items():
            with refused(TypeError, "args[0] is a Tensor that", said):
                remote.call(to, echo, tensor)
            with refused(TypeError, "kwargs['k'][1]['x'] is a Tensor that", said):
                remote.call_async(to, two, 1, k=[1, {"x": tensor}])
            with refused(TypeError, "args[1][0] is a Tensor that", said):
                net(torch.ones(1), (tensor,))
            with refused(TypeError, "args[0] is a Tensor that", said):
                remote.create(to, "Counter", tensor)
            with refused(TypeError, "the result['out'][1] is a Tensor that", said):
                remote.call(to, make_tensor_that_cannot_be_sent, said)
        assert remote.call(to, echo, 3) == 3


@on_remote_ranks(2)
def test_a_type_is_refused_with_its_place(rank: int) -> None:
    if rank == 1:
        return
    mine = Mine()
    with refused(TypeError, "args[1]['x'] is a Mine"):
        remote.call("p1", two, 1, {"x": mine})
    with refused(TypeError, "kwargs['k'] is a Mine"):
        remote.call("p1", two, 1, k=mine)
    with refused(TypeError, "kwargs['k'][2][0] is a Mine"):
        remote.call("p1", two, 1, k=(1, 2, [mine]))
    with refused(TypeError, "args[0][3][", "is a Mine"):
        remote.call("p1", two, {3: {(1, "a"): mine}})
    for value in ({mine: 1}, {mine}, {"a": {(1, mine)}}, {(mine,): 1}):
        with refused(TypeError, "args[0]", "Mine"):
            remote.call("p1", two, value)
    for key in (torch.ones(1), frozenset(), Point(1, 2), Color.RED):
        for value in ({key: 1}, {key}, {(key,): 1}):
            with refused(TypeError, "args[0]", type(key).__name__):
                remote.call("p1", two, value)


@on_remote_shm_and_gloo_ranks(2)
def test_a_result_is_refused_with_its_place(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        with refused(TypeError, "the result['out'][0] is a Mine", "result_of"):
            remote.call(to, result_of, "list in dict")
        with refused(TypeError, "the result is a Mine"):
            remote.call(to, result_of, "itself")
        with refused(TypeError, "the result[1][1] is a Mine"):
            remote.call(to, result_of, "in tuple")
        with pytest.raises(ValueError):
            remote.call(to, result_of, "text")
        assert remote.call(to, echo, 3) == 3


@on_remote_ranks(2)
def test_tensors_without_plain_memory_are_refused(rank: int) -> None:
    if rank == 1:
        return
    for tensor in (
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.ones(2).to("meta"),
    ):
        with raised(TypeError):
            remote.call("p1", echo, tensor)
        with raised(TypeError):
            remote.call("p1", two, 1, {"x": tensor})
    assert torch.equal(remote.call("p1", echo, torch.ones(2)), torch.ones(2))


def nested(levels: int, kind: type) -> Any:
    value: Any = 3
    for _ in range(levels):
        value = {"a": value} if kind is dict else kind([value])
    return value


@on_remote_shm_and_gloo_ranks(2)
def test_values_are_nested_so_deep(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for kind in (list, tuple, dict):
            for levels in (1, 64):
                value = nested(levels, kind)
                assert_same(remote.call(to, echo, value), value)
            for levels in (101, 10_000):
                with refused(ValueError, "args[0] is nested deeper than 100 levels"):
                    remote.call(to, echo, nested(levels, kind))
        around: list[Any] = []
        around.append(around)
        with refused(ValueError, "args[0] is nested deeper than 100 levels"):
            remote.call(to, echo, around)
        around.clear()


@on_remote_ranks(2)
def test_text_that_is_not_utf_8_is_refused(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for value in ("\ud800", "a\udcff", ["\ud800"], {"\ud800": 1}, {"a": ("\udfff",)}):
            with pytest.raises(ValueError):  # a UnicodeError is one
                remote.call(to, echo, value)
        with pytest.raises(ValueError):
            remote.call(to, two, 1, k="\ud800")
        with pytest.raises(ValueError):
            remote.call(to, catch_all, **{"\ud800": 1})
    assert remote.call("p1", echo, "\ufffd") == "\ufffd"


@on_remote_ranks(3)
def test_all_ranks_send_to_all_at_once(rank: int) -> None:
    value = {"rank": rank, "tensor": torch.full((1000,), float(rank)), "list": [1, (2, "x")]}
    dist.barrier()
    pending = [remote.call_async(f"p{to}", echo, value) for to in range(3) for _ in range(50)]
    for call in pending:
        assert_same(call.wait(), value)
