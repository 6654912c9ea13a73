"""PipeTransformer: the losses of one process under all plans, moves, checkpoints."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

from harness.faults import raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.ranks import run_ranks
from pipetransformer.elastic_runs import (
    LAYERS,
    ROWS,
    SAMPLES,
    OneProcess,
    adamw,
    assert_same,
    held,
    held_by_any,
    ids_of,
    momentum,
    plan_of,
    run_of,
    shared_folder,
    tanh_data,
    tanh_layers,
    whole_data,
    whole_layers,
    whole_loss,
)

EPOCH = 3  # steps


def train(run: trireme.PipeTransformer, steps: range, data: Any) -> list[float]:
    x, y = data
    return [run.step(x[ids], ids, y[ids]).item() for ids in map(ids_of, steps)]


def train_alone(one: OneProcess, steps: range, data: Any) -> list[float]:
    x, y = data
    return [one.step(x[ids], y[ids]) for ids in map(ids_of, steps)]


def change(run: trireme.PipeTransformer, optimizer: Any, ranks: int) -> None:
    """To so many ranks per pipeline: what is anywhere is the same before and behind it."""
    before = held_by_any(run, optimizer)
    plan = plan_of(ranks, 4)
    run.transform(plan)
    assert run.plan == plan
    assert_same(before, held_by_any(run, optimizer))
    own = [parameter for parameter in run.parameters() if parameter.untyped_storage().nbytes()]
    assert len(own) == sum(
        len(list(layer.parameters()))
        for number, layer in enumerate(run.children())
        if dist.get_rank() in trireme._C.layer_holders(plan)[number]
    )


@on_shm_and_gloo_ranks(4, timeout=100)
def test_losses_are_those_of_one_process_under_all_plans(rank: int) -> None:
    """60 steps; the learning rate follows a scheduler, and a rank that gets layers back trains
    on."""
    data = tanh_data()
    run, optimizer = run_of()
    one = OneProcess()
    schedulers = [StepLR(it, step_size=4, gamma=0.8) for it in (optimizer, one.optimizer)]
    for epoch, ranks in enumerate([4] * 4 + [2] * 4 + [1] * 4 + [4] * 2 + [1] + [2] * 5):
        if epoch % 3 == 1 or run.plan != plan_of(ranks, 4):
            change(run, optimizer, ranks)
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        expected = train_alone(one, steps, data)
        assert train(run, steps, data) == pytest.approx(expected, rel=1e-5), epoch
        if epoch < 10:
            run.end_epoch()
            one.freeze(run.freeze.frozen)
        for scheduler in schedulers:
            scheduler.step()
    assert [entry.frozen for entry in run.history] == [0, 2, 4, 5, 5, 5, 5, 5, 5, 5]
    assert [entry.ranks_per_pipeline for entry in run.history] == [4] * 4 + [2] * 4 + [1] * 2
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, one.model.state_dict()[name])


@on_shm_ranks(4)
def test_whole_numbers_are_exact(rank: int) -> None:
    data = whole_data()
    run, optimizer = run_of(whole_layers, momentum, loss=whole_loss)
    one = OneProcess(whole_layers, momentum, whole_loss)
    for epoch, ranks in enumerate((4, 2, 1)):
        change(run, optimizer, ranks)
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        assert train(run, steps, data) == train_alone(one, steps, data)
        run.end_epoch()
        one.freeze(run.freeze.frozen)
    expected = {
        **one.model.state_dict(),
        **{
            f"{name}.momentum_buffer": one.optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in one.model.named_parameters()
            if parameter.requires_grad
        },
    }
    assert_same(dict(sorted(held(run, optimizer).items())), dict(sorted(expected.items())))


@on_shm_ranks(4)
def test_a_scaler_goes_on_under_all_plans(rank: int) -> None:
    """An inf in one stage, or in the gradients of one replica, makes all ranks skip the step."""
    data = tanh_data()
    run, optimizer = run_of()
    one = OneProcess()
    broken = []  # as many as there are steps that break
    for layers in (run, one.model):
        last = [*layers.children()][-1]
        last[0].bias.register_hook(lambda gradient: gradient * math.inf if broken else gradient)
    ours = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    one.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    run.scale_losses(ours)
    scales = []
    for epoch, ranks in enumerate((4, 2, 1, 2)):
        change(run, optimizer, ranks)
        for step in range(epoch * EPOCH, (epoch + 1) * EPOCH):
            # One rank's replica is enough, where each has the whole model.
            broken[:] = [step] if step % EPOCH == 1 else []
            expected = train_alone(one, range(step, step + 1), data)
            if ranks == 1 and rank != 2:
                broken.clear()
            assert train(run, range(step, step + 1), data) == pytest.approx(expected, rel=1e-5)
            assert ours.get_scale() == one.scaler.get_scale(), step
            scales.append(ours.get_scale())
        run.end_epoch()
        one.freeze(run.freeze.frozen)
    assert set(scales) == {1024.0, 512.0}
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, one.model.state_dict()[name])
    with raises(ValueError, "got a second GradScaler"):
        run.scale_losses(GradScaler("cpu"))


@on_shm_ranks(2)
def test_scalers_that_cannot_scale_a_run(rank: int) -> None:
    run, _ = run_of(freeze=False)
    with raises(TypeError, "got float as scaler"):
        run.scale_losses(8.0)  # type: ignore[arg-type]
    with raises(ValueError, "got GradScalers that differ"):
        run.scale_losses(GradScaler("cpu", init_scale=2.0 + rank))
    run.scale_losses(GradScaler("cpu", enabled=False))
    scaler = GradScaler("cpu")
    run.scale_losses(scaler)
    with raises(ValueError, "got a GradScaler that another pipeline has"):
        run_of(freeze=False)[0].scale_losses(scaler)


@on_shm_ranks(4)
def test_optimizers_of_the_core_go_on(rank: int) -> None:
    """And an epoch that changes nothing keeps what runs the plan."""
    data = tanh_data()

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return trireme.optim.AdamW(parameters, lr=0.01)

    run, optimizer = run_of(optimizer=fused)
    one = OneProcess(optimizer=fused)
    for epoch, ranks in enumerate((4, 2, 1, 2, 4)):
        change(run, optimizer, ranks)
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        expected = train_alone(one, steps, data)
        assert train(run, steps, data) == pytest.approx(expected, rel=1e-5), ranks
        if ranks == 2:
            running = run._replica
            run.end_epoch()
            one.freeze(run.freeze.frozen)
            assert run._replica is running


@on_shm_ranks(4)
def test_plans_follow_what_is_frozen(rank: int) -> None:
    """By given costs: as elastic_plan() says; measured: one process's losses all the same."""
    data = tanh_data()
    for options in ({}, {"costs": None}, {"costs": None, "cache": True}):
        if "cache" in options:
            options["cache"] = trireme.ActivationCache(SAMPLES, 1 << 16)
        run, _ = run_of(lambda: tanh_layers(8), pipe=True, **options)
        one = OneProcess(lambda: tanh_layers(8))
        if options:
            assert run.plan is None
            with raises(ValueError, "got a plan before the first step"):
                run.transform(plan_of(4, 4, 8))
        for epoch in range(6):
            steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
            expected = train_alone(one, steps, data)
            assert train(run, steps, data) == pytest.approx(expected, rel=1e-5), epoch
            run.end_epoch()
            one.freeze(run.freeze.frozen)
        shapes = [(entry.ranks_per_pipeline, entry.replicas) for entry in run.history]
        assert shapes[0] == (4, 1) and all(k * r == 4 for k, r in shapes)
        assert shapes == sorted(shapes, reverse=True)
        assert [entry.frozen for entry in run.history] == [0, 3, 5, 6, 7, 7]
        assert all(entry.seconds > 0 for entry in run.history)
        if not options:
            assert shapes == [(4, 1)] * 2 + [(2, 2)] * 4
        hits = [entry.hits for entry in run.history]
        assert hits[:2] == [0, 0] and (hits[-1] > 0) == ("cache" in options)


