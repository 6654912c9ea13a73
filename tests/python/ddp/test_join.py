"""What join() does that is DDP's alone: buffers, hooks, graphs, sparse and unused parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.derivatives import derived, local, loss_of
from harness.faults import in_case, raises
from harness.joins import inputs
from harness.models import mlp
from harness.on_ranks import WORLD, on_ranks, on_shm_and_gloo_ranks
from harness.training import assert_same_on_all_ranks, values


class Normed(nn.Module):
    """With buffers that every forward changes and that rank 0 (or who is left) broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(3)
        # One tensor is there twice: named_buffers() lists it once.
        self.register_buffer("shared", self.norm.running_var)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def train(ddp: Any, rank: int, counts: tuple[int, ...], **join: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with ddp.join(**join):
        for x in inputs(rank, counts[rank]):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return values(ddp)


@on_ranks(timeout=100)
def test_buffers_are_torchs(rank: int) -> None:
    for counts in ((3, 5), (6, 2), (0, 3), (3, 3), (0, 0)):
        for by_initial_world in (True, False):
            options = {"divide_by_initial_world_size": by_initial_world}
            with in_case(f"{counts}, {options}"):
                theirs = train(TorchDDP(Normed(), bucket_cap_mb=0.0003), rank, counts, **options)
                ours = trireme.DistributedDataParallel(Normed(), bucket_cap_mb=0.0003)
                torch.testing.assert_close(train(ours, rank, counts, **options), theirs)
                assert_same_on_all_ranks(list(ours.state_dict().values()))


@on_shm_and_gloo_ranks(2)
def test_evaluations_inside(rank: int) -> None:
    """Ranks without inputs follow their broadcasts, and no backward."""
    found = []
    for evaluates in (False, True):
        ddp = trireme.DistributedDataParallel(Normed())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for x in inputs(rank, 2 + 2 * rank):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
                if evaluates:
                    ddp.eval()
                    with torch.no_grad() if rank else torch.inference_mode():
                        ddp(x)
                    ddp.train()
        found.append(values(ddp))
    torch.testing.assert_close(found[0], found[1])
    assert_same_on_all_ranks(list(found[1].values()))


@on_shm_and_gloo_ranks(2)
def test_synchronized_layers_are_refused(rank: int) -> None:
    """Also on a rank that has no inputs at all; not where all ranks end together."""
    for counts in ((2, 2), (0, 2)):
        ddp = trireme.DistributedDataParallel(trireme.convert_sync_batchnorm(Normed()))
        with raises(ValueError, "got SyncBatchNorm at 'norm' under join()", "empty batches"):
            train(ddp, rank, counts)
    ddp = trireme.DistributedDataParallel(trireme.convert_sync_batchnorm(Normed()))
    with pytest.raises(RuntimeError, match=r"exhausted .*inputs"):
        train(ddp, rank, (2, 3), throw_on_early_termination=True)


@on_ranks()
def test_joined_ranks_keep_their_gradients(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    with ddp.join():
        for x in inputs(rank, 1 + rank):
            ddp.zero_grad()
            ddp(x).sum().backward()
            kept = [parameter.grad.clone() for parameter in ddp.parameters()]
    assert all(torch.equal(p.grad, k) for p, k in zip(ddp.parameters(), kept, strict=True))


@on_ranks()
def test_no_sync_inside_a_join(rank: int) -> None:
    """A joined rank follows: nothing to reduce where the others accumulate."""

    def accumulate(ddp: Any) -> dict[str, torch.Tensor]:
        with ddp.join():
            for number, x in enumerate(inputs(rank, 2 + 4 * rank)):
                if number % 2 == 0:
                    ddp.zero_grad()
                    with ddp.no_sync():
                        ddp(x).square().mean().backward()
                    continue
                ddp(x).square().mean().backward()
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter -= 0.1 * parameter.grad
        return values(ddp)

    torch.testing.assert_close(
        accumulate(trireme.DistributedDataParallel(mlp())), accumulate(TorchDDP(mlp()))
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_initial_world", [True, False])
@on_shm_and_gloo_ranks(3)
def test_a_graph_inside_a_join(rank: int, by_initial_world: bool) -> None:
    """create_graph=True: .grad is the average of those who train, its graph this rank's part."""
    counts = (1, 4, 2)
    ddp = trireme.DistributedDataParallel(mlp(torch.float64))
    for _ in range(2):  # the second time gradients are expected in another order
        with ddp.join(divide_by_initial_world_size=by_initial_world):
            for step in range(counts[rank]):
                ddp.zero_grad()
                loss_of(ddp, step, rank).backward(create_graph=True)
                active = [one for one in range(3) if step < counts[one]]
                divisor = 3 if by_initial_world else len(active)
                parts = {one: local(step, one) for one in active}
                for name, parameter in ddp.module.named_parameters():
                    average = sum(part[name] for part, _ in parts.values()) / divisor
                    torch.testing.assert_close(parameter.grad, average)
                expected = [None if one is None else one / divisor for one in parts[rank][1]]
                torch.testing.assert_close(derived(ddp), expected)
    ddp.zero_grad()
    loss_of(ddp, 5, rank).backward()  # a step like any other
    assert derived(ddp) == []


@on_ranks()
def test_a_comm_hook_inside_a_join(rank: int) -> None:
    seen = []
    for ddp in (TorchDDP(mlp()), trireme.DistributedDataParallel(mlp())):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        seen.append(train(ddp, rank, (2, 4)))
    torch.testing.assert_close(seen[1], seen[0])


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(8, 4, sparse=True)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(rows))


@on_ranks()
def test_sparse_and_unused_parameters_inside_a_join(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Partly())
    with ddp.join():
        for step in range(1 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.tensor([step, rank])).sum().backward()
            assert ddp.module.unused.weight.grad is None
            assert ddp.module.words.weight.grad.is_sparse
    if rank == 1:
        # Alone at the end, its gradient halved: the others contribute nothing.
        expected = torch.tensor([2.0, 2.0]) / WORLD
        torch.testing.assert_close(ddp.module.head.bias.grad, expected)


@on_ranks()
def test_two_joinables_together(rank: int) -> None:
    """torch's ZeroRedundancyOptimizer joins with our module."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(ddp: Any) -> dict[str, torch.Tensor]:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with Join([ddp, optimizer]):
            for x in inputs(rank, 2 + rank):
                ddp.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
        return values(ddp)

    ours = run(trireme.DistributedDataParallel(mlp()))
    torch.testing.assert_close(ours, run(TorchDDP(mlp())))
    dist.barrier()
