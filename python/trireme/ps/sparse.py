"""Sparse tables: rows by id, and the modules that look rows up."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from trireme._C import PsSparseOptions, PsSparseTable, PsTableSpec
from trireme._core.optimizer_specs import OptimizerSpec
from trireme.ps.areas import AREA
from trireme.ps.row_inits import RowInit, Zeros
from trireme.ps.tables import DenseTable, Pending, check_options


class Sparse:
    """Describes a sparse table: rows of ``dim`` elements by an integer.

    A row comes into being when its id is first pulled or pushed, and has its own optimizer state
    and its own number of steps: what is not pushed does not move.

    Args:
        name: by which the server finds the table.
        dim: elements of a row.
        optimizer: ``ps.SGD``, ``ps.Adam``, ``ps.AdamW``, ``ps.Adagrad``, ``ps.RowwiseAdagrad`` or
            ``ps.Sum``.
        init: what a row holds at first: ``ps.Zeros()``, ``ps.Normal(std)`` or
            ``ps.Uniform(bound)``, drawn from ``seed`` and its id alone.
        dtype: float32, float64, float16 or bfloat16.
        rows: ids are in [0, rows); None: any int64, as long as there is memory.
        reduction: under bsp, whether the sum of the workers' gradients is divided by their number.
        staleness: in place of the server's, under ssp.
        compression: must be None: pushes are not compressed.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        optimizer: OptimizerSpec,
        init: RowInit | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        rows: int | None = None,
        reduction: str = "mean",
        staleness: int | None = None,
        compression: None = None,
    ) -> None:
        check_options(name, optimizer, reduction, staleness, compression)
        init = Zeros() if init is None else init
        AREA.expect("dim", dim, int, "an int", next_step="Count the elements of a row.")
        AREA.expect(
            "init", init, RowInit.__args__, "ps.Zeros, ps.Normal or ps.Uniform",
            next_step="Rows are made from these.",
        )  # fmt: skip
        AREA.expect("dtype", dtype, torch.dtype, "a dtype", next_step="Pass torch.float32, say.")
        AREA.expect("seed", seed, int, "an int", next_step="Pass a number.")
        if rows is not None:
            AREA.expect("rows", rows, int, "an int", next_step="Count the ids.")
        self.name = name
        self.dim = dim
        self.optimizer = optimizer
        self.init = init
        self.seed = seed
        self.dtype = dtype
        self.rows = rows
        self.reduction = reduction
        self.staleness = staleness

    def _to_core(self) -> PsTableSpec:
        of_all = (self.reduction == "mean", self.staleness)
        seed = self.seed % 2**64  # torch.manual_seed takes negative ones likewise
        options = PsSparseOptions(self.init, seed, self.dtype, self.rows, of_all)
        return PsTableSpec.sparse(self.name, self.dim, self.optimizer, options)


