"""One rank that trains by another library's loop, and how long its steps take.

The argument is a FrameworkCase as JSON. Both sides have the library's loop, the same optimizer,
data and threads; ours differs by the import, or the argument, that docs/integrations.md names.
"""

from __future__ import annotations

import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from workloads import WORKLOADS, Batch, Workload, WorkloadOptions

from measure.rounds import WARM_UP_STEPS
from measure.worker import take_over_stdout


@dataclass(frozen=True)
class FrameworkCase:
    """`ours`: with Trireme's classes; else with the library's defaults: torch's DDP over Gloo."""

    framework: str
    ours: bool
    workload: str
    steps: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class LossOf(nn.Module):
    """A workload's model that takes a batch and returns its loss, as the Trainers expect."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = workload.model()
        self._loss = workload.loss

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self._loss(self.net(inputs), Batch(inputs, targets))}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The workload's samples, over and over."""

    def __init__(self, workload: Workload, count: int) -> None:
        self._samples, self._count = workload.samples(), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self._samples.rows(torch.tensor([index % len(self._samples)]))
        return {"inputs": batch.inputs[0], "targets": batch.targets[0]}


@dataclass(frozen=True)
class Training:
    model: LossOf
    rows: Rows
    batch: int
    """Rows of a rank."""
    note: Callable[[], None]
    """Called after each step."""

    def loader(self) -> torch.utils.data.DataLoader[dict[str, Tensor]]:
        return torch.utils.data.DataLoader(self.rows, batch_size=self.batch)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def with_lightning(ours: bool, training: Training) -> None:
    from lightning.pytorch import LightningModule, Trainer

    if ours:
        import trireme.integrations.lightning  # noqa: F401

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, *_: object) -> None:
            training.note()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return training.optimizer()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    strategy = "trireme_ddp" if ours else "ddp"
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 1},
        **{"enable_checkpointing": False, **quiet},
    )
    trainer.fit(Module(), training.loader())


def with_accelerate(ours: bool, training: Training) -> None:
    if ours:
        from trireme.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        training.model, training.optimizer(), training.loader()
    )
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        training.note()
    accelerator.end_training()


def with_transformers(ours: bool, training: Training) -> None:
    import transformers
    from transformers import TrainerCallback, TrainingArguments

    trainer_class = transformers.Trainer
    if ours:
        from trireme.integrations.transformers import Trainer

        trainer_class = Trainer

    class Note(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            training.note()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **{"output_dir": folder, "use_cpu": True, "num_train_epochs": 1},
            **{"per_device_train_batch_size": training.batch, "save_strategy": "no"},
            **{"report_to": [], "disable_tqdm": True, "logging_strategy": "no"},
            **{"remove_unused_columns": False, "max_grad_norm": 0.0},
            ddp_find_unused_parameters=False,  # the faster of torch's options
        )
        optimizers = (training.optimizer(), None)
        trainer_class(
            training.model,
            arguments,
            train_dataset=training.rows,
            optimizers=optimizers,
            callbacks=[Note()],
        ).train()


FRAMEWORKS = {
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "transformers": with_transformers,
}


def median_step_ms(case: FrameworkCase) -> float:
    """Trains as the case says; returns the median of the steps after the warm-up."""
    workload = WORKLOADS[case.workload](WorkloadOptions())
    ends: list[float] = []
    count = WARM_UP_STEPS + case.steps
    rows = Rows(workload, 2 * workload.rows_per_rank * count)
    training = Training(
        LossOf(workload), rows, workload.rows_per_rank, lambda: ends.append(time.perf_counter())
    )
    FRAMEWORKS[case.framework](case.ours, training)
    spans = [after - before for before, after in itertools.pairwise(ends)]
    return 1e3 * statistics.median(spans[WARM_UP_STEPS - 1 :])


def main() -> None:
    replies = take_over_stdout()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case = FrameworkCase(**json.loads(sys.argv[1]))
    replies.write(json.dumps({"step_ms": median_step_ms(case)}) + "\n")
    sys.stdin.readline()  # until all ranks have replied


if __name__ == "__main__":
    main()
