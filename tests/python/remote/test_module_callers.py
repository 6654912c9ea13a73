"""Several callers of one module: gradients of each, steps beside graphs; modes and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trireme import ps, remote

from harness.meeting import say, stay_until, until
from harness.models import batch
from remote import networks
from remote.equality import assert_equal, assert_state
from remote.functions import FREED_S, open_gate
from remote.networks import (
    count_graphs,
    make_mlp,
    make_noisy,
    make_normed,
    make_raising,
    make_shared,
    make_waiting,
    weight_of_shared,
)
from remote.ranks import (
    on_remote_ranks,
    on_remote_shm_and_gloo_ranks,
    raised,
    refused,
)


def shared(to: str, lr: float = 1.0, **options: Any) -> remote.Module:
    return remote.Module(to, make_shared, "one", optimizer=ps.SGD(lr), **options)


def push(net: remote.Module, value: float) -> None:
    """Lets its gradient be that much larger."""
    net(torch.full((1, 1), value)).sum().backward()


def weight(to: str, name: str = "one") -> float:
    return remote.call(to, weight_of_shared, name).item()


@on_remote_shm_and_gloo_ranks(3)
def test_two_trainers_never_mix(rank: int) -> None:
    if rank == 2:
        return
    group_words = [f"{rank} has pushed", f"{1 - rank} has pushed"]
    net = shared("p2")
    push(net, 10.0**rank)
    say(group_words[0])
    stay_until(*group_words)
    if rank == 0:
        net.step()
        assert weight("p2") == -1  # its own gradient only
        say("0 has stepped")
        stay_until("1 has stepped")
        assert weight("p2") == -11
        net.step()  # its gradient stays until it is set to zero
        assert weight("p2") == -12
        net.zero_grad()
        net.step()
        assert weight("p2") == -12
    else:
        stay_until("0 has stepped")
        net.step()
        net.zero_grad()
        say("1 has stepped")


@on_remote_ranks(3, timeout=100)
def test_trainers_at_full_speed(rank: int) -> None:
    """Whole numbers: the sum is exact in any order, and a gradient that went astray is seen."""
    if rank != 2:
        net = shared("p2")
        for step in range(200):
            push(net, float(rank + 1))
            if step % 3 == 0:
                push(net, 4.0)
            net.step()
            net.zero_grad()
        say(f"{rank} is done")
        stay_until("0 is done", "1 is done")
        assert weight("p2") == -(200 * 3 + 2 * 67 * 4)


@on_remote_ranks(2)
def test_one_module_for_two_callers_of_a_process(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        one, other = shared(to), shared(to, lr=2.0)
        push(one, 1.0)
        push(one, 2.0)  # they add up
        push(other, 100.0)
        one.step()
        assert weight(to) == -3
        one.zero_grad()
        one.step()
        assert weight(to) == -3
        other.step()
        assert weight(to) == -203
        assert_equal(one.state_dict(), other.state_dict())
        third = remote.Module(to, make_shared, "two", optimizer=ps.SGD(1.0))
        push(third, 1.0)
        third.step()
        assert weight(to) == -203 and weight(to, "two") == -1


@on_remote_shm_and_gloo_ranks(2)
def test_a_step_beside_a_graph_in_flight(rank: int) -> None:
    """The backward uses the parameters of its forward; its gradient applies to the newer ones."""
    if rank == 1:
        return
    for to in ("p1", "p0"):
        one, other = shared(to), shared(to)
        state = {"weight": torch.full((1, 1), 5.0)}
        one.load_state_dict(state)
        x = torch.full((1, 1), 3.0, requires_grad=True)
        out = one(x)
        push(other, 7.0)
        other.step()
        assert weight(to) == -2
        y = torch.full((1, 1), 1.0, requires_grad=True)
        later = one(y)
        assert later.item() == -2 and out.item() == 15
        other.load_state_dict({"weight": torch.full((1, 1), 100.0)})
        out.sum().backward()
        later.sum().backward()
        assert x.grad.item() == 5 and y.grad.item() == -2
        one.step()
        assert weight(to) == 100 - 3 - 1


@on_remote_ranks(2)
def test_graphs_of_a_caller_that_lets_its_module_go(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", networks.make_counted)
    x = batch(0).requires_grad_()
    loss = net(x).sum()
    graphs = [net(x) for _ in range(5)]
    del net
    loss.backward()  # it holds what it needs
    assert x.grad is not None
    assert remote.call("p1", count_graphs) == len(graphs)
    graphs.clear()
    until(lambda: remote.call("p1", count_graphs) == 0, FREED_S)


@on_remote_shm_and_gloo_ranks(2)
def test_modes_and_buffers(rank: int) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_normed, optimizer=ps.SGD(0.1)), make_normed()
    assert net.training
    for step in range(3):
        x, own = batch(step).requires_grad_(), batch(step).requires_grad_()
        assert_equal(net(x).detach(), local(own).detach())
        assert_state(net, local)  # running statistics among it
    assert net.eval() is net and not net.training
    local.eval()
    x, own = batch(9).requires_grad_(), batch(9).requires_grad_()
    out, expected = net(x), local(own)
    assert_equal(out.detach(), expected.detach())
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_equal(x.grad, own.grad)
    assert_state(net, local)
    assert int(net.state_dict()["1.num_batches_tracked"]) == 3
    net.train()
    local.train()
    assert_equal(net(batch(4)).detach(), local(batch(4)).detach())


@on_remote_ranks(2)
def test_dropout_follows_the_mode_of_each_caller(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_noisy)
    around = nn.Sequential(net, nn.Identity())
    x = batch(0, rows=200)
    assert (around(x) == 0).float().mean() > 0.3
    around.eval()
    assert not net.training and not (around(x) == 0).any()
    assert_equal(around(x).detach(), net(x).detach())
    around.train()
    assert (around(x) == 0).any()
    other = remote.Module("p1", make_noisy).eval()
    assert not (other(x) == 0).any() and (net(x) == 0).any()


@on_remote_shm_and_gloo_ranks(2)
def test_states_are_saved_and_loaded(rank: int) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_normed), make_normed()
    state = net.state_dict()
    assert_state(net, local)
    for tensor in state.values():
        tensor.zero_()  # copies
    assert_state(net, local)
    with torch.no_grad():
        for tensor in local.state_dict().values():
            tensor.add_(1)
    net.load_state_dict(local.state_dict())
    assert_state(net, local)
    local.load_state_dict(net.state_dict())
    net.load_state_dict({**local.state_dict()}, strict=True)


@on_remote_ranks(2)
def test_states_that_do_not_fit(rank: int) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_mlp), make_mlp()
    whole = dict(net.state_dict())
    missing = {name: tensor for name, tensor in whole.items() if name != "2.weight"}
    unknown = {**whole, "9.weight": torch.ones(1)}
    other = {**whole, "4.bias": torch.ones(7)}
    for state, name in ((missing, "2.weight"), (unknown, "9.weight"), (other, "4.bias")):
        changed = {key: tensor + 1 for key, tensor in state.items()}
        with pytest.raises((RuntimeError, ValueError), match=name.replace(".", r"\.")):
            net.load_state_dict(changed)
        assert_state(net, local)  # nothing was written
    with pytest.raises((RuntimeError, ValueError), match=r"4\.bias"):
        net.load_state_dict(other, strict=False)
    found = net.load_state_dict({**missing, "9.weight": torch.ones(1)}, strict=False)
    assert list(found.missing_keys) == ["2.weight"] and list(found.unexpected_keys) == ["9.weight"]
    net.load_state_dict({"4.bias": torch.full((3,), 8.0)}, strict=False)
    after = net.state_dict()
    assert_equal(after["4.bias"], torch.full((3,), 8.0))
    assert_equal(after["2.weight"], whole["2.weight"])


@on_remote_ranks(2)
def test_states_inside_another_module(rank: int) -> None:
    if rank == 1:
        return
    around = nn.Sequential(nn.Linear(6, 6), remote.Module("p1", make_normed))
    local = nn.Sequential(nn.Linear(6, 6), make_normed())
    assert list(around.state_dict()) == list(local.state_dict())
    local.load_state_dict(around.state_dict())
    x = batch(0)
    assert_equal(around(x).detach(), local(x).detach())
    state = {name: tensor + 1 for name, tensor in local.state_dict().items()}
    around.load_state_dict(state)
    assert_equal(dict(around.state_dict()), state)
    assert_equal(around[1].state_dict()["1.running_mean"], state["1.1.running_mean"])


@on_remote_ranks(3)
def test_all_ranks_call_modules_of_all(rank: int) -> None:
    nets = [remote.Module(f"p{to}", make_shared, f"of {rank}", 4) for to in range(3)]
    dist.barrier()
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(30):
        out: Tensor = x
        for net in nets:
            out = out + net(out)
        out.sum().backward()
    assert_equal(x.grad, torch.full((2, 4), 30.0))  # weights are zero


@on_remote_ranks(2)
def test_a_forward_that_comes_late(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_waiting, timeout=2)
    x = torch.ones(2, 4, requires_grad=True)
    with refused(dist.DistBackendError, "p1 (rank 1)", "within 2 s", "forward of make_waiting"):
        net(x, "forward")
    loss = net(x, "backward").sum()
    with refused(dist.DistBackendError, "p1 (rank 1)", "backward of make_waiting"):
        loss.backward()
    remote.call("p1", open_gate)
    net(x, "backward").sum().backward()
    assert x.grad is not None


@on_remote_ranks(2)
def test_a_step_after_a_backward_that_failed(rank: int) -> None:
    """It has added nothing."""
    if rank == 1:
        return
    net = remote.Module("p1", make_raising, "broken", optimizer=ps.SGD(1.0))
    before = dict(net.state_dict())
    with raised(ArithmeticError, "broken"):
        net(torch.ones(2, 4), "backward").sum().backward()
    net.step()
    assert_equal(dict(net.state_dict()), before)
    net(torch.ones(2, 4)).sum().backward()
    net.step()
    assert not torch.equal(net.state_dict()["linear.bias"], before["linear.bias"])
