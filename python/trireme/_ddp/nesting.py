"""A DistributedDataParallel inside another one.

torch's reducers both average; what the outer one writes comes last. Here the outer one averages
alone: a forward of the inner one, inside the outer one's or beside it, counts as one of the outer
one's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trireme._core.compression import Compression
from trireme._ddp import refuse
from trireme._ddp.torch_names import TorchNames

if TYPE_CHECKING:
    from trireme._ddp.module import DistributedDataParallel


def check_nested(
    module: nn.Module, group: dist.ProcessGroup, compression: Compression | None
) -> None:
    """torch's class inside ours averages its own gradients, so it must do it over our ranks. Nobody
    else may average any, or shard them. For ours inside we average, by our ``compression``."""
    for name, inner in module.named_modules():
        if hasattr(inner, "_get_fsdp_state"):  # ours and torch's have it; an import takes long
            refuse(
                f"got a module of fully_shard at '{name}', whose gradients it averages, expected "
                "plain modules",
                "Leave one of them out, or replicate by fully_shard over a mesh of two dimensions.",
                group,
            )
        if isinstance(inner, TorchNames):
            check_compressions(inner.__dict__["compression"], compression, group)
        if not isinstance(inner, TorchDDP) or isinstance(inner, TorchNames):
            continue
        ranks = dist.get_process_group_ranks(inner.process_group)
        if inner is module or ranks != dist.get_process_group_ranks(group):
            refuse(
                f"got torch's DistributedDataParallel at '{name}', which averages over ranks "
                f"{ranks}, expected the module in it",
                "Wrap that one with trireme.DistributedDataParallel, too.",
                group,
            )


def check_compressions(
    inner: Compression | None, outer: Compression | None, group: dist.ProcessGroup
) -> None:
    """Nobody would compress as the inner one says."""
    if inner is not None and inner != outer:
        refuse(
            f"got compression {inner} of a DistributedDataParallel inside of another one, which "
            f"averages alone, with {outer}",
            "Give the outer one the same compression.",
            group,
        )


def parameters_of_torchs(module: nn.Module) -> set[nn.Parameter]:
    """What torch's class averages inside of ``module``."""
    return {
        parameter
        for inner in module.modules()
        if isinstance(inner, TorchDDP) and not isinstance(inner, TorchNames)
        for parameter in inner.module.parameters()
    }


def lead(outer: DistributedDataParallel) -> None:
    """Lets ``outer`` average for those inside of it."""
    outer._led = [module for module in outer.module.modules() if isinstance(module, TorchNames)]
    for inner in outer._led:
        inner._outer = weakref.ref(outer)


def torch_averages() -> bool:
    """Whether a forward of torch's class runs around this one whose backward averages."""
    around = TorchDDP._get_active_ddp_module()
    is_torchs = around is not None and not isinstance(around, TorchNames)
    return is_torchs and bool(around.require_backward_grad_sync)


def leader_of(ddp: TorchNames) -> TorchNames:
    """The outermost one around ``ddp``, or ``ddp`` itself."""
    outer = None if ddp._outer is None else ddp._outer()
    if outer is None or not any(led is ddp for led in outer._led):
        return ddp
    return leader_of(outer)
