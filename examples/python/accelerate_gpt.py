"""Trains a small GPT on any text by Accelerate's loop, with Trireme's classes.

    torchrun --nproc-per-node 2 examples/python/accelerate_gpt.py some_text.txt [ddp | fsdp]

The loop is Accelerate's; the line marked Trireme is all that it has to change.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional
from train_gpt import Gpt, TextWindows
from trireme.integrations.accelerate import Accelerator  # Trireme

LENGTH, BATCH, EPOCHS = 32, 16, 2


def main(text_file: str, strategy: str = "ddp") -> None:
    accelerator = Accelerator(fully_shard=strategy == "fsdp")
    torch.manual_seed(0)
    model = Gpt(width=32, depth=2, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = TextWindows(Path(text_file), LENGTH)
    loader = torch.utils.data.DataLoader(windows, batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        total = 0.0
        for batch in loader:
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        mean = accelerator.reduce(torch.tensor(total / len(loader)), "mean").item()
        accelerator.print(f"epoch {epoch}  loss {mean:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:3])
