"""The model and data of train_ddp.py, fully sharded: the ranks of a host hold one copy of it.

    torchrun --nproc-per-node 2 examples/python/train_fsdp.py some_text.txt [STEPS [FOLDER]]

The six lines marked FSDP are all that a plain loop has to change. examples/cpp/train_fsdp.cpp is
the same program in C++. Both reach the losses of train_ddp. FOLDER is a checkpoint, which every
strategy loads at any number of ranks: training goes on from what is there, from either language.
"""

import sys
from pathlib import Path

import torch
import trireme  # FSDP 1
from torch import nn
from train_ddp import BATCH, CHARACTERS, CONTEXT, NextCharacter


def main(text_file: str, steps: int, folder: str | None = None) -> None:
    ctx = trireme.init()  # FSDP 2
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    model = NextCharacter().to(ctx.device)
    trireme.fully_shard(model.hidden)  # FSDP 3: a unit
    trireme.fully_shard(model)  # FSDP 4: the rest
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    begin = 0
    if folder is not None and Path(folder).exists():
        begin = trireme.load_checkpoint(folder, model, optimizer)["step"]
    share = BATCH // ctx.world  # FSDP 5
    for step in range(begin, steps):
        first = (step * BATCH + ctx.rank * share) * 7  # FSDP 6
        rows = torch.arange(first, first + share * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            mean = trireme.all_mean(loss.detach()).item()
            if ctx.rank == 0:
                print(f"step {step:3d}  loss {mean:.6f}")
    if folder is not None:
        trireme.save_checkpoint(folder, model, optimizer, extra={"step": steps})
    trireme.shutdown()


if __name__ == "__main__":
    _, name, count, *rest = [*sys.argv, "100"] if len(sys.argv) == 2 else sys.argv
    main(name, int(count), *rest)
