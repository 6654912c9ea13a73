"""torchgpipe's names (Kim et al., 2020) for a pipeline in one process."""

from __future__ import annotations

import copy
import operator
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn

from trireme._pipeline.deferred_batch_norm import convert_deferred_batch_norm
from trireme._pipeline.pipeline import Pipeline
from trireme._pipeline.schedule import Checkpoint
from trireme._pipeline.verify_skippables import verify_skippables

Device: TypeAlias = torch.device | int | str
Tensors: TypeAlias = Tensor | tuple[Tensor, ...]

_MAKING = threading.Lock()
"""Held while the pipeline of a GPipe is made, which several threads may call first."""

_ADVICE = """

trireme.pipelining has torchgpipe.balance's functions, which find one:

  balance = balance_by_time(partitions, module, sample, device="cpu")
  model = GPipe(module, balance, ...)
"""


class GPipe(nn.Module):
    """Runs a Sequential as a pipeline in this process, whose stages compute at the same time.

    It is torchgpipe's class on this engine: each partition has a thread of its own, also on the
    CPU. Parameters have torchgpipe's names (``partitions.0.0.weight``), and exceptions its texts::

        model = GPipe(module, balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
        loss = loss_of(model(x), y)
        loss.backward()

    Args:
        module: The layers. Each takes and returns a tensor, or a tuple of tensors.
        balance: How many layers each partition has.
        devices: One for each partition, which is moved there; more are left out. The default are
            all GPUs, and as many CPUs where there is none.
        chunks: How many micro-batches a batch is cut into; fewer where it has fewer rows.
        checkpoint: Which of them are computed once more in the backward: "always", "except_last"
            or "never". In evaluation none are.
        deferred_batch_norm: Whether running statistics of BatchNorm are those of whole batches.

    Raises:
        TypeError: ``module`` is no Sequential; stashes and pops do not match.
        ValueError: invalid arguments; a balance that does not add up; shared parameters.
        IndexError: fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(f"balance is required{_ADVICE}")
        if self.chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        verify_module(module)
        verify_skippables(module)
        self.balance = list(balance)
        _check_balance(len(module), self.balance)
        if deferred_batch_norm:
            converted = convert_deferred_batch_norm(module, self.chunks)
            assert isinstance(converted, nn.Sequential)
            module = converted
        self.devices = _devices_for(len(self.balance), devices)
        layers = list(module._modules.items())
        self.partitions = nn.ModuleList()
        for count in self.balance:
            named = OrderedDict(
                (name, layer) for name, layer in layers[:count] if layer is not None
            )
            self.partitions.append(nn.Sequential(named))
            layers = layers[count:]
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._forget_pipeline()

    def _forget_pipeline(self) -> None:
        # Not a child: its parameters are those of the partitions.
        object.__setattr__(self, "_pipeline", None)

    def _pipe(self) -> Pipeline:
        with _MAKING:
            return self._made_pipe()

    def _made_pipe(self) -> Pipeline:
        partitions = list(self.partitions)
        made: Pipeline | None = self.__dict__["_pipeline"]
        if made is None or not all(map(operator.is_, made._modules.values(), partitions)):
            made = Pipeline(
                nn.Sequential(*partitions),  # whole, so that their hooks are called
                self.chunks,
                balance=[1] * len(partitions),
                devices=self.devices,
                checkpoint=cast(Checkpoint, self.checkpoint),
            )
            object.__setattr__(self, "_pipeline", made)
        made.training = self.training
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pipeline"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget_pipeline()

    def __len__(self) -> int:
        """Counts layers."""
        return sum(self.balance)

    def __iter__(self) -> Iterator[nn.Module]:
        """Goes through the layers of all partitions."""
        for partition in self.partitions:
            assert isinstance(partition, nn.Sequential)
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        """Returns a layer."""
        return list(self)[index]

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refuses: the partitions have their devices."""
        _deny_moving()

    def cpu(self) -> NoReturn:
        """Refuses: the partitions have their devices."""
        _deny_moving()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Casts, and refuses to move."""
        moves = args and isinstance(args[0], torch.device | int | str | Tensor)
        if moves or "device" in kwargs or "tensor" in kwargs:
            _deny_moving()
        return super().to(*args, **kwargs)

    def forward(self, input: Tensors) -> Tensors:
        """Returns what the last layer returns for the batch."""
        _check_tensors(input)
        if not self.balance:
            return input
        output: Tensors = self._pipe()(input)
        _check_tensors(output)
        return output


def verify_module(module: nn.Module) -> None:
    """Refuses what cannot be cut into partitions."""
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")
    of_children = sum(len(list(child.parameters())) for child in module.children())
    if len(list(module.parameters())) != of_children:
        raise ValueError("module with duplicate parameters in distinct children is not supported")


def _check_balance(layers: int, balance: list[int]) -> None:
    if layers != sum(balance):
        raise ValueError(
            "module and sum of balance have different length "
            f"(module: {layers}, sum of balance: {sum(balance)}){_ADVICE}"
        )
    if any(count <= 0 for count in balance):
        raise ValueError(
            f"all balance numbers must be positive integer (balance: {balance}){_ADVICE}"
        )


def _devices_for(partitions: int, devices: Iterable[Device] | None) -> list[torch.device]:
    if devices is None and not torch.cuda.is_available():
        devices = ["cpu"] * partitions
    elif devices is None:
        devices = range(torch.cuda.device_count())
    found = [torch.device(device) for device in devices]
    if partitions > len(found):
        raise IndexError(
            "too few devices to hold given partitions "
            f"(devices: {len(found)}, partitions: {partitions})"
        )
    return copy.copy(found[:partitions])


def _deny_moving() -> NoReturn:
    raise TypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement"
    )


def _check_tensors(value: object) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")
