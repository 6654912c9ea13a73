"""A transformer on characters whose blocks run again in backward and keep nothing until then.

    torchrun --nproc-per-node 2 examples/python/train_checkpointed.py some_text.txt [STEPS [never]]

The line marked CHECKPOINT is all that a plain model has to change; with `never` it is left out.
Losses are equal with and without it, bit for bit, though the blocks draw random numbers (dropout).
At the end it prints the memory that training took on top. examples/cpp/train_checkpointed.cpp is
the same program in C++ and reaches the same losses.
"""

import sys
from pathlib import Path

import torch
import trireme
from torch import nn
from torch.nn import functional as F

LENGTH, CHARACTERS, BATCH = 64, 128, 32  # BATCH is that of all ranks together
WIDTH, HEADS, BLOCKS = 128, 4, 6


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
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        x = x + F.dropout(self.attention_out(attended), 0.1)
        return x + F.dropout(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))), 0.1)


class NextCharacter(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embed(characters) + self.positions.weight
        for block in self.blocks:
            x = trireme.checkpoint(block, x) if self.checkpointed else block(x)  # CHECKPOINT
        return self.out(x)


def peak_mib() -> float:
    """The most memory that this process ever had."""
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024


def main(text_file: str, steps: int = 100, how: str = "always") -> None:
    ctx = trireme.init()
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, LENGTH + 1, 1)

    torch.manual_seed(0)
    model = NextCharacter(how != "never").to(ctx.device)
    trireme.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + ctx.rank)  # each rank has a dropout of its own

    before = peak_mib()
    share = BATCH // ctx.world
    for step in range(steps):
        first = (step * BATCH + ctx.rank * share) * 7
        rows = torch.arange(first, first + share * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        scores = model(batch[:, :LENGTH])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            mean = trireme.all_mean(loss.detach()).item()
            if ctx.rank == 0:
                print(f"step {step:3d}  loss {mean:.6f}")
    if ctx.rank == 0:
        print(f"checkpointed: {how}, peak {peak_mib() - before:.0f} MiB")
    trireme.shutdown()


if __name__ == "__main__":
    _, name, *rest = sys.argv
    main(name, int(rest[0]) if rest else 100, *rest[1:])
