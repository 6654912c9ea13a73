"""What PipeTransformer refuses, and how a run goes on behind a failure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.deaths import assert_seen_soon
from harness.faults import in_case, kill_this_rank, note_death, raises
from harness.on_ranks import AGES_S, on_shm_ranks
from pipetransformer.elastic_runs import (
    ROWS,
    SAMPLES,
    OneProcess,
    adamw,
    assert_same,
    held_by_any,
    ids_of,
    plan_of,
    run_of,
    tanh_data,
    tanh_layers,
)


def sharing() -> list[nn.Module]:
    layers = tanh_layers()
    layers[3][0].bias = layers[1][0].bias  # type: ignore[index]
    return layers


def without_parameters() -> list[nn.Module]:
    return [*tanh_layers(5), nn.Tanh()]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "alpha": ({"freeze": {"alpha": 1.5}}, ValueError, "[freeze] got alpha 1.5"),
    "shared": (
        {"make": sharing},
        ValueError,
        "got '3.0.bias', which is '1.0.bias' as well, expected no layer to share a tensor",
    ),
    "without parameters": ({"make": without_parameters}, ValueError, "'5' without parameters"),
    "no layers": (
        {"make": list, "optimizer": lambda _: adamw(nn.Linear(6, 6).parameters())},
        ValueError,
        "got no layers",
    ),
    "loss": ({"loss": 3}, TypeError, "got int as loss"),
    "loss with parameters": ({"loss": nn.Linear(6, 1)}, ValueError, "got a loss with parameters"),
    "freeze": ({"freeze": 0.5}, TypeError, "got float as freeze"),
    "cache": ({"cache": 7}, TypeError, "got int as cache"),
    "schedule": ({"schedule": 7}, TypeError, "got int as schedule"),
    "batch": ({"global_batch": 15}, ValueError, "got a global batch of 15 rows"),
    "chunks": ({"chunks": 2.5}, TypeError, "chunks is float"),
    "replicas": ({"pipe": True, "replicas": False}, ValueError, "got pipe=True and replicas=False"),
    "costs": ({"costs": [1.0] * 5}, ValueError, "got costs", "for 6 layers"),
    "few layers": (
        {"make": lambda: tanh_layers(1), "costs": None},
        ValueError,
        "got 1 layers for 2 ranks",
    ),
}


@on_shm_ranks(2)
def test_what_cannot_be_a_run(rank: int) -> None:
    for name, (options, kind, *parts) in OPTIONS.items():
        with in_case(name), raises(kind, *parts):
            run_of(**options)
    with raises(ValueError, "got an optimizer whose param_groups[0]['params'][0]", "(6, 6)"):
        run_of(optimizer=lambda _: adamw(nn.Linear(6, 6).parameters()))
    with raises(ValueError, "[freeze] got an optimizer without '1.0.weight'"):
        run_of(optimizer=lambda parameters: adamw(parameters[:2]))
    with raises(TypeError, "got ZeroRedundancyOptimizer as optimizer"):
        run_of(
            optimizer=lambda parameters: trireme.ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, lr=0.1
            )
        )
    # One rank's mistake is everybody's.
    with raises(ValueError, "15 rows" if rank else "got what rank 1 cannot use", "15 rows"):
        run_of(global_batch=15 if rank else ROWS)
    with raises(ValueError, "got ranks with other options", "'chunks=8' on rank 0"):
        run_of(chunks=4 if rank else 8)
    with raises(TypeError, "got int as loss" if rank else "got an exception on rank 1"):
        run_of(loss=3 if rank else mse_loss)


@on_shm_ranks(2)
def test_batches_that_are_refused(rank: int) -> None:
    """In both kinds of plans; the next step works, with the bits of a run without a refusal."""
    x, y = tanh_data()
    reached = []
    for refuses in (False, True):
        kept = trireme.ActivationCache(SAMPLES, 1 << 16)
        run, optimizer = run_of(cache=kept)
        for ranks in (2, 1):
            run.transform(plan_of(ranks, 2))
            run.freeze.advance()
            run.freeze.advance()
            ids = ids_of(0)
            if refuses:
                outside = ids.clone()
                outside[1] = outside[ROWS // 2] = SAMPLES
                bad: list[tuple[type[Exception], str, Any]] = [
                    (ValueError, "got a batch of 8 rows, expected the global batch of 16",
                     (x[ids[:8]], ids[:8], y[ids[:8]])),
                    (ValueError, "got a batch without ids", (x[ids], None, y[ids])),
                    (TypeError, "got list as ids", (x[ids], ids.tolist(), y[ids])),
                    (ValueError, "got ids as", (x[ids], ids[:3], y[ids])),
                    (ValueError, "got ids as", (x[ids], ids.float(), y[ids])),
                    (ValueError, "got a batch of 0 rows", ("rows", ids, y[ids])),
                ]  # fmt: skip
                for kind, text, given in bad:
                    with in_case((ranks, text)), raises(kind, text):
                        run.step(*given)
                with pytest.raises(Exception, match=r"\[cache\].* 48"):
                    run.step(x[ids], outside, y[ids])
                half = slice(None) if rank == 0 else slice(8)
                own = "got what rank 1 cannot use" if rank == 0 else "got a batch"
                plan = f"under the plan {ranks} x {2 // ranks}"
                with raises(ValueError, own, "of 8 rows", plan):
                    run.step(x[ids[half]], ids[half], y[ids[half]])
            run.step(x[ids], ids, y[ids])
        reached.append(held_by_any(run, optimizer))
    assert_same(*reached)


@on_shm_ranks(4)
def test_plans_that_are_refused(rank: int) -> None:
    run, optimizer = run_of()
    before, plan = held_by_any(run, optimizer), run.plan

    def plan_with(k: int, r: int, *balance: int) -> trireme.ElasticPlan:
        return trireme.ElasticPlan(ranks_per_pipeline=k, replicas=r, balance=balance)

    for other, text in (
        (plan_with(2, 1, 3, 3), "for 4 ranks"),
        (plan_with(2, 2, 3, 2), "for 6 layers"),
        (plan_with(2, 2, 6, 0), "for 6 layers"),
    ):
        with raises(ValueError, "[pipetransformer] got the plan", text):
            run.transform(other)
    with raises(TypeError, "got int as plan"):
        run.transform(2)  # type: ignore[arg-type]
    with raises(ValueError, "got ranks that move layers differently", "2 x 2", "1 x 4"):
        run.transform(plan_of(1 if rank == 3 else 2, 4))
    own = "got int as plan" if rank == 3 else "got an exception on rank 3 under the plan 4 x 1"
    with raises(TypeError, own):
        run.transform(7 if rank == 3 else plan_of(2, 4))  # type: ignore[arg-type]
    assert run.plan == plan
    assert_same(before, held_by_any(run, optimizer))
    run, optimizer = run_of(global_batch=6, chunks=3)
    with raises(ValueError, "got a global batch of 6 rows in 3 micro-batches"):
        run.transform(plan_of(2, 4))


class Wide(nn.Module):
    """A parameter that takes no memory here, and more than there is where it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(1).expand(1 << 50))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_shm_ranks(4)
