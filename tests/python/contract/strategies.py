"""The strategies, one entry each; a new strategy joins every scenario of this room by its entry.

    @on_every_strategy()
    def test_something(rank: int, strategy: Strategy) -> None:
        ours, one = strategy.pair(mlp)
        for step in range(3):
            strategy.train_both(ours, one, step)

``one`` is one process on the whole batch. DataParallel has no ranks: its replicas are threads. What
a strategy cannot do at all is a field of its entry, with the reason, and a scenario ``needs`` it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from trireme.compression import Int8

import fsdp.ranks
import pipeline.ranks
import zero.ranks
from fsdp.ranks import SGD_OPTIONS, ModelMaker, assert_parts, local, part_of
from harness.faults import raises
from harness.on_ranks import Wrapped, run_program, signature_without_rank
from harness.ranks import run_ranks
from harness.training import Gradients, Training, alone, assert_close, assert_same_on_all_ranks
from zero.ranks import DDP, own_parts


def _whole(_: Training, gradients: Gradients) -> Gradients:
    return gradients


@dataclass(frozen=True, repr=False)
class Strategy:
    name: str
    backend: str | None
    """By which ranks meet; None for a strategy of one process."""
    make: Callable[..., Training]
    """(make_model, optimizer_class, **defaults of the optimizer)."""
    parts: Callable[[Training, Gradients], Gradients] = _whole
    """What this rank has of gradients of whole parameters, when backward has returned."""
    passes: bool = True
    """Whether forward and backward are calls of their own. A pipeline over ranks has step() for
    both, since its ranks run forwards and backwards in turns, and a rank has its stages only."""
    own_forward: bool = True
    """Whether it calls the forward that a model has written. A pipeline calls layers one after
    another, or what torch.export has traced."""
    runs_alone: bool = True
    """Whether one rank can run the model while others do something else. Not where it lacks layers,
    or must gather them."""
    joins: Callable[[Training], tuple[list[Any], dict[str, Any]]] | None = None
    """Who joins, and what Join() is told beside; None where nobody can."""
    dead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What others say of a rank that has died, by the moment; in "always" what they always say."""
    late: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Where others wait for a rank that does not come, and what they say then."""

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        """Pickles by its name, since its functions have none."""
        return _strategy, (self.name,)

    @property
    def ranks(self) -> bool:
        return self.backend is not None

    @property
    def whole_gradients(self) -> bool:
        """Whether each rank has all of them."""
        return self.parts is _whole

    @property
    def recovers(self) -> bool:
        """Whether the step after an exception in one rank's backward works."""
        return self.backend != "gloo"

    def abandons(self, ours: Training, failing: int) -> Any:
        """Expects what leaves a backward in which break_it was called on rank ``failing``."""
        cause = "ArithmeticError: the data of this rank are broken"
        where = f"(rank {failing} of {ours.world})"
        if not self.passes:
            return raises(RuntimeError, cause, where)
        if ours.rank == failing:
            return pytest.raises(ArithmeticError, match="the data of this rank are broken")
        return raises(dist.DistBackendError, "backward", "was abandoned", cause, where)

    def pair(
        self, make: ModelMaker, optimizer_class: Any = SGD, **defaults: Any
    ) -> tuple[Training, Training]:
        """Training under this strategy, and of one process on whole batches."""
        given = defaults or SGD_OPTIONS
        return self.make(make, optimizer_class, **given), alone(make, optimizer_class, **given)

    def assert_gradients(self, ours: Training, one: Training) -> None:
        whole = [parameter.grad for parameter in ours.counterparts(one)]
        expected = self.parts(ours, whole)
        for (name, parameter), right in zip(ours.model.named_parameters(), expected, strict=True):
            assert_close(f"{name}.grad", local(parameter.grad), right)
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape, name
                assert parameter.grad.is_leaf and not parameter.grad.requires_grad, name

    def assert_parameters(self, ours: Training, one: Training) -> None:
        """Those that ranks have whole are the same bits on all of them."""
        assert_parts(ours, one)
        if self.ranks and self.passes:
            parameters = ours.model.parameters()
            assert_same_on_all_ranks([it for it in parameters if not isinstance(it, DTensor)])

    def step_both(self, ours: Training, one: Training) -> None:
        """After backward: compares gradients, steps, compares parameters."""
        self.assert_gradients(ours, one)
        for training in (ours, one):
            training.optimizer.step()
        self.assert_parameters(ours, one)

    def train_both(self, ours: Training, one: Training, *numbers: int) -> None:
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(*numbers)
        self.step_both(ours, one)


def _ddp(make: ModelMaker, optimizer_class: Any, **defaults: Any) -> Training:
    model = make()
    optimizer = optimizer_class(model.parameters(), **defaults)
    net = DDP(model, bucket_cap_mb=0.0001 if dist.get_backend() == "gloo" else 25)
    return Training(model, net, optimizer, dist.get_rank(), dist.get_world_size())


def _coded_ddp(make: ModelMaker, optimizer_class: Any, **defaults: Any) -> Training:
    """The way of codes, on which all goes as fp32, so that it is as exact as without."""
    model = make()
    optimizer = optimizer_class(model.parameters(), **defaults)
    codes = Int8(dense_below=1 << 40, between="ranks")
    net = DDP(model, bucket_cap_mb=0.0001, compression=codes)
    return Training(model, net, optimizer, dist.get_rank(), dist.get_world_size())


def _dp(make: ModelMaker, optimizer_class: Any, **defaults: Any) -> Training:
    model = make()
    net = trireme.DataParallel(model, replicas=2)
    return Training(model, net, optimizer_class(model.parameters(), **defaults))


