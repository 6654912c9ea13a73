"""LocalSGD and DiLoCo train as a plain simulation in one process, and as torch's averager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.optim import SGD, Adam
from trireme import compression as c

from harness.models import mlp
from harness.on_ranks import on_ranks
from harness.training import assert_same_on_all_ranks
from local_sgd.simulation import Simulation, assert_close, inner_optimizer, train

STEPS = 16


def cuts_of(rounds: Any) -> list[int]:
    return [fragment[0] for fragment in rounds._fragments]


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 4},
        {"sync_every": 4, "fragment_sync_delay": 1},
        {"sync_every": 4, "fragments": 2},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
        {"sync_every": 6, "fragment_sync_delay": 2, "fragment_update_alpha": 1.0},
    ],
    ids=str,
)
@on_ranks()
def test_diloco_is_what_one_process_does(rank: int, options: dict[str, Any]) -> None:
    model = mlp()
    optimizer = inner_optimizer(model)
    with trireme.DiLoCo(model, optimizer, across=dist.group.WORLD, **options) as rounds:
        one = Simulation(
            2,
            options["sync_every"],
            cuts_of(rounds),
            options.get("fragment_sync_delay", 0),
            options.get("fragment_update_alpha", 0.0),
        )
        for step in range(STEPS):
            train(model, optimizer, step, rank, 2)
            one.train(step)
            assert_close(model, one.models[rank])


@pytest.mark.parametrize("number", [1, 2])
@on_ranks()
def test_outer_optimizers_of_the_user(rank: int, number: int) -> None:
    """One over all parameters, or one per fragment; its state is that of the parameters then."""
    model = mlp()
    optimizer = inner_optimizer(model)
    params = list(model.parameters())
    modules = [model[0], nn.ModuleList(list(model)[1:])]
    parts = [list(module.parameters()) for module in modules]
    outer = [Adam(part, lr=0.05) for part in parts] if number == 2 else Adam(params, lr=0.05)
    one = Simulation(2, 4, (0, len(parts[0])), outer=lambda params: Adam(params, lr=0.05))
    rounds = trireme.DiLoCo(
        model, optimizer, outer, sync_every=4, fragments=modules, across=dist.group.WORLD
    )
    params[0].grad = before = torch.ones_like(params[0])
    with rounds:
        assert params[0].grad is before
        for step in range(8):
            train(model, optimizer, step, rank, 2)
            one.train(step)
            assert_close(model, one.models[rank])
            assert all(param.grad is not None for param in params)
    state = (outer[0] if number == 2 else outer).state[params[0]]
    torch.testing.assert_close(state["exp_avg"], one.steps.state[one.anchors[0]]["exp_avg"])


@on_ranks()
def test_local_sgd_is_torchs_averager(rank: int) -> None:
    model = mlp()
    optimizer = inner_optimizer(model)
    theirs = copy.deepcopy(model)
    their_optimizer = inner_optimizer(theirs)
    with trireme.LocalSGD(model, optimizer, sync_every=3, warmup_steps=2, across=dist.group.WORLD):
        for step in range(1, 10):
            train(model, optimizer, step, rank, 2)
            train(theirs, their_optimizer, step, rank, 2)
            if step <= 2 or step % 3 == 0:
                average_parameters(theirs.parameters(), dist.group.WORLD)
                assert_same_on_all_ranks(list(model.parameters()))
            for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(mine, other), step


@on_ranks(3)
def test_uneven_weights(rank: int) -> None:
    """0 for a worker, and for all of them, when nothing moves."""
    weights = [[1, 1, 1], [0.5, 3, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]]
    model = mlp()
    optimizer = inner_optimizer(model)
    one = Simulation(3, 2, weights=lambda round, worker: weights[round][worker])
    with trireme.DiLoCo(model, optimizer, sync_every=2, across=dist.group.WORLD) as rounds:
        for step in range(2 * len(weights)):
            if step % 2 == 0:
                rounds.set_weight(weights[step // 2][rank])
            train(model, optimizer, step, rank, 3)
            one.train(step)
            assert_close(model, one.models[rank])


@on_ranks()
def test_weight_0_keeps_a_broken_worker_out(rank: int) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD) as rounds:
        if rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
            rounds.set_weight(0)
        optimizer.step()  # without gradients it counts, too
    assert_same_on_all_ranks(list(model.parameters()))
    assert all(param.isfinite().all() for param in model.parameters())


@on_ranks()
def test_dtypes_and_what_stays(rank: int) -> None:
    """Means are those of fp32 and fp64; integers and buffers stay, and so do frozen parameters."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
                name = "of_" + str(dtype).removeprefix("torch.")
                self.register_parameter(name, nn.Parameter(torch.ones(3, 2, dtype=dtype)))
            self.single = nn.Parameter(torch.tensor(1.0))
            self.turned = nn.Parameter(torch.ones(4, 3).t())
            self.whole = nn.Parameter(torch.tensor([rank]), requires_grad=False)
            self.frozen = nn.Parameter(torch.full((2,), 1.0 + rank), requires_grad=False)
            self.register_buffer("count", torch.tensor(rank))

    for kind in (trireme.LocalSGD, trireme.DiLoCo):
        model = Mixed()
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = SGD(trained, lr=1)
        given = {} if kind is trireme.LocalSGD else {"outer_optimizer": SGD(trained, lr=1)}
        with kind(model, optimizer, sync_every=1, across=dist.group.WORLD, **given):
            for param in trained:
                param.grad = torch.full_like(param, 0.25 * (rank + 1))
            optimizer.step()
        for name, param in model.named_parameters():
            if param.requires_grad:
                assert torch.equal(param, torch.full_like(param, 1 - 0.375)), name
                assert param.stride() == Mixed().get_parameter(name).stride()
        assert model.whole.item() == model.count.item() == rank
        assert model.frozen[0].item() == 1 + rank


