"""Trains the model of train_ddp.py, with a layer more, as a pipeline: every rank has some layers.

    torchrun --nproc-per-node 2 examples/python/train_pipeline.py some_text.txt

The lines marked PIPE are all that a plain loop has to change. examples/cpp/train_pipeline.cpp is
the same program in C++ and reaches the same loss.
"""

import sys
from pathlib import Path

import torch
import trireme  # PIPE 1
from torch import nn

CONTEXT, CHARACTERS, BATCH = 32, 128, 64


def main(text_file: str, last: str = "100", schedule: str = "1f1b") -> None:
    steps = int(last)
    ctx = trireme.init()  # PIPE 2
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(CHARACTERS, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, CHARACTERS),
    ).to(ctx.device)
    loss_of = nn.functional.cross_entropy
    model = trireme.Pipeline(net, 4, ranks=True, schedule=schedule, loss=loss_of)  # PIPE 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # PIPE 4

    for step in range(steps):
        first = step * BATCH * 7
        rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        optimizer.zero_grad()
        loss = model.step(batch[:, :CONTEXT], target=batch[:, CONTEXT])  # PIPE 5
        optimizer.step()
        if ctx.rank == 0 and (step % 20 == 0 or step == steps - 1):  # PIPE 6
            print(f"step {step:3d}  loss {loss.item():.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
