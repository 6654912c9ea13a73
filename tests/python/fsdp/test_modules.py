"""What kinds of modules and parameters fully_shard takes, and how they come to their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW

from fsdp.ranks import (
    SGD_OPTIONS,
    assert_parts,
    in_training,
    pair,
    rows_of,
    shard_layers,
    sharded,
    sharded_in,
    step_both,
    train_both,
)
from harness.faults import raises
from harness.models import Shapes, batch, mlp
from harness.on_ranks import on_shm_ranks
from harness.training import Training, alone
from shm.ranks import WORLDS

BF16 = torch.bfloat16


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def reset(model: nn.Module) -> None:
    """Does what a user would who initialises whole parameters from one seed on each rank."""
    values = dict(mlp().named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            (placement,) = param.placements
            chunks = torch.chunk(values[name], param.device_mesh.size(), placement.dim)
            rank = param.device_mesh.get_local_rank()
            if rank < len(chunks):
                param.to_local().copy_(chunks[rank])


@on_shm_ranks(3)
def test_meta_device(rank: int) -> None:
    """Sharded without memory, given some, initialised; forgetting that is said."""
    model = shard_layers(on_meta(mlp))
    assert all(param.is_meta for param in model.parameters())
    with raises(RuntimeError, "got parameter '", "on the meta device", "to_empty"):
        model(batch(0))
    model = shard_layers(on_meta(mlp))
    model.to_empty(device="cpu")
    reset(model)
    ours, one = in_training(model), alone(mlp, SGD, **SGD_OPTIONS)
    assert_parts(ours, one)
    for step in range(3):
        train_both(ours, one, step)


@on_shm_ranks(2)
def test_reset_parameters_of_sharded_modules(rank: int) -> None:
    """torch's own initialisation runs on DTensors; ranks agree on what comes out."""
    model = shard_layers(on_meta(mlp)).to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    whole = mlp()
    for param, mine in zip(whole.parameters(), model.parameters(), strict=True):
        param.data = mine.full_tensor()
        assert param.abs().sum() > 0
    ours, one = in_training(model), Training(whole, whole, SGD(whole.parameters(), **SGD_OPTIONS))
    for step in range(3):
        train_both(ours, one, step)


@on_shm_ranks(2)
def test_casts_before_the_first_forward(rank: int) -> None:
    """to() and double() after fully_shard, as in torch; also after meta."""
    for dtype, tolerance in ((torch.float64, {}), (BF16, {"rtol": 0.05, "atol": 1e-2})):
        for cast in (lambda net, dtype=dtype: net.to(dtype), _to_by_parts(dtype)):
            model = shard_layers(mlp())
            cast(model)
            assert {param.dtype for param in model.parameters()} == {dtype}
            ours = in_training(model)
            one = alone(lambda dtype=dtype: mlp(dtype), SGD, **SGD_OPTIONS)
            for step in range(3):
                for training in (ours, one):
                    training.optimizer.zero_grad()
                    output = training.model(rows_of(step, training, dtype))
                    assert output.dtype == dtype
                    output.float().square().mean().backward()
                step_both(ours, one, **tolerance)


def _to_by_parts(dtype: torch.dtype) -> Callable[[Any], None]:
    def cast(model: Any) -> None:
        for unit in (model[0], model[2], model[4]):
            unit.to(dtype)

    return cast


@on_shm_ranks(2)
def test_a_cast_after_the_first_forward_is_refused(rank: int) -> None:
    ours = sharded(mlp)
    ours.train(0)
    ours.model.double()
    parts = ("got '0.weight' as torch.float64", "torch.float32", "dtypes before the first forward")
    with raises(ValueError, *parts):
        ours.loss(1)


@on_shm_ranks(2)
def test_moves_that_change_nothing(rank: int) -> None:
    """to() of the same dtype and device, and requires_grad_() of the whole model, at any time."""
    ours, one = pair(mlp)
    for step in range(3):
        train_both(ours, one, step)
        ours.model.to("cpu").float().train()
        for training in (ours, one):
            training.model.requires_grad_(step % 2 == 1)
            training.model.requires_grad_(True)


@pytest.mark.parametrize("world", WORLDS)
@on_shm_ranks("world")
def test_other_dimensions(rank: int, world: int) -> None:
    """Shard(1) and Shard(-1), uneven, fewer than ranks; strided views in the host's memory."""

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(-1) if param.ndim > 1 else None

    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.first = nn.Linear(6, 7)
            self.convolution = nn.Conv1d(1, 2, 3)
            self.last = nn.Linear(10, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.convolution(self.first(x).tanh()[:, None, :])
            return self.last(hidden.flatten(1))

    for make in (mlp, Shapes, Convolving):
        options = {"shard_placement_fn": place}
        ours, one = pair(make, options=options)
        for param in ours.model.parameters():
            assert param.ndim < 2 or param.placements == (Shard(param.ndim - 1),)
        for step in range(3):
            train_both(ours, one, step)
        for param, right in zip(ours.model.parameters(), one.model.parameters(), strict=True):
            assert param.full_tensor().shape == right.shape


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their dimensions, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.channels = nn.Parameter(
            torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        )
        self.spread = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.turned.t()).tanh() @ self.spread * self.scale
        return hidden.sum(1, keepdim=True) * self.channels.flatten() + self.none.sum()


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_memory_that_is_not_contiguous(rank: int, world: int) -> None:
    for optimizer_class in (SGD, AdamW, trireme.optim.AdamW):
        ours, one = pair(Strided, optimizer_class, lr=0.01)
        assert ours.model.scale.placements[0].is_replicate()
        for step in range(3):
            train_both(ours, one, step)


