"""Checkpoints that any strategy writes and any other reads, at any number of ranks."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trireme import _C
from trireme._C import CheckpointReader, CheckpointSeries, CheckpointTensor, Communicator
from trireme._C import PendingSave as CorePendingSave
from trireme._core.announced_writes import announce_steps
from trireme._core.errors import Area, text_of
from trireme._core.farewell import call_at_the_end
from trireme._core.group_communicator import keep_communicator
from trireme._core.held_rounds import HoldsRounds
from trireme._core.meshes import group_over
from trireme._core.owners import group_of_stages, table_of
from trireme._saving.content import (
    EXTRA,
    Content,
    content_to_save,
    load_content,
    tensors_written_with,
)
from trireme._saving.parts import Ranks, resharded_model
from trireme._saving.pending_save import PendingSave
from trireme._saving.rounds import add_rounds, load_rounds
from trireme._saving.stages import has_stages, some_rank_has, trains

MAX_FILE_BYTES = 5_000_000_000


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    rounds: HoldsRounds | None = None,
    asynchronous: bool = False,
) -> PendingSave:
    """Saves a model, and the state of its optimizer, into the folder ``path``.

    What is written says nothing of the strategy or the number of ranks: whole tensors under the
    names of the plain model, in safetensors files with a JSON index as Hugging Face has them.
    Nothing is pickled and nothing gathered; each rank writes the bytes that it has. The folder
    takes the place of a previous checkpoint in one step, when all of it is on the disk.

    Args:
        path: of a folder that all ranks see; nothing but a checkpoint may be there, whose index
            names every file.
        model: plain, in DistributedDataParallel (ours or torch's), or sharded by ``fully_shard``;
            tensor parallelism may have cut it before. Or a ``trireme.Pipeline``.
        optimizer: any of ``torch.optim`` and ``trireme.optim``, or
            ``trireme.ZeroRedundancyOptimizer``, over parameters of ``model``. Of a pipeline each
            rank's own, all with the same groups; None where a rank has nothing to train.
        extra: what else to keep, such as the epoch or the state of a random generator: what JSON
            can say, integers of any length included. Rank 0's alone; that of others is not read.
        process_group: the ranks that save; by default those of the model, or all.
        max_file_bytes: of one file.
        rounds: the ``LocalSGD`` or ``DiLoCo`` that trains the model. The model is saved as all
            workers have agreed on it, and beside it what each worker has, also in mid-round. The
            ranks that save are then those of all workers, by default all ranks.
        asynchronous: the call returns at once, and the save goes on while the next steps run. See
            below. Not with ``rounds``.

    Returns:
        The save, which is done unless it is asynchronous.

    An asynchronous save is of the moment of the call, bit for bit, whatever follows. The call notes
    what is to be saved, copies buffers and waits for no other rank, but for the first save of a
    group. A thread writes the rest from the memory of parameters and states, which forward and
    backward only read; a step, ``trireme.writing`` or ``load_checkpoint`` that comes earlier has
    what was not written yet copied first. Any other write (``p.mul_()`` by hand) fails the save,
    which names the tensor; one through ``.data`` is not noticed. One save is in flight: the next
    one waits for it, and raises its error where nobody has called ``wait()``. ``shutdown()`` and
    the end of the interpreter wait, too. Parts on a GPU are copied in the call. Where a group can
    make no second communicator the save is synchronous, which is said once.

    Parameters must be the same on all ranks or sharded; of buffers rank 0's are saved. Of a
    pipeline each rank saves its stages; of what several have, the lowest rank's is saved. What a
    ``remote.Module`` has is fetched from its owner in the call, by every rank, and saved as buffers
    are; the state of its optimizer stays there. Where ranks share such a module, let them meet
    behind the call of an asynchronous save before one of them steps it.

    Raises:
        ValueError, TypeError: it cannot be saved, such as a module whose ``state_dict()`` is
            something else than its parameters and buffers; ``path`` holds something else.
        RuntimeError: the disk is full, or a rank cannot use the folder.
        torch.distributed.DistBackendError: the group failed.

    Whatever is raised is raised on all ranks, and the previous checkpoint is still there.
    Collective.
    """
    ranks = Ranks(group_for(model, optimizer, process_group, rounds))
    save = Save(os.fspath(path), model, optimizer, lambda: extra, max_file_bytes=max_file_bytes)
    save.rounds = rounds
    return save.begin(ranks, asynchronous=asynchronous)


@dataclass
class Numbered:
    """Which checkpoint of a series a save is, and what else goes into it."""

    series: CheckpointSeries
    step: int
    tensors: dict[str, list[CheckpointTensor]]


@dataclass
class Save:
    """The arguments of a save."""

    path: str
    model: nn.Module
    optimizer: Optimizer | None
    extra: Callable[[], dict[str, Any] | None]
    """Called on rank 0."""
    max_file_bytes: int = MAX_FILE_BYTES
    numbered: Numbered | None = None
    rounds: HoldsRounds | None = None
    started: float = field(default_factory=time.perf_counter)

    def begin(self, ranks: Ranks, *, asynchronous: bool) -> PendingSave:
        """Saves, or begins to. Collective where it is synchronous."""
        _refuse_tables(self.model, asynchronous, ranks)
        if asynchronous and self.rounds is not None:
            ranks.refuse("got asynchronous=True with rounds", "Save rounds synchronously.")
        if asynchronous:
            keep_communicator(self.model, ranks.group)
            saver = _C.communicator_of_saves(ranks.core)
            if saver is not None or ranks.world == 1:
                return PendingSave(self._note(ranks, saver))
            _say_that_saves_wait(ranks)
        return PendingSave(self._save(ranks))

    def _save(self, ranks: Ranks) -> CorePendingSave:
        if has_stages(self.model):
            some_rank_has(self.optimizer, self.model, ranks)
        numbered = self.numbered if ranks.rank == 0 else None
        with ranks.together():
            _C.wait_for_earlier_saves(ranks.core)
            content = self._content(ranks, copies=False)
            if numbered is not None:
                numbered.series.make_room(numbered.step)
        if self.rounds is not None:
            add_rounds(content, self.rounds, self.model, self.optimizer, ranks.group)
        saved = _C.save_checkpoint(
            self.path,
            ranks.core,
            tensors=content.tensors,
            texts=content.texts,
            max_file_bytes=self.max_file_bytes,
            stall_ms=_milliseconds_since(self.started),
        )
        if numbered is not None:
            numbered.series.keep_last(numbered.step)
        return saved

    def _note(self, ranks: Ranks, saver: Communicator | None) -> CorePendingSave:
        """Begins an asynchronous one. Where this rank cannot, the others hear why from theirs."""
        announce_steps()
        call_at_the_end(end_saves)
        try:
            _C.wait_for_earlier_saves(ranks.core)
            content = self._content(ranks, copies=True)
            written = tensors_written_with(self.model, self.optimizer)
            stages = _stages_of(self.model, self.optimizer) if has_stages(self.model) else None
        except BaseException as error:
            _C.refuse_to_save(self.path, ranks.core, saver, text_of(error))
            raise
        return _C.save_in_background(
            self.path,
            ranks.core,
            saver,
            tensors=content.tensors,
            texts=content.texts,
            max_file_bytes=self.max_file_bytes,
            written=written,
            stages=stages,
            stall_ms=_milliseconds_since(self.started),
            series=None if self.numbered is None else self.numbered.series,
            step=0 if self.numbered is None else self.numbered.step,
        )

    def _content(self, ranks: Ranks, *, copies: bool) -> Content:
        extra = self.extra() if ranks.rank == 0 else None
        content = content_to_save(
            self.model,
            self.optimizer,
            extra,
            ranks,
            copies=copies,
            has_state=self.rounds is None,
        )
        if self.numbered is not None:
            content.tensors.update(self.numbered.tensors)
        return content


def _stages_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[bool, bool]:
    return optimizer is not None, trains(model)


def _milliseconds_since(begin: float) -> float:
    return (time.perf_counter() - begin) * 1e3


def _say_that_saves_wait(ranks: Ranks) -> None:
    if ranks.rank == 0 and not _said:
        _said.append(True)
        got = "this group can make no second communicator"
        text = _C.error_text("saving", got, "Saves are synchronous.", rank=0, world=ranks.world)
        warnings.warn(text, stacklevel=3)


_said: list[bool] = []


def _refuse_tables(model: nn.Module, asynchronous: bool, ranks: Ranks) -> None:
    """A parameter server's workers save at a clock of all of them."""
    if asynchronous and any(table_of(parameter) is not None for parameter in model.parameters()):
        got = "got asynchronous=True for parameters in a table of a parameter server"
        ranks.refuse(got, "Save the server with its own save(), which is synchronous.")


def end_saves(error: str) -> None:
    """Waits for saves in flight at the end of a run, or gives them up if ``error`` ends it."""
    if error:
        _C.abort_saves(error)
    _C.finish_saves()


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    read_once: bool = False,
    rounds: HoldsRounds | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Loads what ``save_checkpoint`` has saved, under whatever strategy; returns its ``extra``.

    Values are the saved ones bit for bit. Each rank reads the bytes that it needs. Everything is
    checked before anything is changed; a disk that fails later leaves the model half loaded.
    Modules that load in a way of their own, or have hooks that do, are given the values once more
    for that. Values of a ``remote.Module`` are written at its owner.

    Args:
        path: the folder; or one file of tensors as the safetensors package writes it. A folder may
            have that as ``model.safetensors`` without an index.
        model: as for ``save_checkpoint``, of the same names, shapes and dtypes.
        optimizer: of the same class and parameter groups; may be left out.
        process_group: the ranks that load; by default those of the model, or all.
        read_once: of what several ranks need each byte is read by one of them, which sends it to
            the others. For a disk that is slower than the network between the ranks, such as one
            that many hosts read from. The same on all ranks.
        rounds: the ``LocalSGD`` or ``DiLoCo`` that is to train the model, before its block. With
            as many workers as were saved it goes on bit for bit; with others all begin where
            workers had agreed, and the state of the optimizer is fresh.
        verify: whether all bytes are compared with their checksums, each by one of the ranks,
            before anything is changed. Of a folder without checksums (another program's, or an old
            one) nothing is compared. The same on all ranks.

    Raises:
        ValueError: a file is missing, cut or of another save, or its bytes are not those that were
            saved; another model or optimizer.
        RuntimeError: a parameter was written outside of a step before (see ``writing``).
        torch.distributed.DistBackendError: the group failed.

    Whatever is raised is raised on all ranks. Collective.
    """
    group = group_for(model, optimizer, process_group, rounds)
    ranks = Ranks(group)
    reader = CheckpointReader(os.fspath(path), ranks.core, reads_once=read_once, verify=verify)
    if rounds is not None:
        load_rounds(reader, rounds, model, optimizer, group)
    else:
        load_content(reader, model, optimizer, ranks, asks=has_stages(model), has_codes=True)
    text = reader.text(EXTRA)
    return json.loads(text) if text else {}


def _expect_living(stages: dist.ProcessGroup) -> None:
    try:
        dist.get_process_group_ranks(stages)
    except KeyError:
        got = "got a pipeline over ranks whose process group was destroyed, expected a living one"
        Area("saving").refuse(got, "Save or load it before destroy_process_group().")


def group_for(
    model: nn.Module,
    optimizer: Optimizer | None,
    given: dist.ProcessGroup | None,
    rounds: HoldsRounds | None = None,
) -> dist.ProcessGroup | None:
    """Finds the group over which the model is trained; None where nobody made one."""
    plain = resharded_model(model)
    stages = group_of_stages(plain)
    if stages is not None:
        _expect_living(stages)
    if given is not None or not dist.is_initialized():
        return given
    if stages is not None:
        return stages
    if rounds is not None:  # several workers
        return dist.group.WORLD
    parameters = plain.parameters()
    meshes = dict.fromkeys(
        parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)
    )
    if meshes:
        return group_over(list(meshes))
    for holder in (model, optimizer):
        group = getattr(holder, "process_group", None)
        if isinstance(group, dist.ProcessGroup):
            return group
    return dist.group.WORLD
