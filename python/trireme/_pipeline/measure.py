"""What each layer of a Sequential takes, measured one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trireme._core.find_tensors import find_tensors
from trireme._core.nested import map_tensors, tensors_in
from trireme._pipeline import AREA, refuse
from trireme._pipeline.skips import keeping_skips

_RUNS = 5


@dataclass(frozen=True)
class MeasuredLayer:
    """What one layer takes for one micro-batch."""

    name: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    """Its parameters, with gradients and optimizer state of those that are trained."""
    activation_bytes: int
    """What autograd saves in it, and no layer before it has saved."""
    input_bytes: int
    """What it is given."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def bytes(self) -> int:
        """Parameters and activations."""
        return self.parameter_bytes + self.activation_bytes


def measure_layers(
    module: nn.Sequential, sample: Any, *, optimizer_states: int = 2
) -> list[MeasuredLayer]:
    """Runs each layer of a Sequential on what the one before returned, and says what it takes.

    Times are medians of five runs after a first one; a backward computes the gradients of inputs
    and parameters. The module is as before afterwards: buffers, gradients, modes, and torch's
    random numbers. On device "meta" all times are 0 or mean nothing; bytes are right.

    Args:
        module: The model.
        sample: What it is called with: one micro-batch.
        optimizer_states: How many tensors of a parameter's size the optimizer keeps: 2 for Adam, 1
            for SGD with momentum. A gradient is one more.

    Returns:
        One per layer. :func:`partition` takes their ``seconds`` or ``bytes``.
    """
    AREA.expect_module(module)
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        got = f"got a {type(module).__name__}, expected a torch.nn.Sequential"
        refuse(got, "Pass its layers as one.", kind=TypeError)
    measured: list[MeasuredLayer] = []
    kept = {_key(parameter) for parameter in [*module.parameters(), *module.buffers()]}
    weighed: set[int] = set()
    with ExitStack() as stack:
        stack.enter_context(_left_as_it_was(module))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(keeping_skips())
        value = map_tensors(sample, Tensor.detach)
        for name, layer in module._modules.items():
            assert layer is not None
            weight = 0
            for parameter in layer.parameters():
                if id(parameter) not in weighed:
                    weighed.add(id(parameter))
                    copies = 2 + optimizer_states if parameter.requires_grad else 1
                    weight += copies * parameter.numel() * parameter.element_size()
            saving = _Saving(kept)
            with saved_tensors_hooks(saving.pack, lambda tensor: tensor):
                _run(layer, value, bool(measured))
            timed = [_run(layer, value, bool(measured)) for _ in range(_RUNS)]
            measured.append(
                MeasuredLayer(
                    name=name,
                    forward_seconds=median(times[0] for times in timed),
                    backward_seconds=median(times[1] for times in timed),
                    parameter_bytes=weight,
                    activation_bytes=saving.bytes,
                    input_bytes=sum(tensor.nbytes for tensor in tensors_in(value)),
                )
            )
            value = map_tensors(timed[-1][2], Tensor.detach)
    return measured


def _key(tensor: Tensor) -> object:
    """Tells storages apart; a weak reference keeps the address of one from being another one's."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return id(tensor)
    return StorageWeakRef(tensor.untyped_storage())


class _Saving:
    """Counts what autograd saves and has not saved before."""

    def __init__(self, kept: set[object]) -> None:
        self._kept = kept
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        if _key(tensor) not in self._kept:
            self._kept.add(_key(tensor))
            is_plain = tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
            size = tensor.numel() * tensor.element_size()
            self.bytes += tensor.untyped_storage().nbytes() if is_plain else size
        return tensor


def _run(layer: nn.Module, value: Any, is_inner: bool) -> tuple[float, float, Any]:
    """Returns the seconds of forward and backward, and the output."""

    def as_input(tensor: Tensor) -> Tensor:
        can = is_inner and (tensor.is_floating_point() or tensor.is_complex())
        return tensor.clone().requires_grad_(can)

    leaves = map_tensors(value, as_input)
    # A layer may work in place, which a leaf would not take.
    inputs = map_tensors(leaves, lambda one: one.clone() if one.requires_grad else one)
    device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
    begin = _now(device)
    output = layer(inputs)
    middle = _now(device)
    roots = [tensor for tensor in find_tensors(output)[0] if tensor.requires_grad]
    wanted = [
        tensor for tensor in [*tensors_in(leaves), *layer.parameters()] if tensor.requires_grad
    ]
    ones = [torch.ones_like(root) for root in roots]
    before = _now(device)
    if roots and wanted:
        torch.autograd.grad(roots, wanted, ones, allow_unused=True)
    return middle - begin, _now(device) - before, output


def _now(device: torch.device) -> float:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    buffers = [
        (holder._buffers, name, buffer, None if buffer.is_meta else buffer.clone())
        for holder in module.modules()
        for name, buffer in holder._buffers.items()
        if buffer is not None
    ]
    devices = {
        parameter.device
        for parameter in module.parameters()
        if parameter.device.type not in ("cpu", "meta")
    }
    kinds = {device.type for device in devices}
    numbers = sorted({device.index for device in devices})
    forked = {"device_type": kinds.pop()} if kinds else {}
    with torch.random.fork_rng(numbers, **forked):
        try:
            yield
        finally:
            with torch.no_grad():
                for holder, name, buffer, copy in buffers:
                    holder[name] = buffer
                    if copy is not None and not torch.equal(buffer, copy):
                        buffer.copy_(copy)
