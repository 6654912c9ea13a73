"""What LocalSGD and DiLoCo have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trireme import _C
from trireme._C import RoundOptions
from trireme._core.compression import Compression
from trireme._core.errors import text_of
from trireme._core.held_rounds import HeldRounds
from trireme._core.owners import local_of
from trireme._local_sgd import AREA, refuse
from trireme._local_sgd.model import RoundModel
from trireme._local_sgd.outer import OuterOptimizers
from trireme._local_sgd.workers import find_workers

Across = dist.ProcessGroup | DeviceMesh | None


class Rounds:
    """Steps of one worker between averages of all; see LocalSGD and DiLoCo."""

    def __init__(
        self,
        model: RoundModel,
        optimizer: Optimizer,
        options: RoundOptions,
        fragments: Sequence[Sequence[int]],
        outer: OuterOptimizers,
        across: Across,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._outer = outer
        self._fragments = fragments
        self._hook: RemovableHandle | None = None
        workers = find_workers(model, across)
        self._workers = workers
        senders = [0] * len(model.parameters)
        if workers.have_all and workers.inside is not None:
            senders = _C.deal_by_bytes(model.bytes(), workers.inside.size())
        mine = 0 if workers.inside is None else workers.inside.rank()
        self._anchors = [
            model.anchor_for(index) if not workers.have_all or sender == mine else None
            for index, sender in enumerate(senders)
        ]
        held = [None if anchor is None else local_of(anchor) for anchor in self._anchors]
        held = [None if part is None or part.numel() == 0 else part for part in held]
        self._core = _C.Rounds(
            options=options,
            parameters=list(zip(model.names, model.parameters, held, senders, strict=True)),
            fragments=fragments,
            ranks=workers.ranks,
            place=workers.place,
            values=model.values,
            write=model.write,
            step_outer=partial(_step_outer, outer, self._anchors),  # knows nothing of the core
        )

    def set_weight(self, weight: float) -> None:
        """Sets the share of this worker, on all its ranks, in the next average to leave, alone.

        0: it counts for nothing, and goes on from what the others have; if all workers have 0,
        nothing moves.

        Raises:
            ValueError: it is below 0.
        """
        self._core.set_weight(weight)

    def __enter__(self) -> Any:
        """Opens the rounds: from now on each step of the optimizer counts. Collective.

        Raises:
            ValueError: a parameter is in other open rounds.
        """
        if self._hook is not None:
            refuse("got rounds that are open already", "Open them once, by one `with`.")
        self._point_outer()
        self._core.begin()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """Closes them. An exception that leaves the block is what other workers raise with.

        Raises:
            ValueError: a parameter was replaced, which no average has seen.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        if error is not None:
            self._core.abandon(f"{type(error).__name__}: {text_of(error)}")
        try:
            self._core.end()
            if error is None:
                self._model.expect_same()
        finally:
            self._outer.give_back()

    def _held(self) -> HeldRounds:
        self._point_outer()
        return HeldRounds(
            self._core,
            self._model.plain,
            self._optimizer,
            self._model.parameters,
            self._outer.optimizers,
            self._outer.targets,
        )

    def _after_step(self, *_: Any) -> None:
        self._core.after_step()

    def _point_outer(self) -> None:
        pairs = zip(self._model.parameters, self._anchors, strict=True)
        self._outer.point_to({param: it for param, it in pairs if it is not None})


def _step_outer(
    outer: OuterOptimizers,
    all_anchors: Sequence[torch.Tensor | None],
    fragment: int,
    indices: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> None:
    anchors = [all_anchors[index] for index in indices]
    outer.step(fragment, [it for it in anchors if it is not None], gradients)


def round_options(compression: Compression | None, **given: Any) -> RoundOptions:
    """Raises TypeError and ValueError, naming the argument, for what cannot be."""
    if compression is not None and not isinstance(compression, Compression):
        got = f"got {type(compression).__name__} as compression, expected a method of"
        step = "Pass a value such as trireme.compression.Int8()."
        refuse(f"{got} trireme.compression", step, kind=TypeError)
    for name, value in given.items():
        kinds = (int, float) if name == "fragment_update_alpha" else int
        if name != "has_outer_step":
            AREA.expect(name, value, kinds, "a number", next_step="Count it in steps.")
    core = None if compression is None else compression._core()
    return RoundOptions(compression=core, **given)


def check_model(model: object, optimizer: object) -> None:
    """Raises TypeError for what is no model or optimizer."""
    AREA.expect_module(model)
    if not isinstance(optimizer, Optimizer):
        got = f"got {type(optimizer).__name__} as optimizer, expected a torch.optim.Optimizer"
        refuse(got, "Pass the optimizer that trains the model.", kind=TypeError)


def fragments_by_modules(
    modules: Sequence[nn.Module], parameters: Mapping[str, torch.Tensor]
) -> list[list[int]]:
    """Lists the parameters of each module.

    Raises:
        ValueError: a parameter is not in one of them alone.
    """
    inside = [{id(param) for param in module.parameters()} for module in modules]
    for name, param in parameters.items():
        times = sum(id(param) in ids for ids in inside)
        if times != 1:
            refuse(
                f"got fragments of which {times} have '{name}', expected one",
                "Pass modules that have each parameter once.",
            )
    numbered = list(enumerate(parameters.values()))
    return [[index for index, param in numbered if id(param) in ids] for ids in inside]
