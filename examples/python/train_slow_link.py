"""Trains the model of train_ddp.py where the link between workers is slow: they average now and
then, in fragments that travel while training goes on.

    torchrun --nproc-per-node 2 examples/python/train_slow_link.py some_text.txt
    ... train_slow_link.py some_text.txt 100 --method sparse
    sudo examples/two_hosts.sh examples/python/train_slow_link.py some_text.txt 100 --workers hosts

Methods are diloco (the default), sparse (SparseLoCo: codes of the largest values) and local_sgd.
The lines marked ROUNDS are all that a program for one process has to change. On one machine each
rank is a worker. With `--workers hosts` the ranks of a host are one worker, whose gradients
DistributedDataParallel averages in each step.

examples/cpp/train_slow_link.cpp is the same program in C++ and reaches the same losses.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import compression

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
    parser.add_argument("--method", choices=["diloco", "sparse", "local_sgd"], default="diloco")
    parser.add_argument("--workers", choices=["ranks", "hosts"], default="ranks")
    return parser.parse_args()


def make_rounds(
    method: str, model: nn.Module, optimizer: torch.optim.Optimizer, across: Any
) -> Any:
    if method == "local_sgd":
        return trireme.LocalSGD(model, optimizer, sync_every=20, across=across)
    if method == "diloco":
        return trireme.DiLoCo(
            model, optimizer, sync_every=20, fragments=2, fragment_sync_delay=5, across=across
        )
    sparse = compression.TopK(1 / 64, chunk=4096, decay=0.95)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    return trireme.DiLoCo(model, optimizer, outer, sync_every=20, across=across, compression=sparse)


def main() -> None:
    args = parse()
    ctx = trireme.init()
    text = torch.frombuffer(bytearray(Path(args.text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    model: nn.Module = NextCharacter().to(ctx.device)
    across = dist.group.WORLD
    if args.workers == "hosts":
        of_host, _ = dist.new_subgroups(ctx.local_world)
        model = trireme.DistributedDataParallel(model, process_group=of_host)
        across = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    share = BATCH // ctx.world
    with make_rounds(args.method, model, optimizer, across):  # ROUNDS
        for step in range(args.steps):
            first = (step * BATCH + ctx.rank * share) * 7
            rows = torch.arange(first, first + share * 7, 7) % windows.size(0)
            batch = windows[rows].to(ctx.device)
            loss = nn.functional.cross_entropy(model(batch[:, :CONTEXT]), batch[:, CONTEXT])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0 or step == args.steps - 1:
                mean = trireme.all_mean(loss.detach()).item()
                if ctx.rank == 0:
                    print(f"step {step:3d}  loss {mean:.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main()
