"""broadcast_object and allgather_object: kinds of objects, and what is refused on all ranks."""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trireme.horovod as hvd

from harness import pretended_hosts
from harness.deaths import assert_seen_soon
from harness.faults import kill_this_rank, note_death, raises
from harness.meeting import say, stay_until
from harness.ranks import run_ranks
from harness.tensors import assert_bits

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


class Mine:
    pass


class Point(NamedTuple):
    x: int
    y: int


class Color(enum.IntEnum):
    RED = 1


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.Generator().manual_seed(len(shape))
    numel = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=made).to(torch.bool).reshape(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=made, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def objects() -> list[Any]:
    keys = [None, True, 0, -3, 2.5, "a", "", b"a", (), (1, "x", (None, b"y")), 2**70, 1j]
    return [
        *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, -(2**71), 3**4000),
        *(0.0, -0.0, 1.5, 5e-324, math.inf, -math.inf, math.nan, 1j, complex(math.nan, -0.0)),
        *("", "plain", "üñ€ 😀", "a\0b", b"", b"\x00\xff\x80", b"x" * 300_000),
        *([], [None], (), (1,), {}, set()),
        {key: place for place, key in enumerate(keys)},
        set(keys),
        [1, [2.0, ["3", [b"4", (5, {6})]]]],
        [tensor_of(dtype, shape) for dtype in DTYPES for shape in ((), (0, 3), (5,), (2, 3, 4))],
        {"strided": torch.randn(4, 6).t(), "few": torch.randn(6, 4)[::2, 1::2]},
        torch.randn(3, 4, dtype=torch.complex64).conj(),
        torch.nn.Linear(3, 2).state_dict(),
    ]


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert type(got) is dict
        assert_same(list(got.items()), list(expected.items()))
        return
    assert type(got) is type(expected), f"got {got!r}, expected {expected!r}"
    if isinstance(expected, torch.Tensor):
        assert not got.requires_grad
        assert_bits(got, expected.detach())
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, set):
        assert sorted(map(repr, got)) == sorted(map(repr, expected))
    else:
        assert repr(got) == repr(expected)


def send_all(rank: int) -> None:
    hvd.init()
    world = hvd.size()
    torch.manual_seed(7)  # all ranks make the same ones
    for number, one in enumerate(objects()):
        root = number % world
        got = hvd.broadcast_object(one if rank == root else Mine(), root)
        if rank == root:
            assert got is one
        else:
            assert_same(got, one)
        gathered = hvd.allgather_object([rank, one], name=f"object {number}")
        assert len(gathered) == world
        for other, came in enumerate(gathered):
            assert_same(came, [other, one])
    several = hvd.allgather_object("x" * (1000 * rank))  # of unequal lengths
    assert several == ["x" * (1000 * other) for other in range(world)]
    resized = hvd.allgather_object(torch.ones(2))[0]
    resized.resize_(8).fill_(1)  # its memory is its own
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_kind(world: int) -> None:
    run_ranks(send_all, world, timeout=60, fresh=True)


def over_hosts(rank: int) -> None:
    dist.init_process_group("trireme", pg_options=pretended_hosts.place_of(rank, "alone"))
    hvd.init()
    value = {"a": [1, torch.arange(1000)], "b": (None, 2.5)}
    assert_same(hvd.broadcast_object(value if rank == 1 else None, 1), value)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": other} for other in range(hvd.size())]
    hvd.shutdown()
    dist.destroy_process_group()


def test_objects_over_hosts() -> None:
    run_ranks(over_hosts, len(pretended_hosts.LAYOUTS["alone"]), timeout=60, fresh=True)


def nested(levels: int) -> Any:
    value: Any = 3
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[type[Exception], Any]] = {
    "obj is a Mine": (TypeError, Mine()),
    "obj['x'][1] is a Mine": (TypeError, {"x": [1, Mine()]}),
    "obj is a Color": (TypeError, Color.RED),
    "Point": (TypeError, Point(1, 2)),
    "float64": (TypeError, np.float64(1)),
    "ndarray": (TypeError, np.ones(2)),
    "function": (TypeError, nested),
    "frozenset": (TypeError, frozenset({1})),
    "is a Tensor that has the layout Sparse": (TypeError, (torch.eye(2).to_sparse(),)),
    "on the device meta": (TypeError, {"m": torch.ones(2, device="meta")}),
    "a key of obj is a Tensor": (TypeError, {torch.ones(1): 2}),
    "nested deeper than 100 levels": (ValueError, nested(101)),
    "UTF-8": (ValueError, ["\ud800"]),
}


def refuse_all(rank: int) -> None:
    """All ranks raise; the group works on."""
    hvd.init()
    for part, (kind, value) in REFUSED.items():
        with raises(kind, part, "[horovod]", "(rank 1 of 2)"):
            hvd.broadcast_object(value if rank == 1 else 3, 1)
        with raises(kind, part, "[horovod]", "(rank 0 of 2)"):
            hvd.allgather_object(value if rank == 0 else 3)
        assert hvd.broadcast_object(rank + 5, 1) == 6
    with raises(hvd.HorovodInternalError, "got root rank 7, expected a rank of"):
        hvd.broadcast_object(1, 7)
    with raises(hvd.HorovodInternalError, "rank 0 has 0, rank 1 has 1"):
        hvd.broadcast_object(1, rank, name="roots")
    with raises(hvd.HorovodInternalError, "rank 0 has broadcast object, rank 1 has allgather"):
        (hvd.broadcast_object if rank == 0 else hvd.allgather_object)("x", name="kinds")
    alone = hvd.add_process_set([1])
    if rank == 1:
        assert hvd.broadcast_object({"a": 1}, 1, process_set=alone) == {"a": 1}
        assert hvd.allgather_object((1,), process_set=alone) == [(1,)]
    else:
        with raises(hvd.HorovodInternalError, "rank 0 is not in"):
            hvd.allgather_object(1, process_set=alone)
    assert hvd.allgather_object(rank) == [0, 1]
    hvd.shutdown()


def test_other_objects_are_refused() -> None:
    run_ranks(refuse_all, 2, timeout=60, fresh=True)


def outlive(rank: int) -> None:
    hvd.init()
    hvd.broadcast_object("before")
    if rank == 1:
        stay_until("rank 0 waits")
        note_death()
        kill_this_rank()
    say("rank 0 waits")
    with raises(hvd.HorovodInternalError, "broadcast object 'lost'", "rank 1", "has died"):
        hvd.broadcast_object({"a": torch.ones(3)}, name="lost")
    assert_seen_soon()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allgather_object(1)


def test_a_killed_rank() -> None:
    run_ranks(outlive, 2, timeout=60, fresh=True, dying=(1,))
