"""Runs of PipeTransformer on ranks, and one process that freezes alike as their oracle."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.models import batch

LAYERS = 6
ROWS, CHUNKS = 16, 8
SAMPLES = 3 * ROWS  # three steps are an epoch
Make = Callable[[], list[nn.Module]]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def tanh_layers(count: int = LAYERS) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


class Shift(nn.Module):
    """Its gradients are whole numbers where inputs and targets are, divided by the rows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((6,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def whole_layers(count: int = LAYERS) -> list[nn.Module]:
    return [Shift(number) for number in range(count)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Of powers of two, so that nothing is rounded."""
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)


def whole_data() -> tuple[Tensor, Tensor]:
    data = batch(0, rows=SAMPLES).mul(4).round()
    return data, batch(1, rows=SAMPLES).mul(4).round()


def tanh_data() -> tuple[Tensor, Tensor]:
    return batch(0, rows=SAMPLES), batch(1, rows=SAMPLES).tanh()


def whole_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum() / output.size(0)


def ids_of(step: int) -> Tensor:
    """Each epoch has another order."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // 3))
    return order[step % 3 * ROWS : (step % 3 + 1) * ROWS]


def plan_of(ranks: int, world: int, layers: int = LAYERS) -> trireme.ElasticPlan:
    """That of equal layers."""
    return trireme.ElasticPlan(
        ranks_per_pipeline=ranks,
        replicas=world // ranks,
        balance=trireme.partition([1.0] * layers, ranks),
    )


def parameters_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def run_of(
    make: Make = tanh_layers, optimizer: Optimizer = adamw, **options: Any
) -> tuple[trireme.PipeTransformer, torch.optim.Optimizer]:
    layers = make()
    stepping = optimizer(parameters_of(layers))
    given: dict[str, Any] = {
        "loss": mse_loss,
        "global_batch": ROWS,
        "chunks": CHUNKS,
        "freeze": {"rule": "schedule"},
        "pipe": False,
        "costs": [1.0] * len(layers),
    }
    return trireme.PipeTransformer(layers, optimizer=stepping, **(given | options)), stepping


class OneProcess:
    """Trains whole batches, and freezes when it is told."""

    def __init__(
        self, make: Make = tanh_layers, optimizer: Optimizer = adamw, loss: Any = mse_loss
    ) -> None:
        self.layers = make()
        self.model = nn.Sequential(*self.layers)
        self.optimizer = optimizer(self.model.parameters())
        self._loss = loss
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(self, x: Tensor, target: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self._loss(self.model(x), target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss)

    def freeze(self, count: int) -> None:
        for parameter in parameters_of(self.layers[:count]):
            parameter.requires_grad_(False)
            parameter.grad = None
            self.optimizer.state.pop(parameter, None)


Seen = dict[str, Tensor]


def held(run: trireme.PipeTransformer, optimizer: torch.optim.Optimizer) -> Seen:
    """Copies of what this rank has: parameters, buffers, optimizer state."""
    found = {name: value.clone() for name, value in run.state_dict().items()}
    for name, parameter in run.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def held_by_any(run: trireme.PipeTransformer, optimizer: torch.optim.Optimizer) -> Seen:
    """The same of all ranks; those that have the same layer have the same bits."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, held(run, optimizer))
    union: Seen = {}
    for seen in everybody:
        for name, value in seen.items():
            assert torch.equal(union.setdefault(name, value), value), name
    return union


def assert_same(one: Seen, other: Seen) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@contextmanager
def shared_folder() -> Iterator[str]:
    """One temporary folder for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield made[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made[0], ignore_errors=True)
