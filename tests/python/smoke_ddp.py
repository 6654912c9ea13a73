"""Three steps of DistributedDataParallel on two ranks equal three steps of one process.

A script and not a test: .ci/run also runs it on the oldest torch that is supported, with nothing
but torch and the standard library.
"""

import os
import socket

import torch
import trireme
from torch import nn

WORLD = 2
STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(STEPS)
    ]


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches():
        loss = nn.functional.mse_loss(model(inputs[rank::world]), targets[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_rank(rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
    )
    trireme.init(device="cpu")
    model = trireme.DistributedDataParallel(make_model())
    train(model, rank, WORLD)

    alone = make_model()
    train(alone, 0, 1)
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    trireme.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    torch.multiprocessing.spawn(run_rank, args=(free_port(),), nprocs=WORLD)
    print(f"{STEPS} steps on {WORLD} ranks equal one process, torch {torch.__version__}")
