"""Trains a small GPT on any text by Lightning's Trainer, with Trireme's strategies.

    python examples/python/lightning_gpt.py some_text.txt [trireme_ddp | trireme_fsdp]

Lightning starts the two ranks itself. The lines marked Trireme are all that the program changes.
"""

import sys
from pathlib import Path

import torch
import trireme.integrations.lightning  # noqa: F401  # Trireme
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn import functional
from train_gpt import Gpt, TextWindows

LENGTH, BATCH, EPOCHS = 32, 8, 2  # BATCH is that of a rank


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(width=32, depth=2, length=LENGTH)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        logits = self.gpt(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(text_file: str, strategy: str = "trireme_ddp") -> None:
    seed_everything(0, verbose=False)
    model = Language()
    windows = TextWindows(Path(text_file), LENGTH)
    loader = torch.utils.data.DataLoader(windows, batch_size=BATCH)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,  # Trireme
        max_epochs=EPOCHS,
        use_distributed_sampler=True,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main(*sys.argv[1:3])