@on_shm_ranks(2)
def test_a_first_forward_without_gradients(rank: int) -> None:
    """Under inference_mode and under no_grad, and again in between; then training."""
    for mode in (torch.inference_mode, torch.no_grad):
        ours, one = pair(mlp)
        for step in range(3):
            with mode():
                rows = batch(9)
                torch.testing.assert_close(ours.model(rows), one.model(rows))
            train_both(ours, one, step)


class Pair(nn.Module):
    """A list and a dictionary of layers, tuples and keywords in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.list = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.dict = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
        self.own = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.list[1](self.list[0](x).tanh())
        a, b = self.dict["a"](hidden), self.dict["b"](hidden)
        return a * self.own[0] + b * self.own[1]


@on_shm_ranks(2)
def test_containers(rank: int) -> None:
    """Lists of units, indexed and cut as before; a container without forward is none itself."""

    def shard(model: Any) -> None:
        for layer in model.list:
            trireme.fully_shard(layer)
        trireme.fully_shard(model.dict["a"])
        with raises(ValueError, "got a ModuleList, which has no forward"):
            trireme.fully_shard(model.list)
        trireme.fully_shard(model)

    ours, one = pair(Pair, shard=shard)
    for step in range(3):
        train_both(ours, one, step)
    assert len(ours.model.list[:1]) == 1 and isinstance(ours.model.list[0], TorchFSDPModule)


@on_shm_ranks(2)
def test_parts_of_a_sharded_sequential(rank: int) -> None:
    """m[:1] is a plain Sequential of the same layers; it runs once the model has."""
    model = trireme.fully_shard(mlp())
    for part, length in ((model[:1], 1), (model[2:], 3), (model[::2], 3)):
        assert type(part) is nn.Sequential and len(part) == length
        assert part[-1] in list(model)
    units = shard_layers(mlp())
    units(batch(0))
    whole, plain = mlp(), units[:3]
    with torch.no_grad():
        torch.testing.assert_close(plain(batch(1)), whole[:3](batch(1)))
    assert all(sharded_in(units))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(*(Block() for _ in range(3)))


WHOLE: Any = {"backend": "aot_eager", "fullgraph": True}


def compile_blocks(model: Any) -> None:
    """In place, then sharded: what torchtitan does."""
    for block in model:
        block.compile(**WHOLE)
    for block in model:
        trireme.fully_shard(block)
    trireme.fully_shard(model)


def compile_sharded_blocks(model: Any) -> None:
    for block in model:
        trireme.fully_shard(block)
        block.compile(**WHOLE)
    trireme.fully_shard(model)


def shard_compiled_blocks(model: Any) -> None:
    """Shards each torch.compile(block), an OptimizedModule."""
    for index, block in enumerate(model):
        model[index] = torch.compile(block, **WHOLE)
        trireme.fully_shard(model[index])
    trireme.fully_shard(model)


def wrap_sharded_blocks(model: Any) -> None:
    for index, block in enumerate(model):
        trireme.fully_shard(block)
        model[index] = torch.compile(block, **WHOLE)
    trireme.fully_shard(model)


@on_shm_ranks(2, timeout=120, patience_s=60, fresh=True)  # dynamo counts per process
def test_compiled_units(rank: int) -> None:
    ways = (compile_blocks, compile_sharded_blocks, shard_compiled_blocks, wrap_sharded_blocks)
    for shard in ways:
        torch._dynamo.reset()
        model = blocks()
        shard(model)
        ours = in_training(model)
        one = alone(blocks, SGD, **SGD_OPTIONS)
        for step in range(3):
            for training in (ours, one):
                training.optimizer.zero_grad()
                training.backward(step)
            for param, right in zip(model.parameters(), one.model.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), right.grad)
            for training in (ours, one):
                training.optimizer.step()
        for param, right in zip(model.parameters(), one.model.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), right.detach())
        assert not torch._dynamo.utils.counters["graph_break"]


@on_shm_ranks(2)
def test_what_torch_asks_for(rank: int) -> None:
    """A subclass of the module's class and of torch's FSDPModule, with the state torch reads."""
    model = shard_layers(mlp())
    assert isinstance(model, TorchFSDPModule) and isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]) is type(model[2]) and type(model[0]).__name__ == "FSDPLinear"
    state = model._get_fsdp_state()
    assert state is model._get_fsdp_state() and hasattr(state, "_comm_ctx")
    assert trireme.fully_shard.state(model) is state  # type: ignore[attr-defined]
    assert trireme.fully_shard.state(nn.Tanh()) is None  # type: ignore[attr-defined]
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    missing = [name for name in dir(TorchFSDPModule) if not callable(getattr(model, name, None))]
    assert [name for name in missing if name.startswith(("set_", "un", "re"))] == []
    assert str(model).startswith("FSDPSequential(")


@on_shm_ranks(2)
def test_a_unit_without_parameters(rank: int) -> None:
    """Casts and counts forwards as any other; the model trains."""

    def shard(model: nn.Module) -> None:
        trireme.fully_shard(model[1])
        trireme.fully_shard(model[0])
        trireme.fully_shard(model)

    ours, one = pair(mlp, shard=shard)
    for step in range(3):
        train_both(ours, one, step)


class Buffered(nn.Module):
    """Running statistics and a counter stay each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


@on_shm_ranks(2)
def test_buffers(rank: int) -> None:
    ours = sharded(Buffered)
    here = Buffered()
    for step in range(3):
        rows = rows_of(step, ours)
        with torch.no_grad():
            ours.model(rows)
            here(rows)
    for mine, right in zip(ours.model.buffers(), here.buffers(), strict=True):
        assert not isinstance(mine, DTensor)
        torch.testing.assert_close(mine, right)
