"""Checkpoints that any strategy writes and any other reads, at any number of ranks."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trireme import _C
from trireme._C import CheckpointReader
from trireme._core.errors import Area
from trireme._core.held_rounds import HoldsRounds
from trireme._core.meshes import group_over
from trireme._core.owners import group_of_stages
from trireme._saving.content import codes_of, content_of, load_content
from trireme._saving.optimizer import plain_json
from trireme._saving.parts import Ranks, plain_model
from trireme._saving.rounds import add_rounds, load_rounds
from trireme._saving.stages import has_stages, some_rank_has

_EXTRA = "extra.json"
_CODES = "compression"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    max_file_bytes: int = 5_000_000_000,
    rounds: HoldsRounds | None = None,
) -> None:
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

    Parameters must be the same on all ranks or sharded; of buffers rank 0's are saved. Of a
    pipeline each rank saves its stages; of what several have, the lowest rank's is saved. What a
    ``remote.Module`` has is fetched from its owner, by every rank, and saved as buffers are; the
    state of its optimizer stays there.

    Raises:
        ValueError, TypeError: it cannot be saved, such as a module whose ``state_dict()`` is
            something else than its parameters and buffers; ``path`` holds something else.
        RuntimeError: the disk is full, or a rank cannot use the folder.
        torch.distributed.DistBackendError: the group failed.

    Whatever is raised is raised on all ranks, and the previous checkpoint is still there.
    Collective.
    """
    group = _group_for(model, optimizer, process_group, rounds)
    ranks = Ranks(group)
    if has_stages(model):
        some_rank_has(optimizer, model, ranks)
    with ranks.together():
        content = content_of(model, optimizer if rounds is None else None, ranks)
        codes = _C.codes_to_save(codes_of(model, optimizer, ranks))
        if codes is not None:
            content.tensors[_CODES] = codes
        if extra is not None and ranks.rank == 0:
            content.texts[_EXTRA] = json.dumps(plain_json(extra, "`extra`", ranks))
    if rounds is not None:
        add_rounds(content, rounds, model, optimizer, group)
    _C.save_checkpoint(
        os.fspath(path),
        ranks.core,
        tensors=content.tensors,
        texts=content.texts,
        max_file_bytes=max_file_bytes,
    )


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    read_once: bool = False,
    rounds: HoldsRounds | None = None,
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

    Raises:
        ValueError: a file is missing, cut or of another save; another model or optimizer.
        RuntimeError: a parameter was written outside of a step before (see ``writing``).
        torch.distributed.DistBackendError: the group failed.

    Whatever is raised is raised on all ranks. Collective.
    """
    group = _group_for(model, optimizer, process_group, rounds)
    ranks = Ranks(group)
    reader = CheckpointReader(os.fspath(path), ranks.core, reads_once=read_once)
    if rounds is not None:
        load_rounds(reader, rounds, model, optimizer, group)
    else:
        load_content(reader, model, optimizer, ranks, asks=has_stages(model), has_codes=True)
    text = reader.text(_EXTRA)
    return json.loads(text) if text else {}


def _expect_living(stages: dist.ProcessGroup) -> None:
    try:
        dist.get_process_group_ranks(stages)
    except KeyError:
        got = "got a pipeline over ranks whose process group was destroyed, expected a living one"
        Area("saving").refuse(got, "Save or load it before destroy_process_group().")


def _group_for(
    model: nn.Module,
    optimizer: Optimizer | None,
    given: dist.ProcessGroup | None,
    rounds: HoldsRounds | None = None,
) -> dist.ProcessGroup | None:
    """Finds the group over which the model is trained; None where nobody made one."""
    plain = plain_model(model)
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
