"""What runs a model: the columns of pairs.py. Each trains what a row has made, for a few steps.

    seen = seen_by(COLUMNS["fully_shard"], ROWS["tied parameters"], folder)
    expected = seen_alone(COLUMNS["fully_shard"], ROWS["tied parameters"], folder)

What is seen are outputs, losses, parameters and buffers, and what the row has beside these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trireme
import trireme.horovod as hvd
from torch import Tensor, nn
from torch.optim import SGD
from trireme import pipelining, ps, remote
from trireme.compression import Int8

from contract.pair_manners import FREEZING, Seen, freezing
from contract.pair_rows import LR, Made, Place, Row, checkpoint_of_torch, nothing, started
from contract.pair_runs import (
    BATCH,
    CHUNKS,
    STEPS,
    Alone,
    AloneJudged,
    Checkpointed,
    Elastic,
    Horovod,
    Judged,
    Owned,
    Piped,
    Rounded,
    Run,
    Saved,
    Sharded,
    Staged,
    Working,
    Zero2,
    judged,
    owned,
    sgd,
)
from fsdp.ranks import gloo_mesh, shard_layers
from zero.ranks import DDP, Zero

# --- data parallelism ----------------------------------------------------------------------------


def of_ranks(make: Callable[[Made, nn.Module], tuple[Any, Any]], **options: Any) -> Any:
    """A column of ranks: ``make`` returns a net and an optimizer."""

    def opened(row: Row, place: Place, made: Made) -> Run:
        model = judged(made)
        net, optimizer = make(made, model)
        where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
        return options.get("run", Run)(
            row,
            place,
            made,
            model,
            net,
            optimizer,
            **where,
            together=options.get("together", False),
        )

    return opened


# All goes the way of codes, as fp32, so that it is as exact as without.
CODES = Int8(dense_below=1 << 40, between="ranks")


def ddp(made: Made, model: nn.Module, **options: Any) -> tuple[Any, Any]:
    return DDP(model, **options), sgd(made, model)


def zero(stage: int, made: Made, model: nn.Module) -> tuple[Any, Any]:
    net = DDP(model) if stage == 1 else model
    return net, Zero(owned(made, model), SGD, stage=stage, lr=LR)


def sharded(
    made: Made, model: nn.Module, gathered: bool = False, **options: Any
) -> tuple[Any, Any]:
    shard_layers(model, **({"mesh": gloo_mesh()} if gathered else {}), **options)
    return model, sgd(made, model)


def in_replicas(row: Row, place: Place, made: Made) -> Run:
    model = judged(made)
    return Run(row, place, made, model, trireme.DataParallel(model, replicas=2), sgd(made, model))


def in_checkpoint(made: Made, model: nn.Module) -> tuple[Any, Any]:
    net, optimizer = ddp(made, model)
    return Checkpointed(net, trireme.checkpoint), optimizer


def in_rounds(row: Row, place: Place, made: Made) -> Run:
    """LocalSGD of every step, which under SGD is DDP."""
    model = judged(made)
    optimizer = sgd(made, model)
    rounds = trireme.LocalSGD(model, optimizer, sync_every=1, across=dist.group.WORLD)
    rounds.__enter__()
    place.closing.append(partial(rounds.__exit__, None, None, None))
    where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return Rounded(row, place, made, model, model, optimizer, **where)


def under_horovod(row: Row, place: Place, made: Made) -> Run:
    hvd.init()
    model = judged(made)
    where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    run = Horovod(row, place, made, model, model, sgd(made, model), **where)
    with ExitStack() as stack:
        stack.callback(hvd.shutdown)
        run.wrap()
        place.closing.append(stack.pop_all().close)
    return run


# --- pipelines -----------------------------------------------------------------------------------


def piped(row: Row, place: Place, made: Made, **options: Any) -> Run:
    is_threaded = "ranks" not in options
    pipe = trireme.Pipeline(made.model, CHUNKS, schedule="1f1b", loss=made.loss, **options)
    return Piped(row, place, made, pipe, pipe, sgd(made, pipe), together=not is_threaded)


def staged(row: Row, place: Place, made: Made) -> Run:
    rank, world = dist.get_rank(), dist.get_world_size()
    children = list(made.model.named_children())
    half = len(children) // world
    own = children[rank * half : (rank + 1) * half if rank < world - 1 else None]
    part = nn.Sequential(OrderedDict(own))
    stage = pipelining.PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, CHUNKS, made.loss)
    model = part
    if isinstance(made.loss, nn.Module) and rank == world - 1:
        model = Judged(part, made.loss)
    optimizer = sgd(made, model)
    return Staged(row, place, made, model, schedule, optimizer, rank, world, together=True)


def elastic(row: Row, place: Place, made: Made) -> Run:
    layers: list[list[nn.Module]] = [[]]
    for child in made.model.children():
        if any(map(_has_parameters, layers[-1])) and _has_parameters(child):
            layers.append([])
        layers[-1].append(child)
    optimizer = sgd(made, made.model)
    net = trireme.PipeTransformer(
        layers,
        loss=made.loss,
        optimizer=optimizer,
        global_batch=BATCH,
        chunks=CHUNKS,
        freeze=FREEZING if row.manner is freezing else False,
        costs=[1.0] * len(layers),
    )
    where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return Elastic(row, place, made, net, net, optimizer, **where, together=True)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


# --- owners, workers, files, uneven inputs -------------------------------------------------------


_owned: dict[str, nn.Module] = {}


@remote.function
def model_of_pairs() -> nn.Module:
    return _owned["model"]


def owned_elsewhere(row: Row, place: Place, made: Made) -> Run:
    _owned["model"] = judged(made)
    place.meet()
    rank = dist.get_rank()
    net, found = None, [None]
    if rank == 0:
        try:
            net = remote.Module("p1", model_of_pairs, optimizer=ps.SGD(LR))
        except Exception as error:
            found = [error]
    dist.broadcast_object_list(found, 0)  # the owner need not hear that it refuses
    if found[0] is not None:
        raise found[0]
    return Owned(row, place, made, judged(made), net, rank=rank)


def working(row: Row, place: Place, made: Made) -> Run:
    model = judged(made)
    server = ps.ParameterServer([ps.Dense("model", model, optimizer=ps.SGD(LR))])
    place.closing.append(server.close)
    where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return Working(row, place, made, model, model, **where, server=server)


# --- the columns ---------------------------------------------------------------------------------


def strided(whole: Tensor, number: int) -> list[Tensor]:
    """By ranks."""
    return [whole[0::2], whole[1::2]]


def chunked(whole: Tensor, number: int) -> list[Tensor]:
    """By micro-batches or replicas."""
    return list(whole.tensor_split(CHUNKS))


def uneven(whole: Tensor, number: int) -> list[Tensor]:
    """The second rank has one batch less."""
    parts = strided(whole, number)
    return parts[:1] if number % 50 == STEPS - 1 else parts


def own_part(rank: int, number: int) -> int:
    """Ranks do not show each other their statistics."""
    return rank


def last_with_inputs(rank: int, number: int) -> int:
    """Under join() the last rank that has inputs shows the others its statistics."""
    return int(number == 0)


def at_once(whole: Tensor, number: int) -> list[Tensor]:
    return [whole]


def train(run: Run) -> Seen:
    seen: Seen = {}
    for number in range(STEPS):
        found = run.row.manner(run, number)
        seen |= {f"{name} in step {number}": value for name, value in found.items()}
    return seen | run.result()


def train_unevenly(run: Run) -> Seen:
    has_left = run.rank > 0 and run.made.leave is not nothing
    with run.net.join():
        for number in range(STEPS - run.rank):
            run.place.lonely = number == STEPS - 1
            run.row.manner(run, number)
        if run.rank > 0:
            run.made.leave()
    run.place.lonely = False
    if has_left:
        return run.values()
    run.net = run.net.module  # DDP would wait for the others
    return run.result()


@dataclass(frozen=True, repr=False)
class Column:
    name: str
    open: Callable[[Row, Place, Made], Run]
    cut: Callable[[Tensor, int], list[Tensor]] = strided
    """How a batch is cut, where one process runs parts of it one after another."""
    keeps: Callable[[int, int], int] | None = lambda rank, number: 0
    """Which part's statistics a rank keeps in a step; None for those of all parts."""
    world: int = 2
    pushers: int = 2
    remote: bool = False
    """Whether it needs remote calls itself."""
    train: Callable[[Run], Seen] = train
    checkpointed: bool = False
    divisor: int | None = None
    alone: type[Alone] = Alone
    """What one process does."""

    def drops(self, name: str) -> bool:
        """Whether no rank shows this, though one process does: ranks under Join have no loss of all
        of them, once one has run out."""
        return self.train is train_unevenly and " in step " in name

    def place(self, folder: str, alone: bool = False) -> Place:
        return Place(alone=alone, pushers=self.pushers, folder=folder)


