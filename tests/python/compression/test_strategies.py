"""Compression under ZeRO 2, fully_shard and HSDP, against numpy."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from trireme import compression as c
from trireme.compression import state_of

from compression.given import SIZES, Given, drawn
from compression.hosts import hosts_of, of_hosts
from compression.reference import Sender, mean_of
from compression.strategies import METHODS, STRATEGIES, Coded, ddp, sharded, shared_folder, zero
from fsdp.grid import NAMES, on_grid
from harness.faults import break_it, raises
from harness.on_ranks import on_ranks, on_shm_and_gloo_ranks
from harness.pretended_hosts import on_hosts, place_of


def numpy_of(gradients: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: value.reshape(-1).numpy() for name, value in gradients.items()}


def check_step(
    coded: Coded, senders: list[dict[str, Sender]], given: list[dict[str, torch.Tensor]], rank: int
) -> None:
    found = coded.averaged(given[rank])
    for name in given[rank]:
        sent = [
            sender[name].send(numpy_of(gradients)[name])
            for sender, gradients in zip(senders, given, strict=True)
        ]
        np.testing.assert_array_equal(found[name], coded.part(name, mean_of(sent)), err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_shm_and_gloo_ranks(2)
def test_equals_numpy(rank: int, strategy: str) -> None:
    """Each rank has its part of the means that DDP has, of whole parameters."""
    for method in METHODS.values():
        coded = STRATEGIES[strategy](method)
        senders = [{name: Sender(method) for name in SIZES} for _ in range(2)]
        for step in range(3):
            check_step(coded, senders, [drawn(step, sender) for sender in range(2)], rank)
        report = coded.holder.last_step()
        sent = sum(method.bytes(size) for size in SIZES.values())
        assert report["sent_bytes"] == pytest.approx(sent, rel=0.02)
        assert report["encode_ms"] > 0 and not report["streamed"]
        kept = state_of(coded.holder)
        assert set(kept) == {f"held.{name}" for name in SIZES if name != "small"}
        for name, residual in kept.items():
            assert (residual.sender, residual.first) == (rank, 0)
            own = senders[rank][name.removeprefix("held.")].residual
            np.testing.assert_array_equal(residual.values.numpy(), own)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks()
def test_unused_frozen_and_accumulated(rank: int, strategy: str) -> None:
    """A rank that leaves a parameter out sends what it kept; nothing is lost if all do. What is
    accumulated is coded once."""
    method = c.Int4(between="ranks")
    coded = STRATEGIES[strategy](method, {"matrix": (37, 61), "tail": (2000,)})
    senders = [Sender(method), Sender(method)]
    for step, using in enumerate([(0, 1), (0,), (), (0, 1), (1,)]):
        given = [drawn(step, sender) for sender in range(2)]
        used = {"matrix": given[rank]["matrix"]}
        if rank in using:
            used["tail"] = given[rank]["tail"]
        coded.zero_grad()
        coded.net(used).backward()
        if not using:
            assert coded.model.held["tail"].grad is None
            continue
        zeros = np.zeros(2000, np.float32)
        tails = [given[s]["tail"].numpy() if s in using else zeros for s in range(2)]
        expected = mean_of([senders[s].send(tails[s]) for s in range(2)])
        found = coded.gradients(["tail"])["tail"]
        np.testing.assert_array_equal(found, coded.part("tail", expected))
    coded = STRATEGIES[strategy](method, {"tail": (2000,)})
    with coded.accumulating():
        coded.net({"tail": drawn(0, rank)["tail"]}).backward()
    coded.net({"tail": drawn(1, rank)["tail"]}).backward()
    whole = [drawn(0, sender)["tail"] + drawn(1, sender)["tail"] for sender in range(2)]
    expected = mean_of([Sender(method).send(values.numpy()) for values in whole])
    found = coded.gradients(["tail"])["tail"]
    np.testing.assert_array_equal(found, coded.part("tail", expected))


SAVED = {
    "int8, stochastic": c.Int8(rounding="stochastic", between="ranks"),
    "top 1 %": c.TopK(0.01, between="ranks"),
    "low rank": c.PowerSGD(2, start_step=2, between="ranks"),
}
BIG = {"matrix": (37, 61), "tail": (2000,), "small": (1000,), "big": (66_000,)}


def random(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(size, generator=generator) for name, size in BIG.items()}


def assert_goes_on(make: Any, rank: int, folder: Path, steps: int = 3) -> None:
    first, second = make(), make()
    for step in range(steps):
        first.averaged(random(step, rank))
    pending = trireme.save_checkpoint(folder, first.net, first.optimizer, asynchronous=True)
    all_expected = [first.averaged(random(step, rank)) for step in range(steps, steps + 2)]
    pending.wait()
    trireme.load_checkpoint(folder, second.net, second.optimizer)
    for step, expected in enumerate(all_expected, start=steps):
        found = second.averaged(random(step, rank))
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks()
def test_goes_on_bit_for_bit(rank: int, strategy: str, tmp_path: Path) -> None:
    for name, method in SAVED.items():
        make = partial(STRATEGIES[strategy], method, BIG)
        assert_goes_on(make, rank, tmp_path / name)


@on_ranks()
def test_another_strategy_goes_on(rank: int, tmp_path: Path) -> None:
    """Residuals belong to sender and parameter, whoever steps it."""
    method = c.Sign(between="ranks")
    first = sharded(method, BIG)
    for step in range(2):
        first.averaged(random(step, rank))
    trireme.save_checkpoint(tmp_path / "saved", first.model)
    other = ddp(method, BIG)
    trireme.load_checkpoint(tmp_path / "saved", other.net)
    found = other.averaged(random(2, rank))
    for name, values in first.averaged(random(2, rank)).items():
        np.testing.assert_array_equal(first.part(name, found[name]), values)


def of_replicas(rank: int, mesh: DeviceMesh) -> None:
    """A sender is who has the same shard; its blocks begin at the first element of that."""
    sizes = {"matrix": (53, 61), "tail": (5000,), "mostly small": (2040,)}
    for method in METHODS.values():
        coded = sharded(method, sizes, mesh=mesh)
        senders = [{name: Sender(method) for name in sizes} for _ in range(2)]
        for step in range(3):
            given = [hybrid(sizes, step, one) for one in range(4)]
            found = coded.averaged(given[rank])
            for name in sizes:
                sent = []
                for replica, sender in enumerate(senders):
                    mean = (given[2 * replica][name] + given[2 * replica + 1][name]) / 2
                    shard = coded.part(name, mean.reshape(-1).numpy())
                    sent.append(sender[name].send(shard))
                expected = mean_of(sent)
                np.testing.assert_array_equal(found[name], expected, err_msg=name)
        rows = 27 if rank % 2 == 0 else 26
        largest = {"matrix": (rows, 61), "tail": (2500,), "mostly small": (1020,)}
        count = sum(method.bytes(size) for size in largest.values())
        assert coded.holder.last_step()["sent_bytes"] == pytest.approx(count, rel=0.02)
        kept = state_of(coded.model)["held.matrix"]
        assert (kept.sender, kept.first) == (rank // 2, 0 if rank % 2 == 0 else 27 * 61)


def hybrid(sizes: dict[str, tuple[int, ...]], step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def replicas_go_on(rank: int, mesh: DeviceMesh) -> None:
    along_last: dict[str, Any] = {"shard_placement_fn": lambda param: Shard(max(param.ndim - 1, 0))}
    sizes = {"matrix": (64, 61), "tail": (3000,), "big": (140_000,)}
    with shared_folder(rank) as folder:
        for options in ({}, along_last):
            for name, method in SAVED.items():
                first, second = (sharded(method, sizes, mesh=mesh, **options) for _ in range(2))
                for step in range(3):
                    first.averaged(hybrid(sizes, step, rank))
                trireme.save_checkpoint(folder / name, first.model)
                trireme.load_checkpoint(folder / name, second.model)
                for step in range(3, 5):
                    given = hybrid(sizes, step, rank)
                    expected, found = first.averaged(given), second.averaged(given)
                    for key, values in expected.items():
                        np.testing.assert_array_equal(found[key], values, err_msg=key)


@pytest.mark.parametrize("backend", ["gloo", "trireme"])
def test_replicas_of_shards(backend: str) -> None:
    on_grid(backend, of_replicas, replicas_go_on)


def between_hosts(rank: int, world: int, layout: str, strategy: str) -> None:
    for method in (c.Int8(block=33), c.TopK(0.05, chunk=128)):
        coded = STRATEGIES[strategy](method)
        senders = [{name: Sender(method) for name in SIZES} for _ in hosts_of(layout)]
        for step in range(3):
            found = coded.averaged(drawn(step, rank))
            for name, values in found.items():
                inputs = of_hosts(layout, step, name)
                sent = [senders[host][name].send(inputs[host]) for host in range(len(inputs))]
                np.testing.assert_array_equal(values, coded.part(name, mean_of(sent)))


@pytest.mark.parametrize(("layout", "strategy"), [("2x2", "fully_shard"), ("1+3", "zero 2")])
def test_between_hosts(layout: str, strategy: str) -> None:
    """Hosts send, whichever ranks have the shards."""
    on_hosts(layout, between_hosts, layout, strategy)


def replicas_between_hosts(rank: int, world: int, layout: str) -> None:
    """Of one shard each, replicas of a host send together, as under DDP."""
    method = c.Int8(block=33)
    made_anew = partial(dist.new_group, pg_options=place_of(rank, layout))
    with patch.object(dist, "new_group", made_anew):
        coded = sharded(method, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=NAMES))
    senders = [{name: Sender(method) for name in SIZES} for _ in hosts_of(layout)]
    for step in range(3):
        found = coded.averaged(drawn(step, rank))
        for name, values in found.items():
            inputs = of_hosts(layout, step, name)
            sent = [senders[host][name].send(inputs[host]) for host in range(len(inputs))]
            np.testing.assert_allclose(values, mean_of(sent), rtol=0, atol=1e-38)


@pytest.mark.parametrize("layout", ["2x2", "1+3"])
def test_replicas_between_hosts(layout: str) -> None:
    on_hosts(layout, replicas_between_hosts, layout)


@on_ranks()
def test_what_is_refused(rank: int) -> None:
    """On all ranks alike."""
    int8, sign = c.Int8(between="ranks"), c.Sign(between="ranks")
    mine = (int8, sign)[rank]
    for make in (sharded, zero):
        with raises(ValueError, "Int8(", "Sign(", "rank 1"):
            make(mine)
        with raises(TypeError, "str", "trireme.compression"):
            make("int8")
    model = Given(SIZES)
    with raises(ValueError, "compression", "stage 1", "DistributedDataParallel"):
        trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, compression=int8
        )
    model = nn.Sequential(trireme.fully_shard(nn.Linear(4, 4), compression=sign), nn.Linear(4, 4))
    trireme.fully_shard(model, compression=int8)
    with raises(ValueError, "Sign(", "Int8(", "Sequential"):
        model(torch.ones(1, 4))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)["shard"]
    model = nn.Sequential(trireme.fully_shard(nn.Linear(4, 4), mesh=alone), nn.Linear(4, 4))
    trireme.fully_shard(model, compression=int8)
    with raises(NotImplementedError, "compression", "several meshes"):
        model(torch.ones(1, 4))
    inner = trireme.DistributedDataParallel(nn.Linear(4, 4), compression=sign)
    for outer in (None, int8):
        with raises(ValueError, "compression", "Sign(", "inside"):
            trireme.DistributedDataParallel(nn.Sequential(inner), compression=outer)


@on_ranks()
def test_sparse_gradients(rank: int) -> None:
    """Refused when a layer is seen to make them; else in the first backward, naming the same."""
    int8 = c.Int8(between="ranks")
    rows = nn.Sequential(nn.Embedding(2048, 2, sparse=True))
    with raises(ValueError, "sparse", "'0.weight'"):
        trireme.fully_shard(rows, compression=int8)
    optimizer = trireme.ZeroRedundancyOptimizer(
        rows.named_parameters(), torch.optim.SGD, stage=2, compression=int8, lr=0.1
    )
    with raises((ValueError, dist.DistBackendError), "sparse", "'0.weight'"):
        rows(torch.tensor([rank])).sum().backward()
    assert state_of(optimizer) == {}


@on_ranks(backend="trireme")
def test_an_abandoned_backward_loses_nothing(rank: int) -> None:
    """What was kept is as before, though codes of a bucket had left."""
    sizes = {"tail": (2000,), "other": (1500,)}
    coded = ddp(c.Sign(between="ranks"), sizes, bucket_cap_mb=0.001)
    for step in range(2):
        coded.averaged(hybrid(sizes, step, rank))
    before = {name: kept.values.clone() for name, kept in state_of(coded.net).items()}
    if rank == 1:
        hook = coded.model.held["tail"].register_hook(break_it)
    with pytest.raises((ArithmeticError, dist.DistBackendError), match="data of this rank"):
        coded.averaged(hybrid(sizes, 2, rank))
    if rank == 1:
        hook.remove()
    for name, kept in state_of(coded.net).items():
        assert torch.equal(kept.values, before[name]), name
    assert np.isfinite(coded.averaged(hybrid(sizes, 3, rank))["tail"]).all()
