"""Trains the model of train_pipeline.py with torch.distributed.pipelining's names.

    torchrun --nproc-per-node 2 examples/python/train_pipeline_torch.py some_text.txt

The program was written for torch: the line marked PIPE is all that changes, and with torch's own
import in its place it runs on torch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline  # PIPE 1

CONTEXT, CHARACTERS, BATCH = 32, 128, 64


def main(text_file: str, last: str = "100", frontend: str = "manual") -> None:
    steps = int(last)
    ctx = trireme.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(CHARACTERS, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, CHARACTERS),
    ).to(ctx.device)
    cuts = [len(net) * stage // world for stage in range(world + 1)]
    stage: Any
    if frontend == "traced":
        split = {str(cut): SplitPoint.BEGINNING for cut in cuts[1:-1]}
        pipe = pipeline(
            net, mb_args=(windows[: BATCH // 4, :CONTEXT].to(ctx.device),), split_spec=split
        )
        stage = pipe.build_stage(rank, ctx.device)
    else:
        stage = PipelineStage(net[cuts[rank] : cuts[rank + 1]], rank, world, ctx.device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)

    for step in range(steps):
        first = step * BATCH * 7
        rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
        batch = windows[rows].to(ctx.device)
        inputs = (batch[:, :CONTEXT],) if rank == 0 else ()
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == world - 1:
            schedule.step(*inputs, target=batch[:, CONTEXT], losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        if losses and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:3d}  loss {torch.stack(losses).mean().item():.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
