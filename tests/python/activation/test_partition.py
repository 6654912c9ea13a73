"""checkpoint(partition=...): ranks keep equal inputs once, with the bits of a plain call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import GroupMember
from trireme._activation.partition import packer_of

from harness.faults import RANKLESS_FORM, kill_this_rank, message_of, raises
from harness.meeting import say, set_timeout, stay_until
from harness.on_ranks import AGES_S, Wrapped, on_ranks, run_program, signature_without_rank
from harness.ranks import run_ranks

ROWS, WIDTH, BLOCKS = 32, 64, 4
BYTES = ROWS * WIDTH * 4  # an input has so many


def on_both_engines(
    world: int = 2, *, dying: Collection[int] = (), patience_s: float = 30, timeout: float = 60
) -> Any:
    """Runs the decorated test over shared memory, and over an engine that has none."""

    def decorate(program: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("engine", ["trireme", "gloo"])
        @functools.wraps(program)
        def test(engine: str, **case: Any) -> None:
            place = (Wrapped(program), engine, patience_s, None)
            case["engine"] = engine
            run_ranks(run_program, world, *place, case, timeout=timeout, dying=dying)

        test.__signature__ = signature_without_rank(program)  # type: ignore[attr-defined]
        return test

    return decorate


def blocks() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(BLOCKS)
    )


def inputs(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def forward(net: nn.ModuleList, x: torch.Tensor, partition: Any = None) -> torch.Tensor:
    torch.manual_seed(11)
    for block in net:
        x = block(x) if partition is None else trireme.checkpoint(block, x, partition=partition)
    return x.square().sum()


def train(step: int, partition: Any = None) -> list[torch.Tensor]:
    net = blocks()
    loss = forward(net, inputs(step), partition)
    loss.backward()
    return [loss.detach(), torch.rand(2), *(p.grad for p in net.parameters())]


def assert_plain(step: int, partition: Any) -> None:
    torch.testing.assert_close(train(step, partition), train(step), rtol=0, atol=0)


@on_both_engines(3)
def test_bits_and_memory(rank: int, engine: str) -> None:
    packer = packer_of(dist.group.WORLD)
    hosts = set()
    for step in range(3):
        net = blocks()
        loss = forward(net, inputs(step), dist.group.WORLD)
        kept = packer.memory
        assert kept.inputs == BLOCKS * BYTES
        shares = engine == "trireme"
        assert kept.shared == (kept.inputs if shares else 0)
        assert kept.slices == (0 if shares else BLOCKS * 4 * -(-ROWS * WIDTH // 3))
        assert (kept.host >= kept.shared) if shares else (kept.host == 0)
        hosts.add(kept.host)
        loss.backward()
        assert packer.memory.inputs == 0
        assert_plain(step, dist.group.WORLD)
    assert len(hosts) == 1


@on_both_engines()
def test_a_batch_per_rank_has_nothing_in_common(rank: int, engine: str) -> None:
    net = blocks()
    said = ("input 0 of Sequential (Float[32, 64]) differs between ranks of partition=",)
    with raises(ValueError, *said, "rank 1 has other values", "under data parallelism alone"):
        forward(net, inputs(rank), dist.group.WORLD)
    assert_plain(0, dist.group.WORLD)


@on_both_engines()
def test_ranks_that_checkpoint_other_things(rank: int, engine: str) -> None:
    def double(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return value * 2

    def triple(value: torch.Tensor) -> torch.Tensor:
        return value * 3

    x = inputs(0).requires_grad_() * 1
    one = (double, x)
    for other in ((double, x[:16]), (double, x.double()), (double, x, x), (triple, x)):
        with raises(ValueError, "ranks of partition= do different things: rank 0 checkpoints"):
            trireme.checkpoint(*(other if rank else one), partition=dist.group.WORLD)
    assert_plain(0, dist.group.WORLD)


@on_both_engines()
def test_what_stays_as_it_is(rank: int, engine: str) -> None:
    """Parameters and small tensors are a rank's own; a tensor that comes again is kept once."""
    weight = nn.Parameter(inputs(rank))
    small = torch.full((4,), float(rank))
    mask = inputs(7)
    seen = []

    def function(x: torch.Tensor, own: dict[str, torch.Tensor], *, mask: torch.Tensor) -> Any:
        seen.append(own["weight"] is weight and own["small"] is small)
        return x.tanh() * mask, (x * own["weight"]).sum() * own["small"][0]

    x, of_rank = inputs(1), []
    for _ in range(2):
        own = {"weight": weight, "small": small}
        x, one = trireme.checkpoint(function, x, own, mask=mask, partition=dist.group.WORLD)
        of_rank.append(one)
    assert packer_of(dist.group.WORLD).memory.inputs == 3 * BYTES
    sum(of_rank).backward()
    assert seen == [True] * 4
    assert weight.grad is not None


@on_both_engines()
def test_an_input_changed_in_place(rank: int, engine: str) -> None:
    x = inputs(0).requires_grad_() * 1
    out = trireme.checkpoint(torch.exp, x, partition=dist.group.WORLD)
    with torch.no_grad():
        x.add_(1)
    said = ("modified by an inplace operation: input 0 of", "is at version 1, expected version 0")
    with raises(RuntimeError, *said):
        out.sum().backward()
    assert_plain(0, dist.group.WORLD)


@on_both_engines()
def test_nesting_and_several_backwards(rank: int, engine: str) -> None:
    net = blocks()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return forward(net, x, dist.group.WORLD)

    loss = trireme.checkpoint(outer, inputs(0), partition=dist.group.WORLD)
    for _ in range(2):
        for p in net.parameters():
            p.grad = None
        loss.backward(retain_graph=True)
        grads = [p.grad for p in net.parameters()]
        torch.testing.assert_close(grads, train(0)[2:], rtol=0, atol=0)


