"""Trains the GPT of train_gpt.py with two optimizers under ZeRO stage 2, over any number of ranks.

    torchrun --nproc-per-node 2 examples/python/train_muon.py some_text.txt

Hidden matrices are stepped by Muon (Jordan et al., 2024), which needs whole ones: each of them is
one rank's, balanced by size, so that the ranks share the work of making them orthogonal. The rest
is AdamW's, of which each rank has a slice of every parameter.
"""

import sys
from pathlib import Path

import torch
import trireme
from torch import nn
from train_gpt import Gpt, TextWindows

LENGTH, WIDTH, DEPTH = 32, 32, 2
BATCH = 16  # all ranks share it


def make_optimizers(model: Gpt) -> list[trireme.ZeroRedundancyOptimizer]:
    named = list(model.named_parameters())
    hidden = [(name, p) for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    names = {name for name, _ in hidden}
    rest = [(name, p) for name, p in named if name not in names]
    return [
        trireme.ZeroRedundancyOptimizer(hidden, torch.optim.Muon, stage=2, lr=0.02),
        trireme.ZeroRedundancyOptimizer(rest, torch.optim.AdamW, stage=2, lr=3e-3),
    ]


def main(text_file: str, steps: int = 100) -> None:
    ctx = trireme.init()
    windows = TextWindows(Path(text_file), LENGTH)
    torch.manual_seed(0)
    model = Gpt(WIDTH, DEPTH, LENGTH).to(ctx.device)
    optimizers = make_optimizers(model)
    share = BATCH // ctx.world
    for step in range(steps):
        first = step * BATCH + ctx.rank * share
        rows = [windows[row % len(windows)] for row in range(first, first + share)]
        batch = torch.stack(rows).to(ctx.device)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        trireme.clip_grad_norm_(model.parameters(), max_norm=1.0)  # one norm for both
        for optimizer in optimizers:
            optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            mean = trireme.all_mean(loss.detach()).item()
            if ctx.rank == 0:
                print(f"step {step:3d}  loss {mean:.6f}")
    owned = len(optimizers[0].optim.param_groups[0]["params"])
    if ctx.rank == 0:
        print(f"rank 0 of {ctx.world} owns {owned} hidden matrices")
    trireme.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
