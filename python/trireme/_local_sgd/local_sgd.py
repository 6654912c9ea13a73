"""LocalSGD: parameters are averaged now and then."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from trireme._core.compression import Compression
from trireme._local_sgd.model import RoundModel
from trireme._local_sgd.outer import OuterOptimizers
from trireme._local_sgd.rounds import Across, Rounds, check_model, round_options


class LocalSGD(Rounds):
    """Workers train on their own, and average parameters after every ``sync_every``-th step.

    ::

        with trireme.LocalSGD(model, optimizer, sync_every=50):
            for batch in batches:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()  # drives the rounds

    A step counts whenever ``optimizer.step()`` ran. torch has ``PeriodicModelAverager``, which is
    called by hand, and torchft's ``LocalSGD`` is the same. See ``docs/local_sgd.md``.

    Args:
        model: plain, or in DDP, or sharded by ZeRO or ``fully_shard`` over the ranks of one worker.
        optimizer: over parameters of ``model``; any of torch's, or ours.
        sync_every: steps between two averages.
        warmup_steps: the first steps, after each of which workers average.
        across: the ranks that hold the same elements on different workers. None: the ranks that
            have this one's place on other hosts, if hosts have as many ranks each and a strategy
            keeps the ranks of a host equal.
        compression: a method of ``trireme.compression``; what travels is then a code of how far
            parameters have moved, and each worker is a sender.

    Memory: a copy of the parameters. Collective over the ranks of all workers.

    Raises:
        ValueError: naming the argument; on all ranks where they have different options.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        warmup_steps: int = 0,
        across: Across = None,
        compression: Compression | None = None,
    ) -> None:
        check_model(model, optimizer)
        options = round_options(
            compression, sync_every=sync_every, warmup_steps=warmup_steps, has_outer_step=False
        )
        found = RoundModel(model, optimizer)
        everything = [list(range(len(found.parameters)))]
        super().__init__(found, optimizer, options, everything, OuterOptimizers([]), across)
