"""Replicas of a pipeline, and strategies around its layers, average gradients once per step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, accumulate, rows, tanh_layers

CHUNKS = 4
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def meshes() -> tuple[DeviceMesh, int]:
    """Two replicas of a pipeline of two ranks, and the number of this rank's copy."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return mesh, mesh.get_local_rank("dp")


def norms_between(count: int = 8) -> nn.Sequential:
    """Has buffers, which copies see differently."""
    layers = list(tanh_layers(count))
    return nn.Sequential(*layers[:2], nn.BatchNorm1d(WIDTH), *layers[2:])


class OneProcess:
    """The whole module, trained on the batches of all copies."""

    def __init__(self, make: Callable[[], nn.Sequential], optimizer: Any) -> None:
        self.module = make()
        self.optimizer = optimizer(self.module.parameters())

    def train(self, steps: list[int]) -> None:
        """The gradients of these steps' batches, accumulated, as one step of the optimizer."""
        self.optimizer.zero_grad()
        for step in steps:
            for copy in range(2):
                x, y = batch(step, copy)
                kept = [parameter.grad for parameter in self.module.parameters()]
                for parameter in self.module.parameters():
                    parameter.grad = None
                accumulate(self.module, x, y, chunks=CHUNKS, loss=mse_loss)
                for parameter, before in zip(self.module.parameters(), kept, strict=True):
                    if parameter.grad is not None:
                        parameter.grad /= 2
                        parameter.grad = (
                            parameter.grad if before is None else before + parameter.grad
                        )
        self.optimizer.step()

    def assert_same(self, name: str, parameter: Tensor) -> None:
        whole = dict(self.module.named_parameters())[name.replace("module.", "")]
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(full, whole, msg=lambda text: f"{name}: {text}")


@contextmanager
def shared_folder() -> Iterator[str]:
    """One temporary folder for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    yield made[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(made[0])


def batch(step: int, copy: int) -> tuple[Tensor, Tensor]:
    return rows(100 * copy + 2 * step), rows(100 * copy + 2 * step + 1)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_shm_and_gloo_ranks(4, timeout=100)
def test_copies_train_as_one_process(rank: int, schedule: str) -> None:
    """Copies begin with the first one's values; a step in no_sync() accumulates in each."""
    mesh, copy = meshes()
    one = OneProcess(tanh_layers, sgd)
    module = tanh_layers()
    if copy == 1:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    pipe = trireme.Pipeline(module, CHUNKS, mesh=mesh, schedule=schedule, loss=mse_loss)
    optimizer = sgd(pipe.parameters())
    for steps in ([0], [1, 2], [3]):
        optimizer.zero_grad()
        for step in steps[:-1]:
            with pipe.no_sync():
                x, y = batch(step, copy)
                pipe.step(x, target=y)
        x, y = batch(steps[-1], copy)
        pipe.step(x, target=y)
        optimizer.step()
        one.train(steps)
        for name, parameter in pipe.named_parameters():
            one.assert_same(name, parameter)


