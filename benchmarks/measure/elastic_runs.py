"""What PipeTransformer takes: epochs of a GPT in pipelines, and the move to another plan.

Run as a rank (`python -m measure.elastic_runs CONFIG`) it measures once and replies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn

from measure.freeze_runs import (
    RANKS,
    loss_of,
    make_gpt,
    replies_of,
    reply_once,
    rows_of_text,
)
from measure.ranks import Message

SIDES: Mapping[str, tuple[str, ...]] = {
    "pipeline": (),
    "pipeline+freeze": ("freeze",),
    "pipeline+freeze+plan": ("freeze", "pipe"),
    "all": ("freeze", "pipe", "cache"),
}
"""The parts that each has."""
CHUNKS = 4
"""Micro-batches of a step, all replicas together."""


def measure_elastic(what: str, **config: Any) -> list[Message]:
    """What `what` is on each rank of fresh processes; see MEASURED."""
    return replies_of("measure.elastic_runs", what, config)


def _layers(tiny: bool) -> tuple[list[nn.Module], int, int]:
    """What freezes at a time, as under DDP, the length of sequences, and the rows of a global
    batch. The last block comes with the head, which is never frozen."""
    model, _, length, rows = make_gpt(tiny)
    embed, first, *blocks, last, head = model.layers
    return [nn.Sequential(embed, first), *blocks, nn.Sequential(last, head)], length, rows * RANKS


def _run(tiny: bool, **options: Any) -> tuple[trireme.PipeTransformer, int, int]:
    layers, length, rows = _layers(tiny)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4)
    given = {"loss": loss_of, "optimizer": optimizer, "global_batch": rows, "chunks": CHUNKS}
    return trireme.PipeTransformer(layers, **given, **options), length, rows


def epochs(config: Mapping[str, Any]) -> Message:
    """Seconds, loss, hits, frozen layers and plan of each epoch; the changes of plans count."""
    parts = SIDES[config["side"]]
    _, length, rows = _layers(config["tiny"])
    samples = config["steps"] * rows
    options: dict[str, Any] = {"freeze": False, "pipe": "pipe" in parts}
    if "freeze" in parts:
        options["freeze"] = {"rule": "schedule", "alpha": config["alpha"]}
    if "cache" in parts:
        row_bytes = length * (32 if config["tiny"] else 384) * 4
        options["cache"] = trireme.ActivationCache(samples, samples * (row_bytes + 64) + 4096)
    run, length, rows = _run(config["tiny"], **options)
    data, _ = rows_of_text(samples, length)
    found: Message = {name: [] for name in ("seconds", "loss", "hits", "frozen", "ranks")}
    for epoch in range(config["epochs"]):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        dist.barrier()
        begin, total = time.perf_counter(), 0.0
        for ids in order.split(rows):
            tokens = data[ids]
            total += run.step(tokens, ids, tokens).item()
        run.end_epoch()
        was = run.history[-1]
        found["seconds"].append(time.perf_counter() - begin)
        found["loss"].append(total / config["steps"])
        found["hits"].append(was.hits)
        found["frozen"].append(was.frozen)
        found["ranks"].append(was.ranks_per_pipeline)
    return found


def transform(config: Mapping[str, Any]) -> Message:
    """ms from a pipeline of all ranks to a replica on each and back, of a model with state, and of
    one copy of the bytes that come to this rank."""
    run, length, rows = _run(config["tiny"], freeze=False, pipe=False)
    tokens = torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(1))
    run.step(tokens, None, tokens)
    pipeline = run.plan
    assert pipeline is not None
    whole = trireme.ElasticPlan(
        ranks_per_pipeline=1, replicas=RANKS, balance=[sum(pipeline.balance)]
    )
    held = sum(parameter.untyped_storage().nbytes() for parameter in run.parameters())
    every = sum(parameter.numel() * parameter.element_size() for parameter in run.parameters())
    come = 3 * (every - held)  # with two states of Adam
    source = torch.ones(come // 4)
    transforms, copies = [], []
    for _ in range(config["blocks"]):
        dist.barrier()
        begin = time.perf_counter()
        run.transform(whole)
        dist.barrier()
        transforms.append((time.perf_counter() - begin) * 1e3)
        run.step(tokens, None, tokens)
        begin = time.perf_counter()
        torch.empty_like(source).copy_(source)
        copies.append((time.perf_counter() - begin) * 1e3)
        run.transform(pipeline)
        run.step(tokens, None, tokens)
    medians = {"transform_ms": statistics.median(transforms), "copy_ms": statistics.median(copies)}
    return {"bytes": come, **medians}


MEASURED: dict[str, Callable[[Mapping[str, Any]], Message]] = {
    "epochs": epochs,
    "transform": transform,
}


def main() -> None:
    reply_once(MEASURED)


if __name__ == "__main__":
    main()
