"""What activations take on a rank, counted from one forward: docs/activation_memory.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trireme import _C
from trireme._activation import refuse
from trireme._activation.activation_costs import LayerCost, measure_activations
from trireme._activation.checkpoint_plan import checkpoint_plan, plan_in_segments, plan_of

WAYS = ("never", "sqrt", "auto")


@dataclass(frozen=True)
class ActivationEstimate:
    """What :func:`estimate_activations` says."""

    checkpoint: str
    bytes: int
    """What is held at the fullest moment, gradients on their way not counted."""
    where: str
    """The list of layers that are checkpointed, as the model calls it; "" for the model itself."""
    layers: int
    recomputed: int
    extra_share: float
    """The time of what is computed twice, in proportion to a forward of the model."""


@dataclass(frozen=True)
class MeasuredModel:
    """A forward of a model with a list of repeated layers; what is outside of it always stays."""

    where: str
    layers: Sequence[LayerCost]
    outside: LayerCost

    def estimate(self, checkpoint: str, budget_bytes: int | None = None) -> ActivationEstimate:
        """Says what checkpointing its layers leaves, as :func:`estimate_activations` does."""
        self._check(checkpoint, budget_bytes)
        count = len(self.layers)
        stays = self.outside.bytes + self.outside.output_bytes
        if checkpoint == "auto" and budget_bytes is not None:
            # It counts like a layer in front of the others, whose recomputation frees nothing.
            first = LayerCost("", bytes=stays, kept=stays, output_bytes=0, time=0.0)
            plan = checkpoint_plan([first, *self.layers], budget_bytes)
            held, recomputed = plan.bytes, sum(plan.recompute[1:])
        elif checkpoint == "sqrt":
            segments = _C.square_root_segments(count)
            plan = plan_in_segments(self.layers, segments)
            held, recomputed = stays + plan.bytes, (segments - 1) * (count // segments)
        else:
            plan = plan_of(self.layers, [False] * count)
            held, recomputed = stays + plan.bytes, 0
        forward = self.outside.time + sum(layer.time for layer in self.layers)
        return ActivationEstimate(
            checkpoint=checkpoint,
            bytes=held,
            where=self.where,
            layers=count,
            recomputed=recomputed,
            extra_share=plan.extra_time / forward if forward else 0.0,
        )

    def _check(self, checkpoint: str, budget_bytes: int | None) -> None:
        if checkpoint not in WAYS:
            got = f"got checkpoint={checkpoint!r}, expected one of {', '.join(WAYS)}"
            refuse(got, "Say for example 'sqrt'.")
        if (checkpoint == "auto") != (budget_bytes is not None):
            with_budget = "without" if budget_bytes is None else "with"
            got = f"got checkpoint={checkpoint!r} {with_budget} a budget, expected one with 'auto'"
            refuse(got, "Say 'auto' and how many bytes activations may take.")
        if checkpoint != "never" and not self.layers:
            got = "got a model without repeated layers, expected a ModuleList or Sequential of them"
            refuse(got, "Use measure_activations() and checkpoint_plan() on layers of your choice.")


def estimate_activations(
    module: nn.Module,
    *inputs: Any,
    checkpoint: str = "never",
    budget_bytes: int | None = None,
    **kwargs: Any,
) -> ActivationEstimate:
    """Says what a rank keeps of a forward until its backward, from one forward that records it.

    The module may hold fake tensors (torch's ``FakeTensorMode``): then nothing is allocated. A loss
    that is computed outside of the module is not counted; what the module returns is.

    Args:
        module: Called with ``inputs`` and ``kwargs``. Its layers are those of the
            ``torch.nn.Sequential`` that it is, or of the largest list of layers of one class in it.
        checkpoint: "never"; "sqrt" or "auto": as by ``checkpoint_sequential()`` over these layers.
        budget_bytes: With "auto": what all activations may take, also those of other layers.

    Raises:
        ValueError: No such way, no such layers, a budget that no choice fits.
    """
    return measure_model(module, *inputs, **kwargs).estimate(checkpoint, budget_bytes)


def measure_model(module: nn.Module, *inputs: Any, **kwargs: Any) -> MeasuredModel:
    """Measures the repeated layers of a model, and what is outside of them."""
    where, layers = repeated_layers(module)
    *costs, outside = measure_activations(module, *inputs, layers=layers, **kwargs)
    return MeasuredModel(where, costs, outside)


def repeated_layers(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """The list of layers of one class that has most parameters, and its name; a Sequential is such
    a list, whatever its layers are."""
    if isinstance(module, nn.Sequential):
        return "", list(module)
    found: tuple[str, list[nn.Module]] = "", []
    most = -1
    for name, inner in module.named_modules():
        layers = list(inner) if isinstance(inner, nn.ModuleList | nn.Sequential) else []
        numel = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        if len(layers) > 1 and len(set(map(type, layers))) == 1 and numel > most:
            found, most = (name, layers), numel
    return found