class Average(nn.Module):
    """Puts another tensor in the place of its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + x.detach().mean(0)
        return x


@on_shm_ranks(4, timeout=60)
def test_buffers_are_the_first_copys(rank: int) -> None:
    mesh, copy = meshes()
    pipe = trireme.Pipeline(norms_between().append(Average()), CHUNKS, mesh=mesh, loss=mse_loss)
    alone = norms_between().append(Average())
    for step in range(3):
        x, y = batch(step, copy)
        pipe.step(x, target=y)
        if rank == 0:
            accumulate(alone, x, y, chunks=CHUNKS, loss=mse_loss)
            for name, buffer in pipe.named_buffers():
                torch.testing.assert_close(buffer, alone.get_buffer(name))
    with torch.no_grad():
        x, y = batch(3, 0)
        pipe.step(x, target=y)  # begins with the first copy's buffers, and goes on alike
    found = [None] * 4
    dist.all_gather_object(found, {name: buffer.tolist() for name, buffer in pipe.named_buffers()})
    assert found[0] == found[2] and found[1] == found[3]


@on_shm_ranks(4, timeout=60)
def test_unused_and_frozen_parameters(rank: int) -> None:
    """What no copy used has no gradient; what one of them used counts as zeros elsewhere."""
    mesh, copy = meshes()

    class Sometimes(nn.Module):
        def __init__(self, used: bool) -> None:
            super().__init__()
            self.used, self.layer, self.never = used, nn.Linear(WIDTH, WIDTH), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.used else x * 1

    torch.manual_seed(1)
    module = nn.Sequential(Sometimes(copy == 0), nn.Linear(WIDTH, WIDTH))
    module[1].bias.requires_grad_(False)
    pipe = trireme.Pipeline(module, 2, mesh=mesh, schedule="zb-h1", loss=mse_loss)
    x, y = batch(0, 0)
    pipe.step(x, target=y)
    grads = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert "0.never.weight" not in grads or grads["0.never.weight"] is None
    if "0.layer.weight" in grads:
        assert grads["0.layer.weight"].abs().sum() > 0
    else:
        assert grads["1.bias"] is None and grads["1.weight"].abs().sum() > 0


@on_shm_ranks(4, timeout=60)
def test_an_exception_in_one_copy(rank: int) -> None:
    mesh, copy = meshes()
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if copy == 1 and calls == 6:
            raise ArithmeticError("the second step's second loss")
        return mse_loss(output, target)

    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, mesh=mesh, schedule="1f1b", loss=loss)
    x, y = batch(0, copy)
    pipe.step(x, target=y)
    before = [parameter.grad.clone() for parameter in pipe.parameters()]
    with pytest.raises(Exception, match="the second step's second loss"):
        pipe.step(x, target=y)
    assert all(map(torch.equal, before, [parameter.grad for parameter in pipe.parameters()]))
    pipe.zero_grad()
    pipe.step(x, target=y)
    assert all(map(torch.equal, before, [parameter.grad for parameter in pipe.parameters()]))


@on_shm_ranks(4, timeout=60)
def test_copies_that_differ_are_refused(rank: int) -> None:
    mesh, copy = meshes()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1 + copy))
    what = "'1.weight', a parameter of stage 1, as Float [1, 6] on replica 0, and"
    with raises(ValueError, what, form=RANKLESS_FORM):
        trireme.Pipeline(module, CHUNKS, mesh=mesh, loss=mse_loss)


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(wrap(layer) if list(layer.parameters()) else layer for layer in tanh_layers())
    )


def in_ddp(mesh: DeviceMesh) -> nn.Sequential:
    return wrapped(lambda one: trireme.DistributedDataParallel(one, process_group=mesh.get_group()))


def in_torchs_ddp(mesh: DeviceMesh) -> nn.Sequential:
    ddp = nn.parallel.DistributedDataParallel
    return wrapped(lambda one: ddp(one, process_group=mesh.get_group()))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    return wrapped(lambda one: trireme.fully_shard(one, mesh=mesh))


def sharded_by_torch(mesh: DeviceMesh) -> nn.Sequential:
    return wrapped(lambda one: torch_fully_shard(one, mesh=mesh))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("make", [in_ddp, in_torchs_ddp, sharded, sharded_by_torch])
@on_shm_and_gloo_ranks(4, timeout=100)
def test_wrapped_layers_average_once_per_step(
    rank: int, make: Callable[[DeviceMesh], nn.Sequential], schedule: str
) -> None:
    mesh, copy = meshes()
    one = OneProcess(tanh_layers, sgd)
    pipe = trireme.Pipeline(
        make(mesh["dp"]), CHUNKS, mesh=mesh["pp"], schedule=schedule, loss=mse_loss
    )
    optimizer = sgd(pipe.parameters())
    for steps in ([0], [1, 2], [3]):
        optimizer.zero_grad()
        for step in steps[:-1]:
            with pipe.no_sync():
                x, y = batch(step, copy)
                pipe.step(x, target=y)
        x, y = batch(steps[-1], copy)
        pipe.step(x, target=y)
        optimizer.step()
        one.train(steps)
        for name, parameter in pipe.named_parameters():
            one.assert_same(name, parameter)


def ddp_over(mesh: DeviceMesh, layer: nn.Module) -> nn.Module:
    return trireme.DistributedDataParallel(layer, process_group=mesh.get_group())


def shards_over(mesh: DeviceMesh, layer: nn.Module) -> nn.Module:
    return trireme.fully_shard(layer, mesh=mesh)


def torchs_shards_over(mesh: DeviceMesh, layer: nn.Module) -> nn.Module:
    return torch_fully_shard(layer, mesh=mesh)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("wrap", [ddp_over, shards_over, torchs_shards_over])
@on_shm_and_gloo_ranks(4, timeout=60)
def test_a_layer_that_the_last_backward_does_not_reach(
    rank: int, wrap: Callable[[DeviceMesh, nn.Module], nn.Module], schedule: str
) -> None:
    """It averages what earlier micro-batches brought."""

    class AtFirst(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer, self.calls = layer, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) if self.calls % CHUNKS == 1 else x * 1

    def make(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
        first, second = tanh_layers(4)[::2]
        return nn.Sequential(AtFirst(wrap(first)), second)

    mesh, copy = meshes()
    module = make(lambda layer: wrap(mesh["dp"], layer))
    pipe = trireme.Pipeline(module, CHUNKS, mesh=mesh["pp"], schedule=schedule, loss=mse_loss)
    one = OneProcess(
        lambda: make(lambda layer: layer), lambda parameters: torch.optim.SGD(parameters, lr=0.0)
    )
    for step in range(2):
        one.train([step])
        pipe.zero_grad()
        x, y = batch(step, copy)
        pipe.step(x, target=y)
        whole = dict(one.module.named_parameters())
        for name, parameter in pipe.named_parameters():
            if name.startswith("0."):
                got = parameter.grad
                got = got.full_tensor() if isinstance(got, DTensor) else got
                expected = whole[name.replace("module.", "")].grad
                torch.testing.assert_close(got, expected)


@on_shm_ranks(4, timeout=60)
def test_a_layers_own_no_sync_is_honoured(rank: int) -> None:
    mesh, copy = meshes()
    module = in_ddp(mesh["dp"])
    pipe = trireme.Pipeline(module, CHUNKS, mesh=mesh["pp"], schedule="1f1b", loss=mse_loss)
    layers = [
        child for child in pipe.children() if isinstance(child, nn.parallel.DistributedDataParallel)
    ]
    x, y = batch(0, copy)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.no_sync())
        pipe.step(x, target=y)
    assert [layer.last_step()["step"] for layer in layers] == [0, 0]
    pipe.step(x, target=y)
    assert [layer.last_step()["step"] for layer in layers] == [1, 1]


@pytest.mark.parametrize("make", [in_ddp, sharded, "zero 2"])
@on_shm_and_gloo_ranks(4, timeout=60)
def test_an_exception_beside_strategies(rank: int, make: Any) -> None:
    """Ranks that average with one that failed hear of it at once, and not at their deadline."""
    mesh, copy = meshes()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if copy == 1:
            raise ArithmeticError("no loss in this copy")
        return mse_loss(output, target)

    module = tanh_layers() if isinstance(make, str) else make(mesh["dp"])
    pipe = trireme.Pipeline(module, CHUNKS, mesh=mesh["pp"], schedule="gpipe", loss=loss)
    if isinstance(make, str):
        group = mesh.get_group("dp")
        optimizer = trireme.ZeroRedundancyOptimizer(
            pipe.parameters(), torch.optim.SGD, process_group=group, stage=2, lr=0.5
        )
        assert optimizer.stage == 2
    x, y = batch(0, copy)
    with pytest.raises(Exception, match="no loss in this copy"):
        pipe.step(x, target=y)


@pytest.mark.parametrize("make", [in_ddp, sharded, sharded_by_torch, "copies", "zero 2"])
@on_shm_and_gloo_ranks(4, timeout=60)
def test_norms_are_those_of_all_stages(rank: int, make: Any) -> None:
    mesh, copy = meshes()
    one = OneProcess(tanh_layers, sgd)
    module = tanh_layers() if isinstance(make, str) else make(mesh["dp"])
    over = mesh if make == "copies" else mesh["pp"]
    pipe = trireme.Pipeline(module, CHUNKS, mesh=over, schedule="1f1b", loss=mse_loss)
    if make == "zero 2":
        group = mesh.get_group("dp")
        optimizer = trireme.ZeroRedundancyOptimizer(
            pipe.parameters(), torch.optim.SGD, process_group=group, stage=2, lr=0.5
        )
        assert optimizer.stage == 2
    x, y = batch(0, copy)
    pipe.step(x, target=y)
    one.train([0])
    expected = torch.nn.utils.clip_grad_norm_(one.module.parameters(), 0.01)
    torch.testing.assert_close(trireme.clip_grad_norm_(pipe.parameters(), 0.01), expected)
    clipped = trireme.clip_grad_norm_(pipe, 1.0)
    torch.testing.assert_close(clipped, torch.tensor(0.01), atol=1e-5, rtol=1e-4)


@on_shm_ranks(4, timeout=60)
def test_copies_are_saved_once(rank: int) -> None:
    mesh, copy = meshes()
    pipe = trireme.Pipeline(tanh_layers(), CHUNKS, mesh=mesh, loss=mse_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    x, y = batch(0, copy)
    pipe.step(x, target=y)
    optimizer.step()
    again = trireme.Pipeline(tanh_layers(), CHUNKS, mesh=mesh, schedule="zb-v", loss=mse_loss)
    other = torch.optim.AdamW(again.parameters())
    with shared_folder() as folder:
        trireme.save_checkpoint(folder + "/saved", pipe, optimizer)
        trireme.load_checkpoint(folder + "/saved", again, other)
    states: list[Any] = [None] * 4
    mine = {name: tensor.tolist() for name, tensor in pipe.state_dict().items()}
    dist.all_gather_object(states, mine)
    whole = {**states[0], **states[1]}
    for name, tensor in again.state_dict().items():
        assert tensor.tolist() == whole[name], name
    assert all(other.state[parameter]["step"] == 1 for parameter in again.parameters())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@on_shm_ranks(4, timeout=100)
def test_zero(rank: int, schedule: str, stage: int) -> None:
    """ZeRO 2 averages by itself; ZeRO 1 steps with what copies have averaged."""
    mesh, copy = meshes()
    one = OneProcess(tanh_layers, sgd)
    pipe = trireme.Pipeline(
        tanh_layers(),
        CHUNKS,
        mesh=mesh if stage == 1 else mesh["pp"],
        schedule=schedule,
        loss=mse_loss,
    )
    optimizer = trireme.ZeroRedundancyOptimizer(
        pipe.parameters(),
        torch.optim.SGD,
        process_group=mesh.get_group("dp"),
        stage=stage,
        lr=0.5,
        momentum=0.9,
    )
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, copy)
        pipe.step(x, target=y)
        optimizer.step()
        one.train([step])
        for name, parameter in pipe.named_parameters():
            one.assert_same(name, parameter)
