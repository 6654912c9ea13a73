"""Samples that a run has not seen yet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from trireme.horovod.basics import rank, size


class ElasticSampler(Sampler[int]):
    """Draws samples without those that were recorded, so that an epoch can go on in its middle.

    Put into a :class:`TorchState`, it is committed and restored. All ranks draw equally many: the
    last ones again from the first, if the rest is no multiple of the number of ranks.

    Args:
        dataset: of a size that stays.
        shuffle: in an order that ``seed`` and the epoch decide, the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.remaining_indices: list[int] = []
        self.indices: list[int] = []
        """Of this rank, since the last ``iter()``."""
        self.num_replicas = self.rank = self.num_samples = self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with all samples. Called at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that each rank has used a batch of this size, whose number does not matter."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Deals what was not recorded to the ranks; an iterator goes on with what it had."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the number of recorded samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was taken."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        repeated = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(repeated)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
