"""Trains the model of train_ddp.py, and goes on where it was stopped, with any number of ranks.

    torchrun --nproc-per-node 2 examples/python/train_resume.py some_text.txt 100 --folder run

Stop it anywhere (Ctrl-C, kill -9), start it again with another number of ranks: it loads the newest
whole checkpoint of the folder, and the losses are those of a run that nobody has disturbed. A
checkpoint is saved every 10 steps while the next steps run. The lines marked RESUME are all that a
training loop needs for that.

examples/cpp/train_resume.cpp is the same program in C++ and reaches the same losses.
"""

import argparse
from pathlib import Path

import torch
import trireme
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text_file")
    parser.add_argument("steps", type=int, nargs="?", default=100)
    parser.add_argument("--folder", default="run")
    parser.add_argument("--every", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    args = parse()
    ctx = trireme.init()
    text = torch.frombuffer(bytearray(Path(args.text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = NextCharacter().to(ctx.device)
    model = trireme.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = trireme.GlobalBatch(rows=windows.size(0), size=BATCH)  # RESUME
    saves = trireme.Checkpoints(args.folder, model, optimizer, batches, every=args.every)  # RESUME
    start = saves.load_latest()  # RESUME
    if ctx.rank == 0 and start:
        print(f"goes on after {start.step} steps on {ctx.world} ranks")

    for part in batches.steps(start.step if start else 0, args.steps):  # RESUME
        batch = windows[part.rows].to(ctx.device)
        loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
        optimizer.zero_grad()
        (loss * part.weight).backward()
        optimizer.step()
        saves.step(part.number + 1)  # RESUME
        if part.number % 5 == 4:
            mean = trireme.all_mean(loss.detach() * part.weight).item()
            if ctx.rank == 0:
                print(f"step {part.number:3d}  loss {mean:.6f}", flush=True)
    saves.wait()  # RESUME
    trireme.shutdown()


if __name__ == "__main__":
    main()
