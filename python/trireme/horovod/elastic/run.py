"""A function that is called again after an operation has failed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from trireme.horovod.elastic.state import State
from trireme.horovod.errors import HorovodInternalError, refuse
from trireme.horovod.run import engine

P = ParamSpec("P")
Result = TypeVar("Result")
AnyState = TypeVar("AnyState", bound=State)


def run(
    function: Callable[Concatenate[AnyState, P], Result],
) -> Callable[Concatenate[AnyState, P], Result]:
    """Lets a training function go on from the last ``state.commit()`` after HorovodInternalError.

    The function's first argument is a :class:`State`. Before each call all ranks take the state of
    rank 0. When the error is raised on one rank, what others wait for that rank with raises there,
    too; then all restore their state, run the callbacks of ``register_reset_callbacks``, and call
    the function again. Where a rank is gone, the error leaves: torchrun starts the job again.
    Ranks are the same from beginning to end, so there is no HostsUpdatedInterrupt.

    Raises:
        TypeError: the first argument is no State.
        HorovodInternalError: a rank is gone, or has not begun again within the group's timeout.
    """

    @functools.wraps(function)
    def wrapper(state: AnyState, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        if not isinstance(state, State):
            got = f"got {type(state).__name__} as state, expected a hvd.elastic.State"
            refuse(got, "Pass a hvd.elastic.TorchState.", kind=TypeError)
        while True:
            try:
                state.sync()
                return function(state, *args, **kwargs)
            except HorovodInternalError as error:
                _begin_again(error)
                state.restore()
                state.on_reset()

    return wrapper


def _begin_again(error: HorovodInternalError) -> None:
    """Meets the others, or raises the error where that is not possible."""
    running = engine()
    try:
        running.begin_again()
    except HorovodInternalError:
        raise error from error.__cause__
    text = f"[horovod] rank {running.rank} goes on from its last commit after: {error}"
    print(text, file=sys.stderr, flush=True)