@on_shm_ranks(4)
def test_the_cache_changes_no_loss(rank: int) -> None:
    """Under each plan, also one that cuts the frozen layers, and with one id twice."""
    data = tanh_data()
    kept = trireme.ActivationCache(SAMPLES, 1 << 16)
    run, _ = run_of(cache=kept)
    one = OneProcess()
    for epoch, ranks in enumerate((4, 4, 2, 2, 1, 1)):
        run.transform(plan_of(ranks, 4))
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        expected = train_alone(one, steps, data)
        assert train(run, steps, data) == pytest.approx(expected, rel=1e-5), epoch
        run.end_epoch()
        one.freeze(run.freeze.frozen)
    ids = ids_of(0).clone()
    ids[1:] = ids[0]
    x, y = data[0][ids], data[1][ids]
    assert run.step(x, ids, y).item() == pytest.approx(one.step(x, y), rel=1e-5)
    assert run.history[-1].hits > 0
    assert trireme.all_mean(torch.tensor(float(kept.stats().hits))) > 0


@on_shm_ranks(4)
def test_layers_that_others_hold(rank: int) -> None:
    """They have no memory, no state and no gradient; state_dict() leaves them out."""
    run, optimizer = run_of()
    train(run, range(1), tanh_data())
    numbers = [n for n, ranks in enumerate(trireme._C.layer_holders(run.plan)) if rank in ranks]
    assert {int(name.split(".")[0]) for name in run.state_dict()} == set(numbers)
    assert len(optimizer.state) == 2 * len(numbers)
    away = next(n for n in range(LAYERS) if n not in numbers)
    weight = run.get_parameter(f"{away}.0.weight")
    assert weight.shape == (6, 6) and weight.grad is None
    with pytest.raises(RuntimeError, match=r"'0.weight' is on ranks \[\d\]"):
        weight.sum()
    whole = nn.Sequential(*tanh_layers()).state_dict()
    run.load_state_dict(whole)
    for name, value in run.state_dict().items():
        assert torch.equal(value, whole[name])
    with raises(RuntimeError, "got a state without ['0.0.weight']"):
        run.load_state_dict({name: v for name, v in whole.items() if name != "0.0.weight"})
        if rank:
            raise RuntimeError("[x] got a state without ['0.0.weight'] (rank 1 of 4). Not here.")


