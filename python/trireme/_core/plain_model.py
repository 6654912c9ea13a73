"""The module inside of wrappers that add nothing to it but a prefix of its names."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def plain_model(model: nn.Module) -> nn.Module:
    """Takes off DistributedDataParallel, ours or torch's, and torch.compile."""
    name = "module" if isinstance(model, TorchDDP) else "_orig_mod"
    inside = model.__dict__.get("_modules")  # a proxy would ask on, and TorchScript has no dict
    inner = inside.get(name) if isinstance(inside, dict) else None
    return plain_model(inner) if isinstance(inner, nn.Module) else model
