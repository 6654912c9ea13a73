"""A child of a rank by fork(): what it writes into parameters is its own."""

from __future__ import annotations

from typing import Any

import torch
import trireme
from torch import nn
from torch.optim import SGD

from harness.forks import in_child
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from harness.training import Training, assert_same_on_all_ranks
from zero.ranks import sharded


def write(tensors: list[torch.Tensor], value: float) -> bool:
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)
    return all(bool((tensor == value).all()) for tensor in tensors)


def write_as_a_family(tensors: list[torch.Tensor]) -> bool:
    """The child's own child has what the child wrote, and writes for itself, too."""

    def grandchild() -> bool:
        inherited = all(bool((tensor == 7).all()) for tensor in tensors)
        return inherited and write(tensors, 8)

    wrote = write(tensors, 7) and in_child(grandchild)
    return wrote and all(bool((tensor == 7).all()) for tensor in tensors)


def zero_training(stage: int) -> tuple[Training, list[torch.Tensor]]:
    ours = sharded(mlp, SGD, stage, lr=0.1)
    assert ours.optimizer._cores[0].shares_parameters
    return ours, [parameter.detach() for parameter in ours.model.parameters()]


def fsdp_training(rank: int) -> tuple[Training, list[torch.Tensor]]:
    """With all parameters whole, as every rank of the host maps them."""
    model: Any = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            trireme.fully_shard(layer)
    model = trireme.fully_shard(model)
    ours = Training(model, model, SGD(model.parameters(), lr=0.1), rank, 2)
    ours.train(0)
    with torch.no_grad():
        ours.loss(1)
    model.unshard()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.unshard()
    return ours, [parameter.detach() for parameter in model.parameters()]


@on_shm_ranks(2, timeout=90)
def test_a_child_writes_its_own_copy(rank: int) -> None:
    """On the rank that made the memory and on one that opened it; the ranks go on."""
    for ours, tensors in (zero_training(1), zero_training(2), fsdp_training(rank)):
        before = [tensor.clone() for tensor in tensors]
        for _ in range(2):
            assert in_child(lambda tensors=tensors: write_as_a_family(tensors))
            torch.distributed.barrier()  # all children have written
            for tensor, expected in zip(tensors, before, strict=True):
                assert torch.equal(tensor, expected)
        del tensors, tensor
        ours.train(1)
        if isinstance(ours.optimizer, trireme.ZeroRedundancyOptimizer):
            assert_same_on_all_ranks(list(ours.model.parameters()))
