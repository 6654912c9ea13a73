"""Trains a next-character model (Bengio et al., 2003) on any text, over any number of ranks.

    torchrun --nproc-per-node 2 examples/python/train_ddp.py some_text.txt

The five lines marked DDP are all that a plain loop has to change. examples/cpp/train_ddp.cpp is the
same program in C++ and reaches the same loss.
"""

import sys
from pathlib import Path

import torch
import trireme  # DDP 1
from torch import nn

CONTEXT, CHARACTERS, BATCH = 32, 128, 64  # BATCH is that of all ranks together


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, 32)
        self.hidden = nn.Linear(32 * CONTEXT, 256)
        self.out = nn.Linear(256, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.embed(characters).flatten(1))))


def main(text_file: str, steps: int = 100) -> None:
    ctx = trireme.init()  # DDP 2
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = NextCharacter().to(ctx.device)
    model = trireme.DistributedDataParallel(net)  # DDP 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    share = BATCH // ctx.world  # DDP 4
    for step in range(steps):
        first = (step * BATCH + ctx.rank * share) * 7  # DDP 5
        rows = torch.arange(first, first + share * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            mean = trireme.all_mean(loss.detach()).item()
            if ctx.rank == 0:
                print(f"step {step:3d}  loss {mean:.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
