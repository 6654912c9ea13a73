"""Modules that live in another process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from trireme._C import RemoteModuleHandle
from trireme._core.optimizer_specs import OptimizerSpec
from trireme.remote.areas import AREA
from trireme.remote.endpoint import expect_name, names, running, seconds_of
from trireme.remote.functions import name_of


class RemoteParameter:
    """Describes a parameter of a module that is elsewhere."""

    def __init__(
        self, core: RemoteModuleHandle, name: str, shape: list[int], dtype: torch.dtype,
        requires_grad: bool,
    ) -> None:  # fmt: skip
        self._core = core
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.requires_grad = requires_grad

    def to_here(self) -> Tensor:
        """Returns a copy of its values."""
        return self._core.fetch(self.name)

    def __repr__(self) -> str:
        return f"RemoteParameter({self.name!r}, {tuple(self.shape)}, {self.dtype})"


class Module(nn.Module):
    """A module that lives in another process, or in this one behind a call.

    Its outputs have a graph: ``loss.backward()`` goes on at the owner. Gradients of inputs come
    back; those of parameters stay at the owner, for this caller alone, until :meth:`zero_grad`, and
    :meth:`step` applies them under the owner's lock. So callers of one module never mix. A step
    disturbs no graph in flight: its backward uses the parameters of its own forward. A forward, a
    backward and a step are a message there and one back each. torch's equivalent is
    ``RemoteModule`` under ``dist_autograd.context``, with ``DistributedOptimizer``.

    A graph is used once: a second backward raises RuntimeError, and so does ``create_graph=True``.
    It has no parameters here: its training mode travels with each forward.

    Args:
        to: one of :func:`names`.
        factory: a function marked by :func:`function`, or the name of one, which returns a
            ``torch.nn.Module`` in CPU memory. It may return one that it returned before, whose
            callers share parameters.
        args, kwargs: what the factory is called with.
        optimizer: ``ps.SGD``, ``ps.Adam``, ``ps.AdamW``, ``ps.Adagrad`` or ``ps.Sum`` with options.
            Its state belongs to this object.
        timeout: seconds that each call waits; 30 minutes if there is none.

    Raises: what :func:`call` does; an exception of the module is raised by the call, or the
        backward, that it ended.
    """

    sends_gradients = True

    def __init__(
        self, to: str, factory: Callable[..., nn.Module] | str, /, *args: Any,
        optimizer: OptimizerSpec | None = None, timeout: float | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            shown = getattr(optimizer, "__qualname__", type(optimizer).__name__)
            got = f"got {shown} as optimizer, expected one of trireme.ps"
            AREA.refuse(got, "Pass ps.SGD(0.05), for example.", kind=TypeError)
        expect_name(to)
        self._is_strict = False  # while load_state_dict() of this very module runs
        self._factory = name_of(factory)
        self._core = running().module(
            to, self._factory, args, kwargs, optimizer, seconds_of(timeout)
        )

    @property
    def owner(self) -> str:
        """The name of the process that has the module."""
        return names()[self._core.owner]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._core.forward(args, kwargs, self.training)

    def step(self) -> None:
        """Applies the gradients of this caller, by its optimizer.

        Raises:
            RuntimeError: there is no optimizer.
        """
        self._core.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this caller."""
        if not set_to_none:
            AREA.refuse("got set_to_none=False", "Leave it out: gradients are dropped.")
        self._core.zero_grad()

    def remote_parameters(self) -> list[RemoteParameter]:
        """Returns what parameters there are, without their values."""
        return [RemoteParameter(self._core, *parameter) for parameter in self._core.parameters()]

    def extra_repr(self) -> str:
        return f"{self._factory!r} at {self.owner!r}"

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Writes values at the owner. Where ``strict``, nothing is written unless all keys fit."""
        self._is_strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._is_strict = False

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, value in self._core.state().items():
            destination[prefix + name] = value

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any],
        strict: bool, missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        # torch's `strict` is always true here: it drops what it has heard in vain afterwards.
        if local_metadata.get("assign_to_params_buffers", False):
            AREA.refuse("got assign=True", "Leave it out: the values travel to their owner.")
        given = {k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)}
        own = self._core.state()
        missing = [prefix + name for name in own if name not in given]
        unexpected = [prefix + name for name in given if name not in own]
        fitting = {name: value for name, value in given.items() if name in own}
        misfits = (_misfit(prefix + name, own[name], value) for name, value in fitting.items())
        errors = [text for text in misfits if text]
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += errors
        if not errors and not (self._is_strict and (missing or unexpected)):
            self._core.load(fitting)

    def _tensors_elsewhere(self) -> dict[str, Tensor]:
        return self._core.state()

    def _put_elsewhere(self, tensors: dict[str, Tensor]) -> None:
        self._core.load(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        got = "got a remote.Module to copy or to pickle"
        AREA.refuse(got, "Make another one, and load its state dict.", kind=TypeError)


def _misfit(name: str, own: Tensor, value: Any) -> str:
    """Says in torch's words what keeps a value from being loaded; "" for nothing."""
    if not isinstance(value, Tensor):
        return f"While copying the parameter named {name!r}, got {type(value).__name__}."
    if value.shape != own.shape:
        return (
            f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {own.shape}."
        )
    return ""
