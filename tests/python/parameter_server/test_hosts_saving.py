"""Checkpoints of a server over hosts: they are those of one host, and load under any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from safetensors.torch import load_file
from torch import Tensor, nn
from trireme import ps

from harness.faults import raises
from harness.pretended_hosts import on_hosts
from harness.tensors import assert_lists
from parameter_server.hosts import (
    ONE_HOST,
    OPTIMIZERS,
    Run,
    Tables,
    assert_same,
    digest,
    has_all,
    made,
    meet,
    push_ones,
    rates,
    work,
)
from parameter_server.training import NOWHERE, net, seen_by, tables, train

SGD = ps.SGD(0.25)


# The optimizers of a case: of the module, and of the rows.
ADAMW = ("adamw", "adamw")


def tables_by(model: nn.Module, optimizers: tuple[str, str]) -> Tables:
    return tables(model, *(OPTIMIZERS[name] for name in optimizers))


def train_and_save(
    rank: int, world: int, layout: str, path: str, optimizers: tuple[str, str], mode: str
) -> list[Tensor] | None:
    """Trains 8 clocks, and saves in the middle."""
    model = net()
    with made(layout, tables_by(model, optimizers), mode=mode) as server:
        if server.worker is None:
            return server.serve()
        train(server, model, range(4))
        server.save(path)
        train(server, model, range(4, 8))
        return seen_by(server, model) if server.worker == 0 else None


def load_and_train(
    rank: int, world: int, layout: str, path: str, optimizers: tuple[str, str], mode: str
) -> list[Tensor] | None:
    """Begins in the middle, with what was saved."""
    model = net()
    nn.init.zeros_(model[0].weight)
    with made(layout, tables_by(model, optimizers), mode=mode) as server:
        server.load(path)
        if server.worker is None:
            return server.serve()
        train(server, model, range(4, 8))
        return seen_by(server, model) if server.worker == 0 else None


def of_worker_0(layout: str, program: Callable[..., Any], *args: Any) -> list[Tensor]:
    results = [result for result in on_hosts(layout, program, layout, *args) if result is not None]
    assert len(results) == 1
    return results[0]


def content_of(path: str) -> dict[str, Any]:
    """What the files hold, by file and name; rows by their ids."""
    found: dict[str, Any] = {}
    for file in sorted(Path(path).iterdir()):
        if file.suffix == ".json":
            found[file.name] = json.loads(file.read_text())
            found[file.name].get("metadata", {}).pop("trireme", None)  # the name of this save
            continue
        tensors = load_file(file)
        order = tensors.get("items.ids", torch.zeros(0)).argsort()
        for name, tensor in tensors.items():
            is_by_row = name.startswith("items.") and tensor.ndim > 0 and len(tensor) == len(order)
            found[f"{file.name} {name}"] = digest(tensor[order] if is_by_row else tensor)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Tensor]]:
    """A checkpoint of one host, and what its workers saw in the end."""
    path = str(tmp_path_factory.mktemp("one_host") / "checkpoint")
    return path, of_worker_0(ONE_HOST, train_and_save, path, ADAMW, "bsp")


@pytest.mark.parametrize(("layout", "after"), [("2+3", ONE_HOST), ("2+2+2", "3+2 apart")])
def test_files_are_those_of_one_host(
    layout: str, after: str, saved: tuple[str, list[Tensor]], tmp_path: Path
) -> None:
    """They load into servers of any hosts, and into plain modules."""
    path, case = str(tmp_path / "checkpoint"), (ADAMW, "bsp")
    of_one_host, expected = saved
    assert_lists(of_worker_0(layout, train_and_save, path, *case), expected)
    assert_same(content_of(path), content_of(of_one_host))
    assert_lists(of_worker_0(after, load_and_train, path, *case), expected)
    models = [net(), net()]
    for model, folder in zip(models, (path, of_one_host), strict=True):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        trireme.load_checkpoint(folder, model)
    assert_lists(*(list(model.state_dict().values()) for model in models))


@pytest.mark.parametrize("layout", ["3+3", "1+4"])
def test_what_one_host_saved_goes_on(layout: str, saved: tuple[str, list[Tensor]]) -> None:
    path, expected = saved
    assert_lists(of_worker_0(layout, load_and_train, path, ADAMW, "bsp"), expected)


def test_goes_on_under_ssp(tmp_path: Path) -> None:
    """Workers need not be at one clock to save."""
    case = (str(tmp_path / "checkpoint"), ("momentum", "rowwise"), "ssp")
    expected = of_worker_0("2+3", train_and_save, *case)
    assert_lists(of_worker_0("2+2+2", load_and_train, *case), expected)


def push_rows(server: ps.ParameterServer) -> None:
    server["items"].push(torch.arange(9), torch.ones(9, 3))


def loads_that_cannot_be(rank: int, world: int, layout: str, path: str) -> None:
    """A server that somebody has used loads nothing, and goes on."""
    for use in (push_rows, ps.ParameterServer.clock):
        model = net()
        with made(layout, tables_by(model, ADAMW)) as server:
            if server.worker == 2:
                use(server)
            text = "expected a server that nobody has used yet"
            with raises(ValueError, "[ps] ", "load: got ", text):
                server.load(path)
            if server.worker is None:
                server.serve()
            else:
                train(server, model, range(1))
    with made(layout, [ps.Sparse("items", 2, optimizer=SGD)]) as server:
        with raises(ValueError, "load: got a checkpoint"):
            server.load(path)
        if server.worker is None:
            server.serve()


def test_loads_that_cannot_be(saved: tuple[str, list[Tensor]]) -> None:
    on_hosts("2+3", loads_that_cannot_be, "2+3", saved[0])


def saves_that_cannot_be(server: ps.ParameterServer) -> None:
    """All workers are told, on all hosts, and training goes on."""
    for clock in range(2):
        if server.worker == 0:
            with raises(RuntimeError, "[saving] ", "/proc/nowhere"):
                server.save(NOWHERE)
        else:
            text = f"[ps] save at clock {clock}: worker 0 (rank 0, process"
            with raises(dist.DistBackendError, text, "could not: [saving]"):
                server.save(NOWHERE)
        push_ones(server)
        server.clock()
        assert has_all(server, -1.0 - clock)
    meet(server, "goes on")
    if server.worker == 0:
        server.clock()
    with raises(ValueError, "[ps] save at clock", "expected all workers at one clock"):
        server.save(NOWHERE)
    meet(server, "has been told")


def test_saves_that_cannot_be() -> None:
    work("2+3", Run(rates, saves_that_cannot_be))
