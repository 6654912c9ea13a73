"""Trains the model of train_ddp.py with a parameter server, under any of its modes.

    torchrun --nproc-per-node 2 examples/python/ps_train.py some_text.txt 100 ssp

The lines marked PS are all that a plain loop has to change. Under bsp losses are those of one
process on the batches of all workers together, and examples/cpp/train_ps.cpp reaches the same.
"""

import sys
from pathlib import Path

import torch
import trireme  # PS 1
from torch import nn
from trireme import ps

CONTEXT, CHARACTERS, BATCH = 32, 128, 64  # BATCH rows of all workers together


def main(text_file: str, last: str = "100", mode: str = "bsp") -> None:
    steps = int(last)
    ctx = trireme.init(device="cpu")  # PS 2: tables lie in the memory of the host
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(CHARACTERS, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 256),
        nn.ReLU(),
        nn.Linear(256, CHARACTERS),
    )
    # Each push is a step of its own under ssp and async, as many as there are workers in a clock.
    lr = 3e-3 if mode == "bsp" else 3e-3 / ctx.world
    staleness = 2 if mode == "ssp" else 0
    table = ps.Dense("net", net, optimizer=ps.AdamW(lr))
    with ps.ParameterServer([table], mode=mode, staleness=staleness) as server:  # PS 3
        for step in range(steps):
            first = step * BATCH * 7
            rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
            batch = windows[rows[ctx.rank :: ctx.world]]
            server["net"].pull()  # PS 4
            loss = nn.functional.cross_entropy(net(batch[:, :CONTEXT]), batch[:, CONTEXT])
            loss.backward()
            server["net"].push()  # PS 5
            server.clock()
            if step % 20 == 0 or step == steps - 1:
                mean = trireme.all_mean(loss.detach()).item()
                if ctx.rank == 0:  # PS 6
                    print(f"step {step:3d}  loss {mean:.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
