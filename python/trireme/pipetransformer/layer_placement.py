"""Which layers have memory on this rank, and how they come to others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trireme import _C
from trireme._C import Communicator, LayerMove, MovedState
from trireme.pipetransformer.areas import ELASTIC

Holders = Sequence[Sequence[int]]
"""The ranks that hold each layer, in ascending order."""


class LayerPlacement:
    """Moves parameters, buffers and optimizer state of layers from rank to rank.

    A layer that this rank does not hold keeps its tensors, as objects, and the optimizer keeps
    them, but they have no memory and no state. So groups of parameters, schedulers and modules
    never change.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        optimizer: Optimizer,
        ranks: Communicator | None,
    ) -> None:
        self._layers = layers
        self._optimizer = optimizer
        self._ranks = ranks
        self.holders: Holders = [[0] for _ in layers]
        """Rank 0's values count at first, though all ranks have all layers."""

    def has(self, layer: int) -> bool:
        """Whether this rank holds the layer of that number."""
        return self._ranks is None or self._ranks.rank in self.holders[layer]

    def moves_to(self, holders: Holders) -> list[LayerMove]:
        """Lists what :meth:`move` needs. No collective.

        Raises:
            TypeError: optimizer state that cannot be sent.
        """
        moves = []
        for number, (name, layer) in enumerate(self._layers.items()):
            state, values = self._state_of(layer) if self.has(number) else ([], "")
            moves.append(
                LayerMove(
                    name=name,
                    before=self.holders[number],
                    after=holders[number],
                    tensors=list(_tensors_of(layer)),
                    state=state,
                    values=values,
                )
            )
        return moves

    def move(self, moves: Sequence[LayerMove], holders: Holders, plan: str) -> None:
        """Brings each layer to its new holders, bit for bit, then frees what this rank does not
        hold any more. Collective; see ``move_layers`` for what is raised, and then nothing has
        changed here."""
        moved = _C.move_layers(moves, plan=plan, ranks=self._ranks)
        self.holders = holders
        for number, (layer, came) in enumerate(zip(self._layers.values(), moved, strict=True)):
            if came is not None:
                self._take_state(layer, came)
            elif not self.has(number):
                self._free(layer, holders[number])

    def _state_of(self, layer: nn.Module) -> tuple[list[tuple[str, Tensor]], str]:
        tensors: list[tuple[str, Tensor]] = []
        values: dict[str, dict[str, Any]] = {}
        for name, parameter in layer.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.append((f"{name}.{key}", value))
                else:
                    values.setdefault(name, {})[key] = _plain(value, f"'{key}' of '{name}'")
        return tensors, json.dumps(values)

    def _take_state(self, layer: nn.Module, came: MovedState) -> None:
        values = json.loads(came.values) if came.values else {}
        tensors = dict(came.state)
        for name, parameter in layer.named_parameters():
            begin = f"{name}."
            state: dict[str, Any] = {
                key.removeprefix(begin): tensors.pop(key)
                for key in [key for key in tensors if key.startswith(begin)]
            }
            state |= values.get(name, {})
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state

    def _free(self, layer: nn.Module, holders: Sequence[int]) -> None:
        for parameter in layer.parameters():
            parameter.grad = None
            self._optimizer.state.pop(parameter, None)
        for name, tensor in _tensors_of(layer):
            text = f"'{name}' is on ranks {list(holders)}, and has no memory on this one"
            _C.free_memory([tensor], f"[pipetransformer] {text}")


def _tensors_of(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


def _plain(value: Any, what: str) -> Any:
    """``value``, of which JSON says the same."""
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError, RecursionError):
        pass
    got = f"got optimizer state {what} as {type(value).__name__}, which cannot be sent"
    ELASTIC.refuse(got, "Keep it in tensors, or in numbers and texts.", kind=TypeError)
