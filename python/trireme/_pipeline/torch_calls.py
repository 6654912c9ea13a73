"""What the engine calls for a stage of torch's kind: its inputs, its module, its loss."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, fx, nn
from torch.distributed.pipelining.stage import _PipelineStage, _PipelineStageBase
from torch.distributed.tensor import DTensor

from trireme import _C
from trireme._C import BatchVersions
from trireme._core.nested import map_tensors, tensors_in
from trireme._pipeline import refuse
from trireme._pipeline.skips import SkipsOf, skips_of
from trireme._pipeline.torch_stage import call_submod
from trireme._pipeline.values import Text, put_together, take_apart


@dataclass
class StepInputs:
    """What a rank gives to a step, by micro-batch, and what its last stage leaves."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[dict[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    keeps_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    versions: BatchVersions = field(default_factory=_C.BatchVersions)


class Wiring(Protocol):
    """Says how values go from stage to stage."""

    @property
    def skips(self) -> SkipsOf: ...
    def arguments(
        self, given: Any, inputs: StepInputs, micro_batch: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def onward(self, output: Any) -> Any: ...


class ManualWiring:
    """The next stage takes what this one returns: a tuple or list as several arguments."""

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._is_first = stage.stage_index == 0
        self.skips = skips_of(stage.submod)

    def arguments(
        self, given: Any, inputs: StepInputs, micro_batch: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keywords = inputs.kwargs[micro_batch]
        if self._is_first:
            return inputs.args[micro_batch], keywords
        return tuple(given) if type(given) in (tuple, list) else (given,), keywords

    def onward(self, output: Any) -> Any:
        return output


_Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Source:
    """Where an argument of a traced stage comes from: a stage, or the batch."""

    stage: int | None
    path: _Path
    names: tuple[str, ...]
    """Under which the batch may have it."""


class _HasPart(Protocol):
    """Is a part of a traced module, such as torch's stage."""

    stage_index: int
    pipe_info: Any
    submod: nn.Module
    node: fx.Node


class TracedWiring:
    """A graph says which stage takes what of which: past those between it goes as a skip.

    Keywords go to the stages that take them.
    """

    def __init__(self, stage: _HasPart) -> None:
        self._index = stage.stage_index
        calls = [node for node in stage.pipe_info.graph.nodes if node.op == "call_module"]
        numbers = {node.name: number for number, node in enumerate(calls)}
        names = _placeholders(stage.submod)
        roots = [node for node in stage.pipe_info.graph.nodes if node.op == "placeholder"]
        own = {name for pair in names for name in pair}
        self._of_others = {name for node in roots for name in (str(node.target), node.name)} - own
        self._sources = [
            _source_of(argument, numbers, pair)
            for argument, pair in zip(_nodes(stage.node), names, strict=True)
        ]
        taken = {number: _taken(node, numbers) for number, node in enumerate(calls)}
        self._next = [
            source.path for source in taken.get(self._index + 1, []) if source.stage == self._index
        ]
        self._received = [
            source.path for source in taken[self._index] if source.stage == self._index - 1
        ]
        self._stashes = [
            (_key(source, number), source.path)
            for number, sources in taken.items()
            for source in sources
            if source.stage == self._index and number > self._index + 1
        ]
        popped = [source for source in taken[self._index] if source.stage is not None]
        self._pops = [
            _key(source, self._index) for source in popped if source.stage != self._index - 1
        ]
        self.skips: SkipsOf = ([key for key, _ in self._stashes], self._pops)

    @property
    def of_batch(self) -> list[str]:
        """What the stage takes of the module's inputs, by the module's names, in its order."""
        return [source.names[-2] for source in self._sources if source.stage is None]

    def arguments(
        self, given: Any, inputs: StepInputs, micro_batch: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keywords = {
            name: value
            for name, value in inputs.kwargs[micro_batch].items()
            if name not in self._of_others
        }
        if self._index == 0:
            return inputs.args[micro_batch], keywords
        received = dict(zip(self._received, given, strict=True))
        popped = {key: _C.pop(key) for key in self._pops}
        values = []
        for source in self._sources:
            if source.stage is None:
                values.append(self._of_batch(source, keywords))
            elif source.stage == self._index - 1:
                values.append(received[source.path])
            else:
                values.append(popped[_key(source, self._index)])
        return tuple(values), keywords

    def onward(self, output: Any) -> Any:
        for key, path in self._stashes:
            value = _found(output, path)
            if not isinstance(value, Tensor | None):
                got = f"got a {type(value).__name__} from stage {self._index} for a later stage"
                refuse(got, "Let only tensors pass stages.", kind=TypeError)
            _C.stash(key, value)
        return tuple(_found(output, path) for path in self._next)

    def _of_batch(self, source: _Source, keywords: dict[str, Any]) -> Any:
        for name in source.names:
            if name in keywords:
                return keywords.pop(name)
        got = f"got no '{source.names[0]}', which stage {self._index} takes from the batch"
        refuse(got, "Pass it as a keyword on this rank, too.", kind=TypeError)


def _placeholders(module: Any) -> list[tuple[str, ...]]:
    while not hasattr(module, "graph"):
        module = module.module  # it is wrapped
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [(str(node.target), node.name) for node in nodes]


def _source_of(argument: fx.Node, numbers: dict[str, int], names: tuple[str, ...]) -> _Source:
    path: _Path = ()
    while argument.target is operator.getitem:
        inner, key = argument.args
        assert isinstance(inner, fx.Node)
        path = (key, *path)
        argument = inner
    if argument.op == "placeholder":
        return _Source(None, path, (*names, str(argument.target), argument.name))
    if argument.name not in numbers:
        got = f"got an argument of a stage from {argument.op} '{argument.name}', expected a stage"
        refuse(got, "Let stages compute what other stages take.")
    return _Source(numbers[argument.name], path, names)


def _taken(call: fx.Node, numbers: dict[str, int]) -> list[_Source]:
    """Returns what a stage takes of others, each value once."""
    found: dict[tuple[int | None, _Path], _Source] = {}
    for argument in _nodes(call):
        source = _source_of(argument, numbers, ())
        if source.stage is not None:
            found.setdefault((source.stage, source.path), source)
    return list(found.values())


def _nodes(call: fx.Node) -> list[fx.Node]:
    return [arg for arg in call.args if isinstance(arg, fx.Node)]


def _key(source: _Source, to: int) -> str:
    path = "".join(f"[{key!r}]" for key in source.path)
    return f"stage {source.stage}{path} to stage {to}"


def _found(value: Any, path: _Path) -> Any:
    for key in path:
        value = value[key]
    return value


class TorchStageCalls:
    """What the engine calls for one stage."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        loss: Callable[..., Any] | None,
    ) -> None:
        self.stage = stage
        self.index = stage.stage_index
        self.is_last = stage.stage_index == stage.num_stages - 1
        self.wiring: Wiring
        if isinstance(stage, _PipelineStage):
            self.wiring = TracedWiring(stage)
        else:
            self.wiring = ManualWiring(stage)
        self._loss = loss
        self._where = f"stage {self.index}"
        self._output: Any = None
        self._weights: dict[int, Callable[..., None]] = {}
        self.inputs = StepInputs()
        self.failure: Exception | None = None

    @property
    def submod(self) -> nn.Module:
        """The module of the stage, which a program may wrap after the schedule was made."""
        found: nn.Module = self.stage.submod
        return found

    def begin(self, inputs: StepInputs) -> None:
        """Hands over the batch of a step."""
        self.inputs, self.failure, self._output = inputs, None, None
        self._weights.clear()

    def forward(self, micro_batch: int, given: Tensor | Text) -> Tensor | Text:
        try:
            value = None if self.index == 0 else put_together(given)
            args, kwargs = self.wiring.arguments(value, self.inputs, micro_batch)
            output = call_submod(self.stage, micro_batch, args, kwargs)
            if self.is_last:
                return self._keep(micro_batch, output)
            passed = take_apart(self.wiring.onward(output), self._where)
            for tensor in [passed] if isinstance(passed, Tensor) else passed[0]:
                if isinstance(tensor, DTensor):
                    got = f"{self._where} returned a DTensor, which cannot go to another stage"
                    refuse(got, "Return its local tensor.", kind=NotImplementedError)
            return passed
        except Exception as error:
            self.failure = error
            raise

    def _keep(self, micro_batch: int, output: Any) -> Text:
        """Keeps the output of the model for the loss and the caller, who may have any type."""
        self._output = output
        if self.inputs.keeps_outputs:
            self.inputs.outputs[micro_batch] = map_tensors(output, Tensor.detach)
        return tensors_in(output), ""

    def loss(self, micro_batch: int, _: Tensor | Text) -> Tensor:
        try:
            output, self._output = self._output, None
            targets = self.inputs.targets
            assert self._loss is not None and targets is not None
            found = self._loss(output, targets[micro_batch], **self.inputs.loss_kwargs)
            if not isinstance(found, Tensor):
                got = f"loss_fn returned a {type(found).__name__}, expected a tensor"
                refuse(got, "Return the mean or the sum of a micro-batch.", kind=TypeError)
            self.inputs.losses[micro_batch] = found.detach()
            return found
        except Exception as error:
            self.failure = error
            raise

    def begin_weights(self, micro_batch: int, _: None) -> None:
        """Asks the stage's dw_builder, after a backward."""
        builder = self.stage.dw_builder
        assert builder is not None
        try:
            self._weights[micro_batch] = builder()
        except Exception as error:
            self.failure = error
            raise

    def finish_weights(self, micro_batch: int, _: None) -> None:
        """Calls what it returned."""
        try:
            self._weights.pop(micro_batch)()
        except Exception as error:
            self.failure = error
            raise
