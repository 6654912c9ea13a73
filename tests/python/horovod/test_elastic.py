"""hvd.elastic: what goes on from the last commit after an error, and what leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme.horovod as hvd
from torch import nn
from torch.optim.lr_scheduler import StepLR

from harness.deaths import assert_seen_soon
from harness.faults import kill_this_rank, note_death, raises
from harness.meeting import say, stay_until
from harness.ranks import run_ranks

STEPS = 6


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(batch(hvd.rank(), step)).square().sum().backward()
    for one in model.parameters():
        one.grad = hvd.allreduce(one.grad)  # unnamed: numbers must agree after a failure
    optimizer.step()


def make_state(rank: int) -> hvd.elastic.TorchState:
    model = model_of(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    return hvd.elastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, step=0, seen=[]
    )


def values_of(state: hvd.elastic.TorchState) -> dict[str, Any]:
    return {
        "model": state.model.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict()["last_epoch"],
        "step": state.step,
        "seen": state.seen,
    }


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def fail_sometimes(rank: int) -> None:
    """Each failure costs the steps since the last commit, and nothing else."""
    hvd.init()
    failures = {3: "a tensor differs", 5: "one rank raises"}
    resets: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, plan: dict[int, str]) -> str:
        while state.step < STEPS:
            train_step(state.model, state.optimizer, state.step)
            state.scheduler.step()
            failure = plan.pop(state.step, None)
            if failure == "a tensor differs":
                hvd.allreduce(torch.ones(2 + rank), name="differs")
            elif failure is not None and rank == 1:
                raise hvd.HorovodInternalError("of rank 1 alone")
            elif failure is not None:
                hvd.allreduce(torch.ones(2))  # rank 1 will never come
            state.seen.append(state.step)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
            state.check_host_updates()
        return "done"

    state = make_state(rank)
    state.register_reset_callbacks([lambda: resets.append(state.step)])
    assert train(state, dict(failures)) == "done"
    assert resets == [2, 4]  # the steps of the last commits
    assert state.seen == list(range(STEPS))
    undisturbed = make_state(rank)
    assert train(undisturbed, {}) == "done"
    assert_close(values_of(state), values_of(undisturbed))
    first, *others = hvd.allgather_object(values_of(state))
    for other in others:
        assert_close(first["optimizer"], other["optimizer"])
    hvd.shutdown()


def test_training_goes_on_from_the_last_commit() -> None:
    run_ranks(fail_sometimes, 2, timeout=60, fresh=True)


def fail_beside_a_backward(rank: int) -> None:
    """Rank 1 raises where rank 0 waits for its gradients in a backward."""
    hvd.init()
    results = []
    for failing in ([2], []):
        model = model_of(0)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

        @hvd.elastic.run
        def train(state: hvd.elastic.TorchState, failing: list[int]) -> None:
            while state.step < STEPS:
                state.optimizer.zero_grad()
                if rank == 1 and state.step in failing:
                    failing.clear()
                    raise hvd.HorovodInternalError("of rank 1 alone")
                state.model(batch(rank, state.step)).square().sum().backward()
                state.optimizer.step()
                state.step += 1
                state.commit()

        train(state, failing)
        assert state.step == STEPS
        results.append({"model": state.model.state_dict(), "state": optimizer.state_dict()})
    assert_close(*results)
    hvd.shutdown()


def test_gradients_of_an_optimizer_begin_again() -> None:
    run_ranks(fail_beside_a_backward, 2, timeout=60, fresh=True)


def fail_in_a_join(rank: int) -> None:
    """A rank that has joined, one that waits in a set, one in a barrier: all begin again."""
    hvd.init()
    pair = hvd.add_process_set([1, 2])
    state = hvd.elastic.ObjectState(calls=0)
    calls = []

    @hvd.elastic.run
    def work(state: hvd.elastic.ObjectState) -> None:
        calls.append(None)
        state.calls += 1
        if len(calls) == 1:
            if rank == 0:
                hvd.join()
            handle = hvd.allreduce_async(torch.ones(1), name="kept in flight", process_set=pair)
            if rank == 1:
                hvd.synchronize(handle)
                handle = hvd.allreduce_async(torch.ones(1), process_set=pair)
                hvd.synchronize(handle)  # rank 2 never issues it
            hvd.synchronize(handle)
            raise hvd.HorovodInternalError("of rank 2")

    work(state)
    assert len(calls) == 2 and state.calls == 1  # as no call has committed
    assert hvd.join() in range(3)
    for _ in range(2):
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        assert total.item() == 3
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2
    hvd.barrier()  # rank 0, which orders operations of sets, stays until the last one
    hvd.shutdown()


def test_ranks_in_joins_and_sets_begin_again() -> None:
    run_ranks(fail_in_a_join, 3, timeout=60, fresh=True)


def lose_a_rank(rank: int) -> None:
    hvd.init()
    restored: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        hvd.allreduce(torch.ones(2), name="before")
        if rank == 1:
            stay_until("rank 0 waits")
            note_death()
            kill_this_rank()
        say("rank 0 waits")
        hvd.allreduce(torch.ones(2), name="lost")

    state = hvd.elastic.ObjectState(step=3)
    state.register_reset_callbacks([lambda: restored.append(1)])
    with raises(hvd.HorovodInternalError, "allreduce 'lost'", "rank 1", "has died"):
        train(state)
    assert not restored
    assert_seen_soon()


def test_an_error_leaves_where_a_rank_is_gone() -> None:
    run_ranks(lose_a_rank, 2, timeout=60, fresh=True, dying=(1,))


def keep_and_take(rank: int) -> None:
    hvd.init()
    state = hvd.elastic.ObjectState(epoch=rank, losses=[rank])
    state.sync()
    assert state.epoch == 0 and state.losses == [0]
    state.losses.append(5)
    state.epoch = 7
    state.restore()
    assert state.epoch == 0 and state.losses == [0]
    state.losses.append(6)
    state.commit()
    state.losses.clear()
    state.restore()
    assert state.losses == [0, 6]

    torch_state = make_state(rank)
    torch_state.sync()
    first, second = hvd.allgather_object(values_of(torch_state))
    assert_close(first, second)
    assert torch_state.optimizer.param_groups[0]["lr"] == 0.1
    kept = values_of(torch_state)["model"]["0.weight"].clone()
    train_step(torch_state.model, torch_state.optimizer, 0)
    assert not torch.equal(torch_state.model[0].weight, kept)
    torch_state.restore()
    assert torch.equal(torch_state.model[0].weight, kept)
    for _ in range(2):  # what was saved is not what optimizers write
        train_step(torch_state.model, torch_state.optimizer, 0)
        torch_state.restore()
        state_of = torch_state.optimizer.state_dict()["state"]
        assert all(not one["exp_avg"].any() and one["step"] == 0 for one in state_of.values())
    other = model_of(5)
    torch_state.model = other  # saved at once
    with torch.no_grad():
        other[0].weight.zero_()
    torch_state.restore()
    assert other[0].weight.any()

    with raises(ValueError, "a value called save"):
        hvd.elastic.ObjectState(save=1)
    with raises(ValueError, "a value called sync"):
        hvd.elastic.TorchState(sync=model_of(0))
    with raises(TypeError, "got int as model"):
        hvd.elastic.TorchState(model=3)
    with raises(TypeError, "got int as state"):
        hvd.elastic.run(lambda state: None)(3)
    with raises(TypeError, "obj['lock'] is a builtin_function_or_method"):
        hvd.elastic.ObjectState(lock=print).sync()
    with raises(hvd.HorovodInternalError, "names of values"):
        hvd.elastic.ObjectState(**{f"name{rank}": 1}).sync()
    with pytest.raises(NotImplementedError):
        hvd.elastic.State().save()
    hvd.shutdown()


def test_states() -> None:
    run_ranks(keep_and_take, 2, timeout=60, fresh=True)


def drawn_by_all(mine: list[int]) -> list[int]:
    return [index for of_rank in hvd.allgather_object(mine) for index in of_rank]


def draw(rank: int) -> list[Any]:
    hvd.init()
    world, size = hvd.size(), 23
    sampler = hvd.elastic.ElasticSampler(range(size), seed=3)
    each = -(-size // world)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler)) == each
        together = drawn_by_all(list(sampler))
        assert set(together) == set(range(size)) and len(together) == each * world
        epochs.append(together)
    assert epochs[0] != epochs[1]
    state = hvd.elastic.TorchState(sampler=sampler, batch=0)
    used = set(drawn_by_all(list(sampler)[:4]))
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    state.restore()  # as if the second batch had failed
    state.on_reset()
    rest = set(drawn_by_all(list(sampler)))
    assert used | rest == set(range(size)) and not used & rest
    sampler.record_batch(1, size)
    sampler.reset()
    assert len(sampler) == 0 and list(sampler) == []
    plain = hvd.elastic.ElasticSampler(range(1), shuffle=False)
    assert list(plain) == [0]  # each rank draws one
    ordered = hvd.elastic.ElasticSampler(range(2 * world), shuffle=False)
    assert list(ordered) == [rank, rank + world]
    hvd.shutdown()
    return epochs


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_sampler(world: int) -> None:
    first, *others = run_ranks(draw, world, timeout=60, fresh=True)
    assert all(other == first for other in others)
