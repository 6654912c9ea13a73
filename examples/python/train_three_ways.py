"""Trains one model in one process in three ways, side by side: no ranks, no launcher.

    python examples/python/train_three_ways.py some_text.txt

placed: layers are dealt out to devices, and a batch goes through one after the other, as plain
model parallelism does (`trireme.place`). pipelined: the same cut, but the stages compute at the
same time, on micro-batches (`trireme.Pipeline`). data-parallel: each replica has all layers and a
part of the batch (`trireme.DataParallel`). All three compute the same losses; the time of a step
says what a machine is good at.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import trireme
from torch import nn

CONTEXT, CHARACTERS, BATCH = 32, 128, 64


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(CHARACTERS, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, CHARACTERS),
    )


WAYS: dict[str, Callable[[nn.Sequential, int], nn.Module]] = {
    "placed": lambda net, parts: trireme.place(net, ["cpu"] * parts),
    "pipelined": lambda net, parts: trireme.Pipeline(net, 4, devices=["cpu"] * parts),
    "data-parallel": lambda net, parts: trireme.DataParallel(net, replicas=parts),
}


def main(text_file: str, last: str = "60", parts: str = "2") -> None:
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    models = {way: make(make_net(), int(parts)) for way, make in WAYS.items()}
    optimizers = {
        way: torch.optim.AdamW(model.parameters(), lr=3e-3) for way, model in models.items()
    }
    taken = dict.fromkeys(models, 0.0)

    for step in range(int(last)):
        first = step * BATCH * 7
        batch = windows[torch.arange(first, first + BATCH * 7, 7) % windows.size(0)]
        losses = {}
        for way, model in models.items():
            begin = time.perf_counter()
            optimizers[way].zero_grad()
            loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
            loss.backward()
            optimizers[way].step()
            taken[way] += time.perf_counter() - begin
            losses[way] = loss.item()
        if step % 20 == 0 or step == int(last) - 1:
            said = "  ".join(f"{way} {loss:.6f}" for way, loss in losses.items())
            print(f"step {step:3d}  {said}")
    for way, seconds in taken.items():
        print(f"{way:>14}: {1e3 * seconds / int(last):.2f} ms per step")


if __name__ == "__main__":
    main(*sys.argv[1:])
