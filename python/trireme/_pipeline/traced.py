"""Any module cut at names: torch's frontend traces it, and each part is a layer of a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from trireme._pipeline import refuse
from trireme._pipeline.skips import skippable
from trireme._pipeline.torch_calls import StepInputs, TracedWiring

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass
class _Part:
    """What :class:`TracedWiring` reads of a stage."""

    stage_index: int
    pipe_info: Any
    submod: nn.Module
    node: fx.Node


class TracedLayer(nn.Module):
    """A part of a traced module.

    The first one takes what the module takes. A later one takes what the part before hands on, and
    by keyword what it needs of the module's inputs; other values come as skips.
    """

    forward: Callable[..., Any]

    def __init__(self, part: _Part, is_last: bool) -> None:
        super().__init__()
        self.traced = part.submod
        self._is_last = is_last
        self._wiring = TracedWiring(part)
        graph = part.pipe_info.graph
        names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        if part.stage_index == 0:
            self._own = self._wiring.of_batch
            self.forward = _with_names(self._run_first, names)
        else:
            asked = [name for name in names if name in self._wiring.of_batch]
            self.forward = _with_names(self._run, ["handed_on", *asked])

    def _run_first(self, *inputs: Any, **named: Any) -> Any:
        given = inspect.signature(self.forward).bind(*inputs, **named).arguments
        return self._finish(self.traced(*(given[name] for name in self._own)))

    def _run(self, handed_on: Any, **named: Any) -> Any:
        args, _ = self._wiring.arguments(handed_on, StepInputs(kwargs=[named]), 0)
        return self._finish(self.traced(*args))

    def _finish(self, output: Any) -> Any:
        return output if self._is_last else self._wiring.onward(output)


def _with_names(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Lets a function be known by the names of what it takes."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters = [inspect.Parameter(name, _POSITIONAL) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def traced_layers(module: nn.Module, split: Sequence[str], sample: Any) -> dict[str, nn.Module]:
    """Traces a module and cuts it in front of the submodules that ``split`` names.

    Args:
        module: Any module that ``torch.export`` takes. Its parameters are those of the layers.
        split: The names, in the order in which the forward comes to them.
        sample: What the module gets for a micro-batch: a tensor, a tuple of arguments, or a dict of
            keywords.

    Raises:
        ValueError: names that are not there, or are given twice; no ``sample``.
    """
    names = [split] if isinstance(split, str) else list(split)
    _refuse_what_cannot_be_cut(module, names, sample)
    args = () if isinstance(sample, dict) else sample if isinstance(sample, tuple) else (sample,)
    keywords = sample if isinstance(sample, dict) else None
    points = dict.fromkeys(names, SplitPoint.BEGINNING)
    cut = pipeline(module, args, keywords, split_spec=points)
    if cut.num_stages != len(names) + 1:
        got = f"got split={names}, at which the module falls into {cut.num_stages} parts"
        refuse(f"{got}, expected {len(names) + 1}", "Name modules that its forward calls once.")
    info = cut.info()
    calls = [node for node in info.graph.nodes if node.op == "call_module"]
    layers: dict[str, nn.Module] = {}
    for number, (name, node) in enumerate(zip(["the beginning", *names], calls, strict=True)):
        part = _Part(number, info, cut.get_stage_module(number), node)
        layers[name] = _declared(TracedLayer(part, number == len(names)))
    return layers


def _refuse_what_cannot_be_cut(module: nn.Module, names: Sequence[str], sample: Any) -> None:
    known = dict(module.named_modules())
    for name in names:
        if name not in known or name == "":
            got = f"got split={names}, expected names of modules in the {type(module).__name__}"
            refuse(f"{got}: it has no '{name}'", "See named_modules().")
    if len(set(names)) != len(names):
        refuse(f"got split={names}, expected each name once", "Leave out the second.")
    once = {name for name, _ in module.named_parameters()}
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name not in once:
            got = f"got '{name}' of a module that is traced, which is another parameter, too"
            refuse(f"{got}: tracing would take them apart", "Write it as a Sequential.",
                   kind=NotImplementedError)  # fmt: skip
    if sample is None:
        got = "got split= without sample=, expected what the module gets for a micro-batch"
        refuse(got, "Pass it: the module is traced with it.")


def _declared(layer: TracedLayer) -> TracedLayer:
    """Gives a layer a class that declares its skips."""
    stashes, pops = layer._wiring.skips
    if stashes or pops:
        layer.__class__ = skippable(stash=stashes, pop=pops)(
            type("TracedLayer", (TracedLayer,), {})
        )
    return layer


def show_under_own_names(shown: nn.Module, layers: Iterable[nn.Module], module: nn.Module) -> None:
    """Lets ``shown`` have parameters and buffers of traced layers under their names in the module
    that was traced."""
    names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    made: set[nn.Module] = {shown}
    for layer in layers:
        assert isinstance(layer, TracedLayer)
        _join(shown, layer.traced, "", names, made)


def _join(
    target: nn.Module, source: nn.Module, prefix: str, names: set[str], made: set[nn.Module]
) -> None:
    for name in (*source._parameters, *source._buffers):
        held = "_parameters" if name in source._parameters else "_buffers"
        if prefix + name in names:
            getattr(target, held).setdefault(name, getattr(source, held)[name])
    for name, child in source._modules.items():
        if child is None:
            continue
        there = target._modules.get(name)
        if there is None:
            target._modules[name] = child
            continue
        if there not in made:  # it belongs to one layer, and several have a part of it
            whole = nn.Module()
            _join(whole, there, f"{prefix}{name}.", names, made)
            target._modules[name] = there = whole
            made.add(whole)
        _join(there, child, f"{prefix}{name}.", names, made)


def own_name(name: str) -> str:
    """Returns what the module that was traced calls a tensor, of its name in the layers; that of a
    loss stays as it is."""
    return name.split(".traced.", 1)[-1]