class SparseTable:
    """Is a table of rows by id, as one worker sees it. The server makes it.

    Any thread may use it: those of a process take turns, and are one worker. A copy is the same
    table.
    """

    def __init__(self, name: str, core: PsSparseTable, group: dist.ProcessGroup | None) -> None:
        self.name = name
        self.dim = core.dim
        self.dtype = core.dtype
        self.core = core
        self._group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseTable:
        return self

    def __len__(self) -> int:
        """How many rows have come into being."""
        return self.core.size()

    def ids(self) -> Tensor:
        """Their ids, ascending."""
        return self.core.ids()

    def pull(
        self,
        ids: Any = None,
        *,
        create: bool = True,
        view: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Returns copies of rows, ``[*ids.shape, dim]``, on the device of ``ids``.

        A row is never a mixture of two states. In a checkpoint a recomputation gets the rows of its
        forward.

        Args:
            ids: int64 or int32, of any shape.
            create: whether rows come into being; without it an id without a row gives its first
                values.
            view: must be False: rows have no memory of their own that could be shown.
            async_op: return a ``Pending``, whose ``wait()`` returns the rows.

        Raises:
            TypeError: ids of another dtype, or no tensor.
            ValueError: an id outside ``[0, rows)``, or ``view=True``.
            RuntimeError: the server is closed, this worker has left, or it is a server or a forked
                child.
            torch.distributed.DistBackendError: it waits in vain, or there is no memory for a row.
        """
        self._expect_tensor("pull", "ids", ids)
        if view:
            got = f"pull: got view=True for the sparse table '{self.name}', expected False"
            AREA.refuse(got, "Its rows are copied.", self._group)
        if async_op:
            return Pending(self.core.pull_async(ids, create), lambda found: found[0])
        return self.core.pull(ids, create)

    def push(
        self,
        ids: Any = None,
        gradients: Any = None,
        *,
        scale: float = 1.0,
        async_op: bool = False,
    ) -> Any:
        """Hands in gradients ``[*ids.shape, dim]``, times ``scale``. Those of an id that comes
        several times are added before the optimizer sees them.

        Raises:
            TypeError, ValueError, RuntimeError, torch.distributed.DistBackendError: as for
                ``pull``; ValueError also for gradients of another shape, dtype or layout. Under ssp
                and async a push that waits in vain for a row may have stepped others.
        """
        self._expect_tensor("push", "ids", ids)
        self._expect_tensor("push", "gradients", gradients)
        if async_op:
            return Pending(self.core.push_async(ids, gradients, scale), lambda _: None)
        return self.core.push(ids, gradients, scale)

    def _expect_tensor(self, verb: str, what: str, got: Any) -> None:
        if isinstance(got, Tensor):
            return
        kind = "none" if got is None else type(got).__name__
        text = f"{verb} of table '{self.name}': got {kind} as {what}, expected a tensor"
        AREA.refuse(text, "Pass torch.tensor(...).", self._group, kind=TypeError)

    def set_lr(self, lr: float) -> None:
        """As ``DenseTable.set_lr``."""
        self.core.set_lr(lr)

    # What the server calls for tables of all kinds; rows belong to no module.

    def expect_parameters(self) -> None:
        return None

    def expect_buffers(self) -> None:
        return None

    def release_module(self) -> None:
        return None


class Embedding(nn.Module):
    """Looks rows up in a sparse table, as ``torch.nn.Embedding`` does in a parameter.

    Its backward pushes the gradient of each id to the table. It has no parameters, so no optimizer
    and no DDP sees it. In eval mode, ids without a row make none. A backward that runs twice pushes
    twice; it may run on any thread. In a checkpoint, ours or torch's, a recomputation gets the rows
    of its forward.
    """

    sends_gradients = True

    def __init__(self, table: SparseTable | DenseTable) -> None:
        super().__init__()
        self.table = _expect_sparse(table)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns ``[*ids.shape, dim]``."""
        return self.table.core.pull_with_gradient(ids, self.training)

    def extra_repr(self) -> str:
        return f"'{self.table.name}', dim={self.table.dim}"


class EmbeddingBag(nn.Module):
    """Reduces rows of bags, as ``torch.nn.EmbeddingBag``; each id is pulled and pushed once.

    Args:
        mode: "mean", "sum" or "max".
    """

    sends_gradients = True

    def __init__(self, table: SparseTable | DenseTable, mode: str = "mean") -> None:
        super().__init__()
        self.table = _expect_sparse(table)
        if mode not in ("mean", "sum", "max"):
            got = f"got mode={mode!r}, expected 'mean', 'sum' or 'max'"
            AREA.refuse(got, "Leave it out for the mean.")
        self.mode = mode

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Takes what ``torch.nn.EmbeddingBag`` takes; returns ``[bags, dim]``."""
        rows, places = self.table.core.pull_unique_with_gradient(input, self.training)
        return F.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights
        )

    def extra_repr(self) -> str:
        return f"'{self.table.name}', dim={self.table.dim}, mode='{self.mode}'"


def _expect_sparse(table: Any) -> SparseTable:
    """Modules take either kind, since ``server[...]`` may be either; only rows pass."""
    AREA.expect(
        "table", table, SparseTable, "a sparse table of a server",
        next_step="Pass server['items'], where 'items' is described by ps.Sparse.",
    )  # fmt: skip
    return table
