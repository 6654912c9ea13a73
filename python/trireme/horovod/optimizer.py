"""DistributedOptimizer: the wrapped optimizer, with gradients that are reduced over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, Optimizer

from trireme._C import GradientOp, OptimizerGradients
from trireme._core.modules_around import ModulesAround
from trireme._core.owners import averaging_module_of
from trireme.horovod.compression import Compression
from trireme.horovod.errors import HorovodInternalError, refuse
from trireme.horovod.functions import grouped_allreduce
from trireme.horovod.optimizer_checks import (
    SENT_AS,
    Names,
    check_compression,
    check_groups,
    check_passes,
    checked_names,
    checked_op,
    chosen_groups,
    parameters_of,
)
from trireme.horovod.process_sets import ProcessSet, global_process_set, id_of
from trireme.horovod.reductions import Adasum, Average, ReduceOp, Sum
from trireme.horovod.run import engine

Closure = Callable[[], Any]


class _Setup:
    """What ``DistributedOptimizer`` was given, and the gradients of the parameters there are."""

    def __init__(
        self,
        names: dict[torch.Tensor, str] | None,
        op: ReduceOp,
        passes: int,
        predivide_factor: float,
        compression: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names = names
        self.op = op
        self.passes = passes
        self.predivide_factor = predivide_factor
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.number = 0
        self.gradients: OptimizerGradients | None = None
        """None on a rank outside of the process set, which steps with its own gradients."""

    def begin(self, optimizer: Optimizer) -> None:
        """Takes the gradients of the optimizer's parameters. Collective over the process set."""
        if self.gradients is not None:
            self.gradients.end("parameters were added")
        if not self.process_set.included():
            return
        parameters = parameters_of(optimizer)
        running, set_id = engine(), id_of(self.process_set)
        try:
            self.gradients = OptimizerGradients(
                names=[self.name_of(one, place) for one, place in parameters.items()],
                parameters=list(parameters),
                sparse=self._sparse(parameters),
                communicator=running.gradients.over(set_id),
                op=_IN_CORE[self.op],
                predivide_factor=self.predivide_factor,
                backward_passes_per_step=self.passes,
                reduce_dtype=SENT_AS[self.compression],
                sparse_as_dense=self.sparse_as_dense,
                refuse=_raise_assertion,
                failed=_raise_internal,
            )
        except dist.DistBackendError as error:
            raise HorovodInternalError(str(error)) from error
        self.number = running.gradients.note(self.gradients, set_id)

    def name_of(self, parameter: torch.Tensor, place: tuple[int, int]) -> str:
        if self.names is not None and parameter in self.names:
            return self.names[parameter]
        return f"allreduce.noname.{place[0]}.{place[1]}"

    def _sparse(self, parameters: Iterable[torch.Tensor]) -> list[bool]:
        """Says which parameters get sparse gradients, as far as their layers tell."""
        found: set[int] = set()
        for holder in ModulesAround(parameters).holders:
            if isinstance(holder, nn.Embedding | nn.EmbeddingBag) and holder.sparse:
                found.add(id(holder.weight))
        return [id(one) in found for one in parameters]


_IN_CORE = {Average: GradientOp.AVERAGE, Sum: GradientOp.SUM, Adasum: GradientOp.NONE}


def _raise_assertion(text: str) -> NoReturn:
    raise AssertionError(text)


def _raise_internal(text: str) -> NoReturn:
    raise HorovodInternalError(text)


class _Distributed(Optimizer):
    """What is put before the class of the wrapped optimizer."""

    _setup: _Setup | None = None

    def _setup_of(self) -> _Setup:
        if self._setup is None:
            got = "got a copy of a DistributedOptimizer, expected the optimizer itself"
            refuse(got, "Wrap the copy by hvd.DistributedOptimizer().")
        return self._setup

    @property
    def _gradients(self) -> OptimizerGradients | None:
        return self._setup_of().gradients

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """As Horovod's optimizer has them."""
        name_of = self._setup_of().name_of
        return {one: name_of(one, place) for one, place in parameters_of(self).items()}

    @property
    def backward_passes_per_step(self) -> int:
        return self._setup_of().passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backwards a step has, from the next one on."""
        setup = self._setup_of()
        if setup.gradients is not None:
            setup.gradients.set_backward_passes_per_step(passes)
        setup.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, of which none may wait for a step.

        Raises:
            AssertionError: gradients have come that no step has used.
        """
        if self._gradients is not None:
            self._gradients.check_zero_grad()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the state of the wrapped optimizer, and forgets gradients that wait for a step."""
        if self._gradients is not None:
            self._gradients.forget_passes()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. All ranks of the process set call it."""
        gradients = self._gradients
        if gradients is not None and gradients.has_passes():
            got = "got parameters to add between a backward and its step"
            refuse(got, "Add them after step().")
        super().add_param_group(param_group)
        self._setup_of().begin(self)


