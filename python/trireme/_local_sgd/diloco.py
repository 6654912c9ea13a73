"""DiLoCo: an outer optimizer steps what workers have moved, in fragments on their way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from trireme._C import cut_by_bytes
from trireme._core.compression import Compression
from trireme._local_sgd.model import RoundModel
from trireme._local_sgd.outer import outer_optimizers
from trireme._local_sgd.rounds import (
    Across,
    Rounds,
    check_model,
    fragments_by_modules,
    round_options,
)


class DiLoCo(Rounds):
    """Workers train on their own; an outer optimizer steps by how far they have moved on average.

    ::

        with trireme.DiLoCo(model, optimizer, sync_every=50, fragments=5, fragment_sync_delay=5):
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()  # drives the rounds

    The anchor is what workers have agreed on last. In each round its difference to the parameters,
    averaged over the workers, is the gradient of a step of the outer optimizer; parameters then
    become ``lerp(anchor, parameter, fragment_update_alpha)``. With S = sync_every / fragments,
    fragment (round mod fragments) leaves after step S - ``fragment_sync_delay`` of a round, is on
    its way while training goes on, and is applied after step S. Words and numbers are torchft's.
    ``.grad`` is what it was. See ``docs/local_sgd.md``.

    Args:
        model: plain, or in DDP, or sharded by ZeRO or ``fully_shard`` over the ranks of one worker.
        inner_optimizer: over parameters of ``model``; any of torch's, or ours.
        outer_optimizer: over the model's parameters, or a list with one for each fragment; SGD with
            a learning rate of 0.7 and Nesterov momentum of 0.9 by default. Inside the block it
            steps the anchors in place of the parameters.
        sync_every: steps in which every fragment is averaged once.
        fragments: a number, by which parameters are cut, in their order, into parts of about equal
            bytes; or a list of modules.
        fragment_sync_delay: steps that a fragment may be on its way.
        fragment_update_alpha: 0 to go on from what all have agreed on, 1 from what this one has.
        across: the ranks that hold the same elements on different workers. None: the ranks that
            have this one's place on other hosts, if hosts have as many ranks each and a strategy
            keeps the ranks of a host equal.
        compression: a method of ``trireme.compression``; each worker is a sender. With ``TopK`` of
            chunks and ``decay``, and ``SGD(lr=1)`` outside, this is SparseLoCo.

    Memory: a copy of the parameters and the state of the outer optimizer; of what a strategy
    shards, each rank its part. Collective over the ranks of all workers.

    Raises:
        ValueError: naming the argument; on all ranks where they have different options.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        sync_every: int,
        fragments: int | Sequence[nn.Module] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        across: Across = None,
        compression: Compression | None = None,
    ) -> None:
        check_model(model, inner_optimizer)
        count = fragments if isinstance(fragments, int) else len(list(fragments))
        options = round_options(
            compression,
            sync_every=sync_every,
            fragments=count,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            has_outer_step=True,
        )
        found = RoundModel(model, inner_optimizer)
        if isinstance(fragments, int):
            parts = cut_by_bytes(found.bytes(), fragments)
        else:
            parts = fragments_by_modules(list(fragments), found.named)
        outer = outer_optimizers(outer_optimizer, found, parts)
        super().__init__(found, inner_optimizer, options, parts, outer, across)