COLUMNS = {
    column.name: column
    for column in (
        Column("DDP", of_ranks(ddp)),
        Column("ZeRO 1", of_ranks(partial(zero, 1))),
        Column("ZeRO 2", of_ranks(partial(zero, 2), run=Zero2), keeps=own_part),
        Column("fully_shard", of_ranks(sharded, run=Sharded), keeps=own_part),
        Column(
            "fully_shard, gathered",
            of_ranks(partial(sharded, gathered=True), run=Sharded, together=True),
            keeps=own_part,
        ),
        Column("DDP, compressed", of_ranks(partial(ddp, compression=CODES))),
        Column(
            "fully_shard, compressed",
            of_ranks(partial(sharded, compression=CODES), run=Sharded),
            keeps=own_part,
        ),
        Column("DataParallel", in_replicas, chunked, world=1, pushers=1),
        Column("Pipeline, ranks", partial(piped, ranks=True), chunked, None, pushers=1),
        Column(
            "Pipeline, threads",
            partial(piped, devices=["cpu"] * 2),
            chunked,
            None,
            world=1,
            pushers=1,
        ),
        Column("pipelining", staged, chunked, None, pushers=1),
        Column("PipeTransformer", elastic, chunked, None, pushers=1, alone=AloneJudged),
        Column("LocalSGD", in_rounds, keeps=own_part),
        Column("Horovod", under_horovod, keeps=own_part),
        Column("checkpoint", of_ranks(in_checkpoint), checkpointed=True),
        Column("remote owner", owned_elsewhere, at_once, None, pushers=1, remote=True),
        Column("worker", working, keeps=own_part),
        Column("save_checkpoint", of_ranks(ddp, run=Saved)),
        Column(
            "Join",
            of_ranks(ddp, together=True),
            uneven,
            last_with_inputs,
            train=train_unevenly,
            divisor=2,
        ),
    )
}


