"""Numbered checkpoints of a run: saved every so many steps, the last ones kept, resumed exactly."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import CheckpointReader
from trireme._core.errors import Area
from trireme._saving.checkpoint import Numbered, Save, group_for
from trireme._saving.content import CODES, EXTRA, MODEL, load_content
from trireme._saving.global_batch import GlobalBatch
from trireme._saving.optimizer import KIND as OPTIMIZER
from trireme._saving.optimizer import plain_json
from trireme._saving.parts import Ranks
from trireme._saving.pending_save import PendingSave
from trireme._saving.random_states import KIND as RANDOM
from trireme._saving.random_states import load_random, random_to_save
from trireme._saving.stages import has_stages

_AREA = Area("checkpoints")
_MOST = 10**18


class Stateful(Protocol):
    """What has a state that JSON can say: a scheduler, a scaler, a loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass
class LoadedStep:
    """What ``load_latest()`` has found."""

    step: int
    """So many steps are done."""
    extra: dict[str, Any]
    path: str
    warnings: list[str] = field(default_factory=list)
    """What is not as it was saved: checkpoints that gave way to older ones, random numbers that
    begin anew."""


class Checkpoints:
    """The checkpoints of a run: one every so many steps, of which the last ones stay.

    ::

        saves = trireme.Checkpoints("run", model, optimizer, batches, every=100, keep=2)
        start = saves.load_latest()
        for part in batches.steps(start.step if start else 0, 10_000):
            ...
            saves.step(part.number + 1)
        saves.wait()

    ``run/step-0000000100`` is an ordinary checkpoint, which ``load_checkpoint`` loads. Saves go on
    beside training. An old checkpoint is deleted when a new one is durable; never the last whole
    one, never a folder that no save of ours has written. All ranks call all methods.

    Args:
        folder: of the checkpoints, which all ranks see; it need not exist. One object for a folder.
        model, optimizer: as for ``save_checkpoint``.
        batches: a ``GlobalBatch``, or a loader with ``state_dict`` and ``load_state_dict``.
        every: how many steps lie between two checkpoints.
        keep: how many stay.
        asynchronous: as for ``save_checkpoint``.
        stateful: objects with ``state_dict`` and ``load_state_dict`` by name (schedulers, scalers),
            whose states JSON can say. Rank 0's are saved.
        on_error: ``"raise"``: a save that has failed raises at the next call; ``"log"``: it is
            logged on rank 0, and training goes on with the checkpoints that there are.
        process_group: the ranks that save and load; by default those of the model, or all.

    The states of random generators are kept, too: torch's CPU and CUDA generators, Python's, and
    numpy's if it is loaded, of each rank. As many ranks as before go on bit for bit, dropout
    included.

    Raises:
        ValueError, TypeError: there are no such checkpoints.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        batches: Stateful | None = None,
        *,
        every: int,
        keep: int = 2,
        asynchronous: bool = True,
        stateful: Mapping[str, Stateful] | None = None,
        on_error: str = "raise",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            _AREA.expect(name, value, int, "int", next_step="Pass a whole number.")
        if every < 1:
            _AREA.refuse(f"got every={every}, expected 1 or more", "Save at every step, or fewer.")
        if on_error not in ("raise", "log"):
            got = f"got on_error={on_error!r}, expected 'raise' or 'log'"
            _AREA.refuse(got, "Pass one of the two.")
        self._parts = dict(stateful or {})
        for name, part in (*self._parts.items(), ("batches", batches)):
            if part is not None and not (
                hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
            ):
                _AREA.refuse(
                    f"got '{name}' of {type(part).__name__}, expected a state_dict() and a "
                    "load_state_dict()",
                    "Leave it out, or keep it in `extra`.",
                    kind=TypeError,
                )
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._every, self._asynchronous = every, asynchronous
        self._logs = on_error == "log"
        self._ranks = Ranks(group_for(model, optimizer, process_group))
        where = {"rank": self._ranks.rank, "world": self._ranks.world}
        self._series = _C.CheckpointSeries(os.fspath(folder), keep, **where)
        self._pending: PendingSave | None = None

    def step(self, n: int, extra: dict[str, Any] | None = None) -> PendingSave | None:
        """Says that ``n`` steps are done; saves if ``every`` divides ``n``."""
        self._expect_step(n)
        return self.save(n, extra) if n % self._every == 0 else None

    def save(self, n: int, extra: dict[str, Any] | None = None) -> PendingSave | None:
        """Saves after ``n`` steps, in any case. None where it has failed and failures are logged.

        Raises:
            what ``save_checkpoint`` raises, also of the save before.
        """
        self._expect_step(n)
        if self._logs:
            self._wait(None)
        numbered = Numbered(self._series, n, {RANDOM: random_to_save(self._ranks)})
        try:
            save = Save(
                self._series.path_of(n),
                self._model,
                self._optimizer,
                lambda: self._extra(n, extra),
                numbered=numbered,
            )
            self._pending = save.begin(self._ranks, asynchronous=self._asynchronous)
        except (ValueError, TypeError, RuntimeError) as error:
            # It may be that of the save before, which wait() then raises no more.
            if self._pending is not None and self._pending.done():
                self._pending = None
            refused = (ValueError, TypeError, dist.DistBackendError)
            if not self._logs or isinstance(error, refused):
                raise
            self._log(error)
            return None
        return self._pending

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the last save is durable; raises as its ``wait()``, or logs, once."""
        self._wait(timeout)

    def load_latest(self) -> LoadedStep | None:
        """Loads the newest checkpoint that is whole; None where there is none yet.

        All ranks choose the same one. One that fails its checks gives way to the one before, and
        ``warnings`` says why. Collective.

        Raises:
            ValueError: there are checkpoints, but none is whole; it is one of another model,
                optimizer, batch or set of ``stateful``.
        """
        self.wait()
        ranks = self._ranks
        own = json.dumps(self._series.steps()) if ranks.rank == 0 else ""
        steps: list[int] = json.loads(ranks.say_to_all(own)[0])
        told: list[str] = []
        for step in reversed(steps):
            reader = self._open(step, told)
            if reader is not None:
                return self._load(step, reader, told)
        if steps:
            got = f"got no whole checkpoint in '{self._series.folder}': {'; '.join(told)}"
            ranks.refuse(got, "Restore one, or pass another folder.")
        return None

    def _open(self, step: int, told: list[str]) -> CheckpointReader | None:
        """Returns a checkpoint all of whose bytes are those that were saved."""
        path, ranks = self._series.path_of(step), self._ranks
        try:
            reader = CheckpointReader(path, ranks.core)
            reader.verify([MODEL, OPTIMIZER, CODES, RANDOM])
            with ranks.together():
                if "step" not in json.loads(reader.text(EXTRA) or "{}"):
                    got = f"got a checkpoint in '{path}' that no Checkpoints has saved"
                    ranks.refuse(got, "Load it with load_checkpoint().")
            return reader
        except dist.DistBackendError:
            raise
        except (ValueError, RuntimeError) as error:
            self._series.note_damaged(step)
            self._tell(f"'{path}' is left out: {error}", told)
            return None

    def _load(self, step: int, reader: CheckpointReader, told: list[str]) -> LoadedStep:
        ranks = self._ranks
        load_content(
            reader,
            self._model,
            self._optimizer,
            ranks,
            asks=has_stages(self._model),
            has_codes=True,
        )
        saved = json.loads(reader.text(EXTRA))
        with ranks.together():
            self._load_states(saved)
        if not load_random(reader, ranks):
            text = "saved by another number of ranks or in another language: random numbers begin "
            self._tell(f"'{self._series.path_of(step)}' was {text}anew", told)
        return LoadedStep(saved["step"], saved["extra"], self._series.path_of(step), told)

    def _load_states(self, saved: dict[str, Any]) -> None:
        theirs, mine = saved["stateful"], self._parts
        if set(theirs) != set(mine):
            got = f"got a checkpoint with stateful {sorted(theirs)}, expected {sorted(mine)}"
            self._ranks.refuse(got, "Pass the objects that were saved.")
        if self._batches is not None and saved["batches"] is None:
            got = "got a checkpoint without the state of batches"
            self._ranks.refuse(got, "Leave `batches` out.")
        for name, part in mine.items():
            part.load_state_dict(theirs[name])
        if self._batches is not None:
            self._batches.load_state_dict(saved["batches"])

    def _extra(self, n: int, extra: dict[str, Any] | None) -> dict[str, Any]:
        batches = None if self._batches is None else dict(self._batches.state_dict())
        if isinstance(self._batches, GlobalBatch) and batches is not None:
            batches["next_step"] = n
        return {
            "step": n,
            "extra": extra or {},
            "batches": plain_json(batches, "the state of batches", self._ranks),
            "stateful": {
                name: plain_json(part.state_dict(), f"the state of '{name}'", self._ranks)
                for name, part in self._parts.items()
            },
        }

    def _expect_step(self, n: int) -> None:
        _AREA.expect("n", n, int, "int", next_step="Pass the number of steps that are done.")
        if not 0 <= n < _MOST:
            _AREA.refuse(f"got n={n}, expected 0 or more", "Count the steps that are done.")

    def _wait(self, timeout: float | None) -> None:
        try:
            if self._pending is not None:
                self._pending.wait(timeout)
        except (ValueError, TypeError, RuntimeError) as error:
            self._pending = None
            if not self._logs or isinstance(error, (TypeError, dist.DistBackendError)):
                raise
            self._log(error)

    def _log(self, error: Exception) -> None:
        if self._ranks.rank == 0:
            warnings.warn(f"a save has failed, and training goes on: {error}", stacklevel=4)

    def _tell(self, text: str, told: list[str]) -> None:
        told.append(text)
        if self._ranks.rank == 0:
            warnings.warn(text, stacklevel=4)
