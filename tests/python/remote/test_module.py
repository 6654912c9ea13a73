"""Modules of other processes: outputs, gradients and steps as those of a local one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trireme import ps, remote

from harness.meeting import until
from harness.models import batch
from remote import networks
from remote.equality import assert_equal, assert_state
from remote.functions import FREED_S, rank_there
from remote.networks import (
    count_graphs,
    make_chain,
    make_counted,
    make_embedding,
    make_frozen,
    make_lazy,
    make_mlp,
    make_raising,
    make_several,
    memory_in_kib,
    no_module,
)
from remote.ranks import (
    on_remote_ranks,
    on_remote_shm_and_gloo_ranks,
    raised,
    refused,
)

SPECS: dict[str, Any] = {
    "sgd": (ps.SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (ps.SGD(0.1, momentum=0.9, weight_decay=0.01), torch.optim.SGD,
                 {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (ps.Adam(0.01), torch.optim.Adam, {"lr": 0.01}),
    "adamw": (ps.AdamW(0.01, betas=(0.8, 0.9)), torch.optim.AdamW,
              {"lr": 0.01, "betas": (0.8, 0.9)}),
    "adagrad": (ps.Adagrad(0.05), torch.optim.Adagrad, {"lr": 0.05}),
    # It adds gradients: a step of SGD backwards.
    "sum": (ps.Sum(), torch.optim.SGD, {"lr": 1.0, "maximize": True}),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", SPECS)
@on_remote_ranks(2)
def test_training_equals_that_of_a_local_module(rank: int, optimizer: str) -> None:
    if rank == 1:
        return
    spec, kind, options = SPECS[optimizer]
    for to in ("p1", "p0"):
        net = remote.Module(to, make_mlp, optimizer=spec)
        trained = make_mlp()  # what torch's own optimizer makes of it
        steps = kind(trained.parameters(), **options)
        local = make_mlp()  # has the same values in each step, so that bits can be compared
        for step in range(6):
            local.load_state_dict(net.state_dict())
            x, own = batch(step).requires_grad_(), batch(step).requires_grad_()
            out, expected = net(x), local(own)
            assert_equal(out.detach(), expected.detach())
            assert out.grad_fn is not None
            out.square().mean().backward()
            expected.square().mean().backward()
            assert_equal(x.grad, own.grad)
            steps.zero_grad()
            trained(batch(step)).square().mean().backward()
            steps.step()
            net.step()
            net.zero_grad()
            assert_state(net, trained, is_close=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@on_remote_shm_and_gloo_ranks(2)
def test_gradients_have_the_bits_of_a_local_module(rank: int, dtype: str) -> None:
    """Those of parameters, too: the difference that a step of SGD(1) makes to zeros."""
    if rank == 1:
        return
    net, local = remote.Module("p1", make_mlp, dtype=dtype, optimizer=ps.SGD(1.0)), make_mlp()
    local.to(getattr(torch, dtype))
    assert_state(net, make_mlp(dtype=dtype))
    x = batch(0).to(getattr(torch, dtype)).requires_grad_()
    loss = net(x).sum() + 2 * net(x.detach()[:2]).sum()
    loss.backward()
    own = x.detach().clone().requires_grad_()
    (local(own).sum() + 2 * local(own.detach()[:2]).sum()).backward()
    assert_equal(x.grad, own.grad)
    net.load_state_dict(
        {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    )
    net.step()
    for value, parameter in zip(net.state_dict().values(), local.parameters(), strict=True):
        assert_equal(-value, parameter.grad)


@on_remote_ranks(2)
def test_gradients_with_a_lazy_minus(rank: int) -> None:
    if rank == 1:
        return
    lazy = remote.Module("p1", make_lazy, optimizer=ps.SGD(0.5))
    plain = remote.Module("p1", make_mlp, optimizer=ps.SGD(0.5))
    for net in (lazy, plain):
        net(batch(0)).square().mean().backward()
        net.step()
    assert_equal(list(lazy.state_dict().values()), list(plain.state_dict().values()))


@on_remote_ranks(2)
def test_it_is_a_module_without_parameters(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_frozen, optimizer=ps.SGD(0.1))
    assert isinstance(net, nn.Module)
    assert not list(net.parameters()) and not list(net.buffers())
    local = make_frozen()
    found = net.remote_parameters()
    for shown, (name, parameter) in zip(found, local.named_parameters(), strict=True):
        assert shown.name == name and tuple(shown.shape) == tuple(parameter.shape)
        assert shown.dtype == parameter.dtype and shown.requires_grad == parameter.requires_grad
        here = shown.to_here()
        assert_equal(here, parameter.detach())
        assert not here.requires_grad
        here.zero_()  # a copy
    assert_state(net, local)


@on_remote_ranks(2)
def test_frozen_parameters(rank: int) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_frozen, optimizer=ps.SGD(0.1)), make_frozen()
    optimizer = torch.optim.SGD(
        [parameter for parameter in local.parameters() if parameter.requires_grad], lr=0.1
    )
    for step in range(3):
        x, own = batch(step).requires_grad_(), batch(step).requires_grad_()
        net(x).square().sum().backward()
        local(own).square().sum().backward()
        torch.testing.assert_close(x.grad, own.grad, rtol=1e-5, atol=1e-6)
        net.step()
        net.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    assert_state(net, local, is_close=True)
    before = make_frozen().state_dict()
    assert_equal(net.state_dict()["0.weight"], before["0.weight"])
    assert not torch.equal(net.state_dict()["2.weight"], before["2.weight"])


def losses_of(out: Any) -> dict[str, Tensor]:
    """Of all outputs, and of some."""
    first, second, total = out["first"], out["rest"][0], out["rest"][1][0]
    return {
        "all": (first.sum() * 2 + second.sum() + total * 3),
        "first": first.square().sum(),
        "second": second[0].sum(),
        "total": total * 5,
    }


@pytest.mark.parametrize("used", ["all", "first", "second", "total"])
@on_remote_shm_and_gloo_ranks(2)
def test_several_inputs_and_outputs(rank: int, used: str) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_several, optimizer=ps.SGD(1.0)), make_several()
    grads = []
    for module in (net, local):
        x, y = batch(0, 3, 4).requires_grad_(), batch(1, 3, 4).requires_grad_()
        plain = batch(2, 3, 4)
        out = module({"x": x, "rest": [y, plain]}, scale=3.0, names=("a", "b"))
        assert list(out) == ["first", "rest", "where", "constant"]
        assert out["rest"][1][1:] == [2, None] and not out["where"].requires_grad
        assert out["first"].requires_grad and not out["constant"].requires_grad
        losses_of(out)[used].backward()
        assert plain.grad is None
        grads.append((x.grad, y.grad))
        del out
    for ours, expected in zip(*grads, strict=True):
        if expected is None:  # then it leads to no loss, which the owner knows and this rank not
            assert ours is None or not ours.any()
        else:
            assert_equal(ours, expected)
    torch.optim.SGD(local.parameters(), lr=1.0).step()
    net.step()
    assert_state(net, local, is_close=True)


@on_remote_ranks(2)
def test_inputs_that_have_no_gradient(rank: int) -> None:
    """The parameters get theirs."""
    if rank == 1:
        return
    net, local = remote.Module("p1", make_embedding, optimizer=ps.SGD(1.0)), make_embedding()
    ids = torch.tensor([[1, 2], [2, 9]])
    out = net(ids)
    assert out.requires_grad
    assert_equal(out.detach(), local(ids).detach())
    out.sum().backward()
    net.step()
    local(ids).sum().backward()
    torch.optim.SGD(local.parameters(), lr=1.0).step()
    assert_state(net, local)


@on_remote_ranks(2)
def test_two_forwards_and_inputs_used_twice(rank: int) -> None:
    if rank == 1:
        return
    net, local = remote.Module("p1", make_mlp), make_mlp()
    grads = []
    for module in (net, local):
        x = batch(0).requires_grad_()
        y = module(x) + 2 * module(x * 3)
        hidden = nn.functional.pad(y, (0, 3))
        (module(hidden) * x.sum()).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


@on_remote_shm_and_gloo_ranks(2)
def test_a_forward_without_gradients(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_counted, optimizer=ps.SGD(0.1))
    x = batch(0).requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = net(x)
        assert not out.requires_grad
        until(lambda: remote.call("p1", count_graphs) == 0, FREED_S)
    out = net(x)
    assert out.requires_grad and remote.call("p1", count_graphs) == 1
    out.sum().backward()
    until(lambda: remote.call("p1", count_graphs) == 0, FREED_S)


@on_remote_shm_and_gloo_ranks(2, timeout=100)
def test_a_thousand_dropped_forwards_leave_nothing(rank: int) -> None:
    """Each graph keeps its input, of 256 KiB."""
    if rank == 1:
        return
    net = remote.Module("p1", make_counted, 256)
    x = torch.randn(256, 256)
    before = 0
    for count in range(1100):
        if count == 100:
            before = remote.call("p1", memory_in_kib)
        out = net(x)
        assert out.requires_grad
        if count % 3 == 0:
            net(out)  # one graph upon another
    del out
    until(lambda: remote.call("p1", count_graphs) == 0, FREED_S)
    assert remote.call("p1", memory_in_kib) - before < 64 * 1024
    net(x).sum().backward()


@on_remote_ranks(2)
def test_a_second_backward(rank: int) -> None:
    if rank == 1:
        return
    net = remote.Module("p1", make_mlp)
    for options in ({}, {"retain_graph": True}):
        loss = net(batch(0).requires_grad_()).sum()
        loss.backward(**options)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    x = batch(0).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    own = batch(0).requires_grad_()
    make_mlp()(own).sum().backward()
    assert_equal(grad, own.grad)


@on_remote_shm_and_gloo_ranks(2)
def test_exceptions_are_raised_here(rank: int) -> None:
    if rank == 1:
        return
    for to, where in (("p1", "p1 (rank 1)"), ("p0", "p0 (rank 0)")):
        net = remote.Module(to, make_raising, "the data are broken", optimizer=ps.SGD(0.1))
        x = torch.ones(2, 4, requires_grad=True)
        with raised(ArithmeticError, "the data are broken", "forward of make_raising at " + where):
            net(x, "forward")
        loss = net(x, "backward").sum()
        with raised(ArithmeticError, "the data are broken", "backward of make_raising at " + where):
            loss.backward()
        with raised(TypeError, "forward"):
            net(x, 1, 2, 3)
        with raised(RuntimeError, "forward of make_raising at " + where):  # torch's, of shapes
            net(torch.ones(3, 3))
        with refused(TypeError, "args[1]['x']", "object"):
            net(x, {"x": object()})
        net(x).sum().backward()
        net.step()


@on_remote_ranks(2)
def test_what_cannot_be_made(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        with pytest.raises(TypeError, match="no_module"):
            remote.Module(to, no_module)
        with pytest.raises((TypeError, ValueError), match="batch"):
            remote.Module(to, batch)
        with refused(ValueError, "nothing_such", "make_mlp"):
            remote.Module(to, "nothing_such")
        with raised(TypeError, "make_mlp"):
            remote.Module(to, make_mlp, 1, "float32", 3)
        with refused(ValueError, "RowwiseAdagrad"):
            remote.Module(to, make_mlp, optimizer=ps.RowwiseAdagrad(0.1))
        with refused(ValueError, "lr"):
            remote.Module(to, make_mlp, optimizer=ps.SGD(-1.0))
        with pytest.raises(TypeError, match=r"ps\.SGD"):
            remote.Module(to, make_mlp, optimizer=torch.optim.SGD)
        with refused(TypeError, "Sequential"):  # a module is no value
            remote.call(to, make_mlp)
        net = remote.Module(to, "make_mlp", seed=3)  # a name will do
        assert_state(net, make_mlp(3))
        with refused(RuntimeError, "optimizer"):
            net.step()
    with refused(ValueError, "'p9'", "'p1'"):
        remote.Module("p9", make_mlp)
    assert remote.call("p1", rank_there) == 1


@pytest.mark.parametrize("to", ["p2", "p0"])
@on_remote_shm_and_gloo_ranks(3, threads=1)
def test_a_module_inside_the_owners_module(rank: int, to: str) -> None:
    """A -> B -> C, and A -> B -> A."""
    if rank != 0:
        return
    net = remote.Module("p1", make_chain, to, 0.5, optimizer=ps.SGD(0.1))
    torch.manual_seed(8)
    outer_layers = networks.Chain(nn.Identity())
    local = networks.Chain(make_mlp())
    for ours, same in ((local.before, outer_layers.before), (local.after, outer_layers.after)):
        ours.load_state_dict(same.state_dict())
    outer = [*local.before.parameters(), *local.after.parameters()]
    inner_steps = torch.optim.SGD(local.inner.parameters(), lr=0.5)
    outer_steps = torch.optim.SGD(outer, lr=0.1)
    for step in range(3):
        x, own = batch(step).requires_grad_(), batch(step).requires_grad_()
        out, expected = net(x), local(own)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, own.grad, rtol=1e-5, atol=1e-6)
        if step == 0:
            before = remote.call("p1", networks.state_inside)
            net.step()  # its own only
            assert_equal(remote.call("p1", networks.state_inside), before)
        else:
            net.step()
        net.zero_grad()
        remote.call("p1", networks.step_inside)
        for optimizer in (outer_steps, inner_steps):
            optimizer.step()
            optimizer.zero_grad()
        inside = remote.call("p1", networks.state_inside)
        expected_inside = dict(local.inner.state_dict())
        torch.testing.assert_close(inside, expected_inside, rtol=1e-5, atol=1e-6)
    own_state = net.state_dict()
    torch.testing.assert_close(own_state["before.weight"], local.before.weight.detach())


@on_remote_ranks(3)
def test_a_nested_module_gets_gradients_that_nobody_else_needs(rank: int) -> None:
    """Neither the input nor a parameter of the outer module requires one."""
    if rank != 0:
        return
    net = remote.Module("p1", make_chain, "p2", 0.5, True)
    out = net(batch(0))
    before = remote.call("p1", networks.state_inside)
    out.sum().backward()
    remote.call("p1", networks.step_inside)
    after = remote.call("p1", networks.state_inside)
    assert all(not torch.equal(after[name], before[name]) for name in before)


@on_remote_ranks(2)
def test_modules_in_a_row_and_beside_local_ones(rank: int) -> None:
    if rank == 1:
        return
    torch.manual_seed(3)
    middle = nn.Linear(3, 6)
    net = nn.Sequential(remote.Module("p1", make_mlp), middle, remote.Module("p0", make_mlp, 9))
    local = nn.Sequential(make_mlp(), nn.Linear(3, 6), make_mlp(9))
    local[1].load_state_dict(middle.state_dict())
    x, own = batch(0).requires_grad_(), batch(0).requires_grad_()
    assert_equal(net(x).detach(), local(own).detach())
    net(x).sum().backward()
    local(own).sum().backward()
    assert_equal(x.grad, own.grad)
    assert_equal(middle.weight.grad, local[1].weight.grad)
