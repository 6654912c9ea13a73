"""What autograd saves of each layer, and what the layer costs: measured by one forward."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trireme._activation import refuse
from trireme._core.find_tensors import find_tensors

# A byte that is written counts as so many operations: what processors compute meanwhile is about
# 10 on CPUs, 20 and more on GPUs.
FLOPS_PER_BYTE = 16

_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_ATTENTION_OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _COMPRESSED_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COMPRESSED_COLUMNS),
}


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes in a forward."""

    name: str
    bytes: int
    """What autograd saves in it and no layer before it has saved."""
    kept: int
    """Its inputs, which remain where it is checkpointed."""
    output_bytes: int
    time: float
    """In floating point operations; see :func:`measure_activations`."""


def measure_activations(
    module_or_layers: nn.Module | Sequence[Callable[..., Any]],
    *inputs: Any,
    layers: Sequence[nn.Module] | None = None,
    **kwargs: Any,
) -> list[LayerCost]:
    """Runs one forward, and says of each layer what autograd saves in it and how long it takes.

    The result is what :func:`checkpoint_plan` takes. A storage counts whole, and once: for the
    first layer that saves it. Parameters, buffers, the inputs given here and what is hidden in the
    attributes of a ``torch.autograd.Function`` do not count; of a layer that is checkpointed inside
    those tensors count which its checkpoints keep.

    Time is counted, not taken, so that equal ranks find equal times: floating point operations by
    ``torch.utils.flop_counter``, and 16 for each byte that an operator writes.

    The module is as before afterwards: its buffers, and torch's random numbers. Memory: that of the
    fullest layer.

    Args:
        module_or_layers: A module, or a list of layers, which are called one after the other as
            those of a ``torch.nn.Sequential``.
        inputs: What the module or the first layer is called with.
        layers: Which modules inside of the module are to be measured; its children, or those of its
            lists, if left out.
        kwargs: What the module is called with besides.

    Returns:
        The costs of layers in the order of their calls. For a module that is no
        ``torch.nn.Sequential`` the last one, named "", is of what it does outside of them, and
        has its output.
    """
    if isinstance(module_or_layers, nn.Module):
        return _measure_module(module_or_layers, inputs, kwargs, layers)
    if layers is not None or kwargs:
        got = "got a list of layers and layers= or keyword arguments, expected positional inputs"
        refuse(got, "Pass a module for these.")
    return measure_layers(list(module_or_layers), inputs)


def measure_layers(
    layers: Sequence[Callable[..., Any]], inputs: tuple[Any, ...]
) -> list[LayerCost]:
    """Measures layers that are called one after the other, the first one with ``inputs``."""
    recording = _Recording()
    modules = [module for layer in layers for module in modules_in(layer)]
    with _left_as_it_was(modules, inputs), recording.on():
        for number, layer in enumerate(layers):
            inputs = (recording.call(str(number), layer, inputs),)
    return recording.costs


def modules_in(layer: Callable[..., Any]) -> list[nn.Module]:
    """The modules behind a layer: itself, or what a partial, a method or a closure refers to."""
    if isinstance(layer, functools.partial):
        return modules_in(layer.func)
    found: list[object] = [layer]
    if isinstance(layer, MethodType):
        found = [layer.__self__]
    elif isinstance(layer, FunctionType):
        found = []
        for cell in layer.__closure__ or ():
            with suppress(ValueError):  # for a variable that has no value yet
                found.append(cell.cell_contents)
    return [module for module in found if isinstance(module, nn.Module)]


def _measure_module(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: Sequence[nn.Module] | None,
) -> list[LayerCost]:
    recording = _Recording()
    watched = dict(_children(module)) if layers is None else _named(module, layers)
    with _left_as_it_was([module], (inputs, kwargs)), recording.watching(watched), recording.on():
        output = module(*inputs, **kwargs)
    around = recording.close_around(output, module)
    is_sequence = isinstance(module, nn.Sequential) and (
        type(module).forward is nn.Sequential.forward
    )
    return recording.costs if is_sequence and layers is None else [*recording.costs, around]