@on_ranks()
def test_workers_begin_at_the_first_ones_parameters(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    expected = nn.Linear(3, 2)
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    with trireme.LocalSGD(
        model, SGD(model.parameters(), lr=1), sync_every=5, across=dist.group.WORLD
    ):
        assert_close(model, expected)


METHODS = [
    c.Int8(),
    c.Bf16(),
    c.TopK(1 / 8, chunk=64, decay=0.95, dense_below=0),
    c.PowerSGD(2, start_step=1, dense_below=0, min_ratio=1),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@on_ranks()
def test_compression(rank: int, method: c.Compression) -> None:
    """All workers agree; a code of all is no code; what is left out of one round comes later."""
    model = mlp()
    optimizer = inner_optimizer(model)
    with trireme.DiLoCo(
        model,
        optimizer,
        SGD(model.parameters(), lr=1),
        sync_every=2,
        fragment_sync_delay=1,
        across=dist.group.WORLD,
        compression=method,
    ) as rounds:
        for step in range(8):
            if step == 4:
                rounds.set_weight(rank)
            train(model, optimizer, step, rank, 2)
            if step % 2 == 1:
                assert_same_on_all_ranks(list(model.parameters()))
    assert model(torch.ones(1, 6)).isfinite().all()


@on_ranks()
def test_a_code_of_all_values_is_no_code(rank: int) -> None:
    """So SparseLoCo with all values is DiLoCo with the same outer optimizer."""
    models = []
    for method in (None, c.TopK(1.0, exact=True, dense_below=0)):
        model = mlp()
        optimizer = inner_optimizer(model)
        outer = SGD(model.parameters(), lr=1)
        with trireme.DiLoCo(
            model, optimizer, outer, sync_every=2, across=dist.group.WORLD, compression=method
        ):
            for step in range(6):
                train(model, optimizer, step, rank, 2)
        models.append(model)
    assert_close(*models)


@on_ranks()
def test_nothing_is_lost_where_all_weights_are_0(rank: int) -> None:
    """What codes had left out is there in the next round that counts."""
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = SGD(model.parameters(), lr=1)
    method = c.TopK(1 / 64, exact=True, dense_below=0)
    with trireme.LocalSGD(
        model, optimizer, sync_every=1, across=dist.group.WORLD, compression=method
    ) as rounds:
        model.weight.grad = torch.arange(4096.0).view(64, 64) + 1
        optimizer.step()
        moved = model.weight.count_nonzero().item()
        assert moved == 64
        for _ in range(3):
            rounds.set_weight(0)
            model.weight.grad = None
            optimizer.step()
            assert model.weight.count_nonzero().item() == moved
        optimizer.step()
        assert model.weight.count_nonzero().item() == 2 * moved


@on_ranks()
def test_one_block_after_another(rank: int) -> None:
    """Rounds go on in their next block, and steps between blocks are the optimizer's alone."""
    model = mlp()
    optimizer = inner_optimizer(model)
    one = Simulation(2, 4, delay=1)
    rounds = trireme.DiLoCo(
        model, optimizer, sync_every=4, fragment_sync_delay=1, across=dist.group.WORLD
    )
    for begin in range(0, 12, 3):  # a fragment is on its way at the end of the first
        with rounds:
            for step in range(begin, begin + 3):
                train(model, optimizer, step, rank, 2)
                one.train(step)
        assert_close(model, one.models[rank])
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, 12, rank, 2)
    assert not torch.equal(before[0], next(model.parameters()))


@on_ranks(1)
def test_one_worker(rank: int) -> None:
    """Outer steps are there, and nothing is coded."""
    model = mlp()
    optimizer = inner_optimizer(model)
    one = Simulation(1, 2, delay=1)
    options: dict[str, Any] = {"fragment_sync_delay": 1, "compression": c.Int8()}
    with trireme.DiLoCo(model, optimizer, sync_every=2, across=dist.group.WORLD, **options):
        for step in range(5):
            train(model, optimizer, step, 0, 1)
            one.train(step)
    assert_close(model, one.models[0])
