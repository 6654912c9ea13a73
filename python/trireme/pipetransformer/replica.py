"""What a rank computes of a step under a plan: a stage of a pipeline, or the whole model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trireme import _C
from trireme._C import Communicator, ElasticPlan
from trireme._core.loss_scale import LossScale
from trireme.activation_cache import ActivationCache, CachedPrefix
from trireme.ddp import DistributedDataParallel
from trireme.pipeline import Pipeline
from trireme.pipetransformer.areas import ELASTIC

Together = Callable[[], AbstractContextManager[None]]
"""Within it an exception of one rank is raised on all of them."""


@dataclass(frozen=True)
class Part:
    """What of a batch this rank's replica takes."""

    x: Any
    ids: Tensor | None
    target: Any


class Replica(Protocol):
    """One of the copies of the model, of which this rank is a part."""

    def is_for(self, frozen: int) -> bool:
        """Whether it is the one for so many frozen layers."""

    def backward(self, part: Part) -> Tensor:
        """Adds to the gradients of this rank's layers; returns the loss of the replica's rows."""

    def evaluate(self, part: Part) -> Tensor:
        """Returns that loss alone."""

    def norm_over_stages(self) -> Communicator:
        """The ranks that have its layers."""


class Prefix(nn.Module):
    """Frozen layers in front: cached, where ids come with the rows; without a graph."""

    def __init__(self, layers: Mapping[str, nn.Module], cache: ActivationCache | None) -> None:
        super().__init__()
        self._modules.update(layers)
        cached = CachedPrefix(layers.values(), cache) if cache is not None and layers else None
        self.__dict__["_cached"] = cached  # beside the layers, which have their names

    def forward(self, x: Any, ids: Tensor | None = None) -> Any:
        cached = self.__dict__["_cached"]
        if cached is not None and ids is not None:
            return cached(x, ids)
        with torch.no_grad():
            for layer in self.children():
                x = layer(x)
        return x


class WholeReplica:
    """All layers on each rank: DistributedDataParallel behind the frozen ones."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        frozen: int,
        loss: Callable[..., Any],
        cache: ActivationCache | None,
        group: dist.ProcessGroup | None,
        together: Together,
        scale: LossScale | None,
    ) -> None:
        names = list(layers)
        self._frozen = frozen
        self._front = Prefix({name: layers[name] for name in names[:frozen]}, cache)
        behind = OrderedDict((name, layers[name]) for name in names[frozen:])
        self._rest: nn.Module = nn.Sequential(behind)
        if group is not None:
            # All ranks have the values of one, and what an epoch freezes leaves the module.
            self._rest = DistributedDataParallel(self._rest, process_group=group, init_sync=False)
        self._loss = loss
        self._together = together
        self._scale = scale

    def is_for(self, frozen: int) -> bool:
        return self._frozen == frozen

    def backward(self, part: Part) -> Tensor:
        loss = self._forward(part)
        # As a tensor, so that a loss of few bits is multiplied in fp32.
        scaled = loss if self._scale is None else loss * torch.tensor(self._scale.value())
        scaled.backward()
        return loss.detach()

    def evaluate(self, part: Part) -> Tensor:
        with torch.no_grad():
            return self._forward(part)

    def norm_over_stages(self) -> Communicator:
        return _C.lone_communicator()

    def _forward(self, part: Part) -> Tensor:
        with self._together():  # a forward of DDP may broadcast buffers
            hidden = self._front(part.x, part.ids)
        with self._together():
            output = self._rest(hidden)
            given = () if part.target is None else (part.target,)
            loss = self._loss(output, *given)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                what = type(loss).__name__
                if isinstance(loss, Tensor):
                    what = f"tensor of sizes {list(loss.shape)}"
                got = f"loss= returned a {what}, expected a 0-dim tensor"
                ELASTIC.refuse(got, "Return the mean over the rows.", kind=TypeError)
        return loss


@dataclass(frozen=True)
class Staging:
    """How a pipeline is made."""

    plan: ElasticPlan
    mesh: DeviceMesh
    micro_batches: int
    schedule: str


class StagedReplica:
    """Some layers on each rank: a pipeline, and replicas of it."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        staging: Staging,
        *,
        frozen: int,
        loss: Callable[..., Any],
        cache: ActivationCache | None,
        scale: LossScale | None,
    ) -> None:
        names, balance = list(layers), list(staging.plan.balance)
        # Frozen layers of later ranks get what crosses, which has no ids.
        self._most_cached = balance[0] if cache is not None else 0
        self._cached = min(frozen, self._most_cached)
        dealt = OrderedDict((name, layers[name]) for name in names[self._cached :])
        if self._cached:
            front = Prefix({name: layers[name] for name in names[: self._cached]}, cache)
            dealt = OrderedDict([(_free_name(layers), front), *dealt.items()])
            balance[0] -= self._cached - 1
        self._pipe = Pipeline(
            nn.Sequential(dealt),
            staging.micro_batches,
            balance=balance,
            mesh=staging.mesh,
            schedule=staging.schedule,
            loss=loss,
        )
        if scale is not None:
            self._pipe.share_scale(scale)

    def is_for(self, frozen: int) -> bool:
        return self._cached == min(frozen, self._most_cached)  # the pipeline sees what is trained

    def backward(self, part: Part) -> Tensor:
        return self._pipe.step(*self._inputs(part), target=part.target)

    def evaluate(self, part: Part) -> Tensor:
        loss: Tensor = self._pipe.eval_step(*self._inputs(part), target=part.target)
        return loss

    def norm_over_stages(self) -> Communicator:
        return self._pipe.norm_over_stages()

    def _inputs(self, part: Part) -> tuple[Any, ...]:
        return (part.x, part.ids) if self._cached and part.ids is not None else (part.x,)


def _free_name(layers: Mapping[str, nn.Module]) -> str:
    """What frozen layers are called together."""
    name = "frozen"
    while name in layers:
        name += "_"
    return name
