"""DataParallel: torch's class, with replicas that stay and backwards without the GIL."""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trireme import _C
from trireme._data_parallel import refuse
from trireme._data_parallel.devices import (
    DeviceLike,
    devices_of_replicas,
    threads_of_replicas,
    to_device,
)
from trireme._data_parallel.modules import ReplicaModules
from trireme._data_parallel.nested import matching_tensors, tensors_in, with_tensors
from trireme._data_parallel.parallel_apply import parallel_apply
from trireme._data_parallel.replicate import replicate
from trireme._data_parallel.scatter_gather import gather, scatter_kwargs
from trireme._data_parallel.targets import check_replicable, wrapped_dim
from trireme._data_parallel.workers import ReplicaThreads

T = TypeVar("T", bound=nn.Module)

_making_threads = threading.Lock()
_STEPS = ("replicate", "scatter", "parallel_apply", "gather")


class DataParallel(nn.DataParallel[T]):
    """One process, several replicas of a module, one line; replaces ``torch.nn.DataParallel``.

    Each forward cuts its inputs along the batch, runs one replica per part, all at the same time,
    and puts the outputs together; gradients of all parts arrive, summed, in the parameters of
    ``module``. Signature, attributes and ``state_dict`` names are those of torch's class, of which
    this is a subclass (``isinstance`` holds).

    What differs, for the better:

    * It works on CPU, where replicas share the module's parameters and take no memory for them.
    * Replicas are made once. On other devices they are copied to again only after a parameter was
      written, or may have been by an optimizer.
    * Backward runs the replicas' graphs at the same time, each in the thread of its replica,
      without Python; gradients are summed meanwhile, in a fixed order: the same bits in every run.
    * ``loss=`` computes the loss where the outputs are, so that no device holds all of them.
    * Forwards of several threads wait for each other.
    * Replicas have parameters (``next(self.parameters())`` works inside forward).

    What forward sets on ``self`` is lost, as in torch, but what it writes in place to buffers stays
    for the first replica (BatchNorm's statistics are those of its part of the batch); hooks of
    layers run once per replica; 0-dim outputs become a vector.

    Args:
        module: all its parameters on the device of the first replica. No ScriptModule, compiled,
            parallel or lazy module in it.
        device_ids: one device per replica: ints (accelerators) or ``["cpu"] * n``. A device may be
            named twice.
        output_device: where outputs are gathered; the device of the first replica if None.
        dim: the batch dimension of inputs and outputs.
        replicas: how many, in place of ``device_ids``. With neither: one per accelerator, or, for a
            module on the CPU, one per group of cores with a cache of their own, and at least two
            where there are two cores. ``torch.get_num_threads()`` threads are shared out to them.
        loss: ``forward(*inputs, target=y)`` then returns ``loss(output, y)``, computed for each
            part by its replica: for a 0-dim loss the mean weighted by the number of rows, or the
            sum if ``loss.reduction == "sum"``; anything else is gathered. Without ``target`` as
            without ``loss``. A mean over anything but rows (``ignore_index``, class weights) is
            weighted by rows all the same, as under DDP.
        balance: ``"even"`` cuts as ``torch.chunk``; ``"auto"`` by measured speed; or one weight per
            replica. Gradients are those of the whole batch in each case.

    Raises:
        TypeError, ValueError: bad arguments; inputs that cannot be cut; outputs that cannot be put
            together. What a replica raises comes out of ``forward`` and ``backward`` as it was,
            with a note that names the replica.

    Cost per step: two thread wake-ups for forward and for backward each; one copy of the outputs
    (none with ``loss``); one addition per replica but the first for each parameter. Memory on CPU:
    a second set of gradients, for as long as backward has not summed it. Not for concurrent
    forwards of several threads. ``backward(create_graph=True)`` raises;
    ``trireme.data_parallel`` has a graph for it.
    """

    _replaces_steps = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._replaces_steps = any(
            getattr(cls, step) is not getattr(DataParallel, step) for step in _STEPS
        )

    def __init__(
        self,
        module: T,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        loss: Callable[..., Any] | None = None,
        balance: str | Sequence[float] = "even",
    ) -> None:
        # torch's __init__ would find no device on a CPU and do nothing then.
        nn.Module.__init__(self)
        check_replicable(module)
        if isinstance(dim, bool) or not isinstance(dim, int):
            refuse(
                f"got dim={dim!r}, expected an int",
                "Name the dimension of the batch.",
                kind=TypeError,
            )
        self._devices = devices_of_replicas(module, device_ids, replicas)
        self.dim = dim
        self.module = module
        accelerated = self._devices[0].type != "cpu"
        # torch has no numbers for the CPU.
        self.device_ids: list[Any] = (
            [device.index for device in self._devices] if accelerated else self._devices
        )
        self.src_device_obj = self._devices[0]
        self._output = self._devices[0] if output_device is None else to_device(output_device)
        self.output_device: Any = self._output.index if accelerated else self._output
        if len(self._devices) == 1:
            module.to(self._devices[0])
        self.balance = _checked_balance(balance, len(self._devices))
        # In a tuple, so that a module is not registered as a part of this one.
        self._loss = (_checked_loss(loss),)
        self._threads: ReplicaThreads | None = None
        self._modules_of_replicas: ReplicaModules | None = None
        self._core: Any = None

    # forward

    @torch._disable_dynamo
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The outputs of ``module`` for the whole batch; with ``loss`` and ``target`` the loss."""
        with_loss = self._loss[0] is not None and "target" in kwargs
        if self._replaces_steps:
            return self._forward_of_subclass(inputs, kwargs)
        if len(self._devices) == 1:
            return self._forward_alone(inputs, kwargs, with_loss)
        return self._forward_together(inputs, kwargs, with_loss)

    def _forward_together(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], with_loss: bool
    ) -> Any:
        threads = self._own_threads()
        if threads.is_this_one_of_them():
            refuse(
                "got a forward within one of the same DataParallel or its backward, expected one "
                "around it",
                "Call the module itself there.",
                kind=RuntimeError,
            )
        with threads.turn:
            return self._run_replicas(threads, (inputs, kwargs), with_loss)

    def _run_replicas(
        self,
        threads: ReplicaThreads,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        with_loss: bool,
    ) -> Any:
        modules = self._made_ready(threads)
        tensors = tensors_in(given)
        core = self._core
        rows = _rows(tensors, self.dim, len(self._devices) if any(given) else 1)
        pass_ = core.begin(rows)
        parts = [pass_.scatter(tensor, self.dim) for tensor in tensors]
        chunks = pass_.chunks
        replicas = [replica for replica, _ in chunks]

        def run(position: int) -> Any:
            own, named = with_tensors(given, iter([part[position] for part in parts]))
            target = named.pop("target") if with_loss else None
            output = modules[replicas[position]](*own, **named)
            return self._loss_on(replicas[position])(output, target) if with_loss else output

        outputs = threads.run(
            replicas,
            run,
            lambda job, on_interrupt: core.forward(pass_, job, on_interrupt),
            core.describe,
        )
        found = matching_tensors(outputs, [core.describe(replica) for replica in replicas])
        weights = _loss_weights(self._loss[0], [n for _, n in chunks]) if with_loss else []
        results = pass_.gather(found, self.dim, weights)
        return with_tensors(outputs[0], iter(results))

    def _forward_alone(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], with_loss: bool
    ) -> Any:
        device = self._devices[0]
        given = (inputs, kwargs)
        if device.type != "cpu":
            moved = (t.to(device, non_blocking=True) for t in tensors_in(given))
            inputs, kwargs = with_tensors(given, iter(list(moved)))
        target = kwargs.pop("target") if with_loss else None
        output = self.module(*inputs, **kwargs)
        return self._loss_on(0)(output, target) if with_loss else output

    def _forward_of_subclass(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch's steps, for classes that replace one of them."""
        scattered, named = self.scatter(inputs, kwargs, self.device_ids)
        if not scattered and not named:
            scattered, named = ((),), ({},)
        if len(self.device_ids) == 1:
            return self.module(*scattered[0], **named[0])
        replicas = self.replicate(self.module, self.device_ids[: len(scattered)])
        outputs = self.parallel_apply(replicas, scattered, named)
        return self.gather(outputs, self.output_device)

    def _own_threads(self) -> ReplicaThreads:
        with _making_threads:
            if self._threads is None or self._threads.process != os.getpid():
                self._threads = ReplicaThreads(self._devices, threads_of_replicas(self._devices))
                self._modules_of_replicas = None
            return self._threads

    def _made_ready(self, threads: ReplicaThreads) -> ReplicaModules:
        """The replicas as the module is now, made anew where its layers or tensors are others."""
        modules = self._modules_of_replicas
        if modules is not None and modules.is_current(self.module):
            modules.follow()
            return modules
        check_replicable(self.module)
        with torch.inference_mode(False):  # what is made here outlives it
            modules = ReplicaModules(self.module, self._devices)
        options = _C.ReplicasOptions()
        options.auto_balance = self.balance == "auto"
        if not isinstance(self.balance, str):
            options.weights = list(self.balance)
        options.output_device = self._output
        self._core = _C.Replicas(module=modules.tensors, pool=threads.pool, options=options)
        self._modules_of_replicas = modules
        return modules

    def _loss_on(self, replica: int) -> Callable[..., Any]:
        """The loss, whose buffers have to be on the device of the replica."""
        loss = self._loss[0]
        assert loss is not None
        device = self._devices[replica]
        if not isinstance(loss, nn.Module) or all(b.device == device for b in loss.buffers()):
            return loss
        return copy.deepcopy(loss).to(device)

    def last_step(self) -> dict[str, Any]:
        """Says what the last step took, on the host's clock; empty before the first.

        Keys: ``step``, ``forward_ms``, ``backward_ms`` (as the caller saw them), ``copied_bytes``
        (to bring the replicas up to date) and ``replicas``, a list of ``device``, ``rows``,
        ``forward_ms``, ``backward_ms``, ``waiting_share`` (of its time, for slower ones) and
        ``memory_bytes`` (parameters and buffers of its own).
        """
        return {} if self._core is None else self._core.last_step()

    # torch's steps. A subclass that replaces one of them gets torch's order of calls.

    def replicate(self, module: T, device_ids: Sequence[DeviceLike]) -> list[T]:
        """See ``trireme.replicate``."""
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        device_ids: Sequence[DeviceLike],
    ) -> Any:
        """See ``trireme.scatter_kwargs``."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(
        self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """See ``trireme.parallel_apply``."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """See ``trireme.gather``."""
        return gather(outputs, output_device, dim=self.dim)

    # copies

    def __getstate__(self) -> dict[str, Any]:
        # Threads and replicas stay behind: a copy makes its own.
        return vars(self) | {"_threads": None, "_modules_of_replicas": None, "_core": None}


def _rows(tensors: Sequence[Tensor], dim: int, without: int) -> int:
    """Returns how many the batch has, which the first tensor with dimensions says."""
    for tensor in tensors:
        if tensor.is_meta:
            refuse("got an input on 'meta', expected data", "Give tensors that have memory.")
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if first is None:
        return without
    return first.size(wrapped_dim(first, dim, "an input"))


def _loss_weights(loss: Any, rows: Sequence[int]) -> list[float]:
    reduction = getattr(loss, "reduction", None)
    if reduction is None and isinstance(loss, functools.partial):
        reduction = loss.keywords.get("reduction")
    total = sum(rows)
    return [1.0 if reduction == "sum" or not total else n / total for n in rows]


def _checked_balance(balance: str | Sequence[float], replicas: int) -> str | tuple[float, ...]:
    if isinstance(balance, str):
        if balance not in ("even", "auto"):
            refuse(
                f'got balance="{balance}", expected "even", "auto" or weights',
                "Choose one of them.",
            )
        return balance
    try:
        weights = tuple(float(weight) for weight in balance)
    except (TypeError, ValueError):
        weights = None
    if weights is None:
        refuse(
            f'got balance={balance!r}, expected "even", "auto" or weights',
            "Choose one of them.",
            kind=TypeError,
        )
    sound = all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)
    if len(weights) != replicas or not sound:
        refuse(
            f"got balance={list(weights)} for {replicas} replicas, expected one "
            "finite weight >= 0 for each, not all 0",
            "Give each its share of the batch.",
        )
    return weights


def _checked_loss(loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if loss is not None and not callable(loss):
        refuse(
            f"got loss={loss!r}, expected a function of output and target",
            "Pass for example torch.nn.functional.cross_entropy.",
            kind=TypeError,
        )
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        refuse(
            "got a loss with parameters, expected them in the module",
            "Compute such a loss in the forward of the module, and return it.",
        )
    return loss
