"""Sets of ranks that run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trireme.horovod.engine import Named
from trireme.horovod.errors import refuse
from trireme.horovod.run import engine


class ProcessSet:
    """Ranks that run operations together.

    Made of a list of ranks, and registered by ``init(process_sets=...)`` or
    :func:`add_process_set`, which give it a ``process_set_id``.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        is_list = isinstance(ranks, Iterable)
        given = sorted(ranks) if is_list else []
        if not is_list or any(not isinstance(rank, int) for rank in given):
            got = f"got {type(ranks).__name__} as ranks, expected a list of process ranks"
            refuse(got, "MPI communicators are not taken; list the ranks.")
        self.ranks = given

    def size(self) -> int | None:
        """Returns how many ranks it has; None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks or ())

    def rank(self) -> int | None:
        """Returns this rank's place in it; None while it is not registered."""
        if self.process_set_id is None:
            return None
        own = engine().rank
        return self.ranks.index(own) if self.ranks and own in self.ranks else -1

    def included(self) -> bool | None:
        """Says whether this rank is in it."""
        return None if self.ranks is None else engine().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_sets: dict[int, ProcessSet] = {}
_next_id = 1


def begin_sets(world: int, process_sets: Sequence[ProcessSet]) -> None:
    """Registers what ``init`` is given, after the set of all ranks."""
    global _next_id
    global_process_set.ranks = list(range(world))
    _sets.clear()
    _next_id = 1
    for one in process_sets:
        add_process_set(one)


def end_sets() -> None:
    for one in _sets.values():
        one.process_set_id = None
    _sets.clear()
    global_process_set.ranks = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a set of ranks. All ranks call it, in the same order, also those outside of it.

    Raises:
        ValueError: a set of these ranks is there; a rank is no rank of the run.
    """
    global _next_id
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    running, ranks = engine(), added.ranks or []
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < running.world:
        got = f"got a process set of ranks {ranks}, expected some of 0 to {running.world - 1}"
        refuse(got, "List each rank once.")
    known = [global_process_set, *_sets.values()]
    if any(one.ranks == ranks for one in known):
        got = f"got a second process set of ranks {ranks}, expected another one"
        refuse(got, "Use the process set that is there.")
    running.add_group(_next_id, ranks)
    added.process_set_id = _next_id
    _sets[_next_id] = added
    _next_id += 1
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set; says whether it was there. All ranks call it."""
    running, set_id = engine(), process_set.process_set_id
    if set_id is None or set_id not in _sets:
        return False
    name = f"remove process set {set_id}"
    running.run(Named("remove process set", name, 0), lambda _: None)
    _sets.pop(set_id).process_set_id = None
    process_set.process_set_id = None
    running.remove_group(set_id, "its process set was removed")
    return True


def id_of(process_set: ProcessSet) -> int:
    """Returns the number of a set. Raises ValueError for one that is unknown or was removed."""
    set_id = getattr(process_set, "process_set_id", None)
    if set_id is None or (set_id != 0 and set_id not in _sets):
        got = f"got {process_set!r}, expected a process set that is registered"
        refuse(got, "Register it by hvd.add_process_set() on all ranks.")
    return int(set_id)
