"""Trains the model of train_pipeline.py as a pipeline in this process: no ranks, no launcher.

    python examples/python/train_pipeline_threads.py some_text.txt

The stages compute at the same time, each on a thread of its own, and the loss is computed outside:
the pipeline is a module like any other. The two lines marked PIPE are all that a plain loop has to
change. examples/cpp/train_pipeline_threads.cpp is the same program in C++.
"""

import sys
from pathlib import Path

import torch
import trireme  # PIPE 1
from torch import nn

CONTEXT, CHARACTERS, BATCH = 32, 128, 64


def main(text_file: str, last: str = "100", threads: str = "2") -> None:
    steps = int(last)
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
    )
    model = trireme.Pipeline(net, 4, devices=["cpu"] * int(threads))  # PIPE 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(steps):
        first = step * BATCH * 7
        rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
        batch = windows[rows]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
