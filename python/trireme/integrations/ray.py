"""Ray Train over the backend trireme, with Trireme's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from ray.train import get_context
from ray.train import torch as ray_torch
from ray.train.torch.config import _TorchBackend
from torch import nn

from trireme.ddp import DistributedDataParallel
from trireme.integrations.tested_versions import say_if_untested
from trireme.integrations.units import shard_units

__all__ = ["TorchConfig", "prepare_model"]

DDP, FSDP = "trireme_ddp", "trireme_fsdp"


class _BackendOverTrireme(_TorchBackend):
    """Ray's way to start torch.distributed in its workers, where trireme is registered first."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_register)
        super().on_start(worker_group, backend_config)


@dataclass
class TorchConfig(ray_torch.TorchConfig):
    """``ray.train.torch.TorchConfig`` over the backend trireme."""

    backend: str | None = "trireme"

    @property
    def backend_cls(self) -> type:
        return _BackendOverTrireme


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = DDP,
    parallel_strategy_kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """As ``ray.train.torch.prepare_model``, with two strategies more.

    ``"trireme_ddp"`` wraps the model in ``trireme.DistributedDataParallel``. ``"trireme_fsdp"``
    shards it by ``trireme.fully_shard``, on the CPU, too: every child of a ModuleList or Sequential
    is a unit. ``parallel_strategy_kwargs`` are arguments of either.
    """
    options = parallel_strategy_kwargs or {}
    if parallel_strategy not in (DDP, FSDP):
        return ray_torch.prepare_model(model, move_to_device, parallel_strategy, options)
    model = ray_torch.prepare_model(model, move_to_device, parallel_strategy=None)
    if get_context().get_world_size() == 1:
        return model
    if parallel_strategy == FSDP:
        return shard_units(model, **options)
    device = next(model.parameters()).device
    if device.type == "cuda":
        options = {"device_ids": [device], **options}
    return DistributedDataParallel(model, **options)


def _register() -> None:
    """Imports this module in a worker, and with it trireme, which registers its backend."""


say_if_untested("ray")
