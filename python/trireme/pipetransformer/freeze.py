"""Layers are frozen from the input on while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import FreezePoint
from trireme.pipetransformer.areas import FREEZE
from trireme.pipetransformer.layers import LayerEntry, Layers

Rule = str | Callable[[FreezePoint], int]


def freeze_schedule(layers: int, alpha: float, epochs: int) -> list[int]:
    """How many of ``layers`` layers are frozen in the epochs 0 to ``epochs`` - 1: in epoch T
    ``ceil(layers * (1 - (1 - alpha) ** T))``.

    Raises:
        ValueError: ``alpha`` is not between 0 and 1, or a number is below 0.
    """
    return _C.freeze_schedule(layers, alpha, epochs)


class Freeze:
    """Freezes the layers of a model from the input on while it trains, under any strategy.

    ::

        freeze = trireme.Freeze(model, optimizer=optimizer)
        for epoch in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                freeze.step()
                optimizer.step()
            freeze.advance()

    A frozen layer has no gradients: neither weight decay nor momentum moves it, its backward is
    left out where nothing in front of it is trained, and nothing of it crosses between ranks from
    the second step behind the change on.

    Every rank makes one and calls it alike. Make it behind what wraps or shards the model.

    Args:
        model: plain, wrapped or sharded; a ``Pipeline`` too.
        layers: modules of the model or their names, from the input on. A list is frozen at a time,
            such as the embedding and the first block. None for those of the Sequential that the
            model is, or of its longest list of layers of one class; of those a layer without
            parameters goes with the one in front of it. Of a pipeline on ranks names.
        alpha: The share of the layers still trained that one interval freezes, at most; between 0
            and 1.
        rule: "gradient": up to the layer whose gradient has the smallest norm, but no further than
            ``alpha`` says. "schedule": by ``alpha`` alone, as :func:`freeze_schedule`. Or a
            function of a :class:`FreezePoint` that returns how many layers are frozen.
        measure_every: Gradients are measured in the first step of an interval and in each step so
            many behind it.
        hold: Intervals at the beginning behind which nothing is frozen yet; the schedule counts
            from the end of them.
        eval_frozen: Whether frozen layers are in evaluation mode, also after ``model.train()``.
        optimizer: The one over the parameters, whose state of frozen ones is freed.

    Raises:
        ValueError, TypeError: on all ranks: options or layers that cannot be used, such as a
            parameter that a layer shares with another one or with what is no layer, an optimizer of
            other parameters; ranks that differ.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerEntry] | None = None,
        *,
        alpha: float = 1 / 3,
        rule: Rule = "gradient",
        measure_every: int = 16,
        hold: int = 0,
        eval_frozen: bool = True,
        optimizer: Optimizer | None = None,
    ) -> None:
        FREEZE.expect("alpha", alpha, (int, float), "a number", next_step="Pass say 1/3.")
        for name, number in (("measure_every", measure_every), ("hold", hold)):
            FREEZE.expect(name, number, int, "a whole number", next_step="Pass a number.")
        if not isinstance(rule, str) and not callable(rule):
            got = f"rule is {type(rule).__name__}, expected a name or a function"
            FREEZE.refuse(got, "Pass 'gradient' or 'schedule'.", kind=TypeError)
        self._evaluates = bool(eval_frozen)
        self._layers = Layers(model, layers, optimizer, evaluates=self._evaluates)
        self._course = _C.FreezeCourse(
            layers=self._layers.names,
            alpha=alpha,
            rule=rule if isinstance(rule, str) else "",
            choose=None if isinstance(rule, str) else rule,
            measure_every=measure_every,
            hold=hold,
            eval_frozen=self._evaluates,
            ranks=self._layers.ranks,
        )

    def step(self) -> None:
        """Measures gradients in some of the steps. Called after each backward, before clipping."""
        if self._course.begin_step():
            self._course.measure(self._layers.gradients(self.frozen))

    def advance(self) -> int:
        """Ends an interval, such as an epoch: freezes layers. Returns how many are frozen from now
        on, the same on all ranks.

        Where nothing outside of ``layers`` is trained, the last layer stays trained. Collective:
        one gather of a number, and with norms one all-reduce of a number per layer.

        Raises:
            ValueError: on all ranks, which then freeze nothing: they have called ``step``,
                ``advance`` or ``unfreeze`` at different times, or have loaded different states.
        """
        self._course.advance(self._layers.train_alone())
        self._follow()
        return self.frozen

    def unfreeze(self, stay: int = 0) -> None:
        """Trains layers again, so that the first ``stay`` stay frozen. The interval begins anew.

        Raises:
            ValueError: more than are frozen, or fewer than none.
        """
        FREEZE.expect("stay", stay, int, "a whole number", next_step="Pass how many stay frozen.")
        self._course.unfreeze(stay)
        self._follow()

    def _follow(self) -> None:
        self._layers.freeze(self.frozen)
        if self._evaluates:
            self._layers.evaluate(self.frozen)

    @property
    def frozen(self) -> int:
        """How many layers are frozen now."""
        return self._course.frozen

    @property
    def history(self) -> list[int]:
        """How many were frozen behind each ``advance()``."""
        return self._course.history

    def state_dict(self) -> dict[str, Any]:
        """Names of the layers, how many are frozen, and the history: the same on all ranks. What an
        interval that has not ended has measured is left out."""
        return {"layers": self._layers.names, "frozen": self.frozen, "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Freezes as many layers as when the state was saved, and goes on from there.

        Raises:
            ValueError: the state of other layers, or none.
        """
        missing = {"layers", "frozen", "history"} - state_dict.keys()
        if missing:
            got = f"got a state dict without {sorted(missing)}"
            FREEZE.refuse(got, "Load what the state_dict() of a Freeze returned.")
        self._course.load(*(state_dict[key] for key in ("layers", "frozen", "history")))
        self._follow()
