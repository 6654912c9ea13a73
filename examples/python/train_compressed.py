"""Trains the model of train_ddp.py, whose gradients travel as codes of fewer bytes.

    torchrun --nproc-per-node 2 examples/python/train_compressed.py some_text.txt
    ... train_compressed.py some_text.txt 100 --method sign

Methods are int8 (the default), int4, sign, fp16, bf16 and none. The line marked COMPRESSION is all
that a program with DistributedDataParallel has to change. Compression is meant for links between
hosts, and on one host the default of all methods, between="hosts", sends gradients as they are.
This program has something to show on one machine, too: it compresses between all ranks unless told
`--between hosts`. At the end it prints what a rank has sent.

examples/cpp/train_compressed.cpp is the same program in C++ and reaches the same losses.
"""

import argparse
from pathlib import Path

import torch
import trireme
from torch import nn
from trireme import compression

METHODS = {
    "int8": compression.Int8,
    "int4": compression.Int4,
    "sign": compression.Sign,
    "fp16": compression.Fp16,
    "bf16": compression.Bf16,
}
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
    parser.add_argument("--method", choices=[*METHODS, "none"], default="int8")
    parser.add_argument("--between", choices=["ranks", "hosts"], default="ranks")
    return parser.parse_args()


def main() -> None:
    args = parse()
    method = METHODS[args.method](between=args.between) if args.method != "none" else None
    ctx = trireme.init()
    text = torch.frombuffer(bytearray(Path(args.text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = NextCharacter().to(ctx.device)
    model = trireme.DistributedDataParallel(net, compression=method)  # COMPRESSION
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    share = BATCH // ctx.world
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
    if ctx.rank == 0:
        last = model.last_step()
        gradients, sent = last["reduced_bytes"], last["sent_bytes"]
        print(f"{args.method}: {gradients} bytes of gradients, {sent} sent as codes in a step")
    trireme.shutdown()


if __name__ == "__main__":
    main()
