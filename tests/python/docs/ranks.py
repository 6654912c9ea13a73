"""Runs Python blocks of the pages on ranks, among the names that all pages use."""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from docs.blocks import Block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.hidden(inputs)
        for block in self.blocks:
            rows = torch.relu(block(rows))
        return self.head(rows)


def loss_of(outputs: Tensor, targets: Tensor | None = None) -> Tensor:
    return outputs.square().mean() if targets is None else (outputs - targets).square().mean()


def names() -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=drawn), torch.randn(64, 4, generator=drawn))
    return {
        **{"torch": torch, "nn": nn, "dist": dist, "trireme": trireme, "os": os},
        **{"contextlib": contextlib, "Net": Net, "loss_of": loss_of, "data": data},
        "loader": [data[first : first + 16] for first in range(0, 64, 16)],
    }


def run_blocks(rank: int, folder: str, blocks: Sequence[Block]) -> None:
    """The blocks of a page, each by itself, in one group; with a model and an optimizer."""
    ctx = trireme.init(device="cpu", set_threads=False)
    for number, block in enumerate(blocks):
        torch.manual_seed(0)
        os.makedirs(f"{folder}/{number}", exist_ok=True)
        os.chdir(f"{folder}/{number}")
        known = {**names(), "ctx": ctx}
        known["model"] = model = trireme.DistributedDataParallel(Net())
        known["optimizer"] = torch.optim.AdamW(model.parameters())
        run(block, known)
        del known, model
    trireme.shutdown()


def run_alone(rank: int, folder: str, block: Block) -> None:
    """A block that begins a program."""
    os.chdir(folder)
    run(block, names())
    trireme.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def run(block: Block, known: dict[str, Any]) -> None:
    execute: Callable[..., Any] = exec
    try:
        execute(compile(block.before, f"{block} before", "exec"), known)
        # So that a traceback names the line of the page.
        execute(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), known)
    except Exception as error:
        raise AssertionError(f"the block at {block} failed: {error!r}") from error
