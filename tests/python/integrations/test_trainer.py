"""Lightning's Trainer over our backend, and with our strategies."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from integrations.sides import (
    OUR_BACKEND,
    OURS,
    Side,
    assert_close,
    assert_equal_to_theirs,
    net,
    rows,
    run_on,
    state_of,
)

pytest.importorskip("lightning", reason="Lightning is not installed")

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from trireme.integrations import lightning as ours


class Classifier(LightningModule):
    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.net = net()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.automatic_optimization = not by_hand
        self.losses: list[float] = []
        self.wrapped_in: type | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.wrapped_in = type(self.trainer.strategy.model)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        outputs = self.net(x)
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", functional.cross_entropy(outputs, y), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Counting(Classifier):
    """Logs what the ranks have counted, as integers."""

    def on_validation_epoch_end(self) -> None:
        seen = torch.tensor(len(self.losses) + 3 * self.global_rank)
        self.log("seen", seen, sync_dist=True, reduce_fx="mean")
        self.log("seen_sum", seen, sync_dist=True, reduce_fx="sum")


class Sharded(Classifier):
    """Its optimizer's state is sharded on our side, which Lightning brings together to save it."""

    def configure_optimizers(self) -> Any:
        if dist.get_backend() == "gloo":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        return trireme.ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.02)


class Gan(Classifier):
    """Two optimizers take turns; while one does, the other's parameters are frozen."""

    def __init__(self) -> None:
        super().__init__(by_hand=True)
        self.made = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.wrapped_in = type(self.trainer.strategy.model)
        for optimizer, target in zip(self.optimizers(), (y, (y + 1) % 3), strict=True):
            self.toggle_optimizer(optimizer)
            loss = functional.cross_entropy(self.net(self.made(x)), target)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=0.02) for net in (self.net, self.made)]


KINDS: dict[str, Callable[[], Classifier]] = {
    "classifier": Classifier,
    "counting": Counting,
    "by hand": lambda: Classifier(by_hand=True),
    "sharded": Sharded,
    "gan": Gan,
}


def trainer_of(side: Side, folder: str, ddp: dict[str, Any], **options: Any) -> Trainer:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy: Any = ours.DDPStrategy(**ddp) if ddp else "trireme_ddp"
    if side != OURS:
        strategy = DDPStrategy(process_group_backend=side.backend, **ddp)
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(
    rank: int, side: Side, folder: str, kind: str, ddp: dict[str, Any], options: dict[str, Any]
) -> Any:
    seed_everything(1)
    model = KINDS[kind]()
    keeping = ModelCheckpoint(folder, monitor="val_loss", save_last=True, save_top_k=1)
    trainer = trainer_of(side, folder, ddp, max_epochs=2, callbacks=[keeping], **options)
    training, held_out = DataLoader(rows(38), batch_size=4, shuffle=True), DataLoader(rows(10))
    trainer.fit(model, training, held_out)
    assert dist.get_backend() == side.backend
    assert model.wrapped_in is side.ddp
    fitted = {"losses": list(model.losses), "state": state_of(model), **trainer.callback_metrics}
    tested = trainer.test(model, held_out, verbose=False)
    resumed = KINDS[kind]()
    trainer = trainer_of(side, folder, ddp, max_epochs=3, callbacks=[], **options)
    trainer.fit(resumed, training, held_out, ckpt_path=keeping.last_model_path)
    return {
        "fitted": fitted,
        "tested": tested,
        "best": float(keeping.best_model_score),
        "resumed": resumed.losses,
    }


