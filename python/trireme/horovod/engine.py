"""Runs named operations in the order on which all ranks agree (csrc/comm/named_order.h)."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from trireme._C import AgreedOperation, NamedOperation, NamedOrder
from trireme._core.group_communicator import communicator_of
from trireme.horovod.errors import HorovodInternalError, NotPossible, operation_error, refuse
from trireme.horovod.gradient_groups import GradientGroups
from trireme.horovod.timeline import Timeline

Terms = Sequence[tuple[str, str]]
Work = Callable[[list[str]], Any]
ALL_RANKS = 0
# Of csrc/comm/name_book.h.
_HAS_JOINED, _BEGUN = "has joined", "begun"
BEGIN_AGAIN = "begin again"
_YIELDS_S = 0.0003
"""How long the thread of the engine lets the program go on, which is about to issue more, or to
wait and then runs operations itself. Horovod's cycle is 1 ms."""


class Named:
    """The name of an operation, and what ranks compare of it, in the form in which they say it."""

    __slots__ = ("kind", "name", "operation", "set_id")

    def __init__(
        self,
        kind: str,
        name: str,
        set_id: int,
        terms: Terms = (),
        *,
        payload: str = "",
        can_have_zeros: bool = False,
    ) -> None:
        self.kind, self.name, self.set_id = kind, name, set_id
        self.operation = NamedOperation(name, set_id, kind, terms, payload, can_have_zeros)


class Operation:
    """What a rank has issued. ``work`` takes the payloads of all ranks of the set, and returns what
    ``synchronize`` returns; ``ended`` is called when it is done."""

    __slots__ = (
        "_ends",
        "ended",
        "error",
        "is_done",
        "issued_ns",
        "kind",
        "name",
        "result",
        "set_id",
        "work",
    )

    def __init__(
        self, kind: str, name: str, set_id: int, work: Work, ended: Callable[[], None] | None
    ) -> None:
        self.kind, self.name, self.set_id, self.work, self.ended = kind, name, set_id, work, ended
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._ends = threading.Lock()
        self._ends.acquire()
        self.issued_ns = time.monotonic_ns()

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self.is_done = True
        self._ends.release()
        if self.ended is not None:
            self.ended()

    def wait_for_end(self) -> None:
        with self._ends:
            pass


