"""SyncBatchNorm: torch's class, also on the CPU, with Trireme's C++ core underneath."""

from __future__ import annotations

import copy
import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from trireme import _C
from trireme._core.errors import Area
from trireme._core.group_communicator import communicator_of

AREA = Area("sync_batch_norm")
refuse = AREA.refuse
_OUTSIDE = "Build the layer on the ranks of its group only."


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalization over the batch of all ranks; a drop-in for ``torch.nn.SyncBatchNorm``.

    In training every rank gets what ``torch.nn.BatchNorm1d``, ``2d`` or ``3d`` would give for the
    batches of all ranks together: output, running statistics and, under DDP, gradients. In
    evaluation it is BatchNorm and communicates nothing. A subclass of torch's class with the same
    signature and ``state_dict``, which a BatchNorm can load too. What differs from torch's:

    * It runs on the CPU, over any process group.
    * On an accelerator the host does not wait for the device, where torch's does in each forward.
    * Training without a process group raises, where torch's silently normalizes each rank alone.
      ``trireme.init()`` makes a group of one when nobody launched several ranks.

    Args:
        num_features: C of an input (N, C) or (N, C, ...). Half and bfloat16 inputs go with
            parameters of their own dtype or of fp32; statistics are fp32, or fp64 for fp64 inputs.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``nn.BatchNorm2d``.
        process_group: the ranks whose batches belong together; the default group if None.

    In training ``forward`` and its backward are collective. Batches may differ in size, and one may
    be empty, (0, C, ...), but every rank's loss has to depend on the output: a rank that leaves it
    out keeps the others waiting.

    Raises:
        ValueError: from ``forward`` in training: no process group; an input without channels, or
            with other channels than the parameters; channels or precision that differ between
            ranks, or 1 value per channel on all ranks together (both on all ranks alike).
        TypeError: an input whose dtype does not go with the parameters.
        NotImplementedError: gradients are differentiated again.
        torch.distributed.DistBackendError: the group failed.

    Cost per step and rank: an all-gather of 2 C + 1 numbers in forward, an all-reduce of 2 C in
    backward, fp32 or fp64; once, in the first forward, an all-gather of 16 bytes.
    """

    _communicator: _C.Communicator | None = None
    _sync: _C.BatchNormSync | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        if isinstance(momentum, bool) or not isinstance(momentum, numbers.Real | None):
            refuse(
                f"got a momentum of type {type(momentum).__name__}, expected a number or None",
                "Pass None for the plain average of all batches.",
                kind=TypeError,
            )
        if process_group is not None:
            AREA.expect_group(process_group, _OUTSIDE)
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            process_group,
            device,
            dtype,
        )
        if not bias:  # torch 2.11's class does not know it
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize ``input``; collective in training. See the class."""
        if not self.training:
            return super().forward(input)
        return self._forward_in_training(input)

    @torch._disable_dynamo
    def _forward_in_training(self, input: torch.Tensor) -> torch.Tensor:
        tracked = self.num_batches_tracked if self.track_running_stats else None
        momentum = self.momentum
        if momentum is None:
            momentum = 0.0 if tracked is None else 1.0 / (float(tracked) + 1.0)
        output = self._core().forward(
            input,
            weight=self.weight,
            bias=self.bias,
            running_mean=self.running_mean if self.track_running_stats else None,
            running_var=self.running_var if self.track_running_stats else None,
            momentum=momentum,
            eps=self.eps,
        )
        if tracked is not None:
            tracked.add_(1)
        return output

    def _core(self) -> _C.BatchNormSync:
        """The C++ side over the group as it is now: it may have been destroyed and made again."""
        communicator = _communicator_of(self.process_group)
        if self._sync is None or communicator is not self._communicator:
            self._communicator = communicator
            self._sync = _C.BatchNormSync(communicator)
        return self._sync

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) == 0:
            refuse(
                f"got an input of shape {list(input.shape)}, expected (batch, channels, ...) with "
                "at least 1 channel",
                "Give the input its batch and channel dimensions.",
            )

    def __getstate__(self) -> dict[str, Any]:
        held_here = ("_communicator", "_sync")
        return {key: value for key, value in self.__dict__.items() if key not in held_here}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy over the same process group, which itself cannot be copied."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo[id(self.process_group)] = self.process_group
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return clone

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        """Replace every BatchNorm in ``module``; see :func:`trireme.convert_sync_batchnorm`."""
        AREA.expect_module(module)
        if process_group is not None:
            AREA.expect_group(process_group, _OUTSIDE)
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(
        cls, module: nn.Module, group: Any | None, converted: dict[nn.Module, nn.Module]
    ) -> nn.Module:
        if module in converted:  # used in several places, as it stays
            return converted[module]
        is_norm = isinstance(module, _BatchNorm)
        result = converted[module] = cls._from_batch_norm(module, group) if is_norm else module
        for name, child in list(result._modules.items()):
            if child is not None:
                result.add_module(name, cls._convert(child, group, converted))
        return result

    @classmethod
    def _from_batch_norm(cls, norm: nn.Module, group: Any | None) -> SyncBatchNorm:
        if isinstance(norm, LazyModuleMixin):
            refuse(
                f"got a {type(norm).__name__} without a number of features, expected an "
                "initialised layer",
                "Run one forward before converting.",
            )
        layer = cls.__new__(cls)
        layer.__dict__.update(norm.__dict__)
        for table in ("_parameters", "_buffers", "_modules"):
            layer.__dict__[table] = copy.copy(norm.__dict__[table])
        layer.process_group = group if group is not None else getattr(norm, "process_group", None)
        layer._communicator = layer._sync = None
        return layer


def convert_sync_batchnorm(module: nn.Module, process_group: Any | None = None) -> nn.Module:
    """Replace every ``BatchNorm1d``, ``2d``, ``3d`` and ``torch.nn.SyncBatchNorm`` in ``module``.

    Convert before wrapping in DDP. Parameters, buffers, hooks and mode go over as they are, so an
    optimizer made before keeps working; a layer used in several places stays one layer.

    Args:
        module: changed in place. If it is a BatchNorm itself, the result is a layer in its stead.
        process_group: the ranks whose batches belong together. If None, a ``SyncBatchNorm`` keeps
            its own and other layers use the default group.

    Returns:
        ``module``, or what stands in its stead.

    Raises:
        TypeError: ``module`` is no module, or ``process_group`` no process group.
        ValueError: a lazy layer that has not seen an input; a group without this rank.
    """
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _communicator_of(process_group: dist.ProcessGroup | None) -> _C.Communicator:
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        refuse(
            "got no process group, expected an initialised one for training",
            "Call trireme.init() first, or model.eval().",
        )
    return communicator_of(group)
