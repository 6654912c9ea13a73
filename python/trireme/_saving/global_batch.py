"""Which rows of the data are a step, whatever the number of ranks."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trireme import _C
from trireme._C import BatchPart
from trireme._core.errors import Area

_AREA = Area("global_batch")
_NAMES = ("rows", "size", "shuffle", "seed", "next_step")


class GlobalBatch:
    """The rows of each step: the same ones on any number of ranks.

    Step ``k`` is always the same ``size`` rows of the data in the same order, of which each rank
    takes a part, so a run that goes on with another number of ranks sees what an undisturbed one
    sees::

        batches = trireme.GlobalBatch(rows=len(data), size=256)
        for part in batches.steps(0, 10_000):
            loss = loss_of(model, data[part.rows])  # the mean over these rows
            (loss * part.weight).backward()

    An epoch is ``rows // size`` steps of one permutation (``torch.randperm`` by a generator of seed
    and epoch); rows that are left over at its end take part in later ones. Parts follow each other
    in the batch. It reads no data and starts nothing; C++ has the same rows.

    Args:
        rows: of the data.
        size: rows of one step, on all ranks together.
        shuffle: False: every epoch is the first rows of the data in their order.
        seed: of the permutations.
        balance: ``"even"``: parts differ by one row at most; or a number >= 0 for each rank, to
            which parts are proportional (largest remainder).
        process_group: whose part it is; by default all ranks, or one rank where there is no group.
        rank, world: in place of a group.

    Raises:
        ValueError, TypeError: there is no such batch.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        balance: str | Sequence[float] = "even",
        process_group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        for name, value in (("rows", rows), ("size", size), ("seed", seed)):
            _expect_int(name, value)
        own_rank, own_world = _place(process_group, rank, world)
        self._core = _C.GlobalBatch(
            rows, size, bool(shuffle), seed, _weights(balance), own_rank, own_world
        )

    def whole(self, step: int) -> torch.Tensor:
        """All rows of a step, int64."""
        _expect_int("a step", step)
        return self._core.whole(step)

    def part(self, step: int, rank: int | None = None, world: int | None = None) -> BatchPart:
        """This rank's part of a step, or that of any rank.

        ``number`` of the step, its ``epoch``, ``rows`` (int64, may be empty), and ``weight`` = rows
        x ranks / size: under a strategy that averages gradients ``(mean_loss *
        weight).backward()`` gives the gradient of the whole batch. An empty part has weight 0, and
        a mean over no rows is no number: add zeros there, ``(output.sum() * 0).backward()``.
        """
        _expect_int("a step", step)
        if rank is None and world is None:
            return self._core.part(step)
        return self._core.part_of(step, *_pair(rank, world))

    def steps(self, first: int, last: int) -> Iterator[BatchPart]:
        """This rank's parts of the steps ``first`` up to ``last``, without that one."""
        _expect_int("the first step", first)
        _expect_int("the last step", last)
        for step in range(first, last):
            yield self._core.part(step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: rows, size, shuffle, seed, and the next step; nothing of
        ranks."""
        state: dict[str, Any] = json.loads(self._core.state())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the next step of a state.

        Raises:
            ValueError: it is one of other rows, another size or seed; the text has both.
        """
        known = {name: state[name] for name in _NAMES if name in state}
        self._core.load_state(json.dumps(known))

    def __repr__(self) -> str:
        state = self.state_dict()
        named = ", ".join(f"{name}={state[name]}" for name in _NAMES)
        return f"GlobalBatch({named}, rank={self._core.rank} of {self._core.world})"


def _expect_int(name: str, value: object) -> None:
    _AREA.expect(name, value, int, "int", next_step="Pass a whole number.")
    assert isinstance(value, int)
    if not -(2**63) <= value < 2**63:
        _AREA.refuse(f"got {name} of {value:.3e}, expected 64 bits", "Pass a smaller number.")


def _pair(rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is None or world is None:
        got = f"got rank={rank} and world={world}, expected both or neither"
        _AREA.refuse(got, "Pass both.")
    _expect_int("rank", rank)
    _expect_int("world", world)
    return rank, world


def _place(group: dist.ProcessGroup | None, rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is not None or world is not None:
        if group is not None:
            _AREA.refuse("got a process_group and a rank", "Pass one of the two.")
        return _pair(rank, world)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return (0, 1) if group is None else (group.rank(), group.size())


def _weights(balance: object) -> list[float]:
    if isinstance(balance, str):
        if balance != "even":
            _AREA.refuse(
                f"got balance={balance!r}, expected 'even' or a number for each rank",
                "Pass one of these.",
            )
        return []
    if not isinstance(balance, Sequence) or not balance:
        got = f"got a balance of {type(balance).__name__}, expected numbers, one for each rank"
        _AREA.refuse(got, "Pass a list.", kind=TypeError)
    for weight in balance:
        if not isinstance(weight, numbers.Real) or isinstance(weight, bool):
            got = f"got {type(weight).__name__} in the balance, expected numbers"
            _AREA.refuse(got, "Pass a number for each rank.", kind=TypeError)
        if not math.isfinite(weight) or weight < 0:
            _AREA.refuse(
                f"got {weight} in the balance, expected numbers >= 0", "Give each rank a share."
            )
    return [float(weight) for weight in balance]
