"""Learns drawn digits with Horovod's API, over any number of ranks.

    torchrun --nproc-per-node 2 examples/python/horovod_digits.py

A program of horovod.torch with another import. examples/cpp/horovod_sgd.cpp is the same program in
C++ and reaches the same loss.
"""

import sys

import torch
import trireme.horovod as hvd
from torch import nn

BATCH = 64  # of all ranks together
SEGMENTS = [  # which of seven strokes a digit has
    "1110111", "0010010", "1011101", "1011011", "0111010",
    "1101011", "1101111", "1010010", "1111111", "1111011",
]  # fmt: skip


def strokes(digits: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([[float(one) for one in digit] for digit in SEGMENTS])
    return table[digits]


def main(steps: int = 100) -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())  # another model on each rank, until rank 0's comes
    net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    torch.manual_seed(0)  # the same data on each rank, of which it takes its part
    for step in range(steps):
        digits = torch.arange(BATCH) % 10
        drawn = strokes(digits) + 0.3 * torch.randn(BATCH, 7)
        rows = slice(hvd.rank(), None, hvd.size())
        loss = nn.functional.cross_entropy(net(drawn[rows]), digits[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step:3d}  loss {mean:.6f}")
    hvd.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
