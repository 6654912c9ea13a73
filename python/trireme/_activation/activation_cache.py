"""Outputs of frozen layers, kept for each sample in the memory of the host."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from trireme import _C
from trireme._C import CacheStats
from trireme._core.errors import Area
from trireme._core.group_communicator import communicator_of

AREA = Area("cache")


class ActivationCache:
    """Memory for outputs of frozen layers, one run per host for all ranks there.

    Collective. Entries have one size. Samples whose ids lie below the number of entries that fit
    are kept, the others are computed each time: an epoch visits each sample once, so that dropping
    the oldest entry would drop each before its use.

    Args:
        samples: How many the data set has; ids go from 0 to that number, not included.
        bytes: What the entries of a host may take, all its ranks together.
        group: The ranks; the default group if None, or this process alone without one. Ranks of a
            host share memory under the backend ``trireme``.

    Raises:
        ValueError, TypeError: numbers below 1, or others than on other ranks; ranks that share no
            memory; no such memory.
    """

    def __init__(self, samples: int, bytes: int, group: dist.ProcessGroup | None = None) -> None:
        for name, number in (("samples", samples), ("bytes", bytes)):
            AREA.expect(name, number, int, "a whole number", next_step="Pass a number.")
        self.group: dist.ProcessGroup | None = None
        if group is not None or dist.is_initialized():
            self.group = AREA.expect_group(group, "Make the cache on the ranks of the group only.")
        communicator = None if self.group is None else communicator_of(self.group)
        self._core = _C.ActivationCache(samples, bytes, communicator)

    def stats(self) -> CacheStats:
        """What this rank has had since the cache was made: ``hits`` and ``misses`` in rows,
        ``bytes`` that it has stored, ``depth``, the most layers that rows have gone through."""
        return self._core.stats()

    @property
    def samples(self) -> int:
        return self._core.samples

    @property
    def entries(self) -> int:
        """How many samples have room; 0 before the first row has told its size."""
        return self._core.entries

    @property
    def is_off(self) -> bool:
        """Whether another input has come under an id, which ends the use of the cache."""
        return self._core.is_off

    def __reduce__(self) -> NoReturn:
        got = "got a copy or a pickle of an ActivationCache, whose memory belongs to its ranks"
        AREA.refuse(got, "Make one on each rank.", self.group, kind=TypeError)


class CachedPrefix(nn.Module):
    """Frozen layers in front of a model, whose outputs are kept by an :class:`ActivationCache`.

    ::

        prefix = trireme.CachedPrefix(model.blocks[:frozen], cache)
        loss = loss_of(ddp(prefix(x, ids)), y)             # in front of the wrapped rest
        pipe.step(x, ids, target=y)                        # or the first layer of a Pipeline

    ``forward(x, ids)``: ``ids`` has the number of each row's sample. Rows that are there are
    copied, others are computed without a graph and stored. A row is taken only if its input, the
    layers, their parameters and buffers and autocast are those with which it was stored. A prefix
    of more layers over the same cache goes on from what is there: only the new layers run.

    Writes to parameters through ``.data`` leave no trace, so that they are not noticed.

    Args:
        layers: Modules, of which each takes what the one in front of it returns: one tensor, whose
            rows are those of the input. Their parameters are frozen.
        cache: May be that of a prefix of fewer layers, the first of these.
        always: Whether rows are stored whatever it costs to read them. Else they are stored from
            the eighth call on only while a timed read costs less than the timed layers.

    Raises:
        ValueError, TypeError: out of ``forward``: ids that are missing or outside; a parameter that
            is trained or sharded; a layer in training mode that depends on it, draws random numbers
            or changes its buffers; rows of another size than before.
    """

    def __init__(
        self, layers: Iterable[nn.Module], cache: ActivationCache, *, always: bool = False
    ) -> None:
        super().__init__()
        if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential | nn.ModuleList):
            got = f"got a {type(layers).__name__} as layers, expected a list of modules"
            AREA.refuse(got, "Put it in a list.", kind=TypeError)
        given = list(layers)
        for layer in given:
            AREA.expect_module(layer)
        if not isinstance(cache, ActivationCache):
            got = f"got {type(cache).__name__} as cache, expected an ActivationCache"
            AREA.refuse(got, "Make one for the samples of the data set.", kind=TypeError)
        self.layers = nn.ModuleList(given)
        self.cache = cache
        self._same: set[type[nn.Module]] = set()
        self._outputs = _C.PrefixCache(cache._core, list(map(_text_of, given)), always)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Returns the outputs of the layers, without a graph."""
        if not isinstance(x, Tensor):
            got = f"got {type(x).__name__} as input, expected a tensor"
            self._refuse(got, "Cache layers that take one tensor.", TypeError)
        if not isinstance(ids, Tensor):
            got = f"got {type(ids).__name__} as ids, expected a tensor with an id for each row"
            self._refuse(got, "Have the data set return the number of each sample.", TypeError)
        return self._outputs.forward(x, ids, _Layers(self.layers, self._same, self.cache.group))

    def _refuse(self, got: str, next_step: str, kind: type[Exception] = ValueError) -> NoReturn:
        AREA.refuse(got, next_step, self.cache.group, kind=kind)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a prefix in one call, for the C++ core."""

    modules: nn.ModuleList
    same_in_both_modes: set[type[nn.Module]]
    """Classes that are known not to depend on the training mode. The core asks
    ``expect_evaluation`` where others are in it."""
    group: dist.ProcessGroup | None

    def run(self, first: int, x: Tensor) -> Tensor:
        value: Any = x
        for layer in list(self.modules)[first:]:
            value = layer(value)
        if not isinstance(value, Tensor):
            got = f"got {type(value).__name__} from the layers, expected a tensor"
            next_step = "Cache layers that return one tensor."
            AREA.refuse(got, next_step, self.group, kind=TypeError)
        return value

    def named(self) -> list[tuple[int, str, Tensor, bool]]:
        """Layer, name and tensor of each parameter and buffer, and whether it is a parameter."""
        found: list[tuple[int, str, Tensor, bool]] = []
        for number, layer in enumerate(self.modules):
            prefix = f"layers.{number}"
            for name, parameter in layer.named_parameters(prefix, remove_duplicate=False):
                if hasattr(parameter, "placements"):
                    got = f"got parameter '{name}' that is sharded, expected layers that are whole"
                    AREA.refuse(got, "Leave the prefix out of fully_shard.", self.group)
                found.append((number, name, parameter, True))
            for name, buffer in layer.named_buffers(prefix, remove_duplicate=False):
                found.append((number, name, buffer, False))
        return found

    def expect_evaluation(self) -> None:
        for name, module in self.modules.named_modules(prefix="layers"):
            if module.training and _depends_on_mode(module):
                got = f"got {name!r}, a {type(module).__name__} in training mode, expected "
                next_step = (
                    "Call eval() on the layers of the prefix, or freeze them with trireme.Freeze."
                )
                AREA.refuse(f"{got}evaluation mode", next_step, self.group)
            if not isinstance(module, _MODAL):
                self.same_in_both_modes.add(type(module))


_MODAL = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention, _NormBase, nn.RReLU)


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether a module of torch does something else in training mode. What else draws random
    numbers, or changes a buffer, is found when it runs."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, _NormBase):
        return isinstance(module, _BatchNorm) or module.track_running_stats
    return isinstance(module, _MODAL)


def _text_of(layer: nn.Module) -> str:
    """Tells layers apart that have the same parameters: by their classes and what is written in
    them. Addresses in it would differ between ranks."""
    said = [repr(layer)]
    for name, module in layer.named_modules():
        kind = type(module)
        simple = {
            key: value
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str) and key != "training"
        }
        said.append(f"{name}: {kind.__module__}.{kind.__qualname__} {simple}")
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(said))