@on_both_engines()
def test_backwards_in_another_order(rank: int, engine: str) -> None:
    nets = [blocks(), blocks()]
    losses = [forward(net, inputs(0), dist.group.WORLD) for net in nets]
    order = [0, 1] if rank == 0 else [1, 0]
    if engine == "gloo":
        with raises(ValueError, "do different things: rank 0 recomputes from input 0 of"):
            losses[order[0]].backward()
    else:
        for index in order:
            losses[index].backward()
            grads = [p.grad for p in nets[index].parameters()]
            torch.testing.assert_close(grads, train(0)[2:], rtol=0, atol=0)


@on_both_engines()
def test_graphs_without_a_backward(rank: int, engine: str) -> None:
    """One rank drops its graph at once, the other one later."""
    packer = packer_of(dist.group.WORLD)
    kept = []
    for step in range(6):
        loss = forward(blocks(), inputs(step), dist.group.WORLD)
        if rank == 0 and step < 3:
            kept.append(loss)
    del loss
    assert packer.memory.inputs == (3 * BLOCKS * BYTES if rank == 0 else 0)
    kept.clear()
    assert packer.memory.inputs == 0
    assert_plain(0, dist.group.WORLD)


@on_both_engines()
def test_a_function_that_raises(rank: int, engine: str) -> None:
    """On all ranks, then on one: the other one hears at the next checkpoint."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("broken")

    x = inputs(0).requires_grad_() * 1
    with pytest.raises(ArithmeticError, match="broken"):
        trireme.checkpoint(broken, x, partition=dist.group.WORLD)
    assert_plain(0, dist.group.WORLD)
    fails = rank == 1

    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return broken(x) if fails else x * 2

    if fails:
        with pytest.raises(ArithmeticError, match="broken"):
            trireme.checkpoint(sometimes, x, partition=dist.group.WORLD)
    else:
        trireme.checkpoint(sometimes, x, partition=dist.group.WORLD)
    with raises(ValueError, "rank 0 checkpoints", "rank 1 checkpoints"):
        trireme.checkpoint(torch.exp if fails else torch.sin, x, partition=dist.group.WORLD)
    assert_plain(1, dist.group.WORLD)


@on_both_engines(4)
def test_dimensions_of_a_mesh(rank: int, engine: str) -> None:
    """Ranks of tp have a batch in common, those of dp have not; two groups may take turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with raises(ValueError, "got a mesh of 2 dimensions", form=RANKLESS_FORM):
        trireme.checkpoint(torch.exp, inputs(0), partition=mesh)
    assert_plain(rank // 2, mesh["tp"])
    assert_plain(rank // 2, mesh["tp"].get_group())
    with raises(ValueError, "differs between ranks of partition="):
        train(rank // 2, mesh["dp"])
    losses = [
        forward(blocks(), inputs(rank // 2), mesh["tp"]),
        forward(blocks(), inputs(5), dist.group.WORLD),
    ]
    for loss in losses:
        loss.backward()
    assert packer_of(mesh["tp"]).memory.inputs == 0


@on_both_engines()
def test_groups_that_do_not_fit(rank: int, engine: str) -> None:
    alone = [dist.new_group([0]), dist.new_group([1])]
    assert_plain(rank, alone[rank])
    assert packer_of(alone[rank]).memory.inputs == 0
    assert alone[1 - rank] is GroupMember.NON_GROUP_MEMBER
    said = "got a process group without rank"
    with raises(ValueError, said, form=RANKLESS_FORM):
        trireme.checkpoint(torch.exp, inputs(0), partition=alone[1 - rank])
    with raises(TypeError, "got int as partition=", form=RANKLESS_FORM):
        trireme.checkpoint(torch.exp, inputs(0), partition=3)


@on_both_engines(dying=(1,), patience_s=AGES_S, timeout=40)
def test_a_killed_rank(rank: int, engine: str) -> None:
    """The other one hears long before the timeout of the group. What is shared is still its own."""
    net = blocks()
    loss = forward(net, inputs(0), dist.group.WORLD)
    if rank == 1:
        kill_this_rank()
    if engine == "trireme":
        loss.backward()
        grads = [p.grad for p in net.parameters()]
        torch.testing.assert_close(grads, train(0)[2:], rtol=0, atol=0)
    else:
        with raises(dist.DistBackendError, "(rank 0 of 2)", "partition="):
            loss.backward()
    with raises(dist.DistBackendError, "(rank 0 of 2)", "partition="):
        train(1, dist.group.WORLD)


@on_both_engines(timeout=40, patience_s=AGES_S)
def test_a_rank_that_does_not_come(rank: int, engine: str) -> None:
    dist.barrier()
    set_timeout(4)  # the packer's own group takes it over
    assert_plain(0, dist.group.WORLD)
    if rank == 1:
        return stay_until("done")
    with raises(dist.DistBackendError, "(rank 0 of 2)"):
        train(1, dist.group.WORLD)
    say("done")


@on_ranks(backend="trireme", fresh=True)
def test_a_forked_child(rank: int) -> None:
    """In fresh ranks: autograd refuses children once a deep backward has started threads."""
    x = inputs(0).requires_grad_() * 1
    out = trireme.checkpoint(torch.exp, x, partition=dist.group.WORLD)
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: torch.autograd.grad(out.sum(), x),
            lambda: trireme.checkpoint(torch.exp, x, partition=dist.group.WORLD),
        ):
            try:
                call()
            except RuntimeError as error:
                said.append("in a forked child" in message_of(error))
        os._exit(0 if said == [True, True] else 1)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], x.exp(), rtol=0, atol=0)
    assert_plain(1, dist.group.WORLD)
