"""Strategies around a pipeline of one process, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import rows, tanh_layers

WRAPS: dict[str, Any] = {
    "ours": trireme.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
    "fully_shard": trireme.fully_shard,
    "torch fully_shard": torch_fully_shard,
}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@on_shm_and_gloo_ranks(2, timeout=120, fresh=True)  # modules of torch's fully_shard stay
def test_strategies_around_a_pipeline(rank: int) -> None:
    """Each rank has rows of its own; three steps of AdamW equal those of one process."""
    for wrap in WRAPS.values():
        for checkpoint in ("never", "always"):
            pipe = trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, checkpoint=checkpoint)
            model = wrap(pipe)
            one = tanh_layers()
            optimizers = [
                torch.optim.AdamW(module.parameters(), lr=0.01) for module in (model, one)
            ]
            for step in range(3):
                x, y = rows(2 * step, 8), rows(2 * step + 1, 8)
                part = slice(4 * rank, 4 * rank + 4)
                loss = mse_loss(model(x[part]), y[part])
                loss.backward()
                mse_loss(one(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for got, expected in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(whole(got.detach()), expected.detach())


@on_shm_ranks(2)
def test_what_several_threads_cannot_do_is_refused(rank: int) -> None:
    layers = [trireme.DistributedDataParallel(layer) if list(layer.parameters()) else layer
              for layer in tanh_layers(4)]  # fmt: skip
    with pytest.raises(NotImplementedError, match="a layer in DistributedDataParallel"):
        trireme.Pipeline(nn.Sequential(*layers), 2, devices=["cpu"] * 2, loss=mse_loss)
    pipe = trireme.Pipeline(tanh_layers(), 2, devices=["cpu"] * 2, loss=mse_loss)
    pipe.step(rows(0), target=rows(1))
    model = trireme.DistributedDataParallel(pipe)
    with pytest.raises(NotImplementedError, match="got a step of a pipeline in one process"):
        pipe.step(rows(0), target=rows(1))
    model(rows(0)).sum().backward()
