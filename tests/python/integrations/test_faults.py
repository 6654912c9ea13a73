"""An exception of one rank ends the others of a framework's program, with its text."""

import os
import time
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from harness.deaths import SEEN_S
from harness.ranks import run_ranks
from integrations.sides import WORLD, net


class Broken(Dataset):
    """On rank 1 its eleventh sample cannot be read."""

    def __init__(self, rank: int) -> None:
        self._left = 10 if rank == 1 else 1000

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("the data are broken")
        return self.sample()

    def sample(self) -> Any:
        return torch.ones(6), torch.tensor(1)


class BrokenTexts(Broken):
    def sample(self) -> Any:
        return {"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)}


def with_lightning(rank: int, folder: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from trireme.integrations import lightning  # noqa: F401

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="trireme_ddp", default_root_dir=folder, **quiet
    )
    trainer.fit(Classifier(), DataLoader(Broken(rank), batch_size=4))


def with_accelerate(rank: int, folder: str) -> None:
    from trireme.integrations.accelerate import Accelerator

    accelerator = Accelerator(fully_shard=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Broken(rank), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def with_transformers(rank: int, folder: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    from trireme.integrations.transformers import Trainer

    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    small = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, **small))
    Trainer(model, arguments, train_dataset=BrokenTexts(rank)).train()


PROGRAMS: dict[str, Callable[[int, str], None]] = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}


def fail(rank: int, framework: str, folder: str) -> float:
    """Returns, on rank 0, how long it went on."""
    ended = Path(folder) / "ended"
    try:
        PROGRAMS[framework](rank, folder)
    except ValueError as error:
        assert rank == 1 and "the data are broken" in str(error)
        ended.write_text(str(time.monotonic()))  # one clock for all processes
        util._exit_function()  # as where a process of multiprocessing ends by an exception
        os._exit(1)
    except dist.DistBackendError as error:
        at = time.monotonic()
        assert "rank 1" in str(error) and "ValueError: the data are broken" in str(error), error
        return at - float(ended.read_text())
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("framework", PROGRAMS)
def test_an_exception_on_one_rank(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    env = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    seconds = run_ranks(fail, WORLD, framework, str(tmp_path), timeout=90, env=env, dying=(1,))[0]
    assert seconds < SEEN_S