def _rows(training: Training, whole: Gradients) -> Gradients:
    """fully_shard: the rows of a DTensor that this rank has."""
    parameters = training.model.parameters()
    return [
        part_of(gradient, parameter)
        if gradient is not None and isinstance(parameter, DTensor)
        else gradient
        for parameter, gradient in zip(parameters, whole, strict=True)
    ]


def _zero(stage: int) -> Callable[..., Training]:
    def make(make_model: ModelMaker, optimizer_class: Any, **defaults: Any) -> Training:
        return zero.ranks.sharded(make_model, optimizer_class, stage, **defaults)

    return make


def _net_joins(training: Training) -> tuple[list[Any], dict[str, Any]]:
    return [training.net], {}


def _optimizer_joins(training: Training) -> tuple[list[Any], dict[str, Any]]:
    """Beside DDP, where that averages."""
    averaging = [] if training.net is training.model else [training.net]
    return [*averaging, training.optimizer], {}


def _units_join(training: Training) -> tuple[list[Any], dict[str, Any]]:
    return [training.model], {"optimizer": training.optimizer}


# Where ranks share memory their deaths are seen, and what they wait for has a name.
_SHARED = {"always": ("rank 1 (process ", "has died")}
_GATES = {"before step": ("step gate: before writing",), "in step": ("step gate: written",)}
_ABSENT = ("rank 1 (process ", "has not come within ", "alive")
_AT_STEP = ("step gate: before writing", *_ABSENT)
_CHANNELS = ("stage 1", " of ", "by channel 'stage ")

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("dp", None, _dp),
        Strategy(
            "ddp",
            "gloo",
            _ddp,
            joins=_net_joins,
            dead={"always": ("rank 1 (process ", "left no word", "all_reduce of bucket")},
            late={
                "forward": (
                    "all_reduce of bucket 0: 4.",
                    "This rank waited in step 3 for all_reduce of bucket 0",
                    "rank 1 (process ",
                    "has left no report (it is alive, ",
                )
            },
        ),
        Strategy("ddp, codes of ranks", "gloo", _coded_ddp, joins=_net_joins),
        Strategy(
            "ddp, shared memory",
            "trireme",
            _ddp,
            joins=_net_joins,
            dead=_SHARED,
            late={"forward": _ABSENT},
        ),
        Strategy(
            "zero 1",
            "trireme",
            _zero(1),
            joins=_optimizer_joins,
            dead=_SHARED | _GATES,
            late={"forward": _ABSENT, "step": _AT_STEP},
        ),
        Strategy(
            "zero 2",
            "trireme",
            _zero(2),
            own_parts,
            joins=_optimizer_joins,
            dead=_SHARED | _GATES,
            late={"forward": _ABSENT, "step": _AT_STEP},
        ),
        Strategy(
            "zero 2, gathered",
            "gloo",
            _zero(2),
            own_parts,
            joins=_optimizer_joins,
            late={"forward": ()},
        ),
        Strategy(
            "fully_shard",
            "trireme",
            fsdp.ranks.sharded,
            _rows,
            joins=_units_join,
            dead=_SHARED | _GATES,
            late={"forward": ("step gate: written", *_ABSENT), "step": _AT_STEP},
        ),
        Strategy(
            "fully_shard, gathered",
            "gloo",
            fsdp.ranks.sharded,
            _rows,
            runs_alone=False,
            joins=_units_join,
            dead={"in forward": ("0.weight",), "in backward": ("0.weight",)},
            late={
                "first forward": ("all_gather of units that ranks need", "rank 1"),
                "forward": (),
            },
        ),
        Strategy("pipeline, threads", None, pipeline.ranks.in_threads, own_forward=False),
        Strategy(
            "pipeline",
            "trireme",
            pipeline.ranks.staged,
            passes=False,
            own_forward=False,
            runs_alone=False,
            dead=_SHARED | {"in forward": _CHANNELS, "in backward": _CHANNELS},
            late={"forward": _ABSENT},
        ),
    )
}


def _strategy(name: str) -> Strategy:
    return STRATEGIES[name]


def strategies_with(*needs: str) -> list[str]:
    """The names of those that have all of these."""
    return [name for name, one in STRATEGIES.items() if all(getattr(one, it) for it in needs)]


def on_every_strategy(
    world: int = 2,
    *,
    needs: Sequence[str] = (),
    timeout: float = 60,
    patience_s: float = 30,
) -> Any:
    """Runs the decorated test under each strategy on ``world`` ranks; it gets its ``rank``, too.

    ``patience_s`` is the timeout of the group, ``timeout`` that of the whole test. ``needs`` are
    what a strategy must have, such as "passes".
    """
    names = strategies_with(*needs)

    def decorate(program: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("strategy", names)
        @functools.wraps(program)
        def test(strategy: str, **case: Any) -> None:
            chosen = STRATEGIES[strategy]
            if chosen.backend is None:
                return program(0, chosen, **case)
            place = (Wrapped(program), chosen.backend, patience_s, None)
            case["strategy"] = chosen
            run_ranks(run_program, world, *place, case, timeout=timeout)

        test.__signature__ = signature_without_rank(program)
        return test

    return decorate


def set_requires_grad(model: nn.Module, change: dict[str, bool]) -> None:
    """A pipeline has those of its stages."""
    parameters = dict(model.named_parameters())
    for name, requires_grad in change.items():
        if name in parameters or not isinstance(model, trireme.Pipeline):
            parameters[name].requires_grad_(requires_grad)


def middle_layer(model: nn.Module) -> nn.Linear:
    """In the middle of those that this rank has."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return linear[len(linear) // 2]


def kept(gradients: Sequence[torch.Tensor | None], before: Sequence[torch.Tensor | None]) -> bool:
    """Whether these are the same objects."""
    return all(now is then for now, then in zip(gradients, before, strict=True))
