"""join(): ranks with fewer inputs keep the others company; as torch's class does it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import ExponentialLR

from ddp.ranks import WORLD, assert_same_on_all_ranks, mlp, on_ranks, values
from ddp.test_create_graph import derived, local, loss_of
from shm.ranks import on_shm_and_gloo_ranks


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


def inputs(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def train(ddp: Any, rank: int, counts: tuple[int, ...], **join: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with ddp.join(**join):
        for x in inputs(rank, counts[rank]):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return values(ddp)


def make(buffers: bool) -> nn.Module:
    return Normed() if buffers else mlp()


@pytest.mark.parametrize("buffers", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("by_initial_world", [True, False])
@pytest.mark.parametrize("counts", [(3, 5), (6, 2), (0, 3), (3, 3), (0, 0)])
@on_ranks()
def test_equals_torch(
    rank: int, counts: tuple[int, int], by_initial_world: bool, buffers: bool
) -> None:
    options = {"divide_by_initial_world_size": by_initial_world}
    theirs = train(TorchDDP(make(buffers), bucket_cap_mb=0.0003), rank, counts, **options)
    ours = trireme.DistributedDataParallel(make(buffers), bucket_cap_mb=0.0003)
    torch.testing.assert_close(train(ours, rank, counts, **options), theirs)
    assert_same_on_all_ranks(list(ours.state_dict().values()))


@pytest.mark.parametrize("by_initial_world", [True, False])
@on_ranks(3)
def test_three_ranks_leave_one_after_another(rank: int, by_initial_world: bool) -> None:
    counts = (5, 2, 3)
    options = {"divide_by_initial_world_size": by_initial_world}
    theirs = train(TorchDDP(mlp()), rank, counts, **options)
    ours = train(trireme.DistributedDataParallel(mlp()), rank, counts, **options)
    torch.testing.assert_close(ours, theirs)


@on_ranks()
def test_training_goes_on_after_a_join(rank: int) -> None:
    """Afterwards the average is over all ranks again."""
    ddp = trireme.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    nn.init.ones_(ddp.module.weight)
    for counts in ((1, 3), (2, 1)):
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(counts[rank]):
                ddp(torch.ones(1, 2)).sum().backward()
    ddp.zero_grad()
    ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((1, 2), 1.5))


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
def test_early_termination_raises_everywhere(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    with pytest.raises(RuntimeError, match="exhausted"):
        train(ddp, rank, (2, 4), throw_on_early_termination=True)
    # Nothing is broken: the next step is in step again.
    ddp._join_config = ddp._join_config.construct_disabled_join_config()
    ddp(inputs(rank, 1)[0]).sum().backward()


@on_ranks()
def test_disabled(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        for of in range(WORLD):
            (alone(inputs(of, 2)[step]).square().mean() / WORLD).backward()
        optimizer.step()
    torch.testing.assert_close(train(ddp, rank, (2, 2), enable=False), values(alone))


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


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, trireme.clip_grad_norm_])
@on_shm_and_gloo_ranks(WORLD)
def test_a_schedule_and_clipping_inside_a_join(rank: int, clip: Any) -> None:
    """A rank that has joined steps nothing itself: it gets what the others have stepped to."""

    def follow(ddp: Any) -> list[dict[str, torch.Tensor]]:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        schedule = ExponentialLR(optimizer, gamma=0.5)
        seen = []
        for counts in ((2, 5), (3, 1)):
            with ddp.join():
                for x in inputs(rank, counts[rank]):
                    optimizer.zero_grad()
                    ddp(x).square().mean().backward()
                    clip(ddp.parameters(), 0.1)
                    optimizer.step()
                    schedule.step()
            seen.append(values(ddp))
        return seen

    theirs = TorchDDP(mlp(), process_group=dist.new_group(backend="gloo"))
    torch.testing.assert_close(follow(trireme.DistributedDataParallel(mlp())), follow(theirs))


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