def test_no_memory_for_a_plan_leaves_the_old_one(rank: int) -> None:
    data = tanh_data()
    run, _ = run_of(lambda: [Wide(), *tanh_layers(5)])
    ids = ids_of(0)
    before = run.step(data[0][ids], ids, data[1][ids])
    with raises(ValueError, "2 x 2"):
        run.transform(plan_of(2, 4))
    assert run.plan == plan_of(4, 4)
    assert run.step(data[0][ids], ids, data[1][ids]) < before


@on_shm_ranks(2)
def test_ranks_with_different_histories(rank: int) -> None:
    data = tanh_data()
    run, _ = run_of(pipe=True, freeze={"measure_every": 1})
    ids = ids_of(0)
    run.step(data[0][ids], ids, data[1][ids])
    if rank == 1:
        run.freeze.step()
    with raises(ValueError, "[freeze] got ranks that freeze differently"):
        run.end_epoch()
    assert run.history == [] and run.freeze.history == []


class Fragile:
    """A loss that raises on one rank when it is told to."""

    def __init__(self) -> None:
        self.breaks = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self.breaks:
            raise ArithmeticError("the data are broken")
        return mse_loss(output, target)


@on_shm_ranks(4)
def test_an_exception_in_loss_behind_a_transform(rank: int) -> None:
    (x, y), ids = tanh_data(), ids_of(0)
    loss, one = Fragile(), OneProcess()
    run, optimizer = run_of(loss=loss)
    for ranks in (4, 2, 1, 2):
        run.transform(plan_of(ranks, 4))
        before = held_by_any(run, optimizer)
        loss.breaks = rank == ranks - 1  # the last stage of the first replica
        with pytest.raises((RuntimeError, ArithmeticError), match="the data are broken"):
            run.step(x[ids], ids, y[ids])
        loss.breaks = False
        assert_same(before, held_by_any(run, optimizer))
        found = run.step(x[ids], ids, y[ids]).item()
        assert found == pytest.approx(one.step(x[ids], y[ids]), rel=1e-5)
        run.end_epoch()
        one.freeze(run.freeze.frozen)


@on_shm_ranks(4, dying=[1], patience_s=AGES_S)
def test_a_rank_killed_in_a_transform_is_named(rank: int) -> None:
    (x, y), ids = tanh_data(), ids_of(0)
    run, _ = run_of()
    run.step(x[ids], ids, y[ids])
    dist.barrier()
    if rank == 1:  # behind the comparison, in front of the first layer

        def die(*_: Any) -> None:
            note_death()
            kill_this_rank()

        run._placement.move = die  # type: ignore[method-assign]
    with raises(dist.DistBackendError, "rank 1"):
        run.transform(plan_of(2, 4))
    assert_seen_soon()


@on_shm_ranks(2)
def test_copies_are_refused(rank: int) -> None:
    run, _ = run_of()
    with raises(TypeError, "got a copy or a pickle of a PipeTransformer"):
        copy.deepcopy(run)
    with raises(ValueError, "got assign=True"):
        run.load_state_dict(run.state_dict(), assign=True)
