"""Objects of plain kinds that ranks send each other. Nothing is pickled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trireme import _C
from trireme._core.group_communicator import device_of_numbers
from trireme.horovod.engine import Terms
from trireme.horovod.errors import NotPossible
from trireme.horovod.functions import gather_rows, issue
from trireme.horovod.process_sets import ProcessSet, global_process_set
from trireme.horovod.run import engine

_REFUSALS = {"TypeError": TypeError, "ValueError": ValueError}


@dataclass(frozen=True)
class _Packed:
    """An object as bytes, or why it is none."""

    bytes: torch.Tensor
    refusal: tuple[str, str] | None = None

    @property
    def said(self) -> str:
        """What all ranks hear of it."""
        return json.dumps(self.refusal or self.bytes.numel())


@dataclass(frozen=True)
class _Refused:
    """What all ranks raise, as one of them cannot send its object."""

    kind: str
    text: str


def _pack(obj: Any) -> _Packed:
    running = engine()
    try:
        return _Packed(_C.pack_value(obj, "horovod", "obj", running.rank, running.world))
    except (TypeError, ValueError) as error:
        kind = "TypeError" if isinstance(error, TypeError) else "ValueError"
        return _Packed(torch.empty(0), (kind, str(error)))


def _refusal_in(said: list[Any]) -> _Refused | None:
    return next((_Refused(*one) for one in said if isinstance(one, list)), None)


def _checked(result: Any) -> Any:
    if isinstance(result, _Refused):
        raise _REFUSALS[result.kind](result.text)
    return result


def broadcast_value(
    kind: str,
    obj: Any,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    terms: Terms,
) -> Any:
    """Returns the root's object, the root its own; ``terms`` must be equal on all ranks."""
    is_root = engine().rank == root_rank
    packed = _pack(obj) if is_root else None

    def work(group: dist.ProcessGroup, payloads: list[str]) -> Any:
        ranks = process_set.ranks or []
        if root_rank not in ranks:
            got = f"got root rank {root_rank}, expected a rank of {process_set}"
            raise NotPossible(got)
        said = json.loads(payloads[ranks.index(root_rank)])
        if refused := _refusal_in([said]):
            return refused
        device = device_of_numbers(group)
        if packed is not None:
            dist.broadcast(packed.bytes.to(device), root_rank, group=group)
            return obj
        came = torch.empty(said, dtype=torch.uint8, device=device)
        dist.broadcast(came, root_rank, group=group)
        return _C.unpack_value(came.cpu())

    terms = [("root rank", str(root_rank)), *terms]
    payload = packed.said if packed is not None else ""
    return _checked(issue(kind, name, process_set, terms, work, payload=payload, waits=True))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object; the root gets its own back.

    An object is None, a bool, an int, a float, a complex, a str, bytes, a tensor, or a list, tuple,
    set or dict of these. Tensors arrive on the CPU, without their graph.

    Raises:
        TypeError, ValueError: on all ranks, if the root's object is another one; the text names its
            class and place.
        HorovodInternalError: the root is no rank of the set, or a rank is gone.
    """
    return broadcast_value("broadcast object", obj, root_rank, name, process_set, [])


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks of the set, by rank; of the kinds of broadcast_object().

    Raises:
        TypeError, ValueError: on all ranks, if one has an object of another kind; the text names
            the rank, and the object's class and place.
        HorovodInternalError: a rank is gone.
    """
    packed = _pack(obj)

    def work(group: dist.ProcessGroup, payloads: list[str]) -> Any:
        said = [json.loads(payload) for payload in payloads]
        if refused := _refusal_in(said):
            return refused
        gathered = gather_rows(packed.bytes.to(device_of_numbers(group)), said, group).cpu()
        return [_C.unpack_value(one) for one in gathered.split(said)]

    kind = "allgather object"
    return list(_checked(issue(kind, name, process_set, [], work, payload=packed.said, waits=True)))
