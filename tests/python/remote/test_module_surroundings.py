"""What surrounds a module of another process: inputs that it writes, autocast, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trireme
from torch import Tensor, nn
from trireme import ps, remote

from harness.models import batch
from remote.equality import assert_equal, assert_state
from remote.networks import (
    autocast_there,
    make_chain,
    make_embedding,
    make_in_place,
    make_mixed,
    make_mlp,
    make_normed,
    make_relu,
)
from remote.ranks import on_remote_ranks, on_remote_shm_and_gloo_ranks

INPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one": lambda x: (x[:, :4].clone(),),
    "several": lambda x: (x[:, :4].clone(), x[:, 2:6].clone()),
    "views": lambda x: (x[:, :4], x[:, 2:6]),
    "columns": lambda x: (x[:4, :4].t(), x[:4, 2:6].t()),
    "twice": lambda x: (x[:, :4] * 1, x[:, :4] * 1),
}


def weight_gradients(net: remote.Module, local: nn.Module) -> None:
    """A step of SGD(1) shows those of the remote one."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.step()
    after = net.state_dict()
    for name, parameter in local.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad)


@on_remote_ranks(2)
def test_a_module_that_works_in_place_on_its_inputs(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for name, inputs in INPUTS.items():
            net = remote.Module(to, make_in_place, optimizer=ps.SGD(1.0))
            local = make_in_place()
            x, own = batch(0).requires_grad_(), batch(0).requires_grad_()
            given = inputs(x)
            versions = [one._version for one in given]
            # What was sent is contiguous; a product of others may differ in its last bit.
            form = torch.contiguous_format if to == "p1" else torch.preserve_format
            copies = [one.clone(memory_format=form) for one in inputs(own)]
            out, expected = net(*given), local(*copies)
            assert_equal(out.detach(), expected.detach())
            assert [one._version for one in given] == versions, (
                name
            )  # the caller's stay as they are
            out.square().sum().backward()
            expected.square().sum().backward()
            assert_equal(x.grad, own.grad)
            weight_gradients(net, local)
        leaf = batch(1).requires_grad_()  # locally a leaf is refused; here the owner has a copy
        remote.Module(to, make_relu)(leaf).sum().backward()
        assert_equal(leaf.grad, (leaf.detach() > 0).float())
        same = remote.Module(to, make_in_place)
        x, own = batch(2)[:, :4].clone().requires_grad_(), batch(2)[:, :4].clone().requires_grad_()
        same(x, x).sum().backward()
        make_in_place()(own.clone(), own.clone()).sum().backward()
        assert_equal(x.grad, own.grad)
        with torch.no_grad():
            assert not same(x).requires_grad


@on_remote_shm_and_gloo_ranks(2)
def test_the_autocast_of_a_caller_reaches_the_owner(rank: int) -> None:
    if rank == 1:
        return
    for to in ("p1", "p0"):
        for options in ({}, {"dtype": torch.float16}, {"cache_enabled": False}, {"enabled": False}):
            net, local = remote.Module(to, make_mixed, optimizer=ps.SGD(1.0)), make_mixed()
            x, own = batch(0).requires_grad_(), batch(0).requires_grad_()
            with torch.autocast("cpu", **options):
                out, expected = net(x), local(own)
                with torch.autocast("cpu", enabled=False):
                    assert_equal(net(batch(1)), local(batch(1)))
                assert not remote.call(to, autocast_there)  # functions have their own
            assert_equal(out.detach(), expected.detach())
            out.float().square().sum().backward()
            expected.float().square().sum().backward()
            assert_equal(x.grad, own.grad)
            weight_gradients(net, local)
        assert not remote.call(to, autocast_there)


@on_remote_ranks(3)
def test_autocast_goes_on_to_a_module_inside(rank: int) -> None:
    if rank != 0:
        return
    net = remote.Module("p1", make_chain, "p2", 0.1)
    with torch.autocast("cpu"):
        out = net(batch(0))
        assert out.dtype == torch.bfloat16
        inner = remote.Module("p2", make_mlp)(batch(0))
    assert inner.dtype == torch.bfloat16 and net(batch(0)).dtype == torch.float32


@on_remote_ranks(2)
def test_a_sparse_gradient_goes_there_and_back(rank: int) -> None:
    if rank == 1:
        return
    ids = torch.tensor([1, 3, 3])
    for to in ("p1", "p0"):
        net, local = remote.Module(to, make_mlp, optimizer=ps.SGD(1.0)), make_mlp()
        x, own = batch(0).requires_grad_(), batch(0).requires_grad_()
        for module, given in ((net, x), (local, own)):
            table = module(given)
            # Locally the last layer takes no sparse one.
            nn.functional.embedding(ids, table, sparse=module is net).sum().backward()
        assert_equal(x.grad, own.grad)


class Whole(nn.Module):
    """Has layers here and there."""

    def __init__(self, there: nn.Module, further: nn.Module) -> None:
        super().__init__()
        self.here = nn.Linear(6, 6)
        for parameter in self.here.parameters():  # seeds are set by what others call here
            nn.init.ones_(parameter)
        self.there = there
        self.rest = nn.ModuleDict({"further": further})


def whole(to: str | None) -> Whole:
    if to is None:
        return Whole(make_normed(), make_embedding())
    return Whole(remote.Module(to, make_normed), remote.Module(to, make_embedding))


def change(model: nn.Module) -> None:
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@on_remote_ranks(2)
def test_a_checkpoint_has_what_is_elsewhere(rank: int, tmp_path: Path) -> None:
    """Each rank has modules at the other one; rank 0's are saved. A plain model has the same."""
    model = whole(f"p{1 - rank}")
    change(model)
    if rank == 0:
        change(model.there)
    trireme.save_checkpoint(tmp_path / "ours", model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    plain = whole(None)
    trireme.load_checkpoint(tmp_path / "ours", plain)
    assert len(saved) == len(plain.state_dict()) == 10
    if rank == 0:
        assert_equal(dict(plain.state_dict()), saved)
    change(plain)
    trireme.save_checkpoint(tmp_path / "plain", plain)
    trireme.load_checkpoint(tmp_path / "plain", model)
    assert_state(model, plain)
    ddp = trireme.DistributedDataParallel(whole(f"p{rank}"))
    trireme.load_checkpoint(tmp_path / "plain", ddp)
    assert_state(ddp.module, plain)
    del ddp


@on_remote_ranks(2)
def test_a_checkpoint_of_a_pipeline_has_what_is_elsewhere(rank: int, tmp_path: Path) -> None:
    """A pipeline in one process, on each rank; rank 0's is saved. One without it has the same."""

    def layers(first: nn.Module) -> nn.Sequential:
        return nn.Sequential(first, nn.Tanh(), nn.LayerNorm(3))  # alike whatever the seed is

    far, plain = layers(remote.Module(f"p{1 - rank}", make_mlp)), layers(make_mlp())
    pipe = trireme.Pipeline(far, 2, devices=["cpu"] * 2)
    change(pipe)
    if rank == 0:
        change(far[0])
    saved = {name: value.clone() for name, value in far.state_dict().items()}
    trireme.save_checkpoint(tmp_path / "ours", pipe)
    trireme.load_checkpoint(tmp_path / "ours", plain)
    if rank == 0:
        assert_equal(dict(plain.state_dict()), saved)
    change(plain)
    trireme.save_checkpoint(tmp_path / "plain", plain)
    trireme.load_checkpoint(tmp_path / "plain", pipe)
    assert_state(far, plain)
    torch.testing.assert_close(pipe.eval_step(batch(0)), plain(batch(0)))


@on_remote_ranks(2)
def test_a_checkpoint_of_another_module_is_refused(rank: int, tmp_path: Path) -> None:
    model = nn.Sequential(remote.Module("p0", make_mlp))
    trireme.save_checkpoint(tmp_path / "ours", model)
    other = nn.Sequential(remote.Module("p0", make_normed))
    before = dict(other.state_dict())
    with pytest.raises(ValueError, match=r"0\.(1|4|0)"):
        trireme.load_checkpoint(tmp_path / "ours", other)
    assert_equal(dict(other.state_dict()), before)