class Engine:
    """Takes operations from any thread. A thread that waits for one runs what comes until then; a
    thread of the engine runs what comes while nobody waits."""

    def __init__(self, group: dist.ProcessGroup, report_after: float, timeout: timedelta) -> None:
        self.rank, self.world = group.rank(), group.size()
        self._timeout = timeout
        self.groups: dict[int, Any] = {}
        """By id of the process set; what a user's own collectives do not use."""
        control: Any = dist.new_group(list(range(self.world)), timeout=timeout)
        self._control = control
        report = timedelta(seconds=report_after)
        self._order = NamedOrder(communicator_of(control), report, timeout)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        """Held by the thread that takes the next operation and runs it."""
        self._pending: dict[tuple[int, str], Operation] = {}
        self._handles: dict[int, Operation] = {}
        self._numbers = itertools.count()
        self._unnamed: Counter[tuple[int, str]] = Counter()
        self._failure: HorovodInternalError | None = None
        self.gradients = GradientGroups(timeout)
        self._begun: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
        """Backwards that other ranks have begun since this one has joined; see GradientGroups."""
        self.timeline: Timeline | None = None
        self.zeros: Callable[[str, Terms, int], None] | None = None
        """Takes part in an operation of the others while this rank has joined."""
        self.add_group(ALL_RANKS, list(range(self.world)))
        self._thread = threading.Thread(target=self._run, name="trireme.horovod", daemon=True)
        self._thread.start()

    def add_group(self, set_id: int, ranks: list[int]) -> None:
        """Makes the group of a process set. All ranks call it in the same order."""
        self.groups[set_id] = dist.new_group(ranks, timeout=self._timeout)
        self.gradients.add(set_id, ranks)
        if set_id != ALL_RANKS:
            self._order.define_set(set_id, ranks)

    def remove_group(self, set_id: int, why: str) -> None:
        self.gradients.end(set_id, why)
        group = self.groups.pop(set_id)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

    def join(self) -> int:
        """Takes part with zeros in what the others do, until all have joined. Returns the last.

        Operations are run by the engine's thread, backwards by this one.
        """
        queue: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
        self._begun = queue
        handle = self.issue(
            Named("join", "join", ALL_RANKS),
            lambda payloads: int(payloads[0]),
            ended=lambda: queue.put(None),
        )
        while (begun := queue.get()) is not None:
            self.gradients.give_zeros(*begun)
        return int(self.wait(handle))

    def _announce_begun(self, set_id: int, number: int, step: int) -> None:
        self._order.announce(NamedOperation(str(number), set_id, _BEGUN, [], str(step), False))

    def name_for(self, kind: str, name: str | None, set_id: int) -> str:
        """Returns a name; without one, that of the next unnamed operation of this kind."""
        if name is not None:
            return name
        with self._lock:
            number = self._unnamed[set_id, kind]
            self._unnamed[set_id, kind] += 1
        return f"{kind}.noname.{number}"

    def issue(self, named: Named, work: Work, *, ended: Callable[[], None] | None = None) -> int:
        """Returns the handle of an operation that begins when all ranks have issued it.

        Raises:
            ValueError: one of this name is in flight.
            HorovodInternalError: a rank is gone.
        """
        operation = Operation(named.kind, named.name, named.set_id, work, ended)
        self._announce(operation, named)
        with self._lock:
            handle = next(self._numbers)
            self._handles[handle] = operation
        return handle

    def run(self, named: Named, work: Work) -> Any:
        """Does the same and waits. Returns what ``work`` returns; raises, too, if it fails."""
        operation = Operation(named.kind, named.name, named.set_id, work, None)
        if not self._begin_turn():
            self._announce(operation, named)
            return self._result_of(operation)
        try:
            self._announce(operation, named)
            self._run_until(operation)
        finally:
            self._end_turn()
        return self._result_of(operation)

    def _announce(self, operation: Operation, named: Named) -> None:
        key = operation.set_id, operation.name
        with self._lock:
            if self._failure is not None:
                raise self.error_of(operation, str(self._failure))
            if key in self._pending:
                got = f"got a second operation of the name '{named.name}', expected one in flight"
                refuse(got, "Wait for the first one, or give another name.")
            self._pending[key] = operation
        try:
            self._order.announce(named.operation)
        except dist.DistBackendError as error:
            with self._lock:
                self._pending.pop(key, None)
            raise self.error_of(operation, str(error)) from None

    def _result_of(self, operation: Operation) -> Any:
        if not operation.is_done and self._begin_turn():
            try:
                self._run_until(operation)
            finally:
                self._end_turn()
        if not operation.is_done:
            operation.wait_for_end()
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _begin_turn(self) -> bool:
        """Says whether this thread runs what comes; otherwise another one does."""
        if not self._turn.acquire(blocking=False):
            return False
        if self._order.begin_turn():
            return True
        self._turn.release()
        return False

    def _end_turn(self) -> None:
        self._order.end_turn()
        self._turn.release()

    def _run_until(self, operation: Operation) -> None:
        """Runs what comes in this thread, which has the turn, until the operation is done."""
        try:
            while not operation.is_done:
                agreed = self._order.next_in_turn()
                if agreed is not None:
                    self._perform(agreed)
        except dist.DistBackendError as error:
            self._fail(str(error))

    def is_done(self, handle: int) -> bool:
        return self._operation_of(handle).is_done

    def wait(self, handle: int) -> Any:
        """Returns the result of an operation, once; None for a handle that is not known."""
        operation = self._handles.get(handle)
        if operation is None:
            return None
        try:
            return self._result_of(operation)
        finally:
            if operation.is_done:
                self._handles.pop(handle, None)

    def begin_again(self) -> None:
        """Waits until all ranks have called it, and forgets what was issued before.

        What other ranks wait for this one with raises there, so that they come here, too.

        Raises:
            HorovodInternalError: a rank is gone, or has not come within the group's timeout; or
                optimizers reduce gradients over Gloo, which does not go on after a failure.
        """
        self.gradients.abort(f"rank {self.rank} begins again")
        self.run(Named(BEGIN_AGAIN, BEGIN_AGAIN, ALL_RANKS), lambda _: None)
        self.gradients.begin_again()

    def stop_timeline(self) -> None:
        """Completes the file of the timeline, if there is one."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.stop()

    def leave(self) -> None:
        """Lets go of the others at the end of the process."""
        self._order.close()

    def close(self) -> None:
        """Ends this rank's part; operations in flight raise."""
        self._order.close()
        self._thread.join()
        del self._order
        for set_id in list(self.groups):
            self.remove_group(set_id, "hvd.shutdown()")
        dist.destroy_process_group(self._control)

    def _operation_of(self, handle: int) -> Operation:
        operation = self._handles.get(handle)
        if operation is None:
            refuse(f"got handle {handle!r}, expected one that is not synchronized", "Poll before.")
        return operation

    def _run(self) -> None:
        try:
            while self._order.wait_for_next():
                report = self._order.take_report()
                if report is not None:
                    text = f"[horovod] some ranks wait: {report}"
                    print(text, file=sys.stderr, flush=True)
                    continue
                if (ALL_RANKS, "join") not in self._pending:
                    time.sleep(_YIELDS_S)
                while self._perform_next():
                    pass
            self._fail("this rank has shut down")
        except Exception as error:  # a rank is gone, or zeros of a rank that has joined have failed
            self._fail(str(error))

    def _perform_next(self) -> bool:
        """Says whether there was an operation that no thread that waits has run."""
        with self._turn:
            agreed = self._order.next()
            if agreed is not None:
                self._perform(agreed)
        return agreed is not None

    def _perform(self, agreed: AgreedOperation) -> None:
        kind = agreed.kind
        if kind == _HAS_JOINED:
            self.gradients.tell_begun(self._announce_begun)
            return
        if kind == _BEGUN:
            self._begun.put((agreed.set, int(agreed.name), int(agreed.payload)))
            return
        if kind == "join":
            self.gradients.tell_no_more()
        begun_ns, timeline = time.monotonic_ns(), self.timeline
        if timeline is not None:
            timeline.mark_cycle()
        operation = self._pending.get((agreed.set, agreed.name))
        if operation is None:
            assert self.zeros is not None
            self.zeros(kind, agreed.terms, agreed.set)
            if timeline is not None:
                timeline.note(agreed.name, kind, begun_ns, begun_ns, None)
            return
        try:
            result, error = self._outcome_of(operation, agreed)
        except BaseException as interrupt:  # KeyboardInterrupt, in the thread that waits
            self._end(operation, None, interrupt)
            raise
        if timeline is not None:
            timeline.note(operation.name, operation.kind, operation.issued_ns, begun_ns, error)
        self._end(operation, result, error)

    def _end(self, operation: Operation, result: Any, error: BaseException | None) -> None:
        """Ends what is in flight until then, unless the engine has failed meanwhile."""
        with self._lock:
            was_pending = self._pending.pop((operation.set_id, operation.name), None) is not None
        if was_pending:
            operation.end(result, error)

    def _outcome_of(
        self, operation: Operation, agreed: AgreedOperation
    ) -> tuple[Any, HorovodInternalError | None]:
        if failed := agreed.error:
            return None, self.error_of(operation, failed)
        if operation.kind in ("join", BEGIN_AGAIN):
            self._count_anew(operation.kind)
        try:
            is_join = operation.kind == "join"
            payloads = [str(agreed.last_joined)] if is_join else agreed.payloads
            return operation.work(payloads), None
        except NotPossible as error:
            return None, self.error_of(operation, str(error))
        except Exception as error:
            own = self.error_of(operation, f"failed: {type(error).__name__}: {error}")
            own.__cause__ = error
            return None, own

    def _count_anew(self, kind: str) -> None:
        """Numbers unnamed operations from 0 after what ranks issue different numbers of them
        before. A join leaves operations of sets in flight."""
        with self._lock:
            for key in list(self._unnamed):
                if kind == BEGIN_AGAIN or key[0] == ALL_RANKS:
                    del self._unnamed[key]

    def error_of(self, operation: Operation, what: str) -> HorovodInternalError:
        return operation_error(operation.kind, operation.name, what, self.rank, self.world)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._failure = HorovodInternalError(why)
            pending, self._pending = list(self._pending.values()), {}
        for operation in pending:
            operation.end(error=self.error_of(operation, why))
