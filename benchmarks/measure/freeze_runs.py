"""What freezing and its cache take: epochs of a GPT, single steps, reads of the cache.

Run as a rank (`python -m measure.freeze_runs CONFIG`) it measures once and replies.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from models import Block, Gpt, PlainMlp
from torch import Tensor, nn
from torch.nn import functional as F

from measure.corpus import read_corpus
from measure.memory import keep_heap_warm
from measure.ranks import Launch, Message, RankGroup
from measure.worker import take_over_stdout

RANKS = 2
EPOCHS, STEPS, ALPHA = 6, 16, 1 / 3
SIDES = ("ddp", "ddp+freeze", "ddp+freeze+cache")
STRATEGIES = ("ddp", "zero2", "fully_shard")
ROW_FLOATS = (1 << 14, 1 << 16, 1 << 18)  # of a cached row: 64 KiB, 256 KiB, 1 MiB
HELD_OUT = 64  # rows of text that are never trained on
TOKENS, BATCHES = 128, (4, 32)  # of an input, and rows of it that are read at a time


def measure_freeze(what: str, **config: Any) -> list[Message]:
    """What `what` is on each rank of fresh processes; see MEASURED."""
    return replies_of("measure.freeze_runs", what, config)


def replies_of(module: str, what: str, config: Mapping[str, Any]) -> list[Message]:
    """What fresh ranks reply that run a module, whose main() is reply_once()."""
    text = json.dumps({"what": what, **config})
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        launch = Launch(what, module, text, RANKS, 1, Path(scratch))
        with RankGroup(launch) as group:
            return group.replies()


class Embedded(nn.Module):
    """The first layer of a GPT: token ids in, activations out."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class FromLayer(nn.Module):
    """Layers of which the first ones may have been run elsewhere."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        for layer in self.layers[first:]:
            x = layer(x)
        return x


def make_gpt(tiny: bool) -> tuple[FromLayer, list[list[str]], int, int]:
    """The model, its layers to freeze, the length of its sequences and the rows of a rank."""
    width, depth, heads, length, rows = (32, 4, 2, 16, 2) if tiny else (384, 8, 6, 128, 8)
    torch.manual_seed(0)
    gpt = Gpt(128, width, depth, heads, length)
    blocks: list[nn.Module] = list(gpt.blocks)
    assert all(isinstance(block, Block) for block in blocks)
    model = FromLayer([Embedded(gpt), *blocks, nn.Sequential(gpt.norm, gpt.head)])
    layers = [["layers.0", "layers.1"], *([f"layers.{i}"] for i in range(2, depth + 1))]
    return model, layers, length, rows


def rows_of_text(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of a text to train on, and the HELD_OUT rows behind them."""
    text = torch.frombuffer(bytearray(read_corpus(None).text), dtype=torch.uint8)
    rows = text[: (count + HELD_OUT) * length].long().clamp_max(127).view(-1, length)
    return rows[:count], rows[count:]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def epochs(config: Mapping[str, Any]) -> Message:
    """Seconds, loss, hits and frozen layers of each epoch, and the loss of what is held out."""
    model, layers, length, rows = make_gpt(config["tiny"])
    steps = config["steps"]
    samples = steps * rows * RANKS
    data, held_out = rows_of_text(samples, length)
    ddp = trireme.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    freeze = None
    if config["side"] != "ddp":
        options = {"rule": "schedule", "alpha": config["alpha"]}
        freeze = trireme.Freeze(ddp, layers, optimizer=optimizer, **options)
    row_bytes = length * model.layers[-1][0].normalized_shape[0] * 4
    cache = None
    if config["side"] == "ddp+freeze+cache":
        cache = trireme.ActivationCache(samples, samples * (row_bytes + 64) + 4096)
    prefix, first = None, 0
    found: Message = {"seconds": [], "loss": [], "held_out": [], "hits": [], "frozen": []}
    for epoch in range(config["epochs"]):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        dist.barrier()
        begin, total = time.perf_counter(), 0.0
        for step in range(steps):
            at = (step * RANKS + dist.get_rank()) * rows
            ids = order[at : at + rows]
            tokens = data[ids]
            x = tokens if prefix is None else prefix(tokens, ids)
            optimizer.zero_grad()
            logits = ddp(x, first)
            loss = loss_of(logits, tokens)
            loss.backward()
            if freeze is not None:
                freeze.step()
            optimizer.step()
            total += loss.item()
        found["seconds"].append(time.perf_counter() - begin)
        found["loss"].append(total / steps)
        with torch.no_grad():
            found["held_out"].append(loss_of(model(held_out), held_out).item())
        found["hits"].append(cache.stats().hits if cache is not None else 0)
        found["frozen"].append(freeze.frozen if freeze is not None else 0)
        if freeze is not None:
            freeze.advance()
            if cache is not None and freeze.frozen:
                first = freeze.frozen + 1  # the embedding goes with the first block
                prefix = trireme.CachedPrefix(list(model.layers)[:first], cache)
    return found


