"""Calls of torch's checkpoints that are under way on this thread.

The core asks where a function reads what its recomputation would find changed (kept_results.h).
Torch tells nobody that it recomputes, so this looks at what it leaves: the hooks of
``use_reentrant=False`` hold the frame of their checkpoint, and the older way has its context in the
two functions of ``CheckpointFunction``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

_FORWARD = "_checkpoint_hook.__init__.<locals>.pack_hook"
_RECOMPUTATION = "_recomputation_hook.__init__.<locals>.pack_hook"


class Run:
    """One call. ``owner`` lives as long as the graph of the forward, and keeps its results;
    ``task`` tells one recomputation of it from another, and is None for the forward."""

    def __init__(self, owner: Any, task: Any) -> None:
        self.is_recomputation = task is not None
        self._task = task
        if not hasattr(owner, "_trireme_kept"):
            owner._trireme_kept, owner._trireme_taken = [], {}
        self._kept: list[list[Tensor]] = owner._trireme_kept
        self._taken: dict[Any, int] = owner._trireme_taken

    def keep(self, result: list[Tensor]) -> None:
        self._kept.append(result)

    def take(self) -> list[Tensor]:
        """What the forward has kept next; nothing where it has kept no more."""
        place = self._taken.get(self._task, 0)
        self._taken[self._task] = place + 1
        return self._kept[place] if place < len(self._kept) else []


def runs_under_way(pack_hooks: Iterable[Any], is_reentrant: bool) -> list[Run]:
    """Returns them. ``pack_hooks`` are those of the thread's saved-tensor hooks; the older way is
    looked for where ``is_reentrant``."""
    runs = [run for run in map(_run_of_hook, pack_hooks) if run is not None]
    return runs + (_reentrant_runs(sys._getframe(1)) if is_reentrant else [])


def _run_of_hook(hook: Any) -> Run | None:
    name = getattr(hook, "__qualname__", "")
    if getattr(hook, "__module__", "") != "torch.utils.checkpoint":
        return None
    if name == _FORWARD:
        return Run(_closed_over(hook, "frame"), None)
    if name == _RECOMPUTATION:
        owner = _closed_over(hook, "target_frame_ref")()
        return None if owner is None else Run(owner, _closed_over(hook, "gid"))
    return None


def _closed_over(function: Any, name: str) -> Any:
    return inspect.getclosurevars(inspect.unwrap(function)).nonlocals[name]


def _reentrant_runs(frame: FrameType | None) -> list[Run]:
    runs = []
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            runs.append(Run(frame.f_locals["ctx"], None))
        elif frame.f_code is CheckpointFunction.backward.__code__:
            runs.append(Run(frame.f_locals["ctx"], torch._C._current_graph_task_id()))
        frame = frame.f_back
    return runs
