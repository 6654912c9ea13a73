"""A model and its optimizer brought into another one in memory."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trireme._C import HeldCheckpoint
from trireme._saving.content import MODEL, Content, content_of, load_content
from trireme._saving.parts import Ranks, named_tensors


def redistribute(
    source: nn.Module | None,
    target: nn.Module | None,
    source_optimizer: Optimizer | None = None,
    target_optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Brings the values of ``source``, and the state of its optimizer, into ``target``.

    For a change of strategy, of ranks or of stages while the ranks that hold the values are alive::

        sharded = trireme.fully_shard(Net())
        stepping = torch.optim.AdamW(sharded.parameters())
        trireme.redistribute(ddp, sharded, optimizer, stepping)

    It is ``save_checkpoint`` and ``load_checkpoint`` without a file: it takes and refuses what
    these do, bit for bit. Each element comes from one rank that holds it, the rank itself if it
    does, else one on its host if there is one. No rank has more than both models and 80 MiB of
    messages.

    Args:
        source: what is there, which is not changed; None on a rank that holds nothing.
        target: another object of the same names, shapes and dtypes, under any strategy and on any
            ranks; None on a rank that gets nothing.
        source_optimizer: over parameters of ``source``; needed if ``target_optimizer`` is given.
        target_optimizer: of the same class and parameter groups; may be left out.
        process_group: all ranks of both models; by default all ranks.

    Parameters are taken from any rank that has them, buffers from the lowest one. Without
    ``torch.distributed`` both models are this process's.

    Raises:
        ValueError, TypeError: as ``save_checkpoint`` and ``load_checkpoint``; no rank holds some
            elements, which the text names. Nothing was changed.
        torch.distributed.DistBackendError: a rank is gone; ``target`` may be half written.

    Whatever is raised is raised on all ranks. Collective over ``process_group``.
    """
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    ranks = Ranks(process_group, shares_writing=False)
    before = nn.Module() if source is None else source
    after = nn.Module() if target is None else target
    content, of_lowest = Content(), set[str]()
    with ranks.together():
        _check(source, target, source_optimizer, target_optimizer, ranks)
        if source is not None:
            content = content_of(before, source_optimizer, ranks)
            of_lowest = {tensor.name for tensor in content.tensors[MODEL]}
            of_lowest -= {it.name for it in named_tensors(before, ranks) if not it.is_buffer}
    held = HeldCheckpoint(
        ranks.core, tensors=content.tensors, texts=content.texts, of_lowest=of_lowest
    )
    load_content(held, after, target_optimizer, ranks, asks=True)


def _check(
    source: nn.Module | None,
    target: nn.Module | None,
    source_optimizer: Optimizer | None,
    target_optimizer: Optimizer | None,
    ranks: Ranks,
) -> None:
    pairs = ((source, source_optimizer), (target, target_optimizer))
    if any(model is None and optimizer is not None for model, optimizer in pairs):
        ranks.refuse("got an optimizer without its module", "Pass both, or neither.")
    if source is not None and source is target:
        ranks.refuse(
            "got one module before and after", "Make another module, and redistribute into that."
        )
