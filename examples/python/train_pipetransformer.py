"""Trains a transformer on characters in a pipeline that gets shorter as its layers freeze.

    torchrun --nproc-per-node 2 examples/python/train_pipetransformer.py some_text.txt \
        [STEPS [EPOCHS]]

The first run has all parts of PipeTransformer. At the end of each epoch of STEPS steps it prints
the loss, how many of the eight layers were frozen, and the plan: ranks per pipeline x replicas.
Then comes the ablation: the same batches and the same freeze schedule without some of the parts,
and under plain DistributedDataParallel. Sides that freeze reach the same loss, and so do those that
do not. examples/cpp/train_pipetransformer.cpp is the same program in C++ and reaches the same
losses.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trireme
from torch import nn
from torch.nn import functional as F

LENGTH, CHARACTERS, BATCH, CHUNKS = 64, 128, 32, 8  # BATCH and CHUNKS of all ranks together
WIDTH, HEADS, BLOCKS = 64, 4, 8
SCHEDULE: dict[str, Any] = {"rule": "schedule", "alpha": 1 / 3}


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


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.characters(characters) + self.positions.weight


def make_layers() -> list[nn.Module]:
    """What is frozen and moved at a time, the same on every rank."""
    torch.manual_seed(0)
    embed, blocks = Embed(), [Block() for _ in range(BLOCKS)]
    head = nn.Linear(WIDTH, CHARACTERS)
    first, last = nn.Sequential(embed, blocks[0]), nn.Sequential(blocks[-1], head)
    return [first, *blocks[1:-1], last]


def loss_of(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


class Data:
    """Windows of a text, in another order in each epoch."""

    def __init__(self, text_file: str, steps: int, device: torch.device) -> None:
        text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
        windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, LENGTH + 1, 1)
        self.steps, self.samples = steps, steps * BATCH
        self.rows = windows[torch.arange(self.samples) * 7 % windows.size(0)].to(device)
        self.batches = trireme.GlobalBatch(rows=self.samples, size=BATCH)

    def epoch(self, number: int) -> list[torch.Tensor]:
        return [self.batches.whole(number * self.steps + step) for step in range(self.steps)]


def make_cache(data: Data) -> trireme.ActivationCache:
    row = LENGTH * WIDTH * 4
    return trireme.ActivationCache(data.samples, data.samples * (row + 64) + 4096)


def train_elastic(
    data: Data, epochs: int, ctx: trireme.Context, *, tells: bool = False, **options: Any
) -> float:
    """Trains by PipeTransformer; returns the mean loss of the last epoch."""
    layers = make_layers()
    parameters = [parameter for layer in layers for parameter in layer.to(ctx.device).parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    run = trireme.PipeTransformer(
        layers, loss=loss_of, optimizer=optimizer, global_batch=BATCH, chunks=CHUNKS, **options
    )
    for epoch in range(epochs):
        total = 0.0
        for ids in data.epoch(epoch):
            rows = data.rows[ids]
            total += run.step(rows[:, :LENGTH], ids, rows[:, 1:]).item()
        run.end_epoch()
        was = run.history[-1]
        if tells and ctx.rank == 0:
            print(
                f"epoch {epoch}  loss {total / data.steps:.6f}  frozen {was.frozen}  "
                f"plan {was.ranks_per_pipeline} x {was.replicas}  hits {was.hits}"
            )
    return total / data.steps


def train_ddp(
    data: Data, epochs: int, ctx: trireme.Context, *, freezes: bool = False, caches: bool = False
) -> float:
    """Trains by DistributedDataParallel; returns the mean loss of the last epoch."""
    layers = nn.ModuleList(make_layers()).to(ctx.device)
    cache = make_cache(data) if caches else None

    class Rest(nn.Module):
        """Layers behind those whose outputs are given."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
            for layer in self.layers[first:]:
                x = layer(x)
            return x

    ddp = trireme.DistributedDataParallel(Rest())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    freeze = None
    if freezes:
        names = [f"layers.{number}" for number in range(len(layers))]
        freeze = trireme.Freeze(ddp, names, optimizer=optimizer, **SCHEDULE)
    prefix, share = None, BATCH // ctx.world
    for epoch in range(epochs):
        total = 0.0
        for ids in data.epoch(epoch):
            ids = ids[ctx.rank * share : (ctx.rank + 1) * share]
            rows = data.rows[ids]
            x, first = rows[:, :LENGTH], 0
            if prefix is not None and freeze is not None:
                x, first = prefix(x, ids), freeze.frozen
            optimizer.zero_grad()
            loss = loss_of(ddp(x, first), rows[:, 1:])
            loss.backward()
            if freeze is not None:
                freeze.step()
            optimizer.step()
            total += trireme.all_mean(loss.detach()).item()
        if freeze is not None and freeze.advance() and cache is not None:
            prefix = trireme.CachedPrefix(layers[: freeze.frozen], cache)
    return total / data.steps


def main(text_file: str, steps: int = 16, epochs: int = 6) -> None:
    ctx = trireme.init()
    data = Data(text_file, steps, ctx.device)
    everything = {"freeze": SCHEDULE, "cache": make_cache(data)}
    train_elastic(data, epochs, ctx, tells=True, **everything)

    sides: dict[str, Callable[[], float]] = {
        "DDP": lambda: train_ddp(data, epochs, ctx),
        "DDP + Freeze": lambda: train_ddp(data, epochs, ctx, freezes=True),
        "DDP + Freeze + cache": lambda: train_ddp(data, epochs, ctx, freezes=True, caches=True),
        "fixed pipeline": lambda: train_elastic(data, epochs, ctx, freeze=False, pipe=False),
        "+ Freeze": lambda: train_elastic(data, epochs, ctx, freeze=SCHEDULE, pipe=False),
        "+ plan and transform": lambda: train_elastic(data, epochs, ctx, freeze=SCHEDULE),
        "all": lambda: train_elastic(data, epochs, ctx, freeze=SCHEDULE, cache=make_cache(data)),
    }
    for name, train in sides.items():
        begin = time.perf_counter()
        loss = train()
        if ctx.rank == 0:
            print(f"{name:21} last loss {loss:.6f}  {time.perf_counter() - begin:5.1f} s")
    trireme.shutdown()


if __name__ == "__main__":
    _, name, *rest = sys.argv
    main(name, *map(int, rest))