CASES = {
    "plain": ("classifier", {}, {}),
    "accumulated": ("classifier", {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}),
    "bf16": ("classifier", {"gradient_as_bucket_view": True}, {"precision": "bf16-mixed"}),
    "static": ("classifier", {"static_graph": True}, {}),
    "by hand": ("by hand", {}, {}),
    "by hand, static": ("by hand", {"static_graph": True}, {}),
    "integers": ("counting", {}, {}),
    "zero 1": ("sharded", {}, {}),
    "gan": ("gan", {"find_unused_parameters": True}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_fit(tmp_path: Path, case: str) -> None:
    assert_equal_to_theirs(fit, tmp_path, *CASES[case])


class OnePass(Classifier):
    """Plain SGD: Adam would blow up the rounding of a bias in front of a BatchNorm."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def running_statistics(rank: int, side: Side, folder: str, strategy: str) -> Any:
    model = OnePass()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, max_epochs=1,
        use_distributed_sampler=False, sync_batchnorm=True, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    inputs, labels = rows(24).tensors
    mine = TensorDataset(inputs[rank::2], labels[rank::2])
    trainer.fit(model, DataLoader(mine, batch_size=4))
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)()
             for name, value in model.state_dict().items()}  # fmt: skip
    return {name: value.detach().clone() for name, value in whole.items()}


@pytest.mark.parametrize("strategy", ["trireme_ddp", "trireme_fsdp"])
def test_sync_batch_norm(tmp_path: Path, strategy: str) -> None:
    """What one process computes with the batches of both ranks."""
    model = OnePass()
    optimizer = model.configure_optimizers()
    inputs, labels = rows(24).tensors
    for first in range(0, 24, 8):
        optimizer.zero_grad()
        order = torch.tensor([*range(first, first + 8, 2), *range(first + 1, first + 8, 2)])
        functional.cross_entropy(model.net(inputs[order]), labels[order]).backward()
        optimizer.step()
    for state in run_on(OURS, running_statistics, tmp_path, strategy):
        assert_close(state, state_of(model), "state", 1e-4)


class Unsharded(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class ShardedNet(Unsharded):
    """The hook in which Lightning lets a module shard itself."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[3]):
            torch_fully_shard(layer, mesh=mesh)
        torch_fully_shard(self.net, mesh=mesh)


def shard_by_hand(model: nn.Module, mesh: Any) -> nn.Module:
    trireme.fully_shard(model.net, mesh=mesh["data_parallel"])
    return model


def strategy_of(side: Side, by_hand: bool) -> Any:
    if side == OURS:
        return ours.FSDPStrategy(shard_by_hand) if by_hand else "trireme_fsdp"
    return ModelParallelStrategy(2, 1, process_group_backend=side.backend)


def fit_sharded(rank: int, side: Side, folder: str, by_hand: bool) -> Any:
    warnings.filterwarnings("ignore")
    options = {} if by_hand else {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    losses = []
    for epochs, start in ((1, None), (2, f"{folder}/last.ckpt")):
        strategy = strategy_of(side, by_hand)
        keeping = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
            callbacks=[keeping], **options,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = Unsharded(by_hand=by_hand) if side == OURS else ShardedNet(by_hand=by_hand)
        trainer.fit(model, DataLoader(rows(32), batch_size=4), ckpt_path=start)
        assert side == OURS or "configure_model" not in vars(model)
        losses.append(model.losses)
    return losses


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
def test_fully_shard(tmp_path: Path, by_hand: bool) -> None:
    assert_equal_to_theirs(fit_sharded, tmp_path, by_hand, sides={"ours": OURS})


class WithAScale(Unsharded):
    """A parameter of its own, which no forward of a child would show unsharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def fit_scaled(rank: int, side: Side, folder: str) -> str:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="trireme_fsdp", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    with pytest.raises(ValueError) as error:
        trainer.fit(WithAScale(), DataLoader(rows(8), batch_size=4))
    return str(error.value)


def test_a_parameter_outside_of_children(tmp_path: Path) -> None:
    for said in run_on(OURS, fit_scaled, tmp_path):
        assert said.startswith("[integrations] got parameter scale, which is in no module")


def metrics(rank: int, side: Side, folder: str) -> Any:
    """Of other numbers of rows on each rank, so that states are padded and cut."""
    dist.init_process_group(side.backend)
    collected = MetricCollection({"area": BinaryAUROC(), "mean": MeanMetric()})
    made = torch.Generator().manual_seed(rank)
    for count in range(3 + 2 * rank, 5 + 2 * rank):
        scores = torch.rand(count, generator=made)
        collected["area"].update(scores, torch.arange(count) % 2)
        collected["mean"].update(scores)
    return {name: float(value) for name, value in collected.compute().items()}


def test_torchmetrics(tmp_path: Path) -> None:
    assert_equal_to_theirs(metrics, tmp_path, sides={"backend": OUR_BACKEND})
