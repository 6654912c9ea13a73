"""Servers over hosts that are pretended: who serves where, and what workers do there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trireme import ps

from harness.faults import message_of
from harness.meeting import say, stay_until
from harness.on_ranks import AGES_S
from harness.pretended_hosts import LAYOUTS, join
from harness.ranks import run_ranks
from harness.tensors import bits

Tables = list[ps.Dense | ps.Sparse]

WORKERS = 3
ONE_HOST = "4"
# Says by layout which ranks serve; the others are three workers.
SERVERS: dict[str, int | list[int]] = {
    ONE_HOST: [3],
    "2+3": [1, 4],
    "3+2 apart": 2,
    "1+4": [0, 4],  # one host has no worker
    "3+3": [1, 2, 5],  # one host has two servers, for a worker each
    "2+2+2": [1, 3, 5],
}
SEVERAL_HOSTS = tuple(layout for layout in SERVERS if layout != ONE_HOST)


class Abandoned(Exception):
    """Ends a program that leaves its server by an exception."""


@dataclass
class Run:
    """One server from its first call to its last: its tables, and the program of its workers.

    ``tables`` is called with the number of the worker, which is None on a rank that serves.
    """

    tables: Callable[[int | None], Tables]
    program: Callable[..., Any]
    args: Sequence[Any] = ()
    options: dict[str, Any] = field(default_factory=dict)
    serves_after: Sequence[str] = ()  # words that workers say before


@dataclass
class Served:
    """What a rank that serves knows when serve() has ended."""

    error: str | None
    clocks: list[int]
    left: list[int]
    lost: list[int]


def made(layout: str, tables: Tables, **options: Any) -> ps.ParameterServer:
    return ps.ParameterServer(tables, servers=SERVERS[layout], **options)


def work(layout: str, *runs: Run, timeout: float = 60) -> list[list[Any]]:
    """Makes one server after the other; returns by run what the workers return, by number."""
    found = []
    for results in zip(*_on_ranks(layout, runs, timeout=timeout), strict=True):
        for result in results:
            if isinstance(result, Served):
                assert result.error is None and result.lost == [], result
                assert result.left == list(range(WORKERS)), result
        found.append([result for result in results if not isinstance(result, Served)])
    return found


def survive(layout: str, run: Run, *, dying: Collection[int] = ()) -> list[Served]:
    """A run in which something goes wrong; returns what became of the ranks that serve."""
    found = _on_ranks(layout, [run], timeout=40, dying=dying)
    return [results[0] for results in found if results and isinstance(results[0], Served)]


def _on_ranks(
    layout: str, runs: Sequence[Run], *, timeout: float, dying: Collection[int] = ()
) -> list[Any]:
    world = len(LAYOUTS[layout])
    return run_ranks(_runs_of_rank, world, layout, runs, timeout=timeout, dying=dying)


def _runs_of_rank(rank: int, layout: str, runs: Sequence[Run]) -> list[Any]:
    join(rank, layout, AGES_S)
    results = [_run_of_rank(rank, layout, run) for run in runs]
    dist.destroy_process_group()
    return results


def _run_of_rank(rank: int, layout: str, run: Run) -> Any:
    torch.manual_seed(0)
    try:
        with made(layout, run.tables(_worker_of(rank, layout)), **run.options) as server:
            if server.worker is None:
                return _serve(server, run.serves_after)
            return run.program(server, *run.args)
    except Abandoned:
        return None


def _worker_of(rank: int, layout: str) -> int | None:
    world = len(LAYOUTS[layout])
    servers = SERVERS[layout]
    serve = range(world - servers, world) if isinstance(servers, int) else servers
    work = [peer for peer in range(world) if peer not in serve]
    assert len(work) == WORKERS
    return work.index(rank) if rank in work else None


def _serve(server: ps.ParameterServer, words: Sequence[str]) -> Served:
    if words:
        stay_until(*words)
    error = None
    try:
        server.serve()
    except dist.DistBackendError as raised:
        error = message_of(raised)
    stats = server.stats()
    return Served(error, stats["clocks"], stats["left"], stats["lost"])


def meet(server: ps.ParameterServer, word: str, workers: Sequence[int] = range(WORKERS)) -> None:
    """Until these workers have come here; ranks that serve know nothing of it."""
    say(f"worker {server.worker} {word}")
    stay_until(*(f"worker {worker} {word}" for worker in workers))


def digest(tensor: Tensor) -> str:
    """Is equal for equal bits, dtypes and shapes."""
    told = hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()[:16]
    return f"{told} {tensor.dtype} {list(tensor.shape)}"


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Names what differs."""
    assert got.keys() == expected.keys()
    differ = [f"{name}: {got[name]}" for name in expected if got[name] != expected[name]]
    assert not differ, "\n".join(differ)


