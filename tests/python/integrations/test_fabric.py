"""Lightning Fabric over our backend, and with our strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from integrations.sides import (
    OUR_BACKEND,
    OURS,
    THEIRS,
    Side,
    assert_close,
    assert_equal_to_theirs,
    net,
    rows,
    run_on,
    state_of,
)

pytest.importorskip("lightning", reason="Lightning is not installed")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from trireme.integrations.lightning import FabricFSDPStrategy


def fabric_of(side: Side, **options: Any) -> Fabric:
    strategy: Any = "trireme_ddp"
    if side != OURS:
        strategy = DDPStrategy(process_group_backend=side.backend)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, **options)
    fabric.launch()
    assert dist.get_backend() == side.backend
    return fabric


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(x), y)


def train(rank: int, side: Side, folder: str, precision: str) -> Any:
    fabric = fabric_of(side, precision=precision)
    fabric.seed_everything(1)
    model, optimizer = Net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = fabric.setup(model, optimizer)
    assert isinstance(model._forward_module, side.ddp)
    model.mark_forward_method("loss")
    loader = fabric.setup_dataloaders(DataLoader(rows(38), batch_size=4, shuffle=True))
    losses, norms = [], []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            accumulating = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = model.loss(x, y)
                fabric.backward(loss)
            losses.append(loss.item())
            if not accumulating:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.3))
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            fabric.save(f"{folder}/ck", {"model": model, "optimizer": optimizer, "epoch": epoch})
            saved = state_of(model)
    ended = state_of(model)
    state = {"model": model, "optimizer": optimizer, "epoch": -1}
    fabric.load(f"{folder}/ck", state)
    assert state["epoch"] == 0
    if rank == 0:  # its buffers were saved
        assert_close(state_of(model), saved, "loaded", 0)
    return {
        "losses": losses,
        "norms": norms,
        "state": ended,
        "mean": fabric.all_reduce(torch.tensor(losses[-1])),
        "sum": fabric.all_reduce(torch.tensor([rank + 1.5]), reduce_op="sum"),
        "gathered": fabric.all_gather({"rank": torch.tensor(rank), "row": torch.arange(3) + rank}),
        "broadcast": fabric.broadcast({"from": rank}, src=1),
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_training(tmp_path: Path, precision: str) -> None:
    assert_equal_to_theirs(train, tmp_path, precision)


def reduce_integers(rank: int, side: Side, folder: str) -> Any:
    fabric = fabric_of(side)
    made = [torch.tensor([rank, -3 * rank, 7], dtype=kind) for kind in (torch.int32, torch.int64)]
    return [fabric.all_reduce(loss, reduce_op="mean") for loss in made]


def test_mean_of_integers(tmp_path: Path) -> None:
    assert_equal_to_theirs(reduce_integers, tmp_path, sides={"backend": OUR_BACKEND})


def train_sharded(rank: int, side: Side, folder: str) -> Any:
    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for layer in (model.layers[0], model.layers[3]):
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = FabricFSDPStrategy()  # finds the units itself
    if side == THEIRS:
        strategy = ModelParallelStrategy(shard, 2, 1, process_group_backend=side.backend)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Net())
    assert side == THEIRS or isinstance(model.module.layers[3], trireme.FSDPModule)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(DataLoader(rows(24), batch_size=4))
    losses, norms = [], []
    for number, (x, y) in enumerate([*loader, *loader]):
        with fabric.no_backward_sync(model, enabled=number == 1):
            loss = functional.cross_entropy(model(x), y)
            fabric.backward(loss)
        losses.append(loss.item())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            fabric.save(f"{folder}/ck", {"model": model, "optimizer": optimizer, "step": 2})
    fabric.load(f"{folder}/ck", {"model": model, "optimizer": optimizer, "step": 0})
    with torch.no_grad():
        x, y = rows(24).tensors
        losses.append(functional.cross_entropy(model(x), y).item())
    return {"losses": losses, "norms": norms}


def test_fully_shard(tmp_path: Path) -> None:
    expected = run_on(THEIRS, train_sharded, tmp_path / "theirs")
    assert_close(run_on(OURS, train_sharded, tmp_path / "ours"), expected, "ours")
