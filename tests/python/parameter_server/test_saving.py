"""Servers in checkpoints: saved under any workers and servers, loaded under any other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from trireme import ps

from harness.faults import kill_this_rank, raises
from harness.meeting import process_of, state_of, until
from harness.on_ranks import AGES_S, on_shm_ranks
from harness.ranks import run_ranks
from parameter_server.training import NOWHERE, net, seen_by, tables, train


@contextlib.contextmanager
def shm_group() -> Iterator[None]:
    dist.init_process_group("trireme")
    yield
    dist.destroy_process_group()


def run(rank: int, path: str, case: dict[str, Any]) -> list[torch.Tensor] | None:
    """Trains 8 clocks, and saves in the middle; or begins in the middle with what was saved."""
    with shm_group():
        model = net()
        with ps.ParameterServer(
            tables(model, case["dense"](), case["rows"]()),
            mode=case["mode"],
            servers=case["servers"],
        ) as server:
            if case["loads"]:
                if server.worker is not None:
                    server["items"].pull(torch.tensor([77]))  # forgotten by load()
                server.load(path)
            if server.worker is None:
                server.serve()
                return None
            if not case["loads"]:
                train(server, model, range(4))
                server.save(path)
            train(server, model, range(4, 8))
            return seen_by(server, model)


def adamw() -> Any:
    return ps.AdamW(0.01)


def momentum() -> Any:
    return ps.SGD(0.1, momentum=0.9)


def rowwise() -> Any:
    return ps.RowwiseAdagrad(0.1)


def adagrad() -> Any:
    return ps.Adagrad(0.1)


@pytest.mark.parametrize("mode", ["bsp", "ssp"])
@pytest.mark.parametrize(
    ("dense", "rows", "before", "after"),
    [
        (adamw, adamw, (2, 0), (3, 1)),
        (momentum, rowwise, (3, 1), (1, 0)),
        (adagrad, momentum, (1, 0), (2, 0)),
    ],
)
def test_goes_on_bit_for_bit(
    tmp_path: Path, mode: str, dense: Any, rows: Any, before: tuple[int, int], after: Any
) -> None:
    path = str(tmp_path / "checkpoint")
    case = {"mode": mode, "dense": dense, "rows": rows}
    found = [
        run_ranks(run, world, path, {**case, "world": world, "servers": servers, "loads": loads})
        for loads, (world, servers) in ((False, before), (True, after))
    ]
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, two)


def save_for_others(rank: int, path: str) -> None:
    with shm_group():
        model = net()
        with ps.ParameterServer(tables(model, ps.AdamW(0.01), ps.Sum())) as server:
            for clock in range(3):
                server["net"].pull()
                model(torch.full((4, 6), 1.0 + clock)).square().mean().backward()
                server["net"].push()
                server["items"].push(torch.tensor([clock]), torch.ones(1, 3))
                server.clock()
            server.save(path)
            server["net"].pull()
            if rank == 0:
                torch.save(model.eval()(torch.ones(2, 6)), path + ".values")
            dist.barrier()


def load_into_others(rank: int, path: str) -> None:
    with shm_group():
        expected = torch.load(path + ".values")
        for wrap in (trireme.DistributedDataParallel, trireme.fully_shard):
            model = net()
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
            model = wrap(model)
            trireme.load_checkpoint(path, model)
            torch.testing.assert_close(model.eval()(torch.ones(2, 6)), expected)


def test_other_strategies_load_a_dense_table(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save_for_others, 2, path)
    run_ranks(load_into_others, 2, path)
    said = json.loads((tmp_path / "checkpoint" / "extra.json").read_text())["parameter_server"]
    assert said["items"]["rows"] == "rows of 3 float32, Normal(std=1), seed=0"
    index = json.loads((tmp_path / "checkpoint" / "tables.safetensors.index.json").read_text())
    names = {"items.ids", "items.rows", "items.steps", "net.0.weight.exp_avg", "net.lr"}
    assert names <= set(index["weight_map"])


def push_load_and_clock(rank: int, path: str) -> None:
    """Gradients of the clock in which load() is called are forgotten, not pushed to other rows."""
    with shm_group():
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        tables = [
            ps.Dense("net", model, optimizer=ps.SGD(1.0)),
            ps.Sparse("items", 2, optimizer=ps.SGD(1.0)),
        ]
        with ps.ParameterServer(tables) as server:
            server["items"].push(torch.tensor([rank, 7]), torch.ones(2, 2))
            server.clock()
            server.save(path)
            for _ in range(2):
                server["net"].pull()
                model.weight.grad = torch.ones(2, 2)
                server["net"].push()
                server["items"].push(torch.tensor([40 + rank, 7]), torch.ones(2, 2))
                server.load(path)
                server.clock()
                server["net"].pull()
                assert torch.equal(model.weight, torch.zeros(2, 2))
                assert server["items"].ids().tolist() == [0, 1, 7]
                rows = server["items"].pull(torch.tensor([0, 1, 7]))
                assert rows[:, 0].tolist() == [-0.5, -0.5, -1]
                dist.barrier()
            assert server.stats()["rows"] == 3


def test_a_load_drops_what_was_pushed(tmp_path: Path) -> None:
    run_ranks(push_load_and_clock, 2, str(tmp_path / "checkpoint"))


@on_shm_ranks(2, timeout=60)
def test_a_worker_that_missed_a_save_comes_to_the_next(rank: int) -> None:
    """It does not take part in the one that it missed, and what one could not do nobody has."""
    with ps.ParameterServer([small()], mode="async", timeout=2) as server:
        if rank == 1:
            with raises(dist.DistBackendError, "save at clock 0: worker 0", "has not come within"):
                server.save(NOWHERE)
        dist.barrier()
        if rank == 0:
            with raises(RuntimeError, "[saving] ", "/proc/nowhere"):
                server.save(NOWHERE)
        else:
            with raises(dist.DistBackendError, "worker 0", "could not: [saving]"):
                server.save(NOWHERE)


# --- mistakes and faults -------------------------------------------------------------------------


def small(**options: Any) -> ps.Sparse:
    return ps.Sparse("items", 2, **{"optimizer": ps.Sum(), **options})


def load_into_other_tables(rank: int, path: str) -> None:
    with shm_group():
        with ps.ParameterServer([small()]) as server:
            server["items"].push(torch.tensor([1]), torch.ones(1, 2))
            server.clock()
            server.save(path)
            dist.barrier()
        for table, text in (
            (small(init=ps.Normal(1.0)), "Normal(std=1)"),
            (ps.Sparse("items", 3, optimizer=ps.Sum()), "rows of 3 float32"),
            (small(optimizer=ps.Adam()), "Adam(beta1=0.9"),
            (ps.Sparse("users", 2, optimizer=ps.Sum()), "without table 'users'"),
            (ps.Dense("items", {"x": torch.zeros(1)}, optimizer=ps.Sum()), "dense"),
        ):
            with ps.ParameterServer([table]) as server:
                # On worker 0 its own error comes out, on the others one that names it.
                with raises(ValueError, "load: got a checkpoint", text):
                    server.load(path)
                dist.barrier()
        with ps.ParameterServer([small()]) as server:
            if rank == 0:
                server.clock()
            with raises(ValueError, "load: got worker 1", "at clock 0, expected clock 1"):
                server.load(path)
            dist.barrier()


def test_a_checkpoint_of_other_tables(tmp_path: Path) -> None:
    run_ranks(load_into_other_tables, 2, str(tmp_path / "checkpoint"))


@on_shm_ranks(2, timeout=60)
def test_a_save_that_cannot_be(rank: int) -> None:
    """It is told on all workers, and training goes on."""
    with ps.ParameterServer([small()]) as server:
        for clock in range(2):
            if rank == 0:
                with raises(RuntimeError, "[saving] ", "/proc/nowhere"):
                    server.save(NOWHERE)
            else:
                text = f"[ps] save at clock {clock}: worker 0 (rank 0, process"
                with raises(dist.DistBackendError, text, "could not: [saving]"):
                    server.save(NOWHERE)
            server.clock()
            server["items"].pull(torch.tensor([1]))
        dist.barrier()
        if rank == 0:
            server.clock()
        with raises(ValueError, "[ps] save at clock", "expected all workers at one clock"):
            server.save(NOWHERE)
        dist.barrier()


@on_shm_ranks(2, timeout=40, patience_s=AGES_S, dying=[1])
def test_a_worker_dies_before_a_save(rank: int) -> None:
    server = ps.ParameterServer([small()])
    if rank == 1:
        kill_this_rank()
    until(lambda: state_of(process_of(1)) == "Z")
    with raises(dist.DistBackendError, "[ps] save at clock 0: worker 1 (rank 1", "has died"):
        server.save(NOWHERE)
