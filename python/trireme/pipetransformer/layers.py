"""The layers of a model from the input on: which parameters each has, and how it is frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from trireme import _C
from trireme._C import GradNormPart
from trireme._core.agreement import raised_on_all
from trireme._core.grad_parts import GradParts
from trireme._core.owners import ShardedOptimizer, StagedModule
from trireme._core.plain_model import plain_model
from trireme.activation_estimate import repeated_layers
from trireme.ddp import DistributedDataParallel
from trireme.pipetransformer.areas import FREEZE
from trireme.pipetransformer.ranks import ranks_of

LayerEntry = nn.Module | str | Sequence[nn.Module | str]
"""What is frozen at a time: a module or its name, or several."""


class _Parameter(NamedTuple):
    name: str
    tensor: nn.Parameter
    layer: int | None
    """None for what is outside of all layers."""


class Layers:
    """What :class:`Freeze` freezes. Collective over the ranks that train the model, when made.

    A rank of a pipeline knows all layers by name, and has the parameters of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[LayerEntry] | None,
        optimizer: Optimizer | None,
        *,
        evaluates: bool,
    ) -> None:
        FREEZE.expect_module(model)
        self.ranks = ranks_of(model)
        self.inner = _unwrapped(model)
        self._optimizer = optimizer
        self._layer_of: dict[str, int | None] = {}
        self._modes: list[dict[nn.Module, bool]] = []
        """The modules of each frozen layer, and the modes that they had."""
        self._hooks: list[list[Any]] = []
        self._frozen: list[set[str]] = []
        self.names: list[str] = []
        self._prefixes: list[list[str]] = []
        with self._on_all_ranks():
            self._refuse_torchs_class(model)
            entries = None if layers is None else [self._names_of(entry) for entry in layers]
        have_parameters = self._names_with_parameters()
        with self._on_all_ranks():
            self._prefixes = self._all_layers(have_parameters) if entries is None else entries
            self.names = [" + ".join(names) for names in self._prefixes]
            self._frozen = [set() for _ in self.names]
            self._check_nesting()
            self._check_parameters(have_parameters)
            self._check_shared()
            self._check_optimizer()
            if evaluates:
                self._check_modes()

    def _on_all_ranks(self) -> Any:
        ranks = self.ranks or _C.lone_communicator()

        def refuse(rank: int, text: str) -> None:
            self._refuse(f"got what rank {rank} cannot use: {text}", "Give all ranks the same.")

        return raised_on_all(ranks, ranks.device, refuse)

    def _refuse(self, got: str, next_step: str, kind: type[Exception] = ValueError) -> NoReturn:
        ranks = self.ranks or _C.lone_communicator()
        rank, world = (-1, -1) if self.ranks is None else (ranks.rank, ranks.world)
        FREEZE.refuse(got, next_step, kind=kind, rank=rank, world=world)

    # which layers there are

    def _refuse_torchs_class(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, TorchDDP) and not isinstance(module, DistributedDataParallel):
                self._refuse(
                    "got torch's DistributedDataParallel, which does not follow requires_grad",
                    "Use trireme.DistributedDataParallel.",
                )

    def _names_of(self, entry: LayerEntry) -> list[str]:
        if isinstance(entry, str | nn.Module):
            return [self._name_of(entry)]
        if not isinstance(entry, Sequence) or not entry:
            got = f"got {type(entry).__name__} as a layer, expected a module, a name or a list"
            self._refuse(got, "Put what is frozen together in one list.", TypeError)
        return [self._name_of(one) for one in entry]

    def _name_of(self, one: nn.Module | str) -> str:
        is_staged = isinstance(self.inner, StagedModule)
        if isinstance(one, nn.Module):
            for name, module in self.inner.named_modules():
                if module is one and name:
                    return name
            if is_staged:
                self._refuse(
                    "got modules as layers of a pipeline, of which a rank has its own only",
                    "Pass the names that they have in the module.",
                )
            got = f"got a {type(one).__name__} as a layer that is not in the model"
            self._refuse(got, "Pass modules of the model, or their names.")
        if not isinstance(one, str):
            got = f"got {type(one).__name__} as a layer, expected a module, a name or a list"
            self._refuse(got, "Put what is frozen together in one list.", TypeError)
        if not is_staged and self._module(one) is None:
            got = f"got {one!r} as a layer, expected the name of a module in the model"
            self._refuse(got, "Use the names of named_modules(), without those of wrappers.")
        return one

    def _module(self, name: str) -> nn.Module | None:
        try:
            return self.inner.get_submodule(name)
        except AttributeError:
            return None

    def _names_with_parameters(self) -> set[str]:
        """The prefixes of all parameters on any rank that has stages, else on this one."""
        own = {
            ".".join(path[:count])
            for path in (name.split(".") for name, _ in self._named())
            for count in range(1, len(path))
        }
        if not isinstance(self.inner, StagedModule) or self.ranks is None:
            return own
        texts = _C.gather_texts("\n".join(sorted(own)), self.ranks, self.ranks.device)
        return {name for text in texts for name in text.split("\n")}

    def _all_layers(self, have_parameters: set[str]) -> list[list[str]]:
        """Those of ``repeated_layers``; one without parameters goes with the one in front of it."""
        if isinstance(self.inner, StagedModule):
            stages: Any = self.inner.stages
            names = [name for stage in stages for name in stage.layers]
        else:
            where, found = repeated_layers(self.inner)
            prefix = f"{where}." if where else ""
            chosen = self.inner.get_submodule(where)
            numbers = {id(child): name for name, child in chosen.named_children()}
            names = [prefix + numbers[id(layer)] for layer in found]
        layers: list[list[str]] = []
        waiting: list[str] = []
        for name in names:
            if name in have_parameters:
                layers.append([*waiting, name])
                waiting = []
            elif layers:
                layers[-1].append(name)
            else:
                waiting.append(name)
        if not layers:
            got = "got a model without repeated layers, expected a ModuleList or Sequential of them"
            self._refuse(got, "Pass its layers, from the input on.")
        return layers

    # parameters

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.named_parameters(remove_duplicate=False)

    def parameters(self) -> Iterator[_Parameter]:
        """Those of this rank, by each name that they have."""
        for name, tensor in self._named():
            if name not in self._layer_of:
                self._layer_of[name] = self._find_layer(name)
            yield _Parameter(name, tensor, self._layer_of[name])

    def _find_layer(self, name: str) -> int | None:
        for number, prefixes in enumerate(self._prefixes):
            if any(name.startswith(f"{prefix}.") for prefix in prefixes):
                return number
        return None

    def _check_nesting(self) -> None:
        names = [name for prefixes in self._prefixes for name in prefixes]
        for number, name in enumerate(names):
            for other in names[:number] + names[number + 1 :]:
                if name == other or name.startswith(f"{other}."):
                    self._refuse(
                        f"got {name!r} as a layer, which lies in {other!r}",
                        "Name each module once.",
                    )

    def _check_parameters(self, have_parameters: set[str]) -> None:
        for name, prefixes in zip(self.names, self._prefixes, strict=True):
            if not have_parameters.intersection(prefixes):
                self._refuse(
                    f"got layer {name!r} without parameters",
                    "Put it in a list with the layer in front of it: they are frozen together.",
                )

    def _check_shared(self) -> None:
        seen: dict[int, _Parameter] = {}
        elsewhere = self.inner.names_in_whole() if isinstance(self.inner, StagedModule) else {}
        for one in self.parameters():
            first = seen.setdefault(id(one.tensor), one)
            other = elsewhere.get(one.name)
            if other is not None and first is one:
                first = _Parameter(other, one.tensor, self._find_layer(other))
            if first.layer != one.layer and one.tensor.requires_grad:
                self._refuse(
                    f"got parameter {first.name!r}, which is {one.name!r} as well, expected no "
                    "layer to share one with what is frozen at another time",
                    "Put both into one layer, or leave them out.",
                )

    def _check_optimizer(self) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        if not isinstance(optimizer, Optimizer):
            got = f"got {type(optimizer).__name__} as optimizer, expected a torch.optim.Optimizer"
            self._refuse(got, "Pass the one that steps the layers.", TypeError)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for one in self.parameters():
            is_trained = one.layer is not None and one.tensor.requires_grad
            if is_trained and id(one.tensor) not in known:
                self._refuse(
                    f"got an optimizer without {one.name!r}, expected that of the model",
                    "Pass the optimizer that steps the layers.",
                )

    def train_alone(self) -> bool:
        """Whether this rank trains nothing but layers."""
        return not any(one.layer is None and one.tensor.requires_grad for one in self.parameters())

    def gradients(self, frozen: int) -> list[list[GradNormPart]]:
        """What this rank has of the gradients of each layer behind the first ``frozen`` ones."""
        found = [GradParts() for _ in self.names]
        seen: set[int] = set()
        for one in self.parameters():
            if one.layer is not None and one.layer >= frozen and id(one.tensor) not in seen:
                seen.add(id(one.tensor))
                found[one.layer].add(one.tensor)
        for name, parts in zip(self.names, found, strict=True):
            if parts.cut_by_others or any(True for _ in parts.cut_in_stages()):
                self._refuse(
                    f"got layer {name!r} that torch has sharded, whose gradients are not measured",
                    "Shard it with trireme.fully_shard, or choose rule='schedule'.",
                )
        return [parts.parts() for parts in found]

    # freezing

    def freeze(self, count: int) -> None:
        """Freezes the first ``count`` layers, and trains behind them what this has frozen.

        A frozen parameter loses its gradient, and its state in the optimizer.
        """
        for name, parameter, layer in self.parameters():
            if layer is None:
                continue
            if layer >= count:
                if name in self._frozen[layer]:
                    self._frozen[layer].remove(name)
                    parameter.requires_grad_(True)
            elif parameter.requires_grad:
                self._frozen[layer].add(name)
                parameter.requires_grad_(False)
                parameter.grad = None
                self._forget(parameter)

    def _forget(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.optim.state.pop(optimizer._shards[parameter], None)
        elif optimizer is not None:
            optimizer.state.pop(parameter, None)

    # modes

    def _check_modes(self) -> None:
        here = [one.name for one in self.parameters()]
        for layer, prefixes in zip(self.names, self._prefixes, strict=True):
            is_here = any(name.startswith(f"{prefix}.") for name in here for prefix in prefixes)
            if is_here and all(self._module(prefix) is None for prefix in prefixes):
                self._refuse(
                    f"got layer {layer!r} of a traced pipeline, whose mode is that of the trace",
                    "Pass eval_frozen=False, and trace the module in evaluation mode if need be.",
                )

    def evaluate(self, count: int) -> None:
        """Keeps the first ``count`` layers in evaluation mode, whatever mode the model gets; lets
        go of the others."""
        while len(self._modes) > count:
            for hook in self._hooks.pop():
                hook.remove()
            for one, mode in self._modes.pop().items():
                one.training = mode and self.inner.training
        for prefixes in self._prefixes[len(self._modes) : count]:
            found = [module for name in prefixes if (module := self._module(name)) is not None]
            modules = {inner: inner.training for module in found for inner in module.modules()}
            self._modes.append(modules)
            self._hooks.append([one.register_forward_pre_hook(_evaluate) for one in modules])
            for module in found:
                module.eval()


def _evaluate(module: nn.Module, _: Any) -> None:
    """Before a forward of a frozen module: a program calls ``model.train()`` in each epoch."""
    if module.training:
        module.training = False


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without DistributedDataParallel, DataParallel and torch.compile."""
    plain = plain_model(model)
    return _unwrapped(plain.module) if isinstance(plain, nn.DataParallel) else plain