# --- tables that count ---------------------------------------------------------------------------


def counters(worker: int | None) -> Tables:
    """A column per worker, in elements and rows of all hosts."""
    tensors = {"w": torch.zeros(12000, WORKERS)}
    return [
        ps.Dense("dense", tensors, optimizer=ps.Sum(), reduction="sum"),
        ps.Sparse("rows", WORKERS, optimizer=ps.Sum(), reduction="sum"),
    ]


COUNTED = torch.arange(40)


def count(server: ps.ParameterServer) -> None:
    own = torch.eye(WORKERS)[server.worker]
    server["dense"].push({"w": own.repeat(12000, 1)})
    server["rows"].push(COUNTED, own.repeat(len(COUNTED), 1))


def counted(server: ps.ParameterServer) -> Tensor:
    return torch.cat([server["dense"].pull()["w"], server["rows"].pull(COUNTED)])


# --- tables of all kinds -------------------------------------------------------------------------

DIM = 3
IDS = torch.arange(-25, 25)
OPTIMIZERS = {
    "sgd": ps.SGD(0.25),
    "momentum": ps.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adam": ps.Adam(0.01),
    "adamw": ps.AdamW(0.01, betas=(0.8, 0.9)),
    "adagrad": ps.Adagrad(0.05),
    "rowwise": ps.RowwiseAdagrad(0.05),
    "sum": ps.Sum(),
}
DENSE = [name for name in OPTIMIZERS if name != "rowwise"]
ROWS = [f"rows by {name}" for name in OPTIMIZERS]
DTYPES = {"adagrad": torch.float64, "sum": torch.bfloat16}
CLOCKS = 4
# Hosts cut the first two by rows, which they cannot share evenly, and none of the others.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "cut": ((181, 200), torch.float32),
    "halves": ((5, 7000), torch.bfloat16),
    "one row": ((1, 33000), torch.float32),
    "doubles": ((3, 7), torch.float64),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
}


