"""A transformer on characters whose layers are frozen from the input on while it trains.

    torchrun --nproc-per-node 2 examples/python/train_frozen.py some_text.txt [STEPS [RULE]]

The lines marked FREEZE are all that a plain program has to change. RULE is "gradient", "schedule"
or "never". An interval, behind which layers are frozen, is an eighth of the steps. At the end of
each it prints the loss, how many of the six layers are frozen and how many bytes of gradients the
last step has averaged. examples/cpp/train_frozen.cpp is the same program in C++ and reaches the
same losses.
"""

import sys
from pathlib import Path

import torch
import trireme
from torch import nn
from torch.nn import functional as F

LENGTH, CHARACTERS, BATCH = 64, 128, 32  # BATCH is that of all ranks together
WIDTH, HEADS, BLOCKS, INTERVALS = 64, 4, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embed(characters) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main(text_file: str, steps: int = 160, rule: str = "gradient") -> None:
    ctx = trireme.init()
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, LENGTH + 1, 1)

    torch.manual_seed(0)
    model = NextCharacter().to(ctx.device)
    ddp = trireme.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = ["embed", "positions", "blocks.0"]
    layers = [first, *(f"blocks.{number}" for number in range(1, BLOCKS))]
    freeze = None
    if rule != "never":
        freeze = trireme.Freeze(ddp, layers, rule=rule, optimizer=optimizer)  # FREEZE

    share, every = BATCH // ctx.world, max(1, steps // INTERVALS)
    for step in range(steps):
        begin = (step * BATCH + ctx.rank * share) * 7
        rows = torch.arange(begin, begin + share * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        scores = ddp(batch[:, :LENGTH])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if freeze:
            freeze.step()  # FREEZE
        optimizer.step()
        if step % every == every - 1:
            mean = trireme.all_mean(loss.detach()).item()
            frozen = freeze.frozen if freeze else 0
            sent = int(ddp.last_step()["reduced_bytes"])
            if ctx.rank == 0:
                print(f"step {step:3d}  loss {mean:.6f}  frozen {frozen}  bytes {sent}")
            if freeze:
                freeze.advance()  # FREEZE
    trireme.shutdown()


if __name__ == "__main__":
    _, name, *rest = sys.argv
    main(name, int(rest[0]) if rest else 160, *rest[1:])
