"""What a training function needs to go on: kept in memory, restored, and taken from rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer

from trireme.horovod.elastic.sampler import ElasticSampler
from trireme.horovod.errors import refuse
from trireme.horovod.objects import broadcast_object, broadcast_value
from trireme.horovod.process_sets import global_process_set
from trireme.horovod.state import broadcast_optimizer_state, broadcast_parameters

_ROOT = 0


class State:
    """What ``hvd.elastic.run`` keeps. A subclass says how: save, restore, sync."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Adds functions that are called, in this order, after a state was restored: to set a
        learning rate anew, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls :meth:`reset` and the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Makes anew what depends on the ranks; may be overridden."""

    def commit(self) -> None:
        """Saves the state, to go on from here after a failure. All ranks call it at one step."""
        self.save()

    def check_host_updates(self) -> None:
        """Returns: ranks neither come nor go without a restart of the job."""

    def save(self) -> None:
        """Copies the state in this rank's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Takes what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes the state of rank 0, and saves it. All ranks call it."""
        raise NotImplementedError


class ObjectState(State):
    """Values of the kinds that hvd.broadcast_object() sends, as attributes.

    ``ObjectState(epoch=0, batch=0)`` has ``state.epoch``, which may be set.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._check_names(values)
        self._names = tuple(values)
        self._saved: dict[str, Any] = {}
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self._take_from_root()
        self.save()

    def _take_from_root(self) -> None:
        terms = [("names of values", ", ".join(sorted(self._all_names())))]
        values, kind = self._values(), "sync of a state"
        self._set(broadcast_value(kind, values, _ROOT, None, global_process_set, terms))

    def _check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if hasattr(type(self), name) or name.startswith("_"):
                refuse(f"got a value called {name}, which a state has", "Give it another name.")

    def _all_names(self) -> Iterable[str]:
        return self._names

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A model, an optimizer, samplers, schedulers and plain values.

    ``TorchState(model=model, optimizer=optimizer, epoch=0)`` has them as attributes. What has
    ``state_dict()`` and ``load_state_dict()`` is saved by these.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer, **values}
        self._parts: dict[str, _Part] = {}
        parts = {name: one for name, one in given.items() if _is_part(one)}
        plain = {name: one for name, one in values.items() if name not in parts}
        for name, one in (("model", model), ("optimizer", optimizer)):
            if one is not None and name not in parts:
                got = f"got {type(one).__name__} as {name}, expected one with a state_dict()"
                refuse(got, "Pass it under another name.", kind=TypeError)
            if one is None:
                object.__setattr__(self, name, None)
        super().__init__(**plain)
        self._check_names(parts)
        for name, one in parts.items():
            setattr(self, name, one)

    def __setattr__(self, name: str, value: Any) -> None:
        """Saves a model, an optimizer or the like that takes the place of another one."""
        object.__setattr__(self, name, value)
        if not name.startswith("_") and _is_part(value):
            self._parts[name] = _part_of(value)
            self._parts[name].save()

    def save(self) -> None:
        for part in self._parts.values():
            part.save()
        super().save()

    def restore(self) -> None:
        for part in self._parts.values():
            part.restore()
        super().restore()

    def _take_from_root(self) -> None:
        super()._take_from_root()
        model = getattr(self, "model", None)
        for name in sorted(self._parts):
            self._parts[name].sync(model if isinstance(model, nn.Module) else None)

    def _all_names(self) -> Iterable[str]:
        return (*super()._all_names(), *self._parts)

    def reset(self) -> None:
        for part in self._parts.values():
            part.reset()


# --- parts ---------------------------------------------------------------------------------------


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def _is_part(value: Any) -> bool:
    is_type = isinstance(value, type)
    return not is_type and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _part_of(value: Any) -> _Part:
    if isinstance(value, nn.Module):
        return _Module(value)
    if isinstance(value, Optimizer):
        return _Optimizer(value)
    return _Part(value)


class _Part:
    """What has a state_dict()."""

    def __init__(self, value: _Stateful) -> None:
        self.value = value
        self.saved: dict[str, Any] = {}

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self, model: nn.Module | None) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), _ROOT))

    def reset(self) -> None:
        if isinstance(self.value, ElasticSampler):
            self.value.reset()


class _Module(_Part):
    def sync(self, model: nn.Module | None) -> None:
        state = self.value.state_dict()
        tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
        others = {key: one for key, one in state.items() if key not in tensors}
        broadcast_parameters(tensors, _ROOT)
        others = broadcast_object(others, _ROOT)
        if others:  # what modules add by get_extra_state()
            self.value.load_state_dict({**tensors, **others})


class _Optimizer(_Part):
    def sync(self, model: nn.Module | None) -> None:
        broadcast_optimizer_state(cast(Optimizer, self.value), _ROOT, model)