def drawn_tensors(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=drawn).to(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def first_tensors(worker: int | None) -> dict[str, Tensor]:
    """Those of worker 0 count."""
    tensors = drawn_tensors(5)
    return tensors if worker == 0 else {name: tensor * 0 for name, tensor in tensors.items()}


def tables_of_all_kinds(worker: int | None) -> Tables:
    dense = [ps.Dense(name, first_tensors(worker), optimizer=OPTIMIZERS[name]) for name in DENSE]
    return [
        *dense,
        *(
            ps.Sparse(
                f"rows by {name}", DIM, optimizer=optimizer, init=ps.Normal(1.0), seed=4,
                dtype=DTYPES.get(name, torch.float32),
            )
            for name, optimizer in OPTIMIZERS.items()
        ),
    ]  # fmt: skip


def all_pulled(server: ps.ParameterServer, when: str) -> dict[str, str]:
    """Asks for all tables before it waits for one."""
    rows = {name: server[name].pull(IDS, create=False, async_op=True) for name in ROWS}
    dense = {name: server[name].pull(async_op=True) for name in DENSE}
    found = {f"{name} {when}": digest(pull.wait()) for name, pull in rows.items()}
    for name, pull in dense.items():
        found.update({f"{name}, {key} {when}": digest(of) for key, of in pull.wait().items()})
    assert all(pull.done() for pull in (*rows.values(), *dense.values()))
    return found


def push_drawn(server: ps.ParameterServer, clock: int) -> None:
    """Some ids come several times; one worker leaves a tensor out, or everything."""
    seed = 100 * clock + server.worker
    gradients: dict[str, Tensor | None] = {**drawn_tensors(seed)}
    if clock == 1 and server.worker == 1:
        gradients["cut"] = None
    if clock == 3 and server.worker == 2:
        return
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(-20, 20, (4, 3), generator=drawn)
    of_rows = torch.randn(4, 3, DIM, generator=drawn)
    for name in DENSE:
        server[name].push(gradients, scale=0.5 if clock == 2 else 1.0)
    for name in ROWS:
        server[name].push(ids, of_rows)
        server[name].push(ids[0], of_rows[0], async_op=True)


def all_kinds(server: ps.ParameterServer) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for clock in range(CLOCKS):
        seen |= all_pulled(server, f"at clock {clock}")
        push_drawn(server, clock)
        if clock == 2:
            for name in (*DENSE, *ROWS):
                if "sum" not in name:
                    server[name].set_lr(0.02)
        assert server.clock() == clock + 1
    seen |= all_pulled(server, "at the end")
    seen["ids"] = server["rows by adam"].ids().tolist()
    assert len(server["rows by adam"]) == len(seen["ids"])
    stats = server.stats()
    assert server.clocks() == stats["clocks"] == [CLOCKS] * WORKERS
    told = ("pulls", "pushes", "bytes_pulled", "bytes_pushed", "dropped", "torn", "lost")
    seen["stats"] = {name: stats[name] for name in told}
    return seen


def in_turn(server: ps.ParameterServer) -> dict[str, Any]:
    """Under ssp with staleness 0, where one worker a clock pushes, all is determined."""
    seen: dict[str, Any] = {}
    for clock in range(2 * WORKERS):
        if clock % WORKERS == server.worker:
            seen |= all_pulled(server, f"at clock {clock}")
            push_drawn(server, clock)
        server.clock()
    return seen | all_pulled(server, "at the end")


def uniform_items(worker: int | None) -> Tables:
    return [ps.Sparse("items", DIM, optimizer=ps.Sum(), init=ps.Uniform(1.0), seed=-3)]


def rows_of_all(server: ps.ParameterServer) -> dict[str, Any]:
    """Ids of any shape and integer; who asks makes the row, whichever host it is on."""
    table = server["items"]
    own = torch.arange(10) + 100 * server.worker
    first_values = table.pull(own)
    unseen = table.pull(torch.arange(500, 520), create=False)
    meet(server, "has made rows")
    everybodys = torch.cat([torch.arange(10) + 100 * worker for worker in range(WORKERS)])
    assert len(table) == 10 * WORKERS and torch.equal(table.ids(), everybodys)
    meet(server, "has counted rows")
    assert torch.equal(table.pull(own), first_values)
    seen = {"rows": digest(table.pull(everybodys))}
    for number, ids in enumerate((
        torch.tensor(7),
        torch.tensor([7, 7], dtype=torch.int32),
        torch.empty(0, 3, dtype=torch.long),
        torch.tensor([[[-(2**63), 2**63 - 1]]]),
        torch.arange(12).view(3, 4).t(),
        torch.arange(500, 520),
    )):  # fmt: skip
        rows = table.pull(ids)
        assert rows.shape == (*ids.shape, DIM)
        table.push(ids, torch.zeros(*ids.shape, DIM), async_op=True).wait()
        assert torch.equal(rows, table.pull(ids.contiguous().long(), async_op=True).wait())
        seen[f"ids {number}"] = digest(rows)
    assert torch.equal(unseen, rows)
    meet(server, "has pulled")
    seen["ids"] = table.ids().tolist()
    assert seen["ids"] == sorted(seen["ids"])
    return seen


def rates(worker: int | None) -> Tables:
    return [
        ps.Dense("dense", {"w": torch.zeros(40, 1000)}, optimizer=ps.SGD(1.0)),
        ps.Sparse("rows", DIM, optimizer=ps.SGD(1.0)),
    ]


def push_ones(server: ps.ParameterServer) -> None:
    server["dense"].push({"w": torch.ones(40, 1000)})
    server["rows"].push(COUNTED, torch.ones(len(COUNTED), DIM))


def has_all(server: ps.ParameterServer, value: float) -> bool:
    rows = server["rows"].pull(COUNTED)
    return bool((server["dense"].pull()["w"] == value).all() and (rows == value).all())
