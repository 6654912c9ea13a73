"""Accelerate's Accelerator over the backend trireme, with Trireme's classes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.weak import WeakIdKeyDictionary

from trireme import clip_grad_norm_, load_checkpoint, save_checkpoint
from trireme.ddp import DistributedDataParallel
from trireme.integrations.tested_versions import say_if_untested
from trireme.integrations.torch_names import replaced
from trireme.integrations.units import AREA, is_sharded, shard_units
from trireme.launch import Context, init
from trireme.zero import ZeroRedundancyOptimizer

__all__ = ["Accelerator"]

_FOLDER = "trireme"
"""Where ``save_state`` puts a sharded model, in the folder that it is given."""


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose ``prepare`` gives Trireme's classes, on the CPU, too.

    It makes the process group itself, as ``trireme.init()`` does, unless there is one: started by
    torchrun, SLURM or mpirun. (``accelerate launch --cpu`` starts one rank only.) Without a GPU it
    computes on the CPU; ``cpu=True`` says so where there is one.

    Args:
        fully_shard: ``prepare`` shards models by ``trireme.fully_shard`` in place of wrapping them
            in DistributedDataParallel: every child of a ModuleList or Sequential is a unit. An
            optimizer made before follows its model, if both are prepared by this Accelerator.
        others: as for ``accelerate.Accelerator``, positional ones too.

    A model that was sharded before stays as it is, and so does one whose gradients a
    ``ZeroRedundancyOptimizer`` of stage 2, prepared with it or before, averages. ``save_state`` and
    ``load_state`` keep what is sharded by ``trireme.save_checkpoint``.

    Raises:
        ValueError: ``fully_shard`` beside a plugin that shards.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *arguments: Any, fully_shard: bool = False, **options: Any) -> None:
        say_if_untested("accelerate")
        bound = inspect.signature(accelerate.Accelerator).bind(*arguments, **options)
        given = bound.arguments
        if fully_shard:
            _refuse_plugins(given)
        self._shards = fully_shard
        self._follows: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Sharded parameters by those of which they were made."""
        with nullcontext() if _has_state() else _own_group(given):
            super().__init__(*bound.args, **bound.kwargs)
        if dist.is_initialized():  # Accelerate says gloo of any group of CPU ranks
            PartialState._shared_state["backend"] = self.state.backend = dist.get_backend()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        for one in args:  # models are prepared according to them
            if isinstance(one, ZeroRedundancyOptimizer):
                self.prepare_optimizer(one)
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:  # one may stand before its model
            self._follow(optimizer)
        return prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if evaluation_mode or getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if self._shards and not is_sharded(model):
            self._shard(model, device_placement)
        if is_sharded(model) or self._zero2_of(model) is not None:
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        ours = (torch.nn.parallel, "DistributedDataParallel", DistributedDataParallel)
        with replaced([ours]):
            return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            found = [one for one in self._optimizers if _inner(one) is optimizer]
            # Accelerate would read its whole state, of which each rank has a part.
            return found[0] if found else super().prepare_optimizer(optimizer, False)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self._follow(prepared)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        zero = self._zero2_of(model)
        if is_sharded(model):
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
            try:
                yield
            finally:
                model.set_requires_gradient_sync(True)  # type: ignore[operator]
        else:
            with super().no_sync(model) if zero is None else zero.no_sync():
                yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        parameters = list(parameters)
        if not any(self._is_sharded_here(model) for model in self._models):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        norm = clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)  # empty on ranks but 0

    def save_state(self, output_dir: Any = None, *arguments: Any, **options: Any) -> Any:
        with self._without_sharded() as sharded:
            folder = super().save_state(output_dir, *arguments, **options)
        for index, model, optimizer in sharded:
            save_checkpoint(Path(folder) / f"{_FOLDER}_{index}", model, optimizer)
        return folder

    def load_state(self, input_dir: Any = None, *arguments: Any, **options: Any) -> None:
        found: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        try:
            with self._without_sharded() as sharded:
                super().load_state(input_dir, *arguments, **options)
        finally:
            hook.remove()
        for index, model, optimizer in sharded:
            load_checkpoint(Path(found[0]) / f"{_FOLDER}_{index}", model, optimizer)

    def _shard(self, model: nn.Module, device_placement: bool | None) -> None:
        if self.device_placement if device_placement is None else device_placement:
            model.to(self.device)
        before = dict(model.named_parameters(remove_duplicate=False))
        shard_units(model)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            self._follows[parameter] = after[name]

    def _follow(self, optimizer: Any) -> None:
        """Lets an optimizer step what became of its parameters."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter in self._follows:
                    if optimizer.state.get(parameter):
                        _refuse_stepped(_inner(optimizer))
                    group["params"][index] = self._follows[parameter]

    def _zero2_of(self, model: nn.Module) -> Any:
        """Returns the optimizer that averages the model's gradients, if one does."""
        for one in self._optimizers:
            inner = _inner(one)
            is_zero2 = isinstance(inner, ZeroRedundancyOptimizer) and inner.stage == 2
            if is_zero2 and _share_parameters(inner, model):
                return inner
        return None

    def _is_sharded_here(self, model: nn.Module) -> bool:
        return is_sharded(model) or any(
            isinstance(_inner(one), ZeroRedundancyOptimizer) and _share_parameters(one, model)
            for one in self._optimizers
        )

    @contextmanager
    def _without_sharded(self) -> Iterator[list[tuple[int, nn.Module, Any]]]:
        """Hides what Accelerate cannot save; yields the models with their optimizers."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if self._is_sharded_here(model)]
        pairs = [
            (index, model, _only_optimizer(model, optimizers))
            for index, model in enumerate(sharded)
        ]
        saved_here = [optimizer for _, _, optimizer in pairs]
        self._models = [model for model in models if not any(model is one for one in sharded)]
        self._optimizers = [
            one for one in optimizers if not any(_inner(one) is here for here in saved_here)
        ]
        try:
            yield pairs
        finally:
            self._models, self._optimizers = models, optimizers


@contextmanager
def as_accelerate_reads(context: Context) -> Iterator[None]:
    """Lets Accelerate find a group that exists, and leave the number of threads as it is.

    It reads the place of a rank from variables that torchrun sets, and SLURM does not.
    """
    place = {
        "RANK": context.rank,
        "WORLD_SIZE": context.world,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_WORLD_SIZE": context.local_world,
    }
    if context.world > 1:
        os.environ.update({name: str(value) for name, value in place.items()})
    # Of these it asks only whether they are there.
    asked = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "MASTER_ADDR": "localhost"}
    lacking = {name: value for name, value in asked.items() if name not in os.environ}
    os.environ.update(lacking)
    try:
        yield
    finally:
        for name in lacking:
            os.environ.pop(name, None)


def _has_state() -> bool:
    """Says whether an Accelerator, or TrainingArguments, has decided on device and group."""
    return PartialState._shared_state != {}


@contextmanager
def _own_group(given: dict[str, Any]) -> Iterator[None]:
    """Makes the group that arguments of an Accelerator ask for, and changes them to fit it."""
    handlers = list(given.get("kwargs_handlers") or ())
    asked: dict[str, Any] = {}
    for index, handler in enumerate(handlers):
        if isinstance(handler, InitProcessGroupKwargs):
            asked = handler.to_kwargs()
            handlers[index] = handler = copy(handler)
            handler.backend = "nccl"  # the default: Accelerate refuses any name that it lacks
    on_cpu = bool(given.get("cpu")) or parse_flag_from_env("ACCELERATE_USE_CPU")
    backend = asked.pop("backend", None)
    context = init(backend, device="cpu" if on_cpu else None, **asked)
    given["cpu"] = context.device.type == "cpu"
    if handlers:
        given["kwargs_handlers"] = handlers
    with as_accelerate_reads(context):
        yield


def _refuse_stepped(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    got = f"got a {kind} that has stepped, expected one without a state"
    AREA.refuse(got, "Prepare it first, and load its state by load_state().")


def _refuse_plugins(given: dict[str, Any]) -> None:
    for name in ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"):
        if given.get(name) is not None:
            got = f"got fully_shard=True and {name}, expected one of them"
            AREA.refuse(got, "Leave out the plugin, or take accelerate.Accelerator.")


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer that Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _share_parameters(optimizer: Any, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(one) in own for group in optimizer.param_groups for one in group["params"])


def _only_optimizer(model: nn.Module, optimizers: list[Any]) -> Any:
    found = [_inner(one) for one in optimizers if _share_parameters(one, model)]
    if len(found) > 1:
        got = f"got {len(found)} optimizers over parameters of one sharded model, expected one"
        AREA.refuse(got, "Give one optimizer several parameter groups.", kind=NotImplementedError)
    return found[0] if found else None
