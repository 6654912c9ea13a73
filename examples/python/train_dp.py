"""The model and data of train_ddp.py in one process: no launcher, no ranks, one log.

    python examples/python/train_dp.py some_text.txt [STEPS [REPLICAS]]

The three lines marked DP are all that a plain loop has to change. examples/cpp/train_dp.cpp is the
same program in C++. Both reach the losses of train_ddp.
"""

import sys
from pathlib import Path

import torch
import trireme  # DP 1
from torch import nn
from train_ddp import BATCH, CHARACTERS, CONTEXT, NextCharacter


def main(text_file: str, steps: int = 100, replicas: int | None = None) -> None:
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = NextCharacter()
    model = trireme.DataParallel(net, replicas=replicas, loss=nn.functional.cross_entropy)  # DP 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(steps):
        first = step * BATCH * 7
        rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
        batch = windows[rows]
        loss = model(batch[:, :CONTEXT], target=batch[:, CONTEXT])  # DP 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
