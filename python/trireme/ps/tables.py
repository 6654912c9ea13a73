"""What a table holds, and a table as one worker sees it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trireme._C import PsDenseTable, PsPending, PsTableSpec
from trireme._core.optimizer_specs import OptimizerSpec
from trireme._core.owners import note_table, optimizer_of, table_of, unit_of
from trireme.ps.areas import AREA

Gradients = Mapping[str, Tensor | None]


def check_options(
    name: str,
    optimizer: OptimizerSpec,
    reduction: str,
    staleness: int | None,
    compression: None,
) -> None:
    """Refuses what tables of all kinds refuse."""
    AREA.expect("name", name, str, "a str", next_step="Name the table.")
    AREA.expect(
        "optimizer", optimizer, OptimizerSpec.__args__, "ps.SGD, ps.Adam, ps.AdamW, ps.Adagrad, "
        "ps.RowwiseAdagrad or ps.Sum", next_step="The server steps the values: pass options, not "
        "an optimizer of torch.",
    )  # fmt: skip
    if reduction not in ("mean", "sum"):
        got = f"got reduction={reduction!r}, expected 'mean' or 'sum'"
        AREA.refuse(got, "Leave it out for the mean.")
    if staleness is not None:
        AREA.expect("staleness", staleness, int, "an int", next_step="Count clocks.")
    if compression is not None:
        got = f"got compression={compression!r}, expected None: pushes are not compressed"
        AREA.refuse(got, "Leave it out.")


class Dense:
    """Describes a table of dense tensors: the parameters of a module, or tensors by name.

    Buffers of a module are no part of it. Worker 0's values are everybody's first ones.

    Args:
        name: by which the server finds the table.
        source: a module, whose parameters ``pull()`` fills and whose ``.grad`` ``push()`` takes; or
            tensors by name, which are copied.
        optimizer: ``ps.SGD``, ``ps.Adam``, ``ps.AdamW``, ``ps.Adagrad`` or ``ps.Sum``.
        reduction: under bsp, whether the sum of the workers' gradients is divided by their number.
        staleness: in place of the server's, under ssp.
        compression: must be None: pushes are not compressed.
    """

    def __init__(
        self,
        name: str,
        source: nn.Module | Mapping[str, Tensor],
        *,
        optimizer: OptimizerSpec,
        reduction: str = "mean",
        staleness: int | None = None,
        compression: None = None,
    ) -> None:
        check_options(name, optimizer, reduction, staleness, compression)
        self.name = name
        self.source = source
        self.optimizer = optimizer
        self.reduction = reduction
        self.staleness = staleness
        self._tensors = _tensors_of(name, source)

    @property
    def module(self) -> nn.Module | None:
        return self.source if isinstance(self.source, nn.Module) else None

    def _to_core(self) -> PsTableSpec:
        return PsTableSpec(
            self.name,
            (list(self._tensors), list(self._tensors.values())),
            self.module is not None,
            self.optimizer,
            (self.reduction == "mean", self.staleness),
            [] if self.module is None else persistent_buffers(self.module),
        )


def persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that a state dict has, by their names."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, inner in module.named_modules()
        for name, buffer in inner.named_buffers(recurse=False)
        if name not in inner._non_persistent_buffers_set
    ]


def _tensors_of(table: str, source: Any) -> dict[str, Tensor]:
    if isinstance(source, nn.Module):
        parameters = dict(source.named_parameters())
        for name, parameter in parameters.items():
            _check_free(table, name, parameter)
            _refuse_dtensor(table, name, parameter)
        return dict(parameters)
    AREA.expect(
        "source", source, Mapping, "a module or tensors by name", next_step="Pass model itself, or "
        "a dict.",
    )  # fmt: skip
    for name, tensor in source.items():
        AREA.expect("a name in source", name, str, "a str", next_step="Name each tensor.")
        AREA.expect(f"'{name}'", tensor, Tensor, "a tensor", next_step="Pass tensors by name.")
        _refuse_dtensor(table, name, tensor)
    return {name: tensor.detach() for name, tensor in source.items()}


def _check_free(table: str, name: str, parameter: Tensor) -> None:
    owner = (
        "ZeroRedundancyOptimizer has sharded" if optimizer_of(parameter) is not None
        else "fully_shard has sharded" if unit_of(parameter) is not None
        else "another table keeps" if table_of(parameter) is not None
        else ""
    )  # fmt: skip
    if owner:
        got = f"got '{name}' for table '{table}', which {owner}, expected one that nobody keeps"
        AREA.refuse(got, "Give each parameter to one of them.")


def _refuse_dtensor(table: str, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, DTensor):
        AREA.refuse(
            f"got '{name}' for table '{table}' as a DTensor, of which ranks may have parts, "
            "expected a plain tensor",
            "Make the table of what is not sharded yet, or pass full_tensor() of it by name.",
            kind=TypeError,
        )


class Pending:
    """Is a pull or push that was asked for. Whatever it has to wait for it waits for in ``wait()``:
    no thread stands behind it, and any may call it."""

    def __init__(self, core: PsPending, result: Callable[[list[Tensor]], Any]) -> None:
        self._core = core
        self._result = result

    def done(self) -> bool:
        """Says whether ``wait()`` would return at once."""
        return self._core.done()

    def wait(self) -> Any:
        """Returns what the call returns that waits."""
        return self._result(self._core.wait())


class _ReadGuard:
    """Refuses forwards and state dicts while other workers may write the parameters, and copies and
    pickles of the module, which would take this hook with them. Those have none."""

    def __init__(self, table: DenseTable) -> None:
        self.table = weakref.ref(table)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self._check()

    def __reduce__(self) -> Any:
        self._check()
        return _no_guard, ()

    def _check(self) -> None:
        table = self.table()
        if table is not None and not table.core.is_readable:
            table.refuse_reading()


def _nothing(module: nn.Module, *args: Any) -> None:
    return None


def _no_guard() -> Callable[..., None]:
    return _nothing


class DenseTable:
    """Is a table of dense tensors, as one worker sees it. The server makes it.

    Any thread may use it: those of a process take turns, and are one worker. What reads the
    parameters of a module, or adds to their ``.grad``, is not among them.
    """

    def __init__(
        self,
        name: str,
        core: PsDenseTable,
        module: nn.Module | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name = name
        self.core = core
        self._group = group
        self._module = module
        self._guards: list[Any] = []
        self._buffers = [] if self._module is None else persistent_buffers(self._module)
        self._parameters = [] if self._module is None else list(self._module.parameters())
        if self._module is not None:
            for parameter in self._module.parameters():
                note_table(parameter, self)
            if core.is_bound:
                self._guard(self._module)

    def _guard(self, module: nn.Module) -> None:
        guard = _ReadGuard(self)
        for inner in module.modules():
            if inner is module or next(inner.parameters(recurse=False), None) is not None:
                self._guards.append(inner.register_forward_pre_hook(guard))
                self._guards.append(inner.register_state_dict_pre_hook(guard))

    def refuse_reading(self) -> None:
        AREA.refuse(
            f"got a forward of the module of table '{self.name}' (or its state_dict(), or a copy) "
            "after clock(), expected pull() before it",
            "Others write its parameters meanwhile: pull() says that they may be read.",
            self._group,
            kind=RuntimeError,
        )

    def expect_parameters(self) -> None:
        """Refuses a module whose parameters are others than when the table was made."""
        if self._module is None:
            return
        now = list(self._module.parameters())
        if len(now) != len(self._parameters) or not all(map(operator.is_, now, self._parameters)):
            AREA.refuse(
                f"got other parameters in the module of table '{self.name}' than it was made of, "
                "which the table does not fill",
                "Load states with assign=False, and change layers before the server is made.",
                self._group,
                kind=RuntimeError,
            )

    def expect_buffers(self) -> None:
        """Refuses a module whose buffers are other tensors than when the table was made."""
        if self._module is None:
            return
        now = persistent_buffers(self._module)
        if [(n, id(buffer)) for n, buffer in now] != [
            (n, id(buffer)) for n, buffer in self._buffers
        ]:
            AREA.refuse(
                f"got other buffers in the module of table '{self.name}' than it was made of, "
                "which the server does not know",
                "Write buffers in place, and load states with assign=False.",
                self._group,
                kind=RuntimeError,
            )

    def release_module(self) -> None:
        """Takes what it knows of the module from it."""
        for handle in self._guards:
            handle.remove()
        self._guards.clear()
        if self._module is not None:
            for parameter in self._module.parameters():
                if table_of(parameter) is self:
                    note_table(parameter, None)

    def __len__(self) -> int:
        """How many tensors it has."""
        return len(self.core.names)

    @property
    def is_bound(self) -> bool:
        """Whether the parameters of the module lie in the table's memory, so that no pull moves a
        byte: under bsp without backup, on the CPU."""
        return self.core.is_bound

    def pull(self, *, view: bool = False, async_op: bool = False) -> Any:
        """Returns copies of the tensors by name, or fills the parameters of the module.

        Args:
            view: return the table's own memory, to read only: under bsp it holds that clock's
                values until ``clock()``, else it changes as others push. Not with backup workers.
            async_op: return a ``Pending``, whose ``wait()`` returns the result.

        Raises:
            RuntimeError: a parameter was written in place; the server is closed, this worker has
                left, or it is a server or a forked child.
            ValueError: a view of a module, or with backup workers.
            torch.distributed.DistBackendError: it waits in vain; the message names for whom.
        """
        if self._module is None:
            names = self.core.names
            if async_op:
                pending = self.core.pull_tensors_async(view)
                return Pending(pending, lambda found: dict(zip(names, found, strict=True)))
            return dict(zip(names, self.core.pull_tensors(view), strict=True))
        if view:
            got = f"pull: got view=True for table '{self.name}' made of a module, expected False"
            AREA.refuse(got, "Its parameters are filled.", self._group)
        if async_op:
            return Pending(self.core.pull_async(), lambda _: None)
        self.core.pull()
        return None

    def push(
        self, gradients: Gradients | None = None, *, scale: float = 1.0, async_op: bool = False
    ) -> Any:
        """Hands in gradients, times ``scale``.

        Those of a module are its ``.grad``, which become None; those of a table of tensors are
        given by name. What has no gradient is not updated.

        Raises:
            ValueError: a gradient of another shape, dtype, layout or name. Nothing was pushed.
            TypeError: gradients for a module, or none for tensors.
            RuntimeError, torch.distributed.DistBackendError: as for ``pull``.
        """
        if self._module is None:
            names, tensors = self._checked(gradients)
            if async_op:
                pending = self.core.push_tensors_async(names, tensors, scale)
                return Pending(pending, lambda _: None)
            return self.core.push_tensors(names, tensors, scale)
        if gradients is not None:
            self._refuse_type("gradients for a table made of a module, expected none")
        if async_op:
            return Pending(self.core.push_async(scale), lambda _: None)
        return self.core.push(scale)

    def _checked(self, gradients: Any) -> tuple[Sequence[str], Sequence[Tensor]]:
        if not isinstance(gradients, Mapping):
            kind = "no gradients" if gradients is None else type(gradients).__name__
            self._refuse_type(f"{kind}, expected gradients by name")
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        for name, gradient in given.items():
            if not isinstance(gradient, torch.Tensor):
                self._refuse_type(f"{type(gradient).__name__} as '{name}', expected a tensor")
        return list(given), list(given.values())

    def _refuse_type(self, got: str) -> None:
        AREA.refuse(
            f"push: got {got} (table '{self.name}')",
            "A module's gradients are its .grad; others are passed by name.",
            self._group,
            kind=TypeError,
        )

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate: under bsp for the step of this clock and later ones, where the
        first of several workers that set one counts; else at once, for all workers."""
        self.core.set_lr(lr)