class _Reducing(_Distributed):
    """Steps with gradients that are reduced while backward computes them."""

    def synchronize(self) -> None:
        """Brings every ``.grad`` to its reduced value, if backward has not done so already."""
        if self._gradients is not None:
            self._gradients.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps inside do not synchronize: ``synchronize()`` was called before."""
        gradients = self._gradients
        if gradients is None:
            yield
            return
        gradients.set_steps_synchronize(False)
        try:
            yield
        finally:
            gradients.set_steps_synchronize(True)

    def step(self, closure: Closure | None = None) -> Any:
        """Synchronizes, and makes a step of the wrapped optimizer.

        Gradients that ``closure`` computes are reduced, too.
        """
        gradients = self._gradients
        if gradients is None:
            return super().step(closure)
        if closure is not None and not gradients.has_passes():
            return super().step(_reducing(closure, gradients))
        warning = gradients.warning_of_step()
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        gradients.begin_step()
        return super().step(None if closure is None else _reducing(closure, gradients))


class _Combining(_Distributed):
    """Steps with its own gradients; what steps change is combined by Adasum."""

    def synchronize(self) -> None:
        """Does nothing: gradients stay as they are."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError, as Horovod does."""
        got = "Skipping synchronization is not supported when using Adasum optimizer"
        refuse(got, "Step without it.", kind=AssertionError)
        yield

    def step(self, closure: Closure | None = None) -> Any:
        """Makes a step of the wrapped optimizer, and combines the changes of all ranks."""
        setup, gradients = self._setup_of(), self._gradients
        if gradients is None:
            return super().step(closure)
        if closure is not None:
            closure = _forgetting(closure, gradients)
        gradients.begin_step()
        stepped = [one for one in parameters_of(self) if one.requires_grad]
        before = [one.detach().clone() for one in stepped]
        result = super().step(closure)
        gradients.forget_passes()
        if setup.process_set.size() == 1:
            return result
        with torch.no_grad():
            try:
                changes = grouped_allreduce(
                    [one - earlier for one, earlier in zip(stepped, before, strict=True)],
                    name=f"changes of optimizer {setup.number}",
                    compression=setup.compression,
                    op=Adasum,
                    process_set=setup.process_set,
                )
            except BaseException:
                for one, earlier in zip(stepped, before, strict=True):
                    one.copy_(earlier)
                raise
            for one, earlier, change in zip(stepped, before, changes, strict=True):
                one.copy_(earlier.add_(change))
        return result


def _reducing(closure: Closure, gradients: OptimizerGradients) -> Closure:
    def reduced() -> Any:
        loss = closure()
        if gradients.has_passes():
            gradients.synchronize()
            gradients.forget_passes()
        return loss

    return reduced


def _forgetting(closure: Closure, gradients: OptimizerGradients) -> Closure:
    def forgets() -> Any:
        loss = closure()
        gradients.forget_passes()
        return loss

    return forgets


# The wrapped step calls its hooks itself, with reduced gradients.
for _kind in (_Reducing, _Combining):
    cast(Any, _kind.step).hooked = True


def _subclass(role: type[_Distributed], wrapped: type[Optimizer]) -> type[Optimizer]:
    return type(wrapped.__name__, (role, wrapped), {"__module__": wrapped.__module__})


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Names | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer of a subclass of the given one's class, whose gradients are reduced.

    It shares parameter groups and state with the given optimizer, which is not used any more. When
    the last backward of a step returns, every ``.grad`` is reduced. All ranks of the process set
    call it, with the same parameters in the same order; others may.

    Args:
        optimizer: of any class but LBFGS, whose steps depend on each rank's loss.
        named_parameters: pairs of name and parameter, for messages; without them, parameters are
            numbered.
        compression: ``Compression.none``, ``fp16`` or ``bf16``: the dtype that is sent.
        backward_passes_per_step: how many backwards add up before a step. They are divided by the
            number of ranks alone.
        op: ``Average`` or ``Sum`` of gradients; or ``Adasum``, of what each rank's step changes.
        gradient_predivide_factor: of an average: gradients are divided by it before they are summed
            up, and by the rest afterwards.
        num_groups: the older name of a number of ``groups``.
        groups: is checked, and changes nothing: gradients travel in buckets in any case.
        sparse_as_dense: sparse gradients travel as dense ones, and are sparse again afterwards.
        process_set: whose ranks reduce. A rank outside of it steps with its own gradients.

    Raises:
        ValueError: bad arguments; on all ranks, where these or the parameters differ.
        HorovodInternalError: a rank is gone.
    """
    chosen = checked_op(op, gradient_predivide_factor, process_set)
    _check_optimizer(optimizer)
    check_passes(backward_passes_per_step)
    check_compression(compression)
    check_groups(chosen_groups(num_groups, groups))
    names = checked_names(optimizer, named_parameters)
    role = _Combining if chosen == Adasum else _Reducing
    made = cast(Any, object.__new__(_subclass(role, type(optimizer))))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's, which is bound to the given optimizer
    made._setup = _Setup(
        names,
        chosen,
        backward_passes_per_step,
        gradient_predivide_factor,
        compression,
        sparse_as_dense,
        process_set,
    )
    made._setup.begin(made)
    return made


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        got = f"got {type(optimizer).__name__} as optimizer, expected a torch.optim.Optimizer"
        refuse(got, "Pass an optimizer.", kind=TypeError)
    if isinstance(optimizer, _Distributed):
        refuse("got a DistributedOptimizer, expected a plain optimizer", "Wrap it once.")
    if isinstance(optimizer, LBFGS):
        got = "got LBFGS, whose steps depend on the loss of each rank"
        refuse(got, "Use an optimizer that depends on gradients only.")
    for one in parameters_of(optimizer):
        if averaging_module_of(one) is not None:
            got = "got parameters of a module in DistributedDataParallel, which averages already"
            refuse(got, "Use the plain module.")