@on_shm_ranks(4)
def test_all_ranks_begin_with_rank_0s_values(rank: int) -> None:
    def make() -> list[nn.Module]:
        layers = tanh_layers()
        if rank:
            for parameter in nn.Sequential(*layers).parameters():
                nn.init.zeros_(parameter)
        return layers

    run, _ = run_of(make)
    whole = nn.Sequential(*tanh_layers()).state_dict()
    for name, value in run.state_dict().items():
        assert torch.equal(value, whole[name])


@on_shm_ranks(4)
def test_nothing_is_left_of_former_plans(rank: int) -> None:
    """Pipelines and DDPs go as they are replaced, without the help of the collector."""
    run, _ = run_of()
    gc.collect()
    gc.disable()
    try:
        for ranks in (2, 1, 4, 1, 2):
            former = weakref.ref(run._replica)
            run.transform(plan_of(ranks, 4))
            train(run, range(1), tanh_data())
            assert former() is None
    finally:
        gc.enable()


@on_shm_ranks(4)
def test_layers_are_trained_again(rank: int) -> None:
    data = tanh_data()
    kept = trireme.ActivationCache(SAMPLES, 1 << 16)
    run, _ = run_of(cache=kept, costs=[1.0] * LAYERS)
    one = OneProcess()
    for ranks in (2, 1):
        run.transform(plan_of(ranks, 4))
        run.end_epoch()
        one.freeze(run.freeze.frozen)
        assert train(run, range(3), data) == pytest.approx(
            train_alone(one, range(3), data), rel=1e-5
        )
        run.freeze.unfreeze()
        for parameter in one.model.parameters():
            parameter.requires_grad_(True)
        assert train(run, range(3), data) == pytest.approx(
            train_alone(one, range(3), data), rel=1e-5
        )


