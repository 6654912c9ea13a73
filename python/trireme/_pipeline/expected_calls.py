"""What a pipeline's first layer, its other layers and its loss can be called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from trireme._pipeline import refuse
from trireme._pipeline.stages import keywords_of


class ExpectedCalls:
    """Refuses calls that layers or the loss would refuse, before anything runs."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Callable[..., Any] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._keywords = {keyword for layer in layers for keyword in keywords_of(layer)}
        self._first = _signature(layers[0])
        self.input_names = _positional_names(self._first)
        self._loss = loss
        self._group = group

    def check(
        self, name: str, inputs: tuple[Any, ...], target: Any, kwargs: dict[str, Any]
    ) -> None:
        """Raises TypeError or ValueError for what a call of ``name`` was given."""
        unknown = sorted(set(kwargs) - self._keywords)
        if unknown:
            got = f"got '{unknown[0]}', expected keywords that the forward of some layer names"
            refuse(got, "Name it there, or leave it out.", self._group, kind=TypeError)
        if self._first is not None:
            of_first = {
                key: value for key, value in kwargs.items() if key in self._first.parameters
            }
            if target is not None and "target" in self._first.parameters:
                of_first["target"] = target
            try:
                self._first.bind(*inputs, **of_first)
            except TypeError as error:
                got = f"got inputs that the first layer does not take: {error}"
                next_step = "Pass what it takes; a target goes into target= alone."
                refuse(got, next_step, self._group, kind=TypeError)
        if target is not None and self._loss is None and "target" not in self._keywords:
            got = "got a target and a pipeline without a loss"
            refuse(got, "Pass loss= to trireme.Pipeline.", self._group)
        if name == "step" or target is not None:
            self._check_loss(target)

    def _check_loss(self, target: Any) -> None:
        signature = _signature(self._loss) if self._loss is not None else None
        if signature is None:
            return
        try:
            signature.bind(*((None,) if target is None else (None, None)))
        except TypeError:
            if target is None:
                refuse("got no target, which loss= takes", "Pass target=.", self._group)
            refuse("got a target, and a loss that takes none", "Leave it out.", self._group)


def _positional_names(signature: inspect.Signature | None) -> list[str]:
    """Returns the names of what a layer takes without a keyword."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if signature is None:
        return []
    return [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]


def _signature(called: Any) -> inspect.Signature | None:
    function = called.forward if isinstance(called, nn.Module) else called
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None