def seen_by(column: Column, row: Row, folder: str) -> Seen:
    """What this rank sees of the training of a row by a column."""
    place = column.place(folder)
    place.group = own_group()
    with ExitStack() as stack:
        if column.remote or row.manner.__name__ == "calling_from_afar":
            place.owner = stack.enter_context(started(place))
        torch.manual_seed(5)
        made = stack.enter_context(row.open(place))
        run = column.open(row, place, made)
        try:
            seen = column.train(run)
        finally:
            for close in place.closing:
                close()
            _owned.clear()
        return seen


def own_group() -> Any:
    """A group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def seen_alone(column: Column, row: Row, folder: str) -> Seen:
    place = column.place(folder, alone=True)
    torch.manual_seed(5)
    with row.open(place) as made:
        model = judged(made)
        net = Checkpointed(model, checkpoint_of_torch) if column.checkpointed else model
        keeps = column.keeps and partial(column.keeps, dist.get_rank())
        options = {"cut": column.cut, "keeps": keeps, "divisor": column.divisor}
        run = column.alone(row, place, made, model, net, sgd(made, model), **options)
        return train(run)


def difference(seen: Seen, expected: Seen, precise: bool) -> list[str]:
    """What differs, by name."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if precise else {"rtol": 0.05, "atol": 5e-3}
    found = []
    for name, value in seen.items():
        if name not in expected:
            found.append(f"{name} is not there in one process")
            continue
        try:
            torch.testing.assert_close(value, expected[name], **tolerance, equal_nan=False)
        except AssertionError as error:
            found.append(f"{name}: {' '.join(str(error).split())}")
    return found