@on_shm_ranks(4)
def test_gradients_decide_alike_under_all_plans(rank: int) -> None:
    data = tanh_data()
    reached = []
    for ranks in (4, 2, 1):
        seen: list[list[float]] = []

        def look(point: trireme.FreezePoint, seen: list[list[float]] = seen) -> int:
            seen.append(point.norms)
            return point.frozen + 1

        run, _ = run_of(freeze={"rule": look, "measure_every": 1})
        run.transform(plan_of(ranks, 4))
        for epoch in range(2):
            train(run, range(epoch * EPOCH, (epoch + 1) * EPOCH), data)
            run.end_epoch()
        reached.append(seen)
    for other in reached[1:]:
        for norms, expected in zip(other, reached[0], strict=True):
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected))


@on_shm_ranks(4)
def test_the_norm_of_all_gradients_is_clipped(rank: int) -> None:
    data = tanh_data()
    one = OneProcess()
    run, optimizer = run_of()

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.01)

    def clip_all(*_: Any) -> None:
        trireme.clip_grad_norm_(run, 0.01)

    one.optimizer.register_step_pre_hook(clip)
    optimizer.register_step_pre_hook(clip_all)
    for epoch, ranks in enumerate((4, 2, 1)):
        run.transform(plan_of(ranks, 4))
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        expected = train_alone(one, steps, data)
        assert train(run, steps, data) == pytest.approx(expected, rel=1e-5), ranks


@on_shm_ranks(4)
def test_evaluation_trains_nothing(rank: int) -> None:
    (x, y), one = tanh_data(), OneProcess()
    run, optimizer = run_of(cache=trireme.ActivationCache(SAMPLES, 1 << 16))
    for ranks in (4, 2, 1):
        run.transform(plan_of(ranks, 4))
        before = held_by_any(run, optimizer)
        with torch.no_grad():
            expected = nn.functional.mse_loss(one.model(x[:ROWS]), y[:ROWS]).item()
        assert run.eval_step(x[:ROWS], y[:ROWS]).item() == pytest.approx(expected, rel=1e-5)
        assert_same(before, held_by_any(run, optimizer))
        run.freeze.advance()


@on_shm_ranks(4)
def test_a_checkpoint_goes_on_under_any_plan(rank: int) -> None:
    data = tanh_data()
    with shared_folder() as folder:
        run, optimizer = run_of()
        for epoch, ranks in enumerate((4, 2, 1)):
            run.transform(plan_of(ranks, 4))
            train(run, range(epoch * EPOCH, (epoch + 1) * EPOCH), data)
            run.end_epoch()
            trireme.save_checkpoint(f"{folder}/{ranks}", run, optimizer, extra={"epoch": epoch})
            saved = held_by_any(run, optimizer)
            expected = run.freeze.state_dict()
            for others in (4, 2, 1):
                again, stepping = run_of()
                again.transform(plan_of(others, 4))
                train(again, range(1), data)
                given = trireme.load_checkpoint(f"{folder}/{ranks}", again, stepping)
                assert given == {"epoch": epoch}
                assert again.freeze.state_dict() == expected, (again.freeze.state_dict(), expected)
                assert_same(saved, held_by_any(again, stepping))
                if others == 2:
                    train(again, range(1), data)
                    again.transform(plan_of(1, 4))
            plain = nn.Sequential(*tanh_layers())
            trireme.load_checkpoint(f"{folder}/{ranks}", plain, adamw(plain.parameters()))
            for name, value in plain.state_dict().items():
                assert torch.equal(value, saved[name])
        other, stepping = run_of(lambda: tanh_layers(8))
        with raises(ValueError, "[saving]"):
            trireme.load_checkpoint(f"{folder}/1", other, stepping)


def train_in_one_process(rank: int) -> None:
    data = tanh_data()
    run, _ = run_of(pipe=True, costs=None, cache=trireme.ActivationCache(SAMPLES, 1 << 16))
    one = OneProcess()
    for epoch in range(5):
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        expected = train_alone(one, steps, data)
        assert train(run, steps, data) == pytest.approx(expected, rel=1e-5)
        run.end_epoch()
        one.freeze(run.freeze.frozen)
    assert run.plan is not None and run.plan.balance == [LAYERS]
    assert [entry.hits > 0 for entry in run.history] == [False] * 4 + [True]


def test_one_process_without_a_group() -> None:
    run_ranks(train_in_one_process, 1)


@on_shm_ranks(1)
def test_one_rank(rank: int) -> None:
    train_in_one_process(rank)