def _mlp(tiny: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width, depth, rows = (32, 8, 4) if tiny else (1024, 12, 8)
    return PlainMlp(width, depth), torch.randn(rows, width)


def off(config: Mapping[str, Any]) -> Message:
    """ms of steps of `mlp` under DDP, plain and with a Freeze that freezes nothing."""
    model, x = _mlp(config["tiny"])
    ddp = trireme.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    freeze = trireme.Freeze(ddp, optimizer=optimizer)

    def step(freezes: bool) -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        if freezes:
            freeze.step()
        optimizer.step()
        return (time.perf_counter() - begin) * 1e3

    times: dict[str, list[float]] = {"plain": [], "freeze": []}
    for number in range(config["blocks"]):
        sides = [("plain", False), ("freeze", True)]
        for name, freezes in sides if number % 2 == 0 else sides[::-1]:
            taken = [step(freezes) for _ in range(16)]
            if number > 0:
                times[name].append(statistics.mean(taken))
    return times


def change(config: Mapping[str, Any]) -> Message:
    """ms of usual steps of `mlp`, and of the slower one of the first two behind each of some
    changes: the first averages by the old plan, the second makes the new one."""
    model, x = _mlp(config["tiny"])
    net: nn.Module = model
    optimizer: torch.optim.Optimizer
    if config["strategy"] == "ddp":
        net = trireme.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif config["strategy"] == "zero2":
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=2, lr=1e-3
        )
    else:
        for block in model.blocks:
            trireme.fully_shard(block)
        trireme.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    freeze = trireme.Freeze(net, rule=lambda point: point.frozen + 1, optimizer=optimizer)

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        freeze.step()
        optimizer.step()
        return (time.perf_counter() - begin) * 1e3

    found: Message = {"usual": [], "first": []}
    for _ in range(5):
        step()
    for _ in range(config["changes"]):
        found["usual"].append(statistics.median(step() for _ in range(5)))
        freeze.advance()
        found["first"].append(max(step(), step()))
        freeze.unfreeze()
        for _ in range(12):  # what trains again lies apart for 8 steps
            step()
    return found


def reads(config: Mapping[str, Any]) -> Message:
    """us of batches out of the cache, by the bytes of a row, beside a copy of the same rows; and
    the memory of the cache, shared pages counted by their share, beside the bytes of its entries.
    """
    given = (config["samples"], config["rounds"])
    return {"sizes": [_reads_of(floats, *given) for floats in config["row_floats"]]}


def _frozen_front(floats: int) -> list[nn.Module]:
    """Layers with about as many modules and parameters as four blocks of a GPT, which are quick."""
    width = floats // TOKENS
    blocks = [nn.Sequential(*(nn.LayerNorm(width) for _ in range(6))) for _ in range(4)]
    torch.manual_seed(0)  # the same on both ranks
    return [nn.Embedding(2, width), *blocks]


def _reads_of(floats: int, samples: int, rounds: int) -> Message:
    taken = samples * (4 * floats + 64) + 4096
    cache = trireme.ActivationCache(samples, taken)
    layers = [layer.requires_grad_(False) for layer in _frozen_front(floats)]
    prefix = trireme.CachedPrefix(layers, cache, always=True)
    tokens = torch.randint(2, (samples, TOKENS), generator=torch.Generator().manual_seed(1))
    source = prefix(tokens, torch.arange(samples))
    dist.barrier()

    def microseconds(call: Callable[[], object]) -> float:
        call()
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times)

    found: Message = {"bytes": 4 * floats, "entries": samples * 4 * floats, "batches": []}
    for rows in BATCHES:
        ids = torch.randperm(samples, generator=torch.Generator().manual_seed(rows))[:rows]
        x = tokens[ids]
        read_us = microseconds(partial(prefix, x, ids))
        copy_us = microseconds(partial(source.index_select, 0, ids))
        found["batches"].append({"rows": rows, "read_us": read_us, "copy_us": copy_us})
        assert torch.equal(prefix(x, ids), source[ids])
    assert cache.stats().misses <= samples
    dist.barrier()
    found["pss"] = _pss_of_shared_memory(taken)
    dist.barrier()
    return found


def _pss_of_shared_memory(taken: int) -> int:
    """Bytes of the smallest run of Trireme's shared memory of at least so many, by the share of
    this process in them."""
    found: dict[int, int] = {}
    size = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if not word.endswith(":"):
            begin, end = (int(address, 16) for address in word.split("-"))
            size = end - begin if "trireme" in line else 0
        elif word == "Pss:" and size >= taken:
            found[size] = int(rest[0]) * 1024
    return found[min(found)]


MEASURED: dict[str, Callable[[Mapping[str, Any]], Message]] = {
    "epochs": epochs,
    "off": off,
    "change": change,
    "reads": reads,
}


def reply_once(measured: Mapping[str, Callable[[Mapping[str, Any]], Message]]) -> None:
    """Measures as a rank what the configuration asks for, and replies."""
    replies = take_over_stdout()
    config = json.loads(sys.argv[1])
    context = trireme.init()
    torch.set_num_threads(1)  # after trireme.init(), which sets them
    keep_heap_warm()
    replies.write(json.dumps(measured[config["what"]](config)) + "\n")
    replies.flush()
    sys.stdin.readline()
    del context
    trireme.shutdown()


def main() -> None:
    reply_once(MEASURED)


if __name__ == "__main__":
    main()
