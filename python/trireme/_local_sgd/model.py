"""The parameters that workers average, and this rank's parts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trireme._core.announced_writes import before_writing
from trireme._core.owners import local_of, optimizer_of, table_of
from trireme._core.plain_model import plain_model
from trireme._core.writing import writing_shards
from trireme._local_sgd import refuse


@runtime_checkable
class _Reshards(Protocol):
    """A module of fully_shard, ours or torch's."""

    def _get_fsdp_state(self) -> Any: ...
    def reshard(self) -> None: ...


def parameters_in(optimizer: Optimizer) -> list[torch.Tensor]:
    """Lists the parameters of all groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


class RoundModel:
    """Parameters that train, or that the optimizer steps, in the order of the model.

    Raises:
        ValueError: the optimizer is over other parameters; a table of a server keeps one.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.shown = model
        self.plain = plain_model(model)
        self._reshard()
        stepped = {id(param) for param in parameters_in(optimizer)}
        named = dict(self.plain.named_parameters())
        expect_parameters_of(named.values(), optimizer, "optimizer")
        self.named = {
            name: param
            for name, param in named.items()
            if (param.requires_grad or id(param) in stepped)
            and (param.is_floating_point() or param.is_complex())
        }
        self._left_out = [
            name
            for name, param in named.items()
            if not param.requires_grad and name not in self.named
        ]
        self.names, self.parameters = list(self.named), list(self.named.values())
        if not self.parameters:
            refuse("got a model without parameters to train", "Pass the model to be trained.")
        for name, param in self.named.items():
            if table_of(param) is not None:
                refuse(
                    f"got '{name}', which a parameter server keeps, expected one of this rank",
                    "Leave that module out of the rounds.",
                )
            if param.is_meta:
                refuse(
                    f"got '{name}' on the meta device, expected memory",
                    "Call model.to_empty(device='cpu') before.",
                )

    def bytes(self) -> list[int]:
        """Of whole parameters."""
        return [param.numel() * param.element_size() for param in self.parameters]

    def anchor_for(self, index: int) -> torch.Tensor:
        """Makes memory for what workers have agreed on last, of this rank's part."""
        param = self.parameters[index]
        like = param if isinstance(param, DTensor) else part_of(param)
        return torch.empty_like(like.detach())

    def values(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Returns this rank's parts, in place. Raises what ``expect_same`` does."""
        self._reshard()
        self.expect_same()
        return [part_of(self.parameters[index]).detach() for index in indices]

    def expect_same(self) -> None:
        """Raises ValueError if a parameter was replaced, or one that was left out trains now."""
        present = dict(self.plain.named_parameters())
        for name, param in self.named.items():
            if present.get(name) is not param:
                refuse(
                    f"got '{name}', which was replaced, expected the parameter of the begin",
                    "Make the rounds anew after a parameter was replaced.",
                )
        for name in self._left_out:
            if name in present and present[name].requires_grad:
                refuse(
                    f"got '{name}', which was frozen when the rounds were made, expected it to "
                    "stay so",
                    "Make the rounds anew after a parameter was unfrozen.",
                )

    def write(self, call: Callable[[], None]) -> None:
        """Calls where this rank may write its parts. Collective over the ranks of the worker."""
        before_writing()
        with writing_shards(self.plain), torch.no_grad():
            call()

    def _reshard(self) -> None:
        for module in self.plain.modules():
            if isinstance(module, _Reshards):
                module.reshard()


def part_of(param: torch.Tensor) -> torch.Tensor:
    """Returns what this rank keeps of a parameter, in its memory."""
    sharding = optimizer_of(param)
    return local_of(param) if sharding is None else sharding._shards[param]


def expect_parameters_of(
    known: Iterable[torch.Tensor], optimizer: Optimizer, argument: str
) -> None:
    """Raises ValueError if ``optimizer`` has others."""
    ids = {id(param) for param in known}
    for param in parameters_in(optimizer):
        if id(param) not in ids:
            refuse(
                f"got {argument} over other parameters, one of shape {tuple(param.shape)}, "
                "expected those of the model",
                "Pass the optimizer that was made for this model.",
            )
