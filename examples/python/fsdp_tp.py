"""fully_shard beside tensor parallelism: two ranks hold each matrix together, all share the rest.

    torchrun --nproc-per-node 4 examples/python/fsdp_tp.py [STEPS]

Tensor parallelism is torch's. It comes first, over one dimension of the mesh; fully_shard, over the
other one, shards what each rank has of the model once more. Any number of ranks prints the same
losses.
"""

import sys

import torch
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, ROWS = 32, 24


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def main(steps: int) -> None:
    ctx = trireme.init()
    parts = 2 if ctx.world % 2 == 0 else 1
    mesh = init_device_mesh(
        ctx.device.type, (ctx.world // parts, parts), mesh_dim_names=("dp", "tp")
    )

    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward(), nn.Linear(WIDTH, 1)).to(ctx.device)
    for block in model[:2]:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        trireme.fully_shard(block, mesh=mesh["dp"])
    trireme.fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    batches = torch.Generator().manual_seed(1)
    for step in range(steps):
        batch = torch.randn(ROWS, WIDTH, generator=batches)
        # Ranks that hold one model together share their rows.
        rows = batch[replica::replicas].to(ctx.device)
        loss = nn.functional.mse_loss(model(rows), rows.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = trireme.all_mean(loss.detach()).item()
        if ctx.rank == 0:
            print(f"step {step:3d}  loss {mean:.6f}")
    trireme.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
