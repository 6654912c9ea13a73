"""Who is measured: a strategy with one set of options each, by the label that tables show."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Side:
    """One strategy with one set of options; `optimizer` says whose AdamW it steps."""

    label: str
    strategy: str
    options: Mapping[str, Any]
    optimizer: str = "torch"


Sides = Sequence[Side]

KEPT = {"reshard_after_forward": False}

ONE_PROCESS = Side("1 process", "single", {})
NO_SYNC = Side("no sync", "no-sync", {})

TORCH_VIEW = Side("torch-ddp + view", "torch-ddp", {"gradient_as_bucket_view": True})
TORCH_DDP = tuple(
    side
    for side in (
        Side("torch-ddp", "torch-ddp", {}),
        TORCH_VIEW,
        Side(
            "torch-ddp + view + batched",
            "torch-ddp",
            {"gradient_as_bucket_view": True, "batched_grad_copy": True},  # not in every torch
        ),
    )
    if set(side.options) <= set(inspect.signature(DistributedDataParallel).parameters)
)


def hooked(sides: Sides, hook: str, **options: Any) -> Sides:
    """torch's DDP with one of HOOKS (strategies.py) and further options."""
    return [
        Side(f"{s.label}, {hook}", "torch-ddp-hooked", {**s.options, **options, "hook": hook})
        for s in sides
    ]


def compressed(method: str, **options: Any) -> Side:
    """Our DDP over Gloo with a method of trireme.compression between all ranks."""
    options = {"method": method, "between": "ranks", **options}
    return Side(f"ddp, Gloo, {method}", "ddp-gloo-compressed", options)


def compressed_between_hosts(method: str, **options: Any) -> Side:
    """Our DDP on the backend trireme with a method of trireme.compression."""
    return Side(f"ddp, {method}", "ddp-compressed", {"method": method, **options})


TORCH_ZERO_1 = (
    Side("torch-zero1", "torch-zero1", {}),
    Side("torch-zero1 + view", "torch-zero1", {"parameters_as_bucket_view": True}),
)
TORCH_FSDP2 = (
    Side("torch-fsdp2", "torch-fsdp2", {}),
    Side("torch-fsdp2, kept", "torch-fsdp2", KEPT),
    Side("torch-fsdp2, foreach", "torch-fsdp2", {}, "torch-foreach"),
    Side("torch-fsdp2, kept, foreach", "torch-fsdp2", KEPT, "torch-foreach"),
)

DP = Side("dp", "dp", {})
DDP = Side("ddp", "ddp", {})
ZERO_1 = Side("zero1", "zero1", {})
ZERO_2 = Side("zero2", "zero2", {})
ZERO_2_OWN_ADAM = Side("zero2, trireme.optim", "zero2", {}, "trireme")
ZERO_2_FUSED_STEP = Side("zero2, fused step", "zero2", {"fused_step": True}, "trireme")
FSDP = Side("fsdp", "fsdp", {})
FSDP_FOREACH = Side("fsdp, foreach", "fsdp", {}, "torch-foreach")
FSDP_OWN_ADAM = Side("fsdp, trireme.optim", "fsdp", {}, "trireme")

DDP_GLOO = Side("ddp, Gloo", "ddp-gloo", {})
PS_BSP = Side("ps, bsp", "ps-bsp", {"mode": "bsp"})
ZERO_2_GLOO = Side("zero2, Gloo", "zero2-gloo", {"host_params": False})
FSDP_GLOO = (
    Side("fsdp, Gloo", "fsdp-gloo", {}),
    Side("fsdp, Gloo, kept", "fsdp-gloo", KEPT),
    Side("fsdp, Gloo, foreach", "fsdp-gloo", {}, "torch-foreach"),
    Side("fsdp, Gloo, kept, foreach", "fsdp-gloo", KEPT, "torch-foreach"),
)
