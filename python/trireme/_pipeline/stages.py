"""The stages of a Sequential: its layers dealt out, and what a rank calls for those it holds."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trireme import _C
from trireme._C import BatchVersions, Communicator, DeferredSync
from trireme._core.errors import note, text_of
from trireme._core.nested import map_tensors, tensors_in
from trireme._core.sent_gradients import sends_gradients
from trireme._pipeline import refuse
from trireme._pipeline.agreement import agree
from trireme._pipeline.measure import measure_layers
from trireme._pipeline.schedule import partition
from trireme._pipeline.strategies import Strategies
from trireme._pipeline.values import Text, put_together, take_apart

LOSS = "_loss"
"""What a pipeline calls a loss that is a module."""

Balance = Sequence[int] | Literal["time", "bytes"] | None


@dataclass(frozen=True)
class Stage:
    """Some consecutive layers, and the rank that holds them."""

    number: int
    rank: int
    layers: tuple[str, ...]
    """Their names in the module."""

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        return f"layer {first}" if first == last else f"layers {first}..{last}"


def layers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers of a Sequential by name, and refuses what is more than its layers."""
    if not isinstance(module, nn.Sequential):
        got = f"got a {type(module).__name__} as module, expected a torch.nn.Sequential"
        refuse(got, "Write the model as one, or name in split= where it is to be cut.",
               kind=TypeError)  # fmt: skip
    if type(module).forward is not nn.Sequential.forward:
        got = f"got a {type(module).__name__} with a forward of its own, expected Sequential's"
        refuse(got, "Give a plain torch.nn.Sequential of its layers.", kind=TypeError)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in hooks):
        refuse("got a Sequential with hooks, which a pipeline would not call", "Hook its layers.")
    if module._parameters or module._buffers:
        name = next(iter({**module._parameters, **module._buffers}))
        refuse(f"got a Sequential with '{name}' beside its layers", "Put it into a layer.")
    layers = {name: layer for name, layer in module._modules.items() if layer is not None}
    if not layers:
        refuse("got a Sequential without layers, expected at least one", "Add layers.")
    return layers


def deal_out(
    module: nn.Sequential,
    stages: int,
    balance: Balance,
    sample: Any = None,
    communicator: Communicator | None = None,
) -> list[int]:
    """Returns how many layers each stage has. With a communicator it is collective where layers are
    measured."""
    count = len(module)
    if balance in ("time", "bytes"):
        if sample is None:
            got = f"got balance='{balance}' without sample=, expected one micro-batch"
            refuse(got, "Pass what a step would get, with as many rows as a micro-batch.")
        name = str(balance)
        if communicator is None:
            return partition(_costs(module, name, sample), stages)
        return partition(_costs_on_rank_0(module, name, sample, communicator), stages)
    if sample is not None:
        refuse("got sample= and a balance that is not measured", "Leave one of them out.")
    if isinstance(balance, str):
        got = f"got balance='{balance}', expected 'time', 'bytes', or layers per stage"
        refuse(got, "Correct the name.")
    if balance is None:
        return partition([1.0] * count, stages)
    dealt = list(balance)
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in dealt):
        refuse(f"got balance={dealt}, expected whole numbers from 1 on", "Correct it.")
    if len(dealt) != stages:
        got = f"got a balance for {len(dealt)} stages, expected {stages} as the schedule has"
        refuse(got, "Give each stage its layers.")
    if sum(dealt) != count:
        got = f"got balance={dealt}, which adds up to {sum(dealt)}, expected {count} layers"
        refuse(got, "Deal out all layers.")
    return dealt


def _costs(module: nn.Sequential, balance: str, sample: Any) -> list[float]:
    measured = measure_layers(module, sample)
    return [costs.seconds if balance == "time" else float(costs.bytes) for costs in measured]


def _costs_on_rank_0(
    module: nn.Sequential, balance: str, sample: Any, communicator: Communicator
) -> list[float]:
    """Rank 0 measures for all: times differ from rank to rank."""
    error, costs = None, ""
    if communicator.rank == 0:
        try:
            costs = " ".join(cost.hex() for cost in _costs(module, balance, sample))
        except Exception as raised:
            error = raised
    agree(communicator, {}, error, "layers")
    text = _C.broadcast_text(costs, communicator, torch.device("cpu"))
    return [float.fromhex(part) for part in text.split()]


