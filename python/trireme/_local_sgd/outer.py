"""Outer optimizers, which step what workers have agreed on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from trireme._local_sgd import refuse
from trireme._local_sgd.model import RoundModel, expect_parameters_of, parameters_in


class OuterOptimizers:
    """One over all parameters, or one for each fragment.

    From ``point_to`` to ``give_back`` they step the anchors in place of the parameters, with the
    state that they have, and with any that they load.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.targets: dict[torch.Tensor, torch.Tensor] = {}
        """What they step in place of each parameter."""
        self._given: list[list[list[torch.Tensor]]] = []

    def point_to(self, anchors: dict[torch.Tensor, torch.Tensor]) -> None:
        """``anchors`` by parameter. One without is not stepped."""
        if self._given:
            return
        for optimizer in self.optimizers:
            self._given.append([group["params"] for group in optimizer.param_groups])
            for group, given in zip(optimizer.param_groups, self._given[-1], strict=True):
                for param in given:
                    self.targets.setdefault(param, anchors.get(param, torch.empty(0)))
                group["params"] = [self.targets[param] for param in given]
                _move_states(optimizer, given, group["params"])

    def give_back(self) -> None:
        """They are over the parameters again."""
        before, self._given = self._given, []
        for optimizer, groups in zip(self.optimizers, before, strict=False):
            for group, given in zip(optimizer.param_groups, groups, strict=False):
                _move_states(optimizer, group["params"], given)
                group["params"] = given

    def step(
        self, fragment: int, anchors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Steps some anchors, of a fragment, by the gradients of this rank's parts."""
        for anchor, gradient in zip(anchors, gradients, strict=True):
            anchor.grad = _as_of(anchor, gradient)
        optimizers = self.optimizers
        optimizers[fragment if len(optimizers) > 1 else 0].step()
        for anchor in anchors:
            anchor.grad = None


def outer_optimizers(
    given: Optimizer | Sequence[Optimizer] | None,
    model: RoundModel,
    fragments: Sequence[Sequence[int]],
) -> OuterOptimizers:
    """Checks them; makes SGD (0.7, Nesterov 0.9) for None.

    Raises:
        TypeError, ValueError: they are none, or over other parameters.
    """
    if given is None:
        made = SGD(model.parameters, lr=0.7, momentum=0.9, nesterov=True)
        return OuterOptimizers([made])
    optimizers = [given] if isinstance(given, Optimizer) else list(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            refuse(
                f"got {type(optimizer).__name__} as outer_optimizer, expected a "
                "torch.optim.Optimizer",
                "Pass an optimizer over the model's parameters.",
                kind=TypeError,
            )
    if len(optimizers) not in (1, len(fragments)):
        refuse(
            f"got {len(optimizers)} optimizers as outer_optimizer, expected one or "
            f"{len(fragments)}, one per fragment",
            "Pass one over all parameters, or one for each fragment.",
        )
    every = range(len(model.parameters))
    for number, optimizer in enumerate(optimizers):
        expect_parameters_of(model.plain.parameters(), optimizer, "outer_optimizer")
        has = {id(param) for param in parameters_in(optimizer)}
        for index in fragments[number] if len(optimizers) > 1 else every:
            if id(model.parameters[index]) not in has:
                refuse(
                    f"got outer_optimizer without '{model.names[index]}', expected one over all "
                    "parameters that it is to step",
                    "Make it over model.parameters(), or over those of its fragment.",
                )
    return OuterOptimizers(optimizers)


def _move_states(
    optimizer: Optimizer, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> None:
    for old, new in zip(before, after, strict=True):
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _as_of(anchor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(anchor, DTensor):
        return local
    return DTensor.from_local(
        local,
        anchor.device_mesh,
        anchor.placements,
        run_check=False,
        shape=anchor.shape,
        stride=anchor.stride(),
    )
