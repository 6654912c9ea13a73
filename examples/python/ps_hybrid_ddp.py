"""Trains embeddings in a sparse table together with layers under DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/python/ps_hybrid_ddp.py some_text.txt 100

This is the plan of torch's example "ddp_rpc", where the embeddings are a RemoteModule on a server
and trainers call it by RPC. Here the memory of the host is the server: a forward pulls the rows of
its batch, and its backward pushes their gradients while DDP averages those of the other layers.

The model guesses the next character from the last ones: from the last one, the last two, and so on
up to five, each of which has a row by its characters. Nobody counts beforehand how many there are.
examples/cpp/train_ps_embedding.cpp is the same program in C++ and reaches the same losses.
"""

import sys
from pathlib import Path

import torch
import trireme
from torch import Tensor, nn
from trireme import ps

LENGTH, CHARACTERS, WIDTH = 5, 128, 32
BATCH = 64  # all workers share it


def ids_of(contexts: Tensor) -> Tensor:
    """An id for the last character of each context, the last two, ... as [contexts, LENGTH]."""
    last = contexts.flip(1)
    codes = [torch.zeros_like(last[:, 0])]
    for place in range(LENGTH):
        codes.append(codes[-1] * CHARACTERS + last[:, place] + 1)
    return torch.stack(codes[1:], 1)


class Model(nn.Module):
    """Adds up the rows of a bag of ids; what lies above the sum is DDP's."""

    def __init__(self, server: ps.ParameterServer) -> None:
        super().__init__()
        self.bag = ps.EmbeddingBag(server["grams"], mode="sum")
        self.head = trireme.DistributedDataParallel(nn.Linear(WIDTH, CHARACTERS))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


def main(text_file: str, last: str = "100") -> None:
    steps = int(last)
    ctx = trireme.init(device="cpu")  # tables lie in the memory of the host
    text = torch.frombuffer(bytearray(Path(text_file).read_bytes()), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, LENGTH + 1, 1)

    torch.manual_seed(0)
    table = ps.Sparse("grams", WIDTH, optimizer=ps.RowwiseAdagrad(0.3), init=ps.Normal(0.1))
    with ps.ParameterServer([table], mode="bsp") as server:
        model = Model(server)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # steps the dense layers only
        for step in range(steps):
            first = step * BATCH * 7
            rows = torch.arange(first, first + BATCH * 7, 7) % windows.size(0)
            batch = windows[rows[ctx.rank :: ctx.world]]
            ids, targets = ids_of(batch[:, :LENGTH]), batch[:, LENGTH]
            loss = nn.functional.cross_entropy(model(ids), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            server.clock()  # steps the rows that were pushed
            if step % 20 == 0 or step == steps - 1:
                mean = trireme.all_mean(loss.detach()).item()
                if ctx.rank == 0:
                    print(f"step {step:3d}  loss {mean:.6f}")
        if ctx.rank == 0:
            print(f"{len(server['grams'])} rows")
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