def modules_of(
    stage: Stage, stages: Sequence[Stage], modules: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Returns the modules of a stage: its layers and, of the last one, a loss among the modules."""
    names = [*stage.layers, LOSS] if stage is stages[-1] and LOSS in modules else stage.layers
    return {name: modules[name] for name in names}


def tied_between(
    modules: Mapping[str, nn.Module], stages: Sequence[Stage]
) -> list[list[tuple[int, str]]]:
    """Finds parameters that stages of several ranks have: of each, its stages and names."""
    listed = []
    for stage in stages:
        names: list[str] = []
        tensors: list[Tensor] = []
        for name, module in modules_of(stage, stages, modules).items():
            for inner, parameter in module.named_parameters(name, remove_duplicate=False):
                names.append(inner)
                tensors.append(parameter)
        listed.append((stage.rank, (names, tensors)))
    return _C.find_tied(listed)


def names_in_whole(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Finds what hangs in several places: of each but the first the name, and that of the first."""
    first: dict[int, str] = {}
    later: dict[str, str] = {}
    for layer, module in layers.items():
        for prefix, owner in module.named_modules(prefix=layer, remove_duplicate=False):
            for name, tensor in {**owner._parameters, **owner._buffers}.items():
                if tensor is None or name in owner._non_persistent_buffers_set:
                    continue
                full_name = f"{prefix}.{name}"
                known = first.setdefault(id(tensor), full_name)
                if known != full_name:
                    later[full_name] = known
    return later


def refuse_misplaced(
    layers: Mapping[str, nn.Module], stage: int, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Refuses layers of a stage of this rank that have no memory, or that wait for other stages.
    ``group`` has the ranks of all stages; None where one process has them all."""
    for name, layer in layers.items():
        for inner, tensor in [*layer.named_parameters(name), *layer.named_buffers(name)]:
            if tensor.is_meta:
                got = f"got '{inner}' of stage {stage} on device meta (rank {rank})"
                refuse(f"{got}, expected this rank's layers to have memory",
                       "Call to_empty() and initialise them.")  # fmt: skip
    if group is not None:
        _refuse_synchronized(layers, stage, group)


def _refuse_synchronized(
    layers: Mapping[str, nn.Module], stage: int, group: dist.ProcessGroup
) -> None:
    """Refuses a SyncBatchNorm over ranks of other stages, which never come to it."""
    others = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    for name, layer in layers.items():
        for inner, module in layer.named_modules(prefix=name):
            if not isinstance(module, nn.SyncBatchNorm):
                continue
            waits_for = others.intersection(dist.get_process_group_ranks(module.process_group))
            if waits_for:
                got = (
                    f"got SyncBatchNorm '{inner}' of stage {stage} over ranks {sorted(waits_for)}, "
                    "which have other stages, expected one over ranks with this stage"
                )
                refuse(got, "Pass their group to convert_sync_batchnorm(), or keep BatchNorm.",
                       group)  # fmt: skip


def are_same(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Says whether two lists hold the same objects."""
    return len(tensors) == len(others) and all(map(operator.is_, tensors, others))


class RunsLayers(Protocol):
    """Is what the engine calls for a stage."""

    failure: Exception | None
    """What the user's part of it raised."""


@contextmanager
def with_causes(calls: Iterable[RunsLayers]) -> Iterator[None]:
    """Lets an error of the engine have the exception of this rank's layers as its cause."""
    try:
        yield
    except Exception as error:
        cause = next((call.failure for call in calls if call.failure), None)
        if cause is None or cause is error:
            raise
        raise error from cause


def keywords_of(layer: nn.Module) -> frozenset[str]:
    """Returns the keywords that the forward of a layer names, but for its input."""
    try:
        _, *others = inspect.signature(layer.forward).parameters.values()
    except ValueError:  # there is no input, or nothing can be known
        return frozenset()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(other.name for other in others if other.kind in named)


Named = tuple[list[str], list[Tensor]]


@dataclass
class HeldTensors:
    """What the engine is told of a stage."""

    parameters: Named
    buffers: Named
    strategies: list[DeferredSync]


def held_by(layers: Mapping[str, nn.Module], seen: set[int]) -> HeldTensors:
    """Returns parameters and buffers of layers, but for those in ``seen``, to which it adds them,
    and for parameters of strategies of which the core does not know by itself."""
    strategies = Strategies(layers.values())
    held = HeldTensors(([], []), ([], []), strategies.held)
    for name, layer in layers.items():
        for into, tensors in (
            (held.parameters, layer.named_parameters(name)),
            (held.buffers, layer.named_buffers(name)),
        ):
            for inner, tensor in tensors:
                if id(tensor) in seen or id(tensor) in strategies.parameters:
                    continue
                seen.add(id(tensor))
                into[0].append(inner)
                into[1].append(tensor)
    return held


@dataclass
class MicroBatches:
    """What the micro-batches of a step get: on each rank what its stages need."""

    inputs: Sequence[tuple[Any, ...]] = ()
    names: Sequence[str] = ()
    """What the first layer calls the inputs."""
    keywords: dict[str, Sequence[Any]] = field(default_factory=dict)
    targets: Sequence[Any] | None = None
    versions: BatchVersions | None = None
    keyword_versions: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """In forwards that stages are to compute again, by stage and micro-batch."""


def note_where(error: BaseException, where: str) -> None:
    """Lets what came out of a stage on a thread say so, unless its forward or loss has."""
    told = "\n".join([text_of(error), *getattr(error, "__notes__", ())])
    if "[pipeline] in stage" not in told:
        note(error, f"[pipeline] raised in {where}")


class StageCalls:
    """What the engine calls for a stage."""

    def __init__(
        self,
        stage: Stage,
        layers: Sequence[nn.Module],
        loss: Callable[..., Any] | None,
        device: torch.device | None = None,
    ) -> None:
        """``loss`` is that of the last stage, None for others."""
        self.stage = stage
        self.layers = layers
        self._loss = loss
        self._device = device  # where it computes, if what it gets is to be moved there
        self._devices = {str(parameter.device) for parameter in self._parameters()}
        self._keywords = [keywords_of(layer) for layer in layers]
        self.keywords = frozenset[str]().union(*self._keywords)
        self.sends_gradients = any(map(sends_gradients, self.held().values()))
        self._where = f"stage {stage.number} ({stage})"
        self.begin(MicroBatches())

    def begin(self, batch: MicroBatches) -> None:
        """Hands over what the micro-batches of a call get."""
        self.batch = batch
        self.failure: Exception | None = None

    def end(self) -> None:
        """Drops it; the batch hears of what layers have changed in place."""
        if self.batch.versions is not None:
            self.batch.versions.tell_batch()
        self.begin(MicroBatches())

    def held(self) -> dict[str, nn.Module]:
        """Returns the modules of the stage by name: its layers, and the loss if it is one."""
        held = dict(zip(self.stage.layers, self.layers, strict=True))
        if isinstance(self._loss, nn.Module):
            held[LOSS] = self._loss
        return held

    def _parameters(self) -> Iterator[nn.Parameter]:
        for module in self.held().values():
            yield from module.parameters()

    def expect_unmoved(self, group: dist.ProcessGroup | None) -> None:
        """Refuses a parameter that is elsewhere than when the stage was made."""
        for parameter in self._parameters():
            if str(parameter.device) not in self._devices:
                got = f"got stage {self.stage.number} ({self.stage}) on {parameter.device}"
                expected = (
                    f"expected it on {', '.join(self._devices)} as when the pipeline was made"
                )
                refuse(f"{got}, {expected}", "Move layers before.", group)

    def forward(self, micro_batch: int, given: Tensor | Text) -> Tensor | Text:
        try:
            first = 0
            if self.batch.keywords:
                self._look_at_keywords(micro_batch)
            if self.stage.number == 0:
                first = 1
                value = self._call_first(micro_batch)
            else:
                value = put_together(given)
            if self.batch.keywords:
                for number in range(first, len(self.layers)):
                    named = self._keywords_for(number, micro_batch)
                    value = self.layers[number](value, **named)
            else:
                for layer in self.layers[first:] if first else self.layers:
                    value = layer(value)
            return take_apart(value, self._where)
        except _C.StopRecomputation:
            raise
        except Exception as error:
            self._keep(error, micro_batch)
            raise

    def _keep(self, error: Exception, micro_batch: int) -> None:
        self.failure = error
        note(error, f"[pipeline] in {self._where}, micro-batch {micro_batch}")

    def _bring(self, value: Any) -> Any:
        device = self._device
        if device is None:
            return value
        return map_tensors(value, lambda one: one.to(device, non_blocking=device.type != "cpu"))

    def _call_first(self, micro_batch: int) -> Any:
        inputs = self._bring(self.batch.inputs[micro_batch])
        named = self._keywords_for(0, micro_batch)
        for name in self.batch.names:
            named.pop(name, None)
        return self.layers[0](*inputs, **named)

    def loss(self, micro_batch: int, output: Tensor | Text) -> Tensor:
        try:
            found = put_together(output)
            targets = self.batch.targets
            if self._loss is not None:
                given = () if targets is None else (self._bring(targets[micro_batch]),)
                found = self._loss(found, *given)
            if not isinstance(found, Tensor) or found.dim() != 0:
                self._refuse_loss(found)
            return found
        except _C.StopRecomputation:
            raise
        except Exception as error:
            self._keep(error, micro_batch)
            raise

    def _look_at_keywords(self, micro_batch: int) -> None:
        """Refuses a recomputation with other values than in the forward."""
        if not (_C.is_checkpointing() or _C.is_recomputing()):
            return
        given = self.batch.keywords
        versions = [
            tensor._version
            for name in sorted(self.keywords & given.keys())
            for tensor in tensors_in(given[name][micro_batch])
            if not tensor.is_inference()
        ]
        known = self.batch.keyword_versions
        if _C.is_checkpointing():
            known[self.stage.number, micro_batch] = versions
        elif known[self.stage.number, micro_batch] != versions:
            got = (
                f"got a keyword of {self._where} that was changed in place before it is recomputed"
            )
            refuse(got, "Let layers change copies, or do not checkpoint.", kind=RuntimeError)

    def _keywords_for(self, layer: int, micro_batch: int) -> dict[str, Any]:
        given = self.batch.keywords
        names = self._keywords[layer]
        return {name: self._bring(given[name][micro_batch]) for name in names if name in given}

    def _refuse_loss(self, found: Any) -> None:
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"tensor of sizes {list(found.shape)}"
        who = "the last layer" if self._loss is None else "loss="
        got = f"{who} returned a {what} as the loss of a micro-batch, expected a 0-dim tensor"
        next_step = "Pass loss=." if self._loss is None else "Return its mean or its sum."
        refuse(got, next_step, kind=TypeError)
