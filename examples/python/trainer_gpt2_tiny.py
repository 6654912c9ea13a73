"""Trains a GPT-2 of two layers on any text by Transformers' Trainer, with Trireme's classes.

    torchrun --nproc-per-node 2 examples/python/trainer_gpt2_tiny.py some_text.txt

The model is made from its configuration, so nothing is downloaded. The line marked Trireme is all
that the program changes.
"""

import sys
import tempfile
from pathlib import Path

import torch
from train_gpt import TextWindows
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from trireme.integrations.transformers import Trainer  # Trireme

LENGTH = 31  # each window has one byte more


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows in the form that the Trainer takes; the model shifts the labels itself."""

    def __init__(self, file: Path) -> None:
        self.windows = TextWindows(file, LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def main(text_file: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        size = {"n_positions": LENGTH + 1, "n_embd": 32, "n_layer": 2, "n_head": 4}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))
        trainer = Trainer(model, arguments, train_dataset=Texts(Path(text_file)))
        trainer.train()
        if trainer.is_world_process_zero():
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            for epoch, loss in enumerate(losses):
                print(f"epoch {epoch}  loss {float(loss):.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
