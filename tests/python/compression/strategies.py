"""A model of given gradients under each strategy that compresses, with one face."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import trireme
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from trireme import compression as c
from trireme.compression import Compression

from compression.given import SIZES, Given
from fsdp.ranks import local, part_of

Sizes = dict[str, tuple[int, ...]]

METHODS: dict[str, Compression] = {
    "int8 in odd blocks": c.Int8(block=77, between="ranks"),
    "sign": c.Sign(between="ranks"),
    "top of chunks": c.TopK(0.02, chunk=256, between="ranks"),
}


@dataclass
class Coded:
    model: Any
    net: Any
    """What is called: the model, or what wraps it."""
    optimizer: Any
    """It goes with the model into checkpoints; None without one."""
    holder: Any
    """What was given the compression."""

    def averaged(self, gradients: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """This rank's part of the averages, flat."""
        self.zero_grad()
        self.net(gradients).backward()
        return self.gradients(list(gradients))

    def zero_grad(self) -> None:
        (self.optimizer or self.model).zero_grad()

    def accumulating(self) -> Any:
        """A context in which backwards only accumulate."""
        if isinstance(self.holder, trireme.FSDPModule):
            return _synchronizing_later(self.model)
        return self.holder.no_sync()

    def gradients(self, names: list[str]) -> dict[str, np.ndarray]:
        return {name: self._own(name, self.model.held[name].grad) for name in names}

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """This rank's part of what is flat."""
        like = self.model.held[name]
        return self._own(name, torch.from_numpy(whole.copy()).view(like.shape))

    def _own(self, name: str, gradient: torch.Tensor) -> np.ndarray:
        like = self.model.held[name]
        if isinstance(like, DTensor):
            is_whole = not isinstance(gradient, DTensor)
            values = part_of(gradient, like) if is_whole else local(gradient)
            return values.reshape(-1).numpy()
        if isinstance(self.holder, trireme.ZeroRedundancyOptimizer):
            core, index = self.holder._places[like]
            begin, numel = self.holder._cores[core].plan()[index][self.holder.rank]
            return gradient.reshape(-1)[begin : begin + numel].numpy()
        return gradient.reshape(-1).numpy()


@contextmanager
def _synchronizing_later(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def ddp(method: Compression, sizes: Sizes = SIZES, **options: Any) -> Coded:
    model = Given(sizes)
    net = trireme.DistributedDataParallel(model, compression=method, **options)
    return Coded(model, net, None, net)


def zero(method: Compression, sizes: Sizes = SIZES, **options: Any) -> Coded:
    model = Given(sizes)
    optimizer = trireme.ZeroRedundancyOptimizer(
        model.named_parameters(), SGD, stage=2, compression=method, lr=0.1, **options
    )
    return Coded(model, model, optimizer, optimizer)


def sharded(method: Compression, sizes: Sizes = SIZES, **options: Any) -> Coded:
    model = trireme.fully_shard(Given(sizes), compression=method, **options)
    return Coded(model, model, None, model)


Strategy = Callable[..., Coded]
STRATEGIES: dict[str, Strategy] = {"zero 2": zero, "fully_shard": sharded}


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """One that all ranks see."""
    made = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(made)
    yield Path(str(made[0]))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(str(made[0]))