def _children(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Yields those that are called: lists and dicts of modules never are."""
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif child is not None:
            yield child, prefix + name


def _named(module: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, str]:
    names = {inner: name for name, inner in module.named_modules()}
    for layer in layers:
        if layer not in names:
            got = f"got a {type(layer).__name__} that is not in the module, expected its modules"
            refuse(got, "Pass modules that module.modules() yields.")
    return {layer: names[layer] for layer in layers}


@contextmanager
def _left_as_it_was(modules: Sequence[nn.Module], inputs: object) -> Iterator[None]:
    """Afterwards the buffers of the modules are as before, and so are random numbers."""
    tensors = find_tensors(inputs)[0]
    tensors += [parameter for module in modules for parameter in module.parameters()]
    devices: dict[str, set[int]] = {}
    for device in {tensor.device for tensor in tensors}:
        if device.type not in ("cpu", "meta"):
            devices.setdefault(device.type, set()).add(device.index)
    with _disable_current_modes():  # a FakeTensorMode would hide what buffers hold
        before = [
            (layer._buffers, name, buffer, buffer.clone())
            for module in modules
            for layer in module.modules()
            for name, buffer in layer._buffers.items()
            if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta
        ]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, numbers in devices.items():
            stack.enter_context(torch.random.fork_rng(sorted(numbers), device_type=kind))
        try:
            yield
        finally:
            with torch.no_grad(), _disable_current_modes():
                for buffers, name, buffer, copy in before:
                    buffers[name] = buffer
                    if not torch.equal(buffer, copy):  # else who has saved it would see a change
                        buffer.copy_(copy)


class _Held:
    """What the graph holds for a saved tensor; the tensor goes when its layer has run."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def unpack(self) -> Tensor:
        if self.tensor is None:
            got = "a backward inside of the forward goes back over several layers, expected one"
            refuse(got, "Measure fewer, larger layers.", kind=RuntimeError)
        return self.tensor


@dataclass
class _Open:
    """A layer that is being measured."""

    name: str
    kept: int = 0
    time: float = 0.0
    saved: list[weakref.ref[_Held]] = field(default_factory=list)


class _Recording(TorchDispatchMode):
    """Sees operators and saved tensors of a forward, and which layer they belong to."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # takes a tenth of a second

        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[LayerCost] = []
        self._around = self._open = _Open("")
        self._depth = 0  # counts the open layers that call layers
        # A weak reference keeps the address of a storage from being another one's.
        self._made: set[StorageWeakRef] = set()
        self._counted: set[StorageWeakRef] = set()
        self._formulas = {_FLASH_ATTENTION_OF_CPU: flop_registry[_FLASH_ATTENTION]}  # for 2.11
        self._formulas |= flop_registry

    @contextmanager
    def on(self) -> Iterator[None]:
        hooks = saved_tensors_hooks(self._pack, _Held.unpack)
        with torch.inference_mode(False), torch.enable_grad(), hooks, self:
            yield

    @contextmanager
    def watching(self, layers: Mapping[nn.Module, str]) -> Iterator[None]:
        """Measures layers as they are called, without what other hooks do before and after."""

        def before(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(name, (args, kwargs))

        def after(module: nn.Module, _: Any, output: Any) -> None:
            self._leave(output, [module])

        with ExitStack() as stack:
            for layer, name in layers.items():
                hook = functools.partial(before, name)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(after, prepend=True).remove)
            yield

    def call(self, name: str, layer: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        if isinstance(layer, nn.Module):
            with self.watching({layer: name}):
                return layer(*inputs)
        self._enter(name, inputs)
        output = layer(*inputs)
        self._leave(output, modules_in(layer))
        return output

    def close_around(self, output: Any, module: nn.Module) -> LayerCost:
        return self._close(self._around, output, [module])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operators on the tensors inside come here, too
        named = kwargs or {}
        output = func(*args, **named)
        formula = self._formulas.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            with suppress(AssertionError):  # for shapes that a formula does not know
                self._open.time += formula(*args, **named, out_val=output)
        makes, writes = _effects(func)
        for tensor in find_tensors(output)[0] if writes else ():
            self._open.time += FLOPS_PER_BYTE * tensor.numel() * tensor.element_size()
            if makes:
                self._made.update(_sizes(tensor))
        return output

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())
        self._open.saved.append(weakref.ref(held))
        return held

    def _enter(self, name: str, inputs: object) -> None:
        self._depth += 1
        if self._depth == 1:
            made = (size for storage, size in _sizes(inputs).items() if storage in self._made)
            self._open = _Open(name, kept=sum(made))

    def _leave(self, output: object, modules: Sequence[nn.Module]) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.costs.append(self._close(self._open, output, modules))
            self._open = self._around

    def _close(self, layer: _Open, output: object, modules: Sequence[nn.Module]) -> LayerCost:
        sizes: dict[StorageWeakRef, int] = {}
        for saved in layer.saved:
            held = saved()
            if held is not None:  # else the forward itself has dropped that part of its graph
                sizes |= _sizes(held.tensor)
                held.tensor = None
        own: set[StorageWeakRef] = set()  # parameters may have been gathered in the forward
        for module in modules:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                own.update(_sizes(tensor))
        counted = {
            storage: size
            for storage, size in sizes.items()
            if storage in self._made and storage not in self._counted and storage not in own
        }
        self._counted.update(counted)
        return LayerCost(
            name=layer.name,
            bytes=sum(counted.values()),
            kept=layer.kept,
            output_bytes=sum(_sizes(output).values()),
            time=layer.time,
        )


@functools.cache
def _effects(func: Any) -> tuple[bool, bool]:
    """Whether an operator returns tensors that it makes, and whether it writes what it returns: it
    does not where it returns views."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    aliases = [] if schema is None else [result.alias_info for result in schema.returns]
    makes = schema is None or any(alias is None for alias in aliases)
    return makes, makes or any(alias.is_write for alias in aliases)


def _sizes(value: object) -> dict[StorageWeakRef, int]:
    """The bytes of each storage under the tensors in a value."""
    return {
        StorageWeakRef(storage): storage.nbytes()
        for tensor in find_tensors(value)[0]
        for storage in _storages(tensor)
    }


def _storages(tensor: Tensor) -> Iterable[torch.UntypedStorage]:
    if hasattr(tensor, "__tensor_flatten__"):
        # A DTensor names its mesh, too.
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        parts = [part for part in inner if isinstance(part, Tensor)]
    elif tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    else:
        parts = [getattr(tensor, name)() for name in _SPARSE_PARTS.get(tensor.layout, ())]
    return itertools.chain.from_iterable(map(_storages, parts))
