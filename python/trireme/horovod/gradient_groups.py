"""The groups in which optimizers reduce gradients, and the gradients that use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch.distributed as dist

from trireme._C import Communicator, OptimizerGradients
from trireme._core.group_communicator import communicator_of
from trireme.horovod.errors import HorovodInternalError

Tell = Callable[[int, int, int], None]
"""Takes the process set, the number of the gradients in it, and the step that has begun."""


class GradientGroups:
    """By process set. Backwards use them beside operations, which a thread of the engine runs."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._groups: dict[int, Any] = {}
        self._communicators: dict[int, Communicator] = {}
        self._users: dict[int, WeakSet[OptimizerGradients]] = {}
        self._noted: Counter[int] = Counter()
        self._by_number: WeakValueDictionary[tuple[int, int], OptimizerGradients] = (
            WeakValueDictionary()
        )
        self._tell: Tell | None = None

    def add(self, set_id: int, ranks: list[int]) -> None:
        """Makes the group of a set. All ranks call it: torch counts groups, on each rank."""
        self._groups[set_id] = dist.new_group(ranks, timeout=self._timeout)

    def over(self, set_id: int) -> Communicator:
        """Returns the communicator of a set, the same one at each call."""
        if set_id not in self._communicators:
            self._communicators[set_id] = communicator_of(self._groups[set_id])
        return self._communicators[set_id]

    def note(self, gradients: OptimizerGradients, set_id: int) -> int:
        """Ends these with the group of the set. Returns their number, the same on its ranks."""
        self._users.setdefault(set_id, WeakSet()).add(gradients)
        self._noted[set_id] += 1
        number = self._noted[set_id]
        self._by_number[set_id, number] = gradients
        if self._tell is not None:
            self.tell_begun(self._tell)
        return number

    def end(self, set_id: int, why: str) -> None:
        """Ends the group of a set, and the gradients that use it, for this reason."""
        for gradients in self._users.pop(set_id, ()):
            gradients.end(why)
        self._communicators.pop(set_id, None)
        group = self._groups.pop(set_id)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

    def abort(self, why: str) -> None:
        """Lets backwards of other ranks raise that wait for one of this rank."""
        for set_id in self._users:
            self._communicators[set_id].announce_failure(why)

    def begin_again(self) -> None:
        """Makes the groups work again that all their ranks have given up, and forgets backwards
        without a step.

        Raises:
            HorovodInternalError: one cannot: those over Gloo.
        """
        for set_id, users in self._users.items():
            communicator = self._communicators[set_id]
            communicator.recover()
            if communicator.failure is not None:
                raise HorovodInternalError(communicator.failure)
            for gradients in users:
                gradients.forget_passes()

    def tell_begun(self, tell: Tell) -> None:
        """Calls ``tell`` with the step of each that began last, and for each from now on."""
        self._tell = tell
        for (set_id, number), gradients in list(self._by_number.items()):
            tell_step = partial(tell, set_id, number)
            gradients.set_begun_callback(tell_step)
            tell_step(gradients.last_step())

    def tell_no_more(self) -> None:
        self._tell = None
        for gradients in list(self._by_number.values()):
            gradients.set_begun_callback(None)

    def give_zeros(self, set_id: int, number: int, step: int) -> None:
        """Takes part in backwards of other ranks up to this step; nothing where it has."""
        gradients = self._by_number.get((set_id, number))
        while gradients is not None and gradients.last_step() < step:
            gradients.shadow_backward()
