"""What runs a model: the columns of pairs.py. Each trains what a row has made, for a few steps.

    seen = seen_by(COLUMNS["fully_shard"], ROWS["tied parameters"], folder)
    expected = seen_alone(COLUMNS["fully_shard"], ROWS["tied parameters"], folder)

What is seen are outputs, losses, parameters and buffers, and what the row has beside these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from trireme import pipelining, ps, remote

from contract.pair_manners import Seen, new_scaler
from contract.pair_rows import LR, ROWS, Made, Place, Row, checkpoint_of_torch, nothing, started
from fsdp.ranks import gloo_mesh, shard_layers
from harness.models import batch
from zero.ranks import DDP, Zero

STEPS = 3
BATCH = 8  # parts of it have fewer rows than there are features
CHUNKS = 2
EVALUATED = 80


def inputs(number: int) -> Tensor:
    return batch(number, rows=BATCH)


def targets(number: int) -> Tensor:
    return batch(number + 40, rows=BATCH)


class Judged(nn.Module):
    """A model with its loss, where both are trained."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        output = self.model(x)
        return output if target is None else self.loss(output, target)


def whole_of(made: Made) -> nn.Module:
    """What a strategy wraps."""
    return Judged(made.model, made.loss) if isinstance(made.loss, nn.Module) else made.model


def plain_name(name: str) -> str:
    """A parameter's name in the model, or "loss." before its name in the loss."""
    return name.replace("module.", "").removeprefix("model.").replace("_loss.", "loss.")


@dataclass
class Run:
    """Training on rows ``rank::world`` of every batch, by a net that is called."""

    row: Row
    place: Place
    made: Made
    model: nn.Module
    """Has the parameters."""
    net: Callable[..., Any]
    optimizer: Any = None
    rank: int = 0
    world: int = 1
    together: bool = False
    """Whether a forward needs all ranks."""
    scaler: Any = field(default_factory=new_scaler)

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        """Those that this rank has; each of them is a pass."""
        return [whole[self.rank :: self.world]]

    def begin(self) -> None:
        self.made.before()
        self.model.zero_grad()

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        """Returns the loss of the whole batch."""
        total = torch.zeros(())
        given = self.parts(inputs(number), number)
        for x, y in zip(given, self.parts(targets(number), number), strict=True):
            with self.row.forward(self.place):
                loss = self.judge(x.clone(), y) / self.share(len(given))
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if self.world > 1 and not self.place.lonely:
            dist.all_reduce(total)
        return total / self.world

    def share(self, count: int) -> int:
        """By what the loss of one of so many passes is divided."""
        return count

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.model, Judged):
            return self.net(x, y).mean()  # of replicas
        return self.made.loss(self.net(x), y)

    def no_sync(self) -> AbstractContextManager[Any]:
        no_sync = getattr(self.net, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def end(self, scaler: Any = None) -> None:
        self.made.after()
        if self.optimizer is None:
            return
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()

    def follow(self) -> None:
        """After parameters were replaced: torch's optimizers do not know the new ones."""
        if isinstance(self.optimizer, SGD):
            self.optimizer = sgd(self.made, self.model)

    def evaluate(self, number: int) -> Tensor | None:
        """Outputs for a whole batch."""
        with torch.no_grad():
            return self.net(inputs(number))

    def values(self) -> Seen:
        """Whole parameters and buffers, as far as this rank has them."""
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        return {plain_name(name): whole(value) for name, value in named}

    def modules(self) -> list[nn.Module]:
        """Those that know whether they train."""
        return [self.model]

    def finish(self) -> None:
        """Before what is trained is looked at."""
        self.made.before()

    def result(self) -> Seen:
        self.finish()
        for module in self.modules():
            module.eval()
        with self.row.forward(self.place):
            outputs = self.evaluate(EVALUATED)
        for module in self.modules():
            module.train()
        seen = {} if outputs is None else {"outputs": outputs}
        return seen | self.values() | self.made.seen()


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


Opened = Iterator[Run]


def owned(made: Made, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer of the program steps."""
    foreign = set(made.foreign)
    return [it for it in model.parameters() if it not in foreign and it.requires_grad]


def sgd(made: Made, model: nn.Module) -> Any:
    parameters = owned(made, model)
    return SGD(parameters, lr=LR) if parameters else None


# --- one process -----------------------------------------------------------------------------------


@dataclass
class Alone(Run):
    """One process on whole batches, or on their parts one after another."""

    cut: Callable[[Tensor, int], list[Tensor]] = lambda whole, number: [whole]
    keeps: Callable[[int], int] | None = None
    """Which part's statistics stay in a step; None for those of all."""
    divisor: int | None = None
    """Of losses; None for as many as there are parts."""

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        is_whole = self.row.whole and self.keeps is not None
        parts = self.cut(whole, number)
        return [torch.cat(parts)] if is_whole else parts

    def share(self, count: int) -> int:
        return self.divisor or count

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        buffers = [buffer for buffer in self.model.buffers()]
        if self.keeps is None or not buffers or self.row.whole:
            return super().backward(number, scaler)
        cut, total, kept = self.cut, torch.zeros(()), []
        before = [buffer.clone() for buffer in buffers]
        count = len(cut(inputs(number), number))
        for at in range(count):
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            self.cut = lambda whole, number, at=at: [cut(whole, number)[at]]
            total += super().backward(number, scaler)
            if at == self.keeps(number):
                kept = [buffer.clone() for buffer in buffers]
        self.cut = cut
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 1 if self.divisor else count
        return total / count


# --- data parallelism ------------------------------------------------------------------------------


def of_ranks(make: Callable[[Made, nn.Module], tuple[Any, Any]], **options: Any) -> Any:
    """A net and an optimizer on each rank; ``make`` returns both."""

    def opened(row: Row, place: Place, made: Made) -> Run:
        model = whole_of(made)
        net, optimizer = make(made, model)
        where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
        return options.get("run", Run)(
            row, place, made, model, net, optimizer, **where, together=options.get("together", False)
        )

    return opened


def ddp(made: Made, model: nn.Module) -> tuple[Any, Any]:
    return DDP(model), sgd(made, model)


def zero(stage: int, made: Made, model: nn.Module) -> tuple[Any, Any]:
    net = DDP(model) if stage == 1 else model
    return net, Zero(owned(made, model), SGD, stage=stage, lr=LR)


@dataclass
class Zero2(Run):
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.optimizer.no_sync()


def sharded(made: Made, model: nn.Module, gathered: bool = False) -> tuple[Any, Any]:
    shard_layers(model, **({"mesh": gloo_mesh()} if gathered else {}))
    return model, sgd(made, model)


@dataclass
class Sharded(Run):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


def in_replicas(row: Row, place: Place, made: Made) -> Run:
    model = whole_of(made)
    return Run(row, place, made, model, trireme.DataParallel(model, replicas=2), sgd(made, model))


def in_checkpoint(made: Made, model: nn.Module) -> tuple[Any, Any]:
    net, optimizer = ddp(made, model)
    return Checkpointed(net, trireme.checkpoint), optimizer


@dataclass
class Checkpointed:
    """A net in a checkpoint."""

    net: nn.Module
    run: Callable[..., Any]

    def __call__(self, *given: Tensor) -> Tensor:
        return self.run(self.net, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


# --- pipelines -------------------------------------------------------------------------------------


@dataclass
class Piped(Run):
    """A pipeline over ranks, or in threads; a step has forward and backward."""

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        if scaler is not None and number == 0:
            self.model.scale_losses(scaler)
        if not self.together and number % 2 and scaler is None:  # the loss outside of it
            return super().backward(number)
        with self.row.forward(self.place):
            return self.model.step(inputs(number), target=targets(number))

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync()

    def evaluate(self, number: int) -> Tensor | None:
        with torch.no_grad():
            if not self.together:
                return self.net(inputs(number))
            return self.model.eval_step(inputs(number))


def piped(row: Row, place: Place, made: Made, **options: Any) -> Run:
    is_threaded = "ranks" not in options
    pipe = trireme.Pipeline(made.model, CHUNKS, schedule="1f1b", loss=made.loss, **options)
    return Piped(row, place, made, pipe, pipe, sgd(made, pipe), together=not is_threaded)


@dataclass
class Staged(Run):
    """A stage of torch's names; ``net`` is the schedule."""

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        losses: list[Tensor] = []
        first, last = self.rank == 0, self.rank == self.world - 1
        with self.row.forward(self.place):
            given = {"target": targets(number), "losses": losses} if last else {}
            self.net.step(*([inputs(number)] if first else []), **given)
        return torch.stack(losses).mean() if last else None

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def evaluate(self, number: int) -> Tensor | None:
        last = self.rank == self.world - 1
        given = {"target": targets(number)} if last else {}
        return self.net.eval(*([inputs(number)] if self.rank == 0 else []), **given)


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


# --- owners, workers, files, uneven inputs ---------------------------------------------------------


@dataclass
class Owned(Run):
    """The first rank calls the model of the second, which does nothing but serve meanwhile."""

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        self.scale = scaler
        loss = super().backward(number, scaler) if self.rank == 0 else None
        self.place.meet()
        return loss

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        if self.scale is None:
            return super().judge(x, y)
        # Gradients of parameters stay there, so the scale is taken out before they go.
        output = self.net(x)
        output.register_hook(lambda gradient: gradient / self.scale.get_scale())
        return self.made.loss(output, y)

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        return [whole]

    def end(self, scaler: Any = None) -> None:
        self.made.after()
        if self.rank == 0:
            self.net.step()
            self.net.zero_grad()
        self.place.meet()

    def begin(self) -> None:
        self.made.before()
        self.place.meet()

    def modules(self) -> list[nn.Module]:
        return [] if self.net is None else [self.net]

    def evaluate(self, number: int) -> Tensor | None:
        return super().evaluate(number) if self.rank == 0 else None

    def values(self) -> Seen:
        if self.rank > 0:
            return {}
        buffers = {name for name, _ in self.model.named_buffers()}
        state = self.net.state_dict()
        seen = {it.name: it.to_here() for it in self.net.remote_parameters()}
        seen |= {name: value for name, value in state.items() if name in buffers}
        return {plain_name(name): value for name, value in seen.items()}


_owned: dict[str, nn.Module] = {}


@remote.function
def model_of_pairs() -> nn.Module:
    return _owned["model"]


def owned_elsewhere(row: Row, place: Place, made: Made) -> Run:
    _owned["model"] = whole_of(made)
    place.meet()
    rank = dist.get_rank()
    net = remote.Module("p1", model_of_pairs, optimizer=ps.SGD(LR)) if rank == 0 else None
    return Owned(row, place, made, whole_of(made), net, rank=rank)


@dataclass
class Working(Run):
    """A worker of a server, whose tables have the parameters."""

    server: Any = None

    def begin(self) -> None:
        self.made.before()
        self.server["model"].pull()

    def end(self, scaler: Any = None) -> None:
        self.made.after()
        scale = {} if scaler is None else {"scale": 1 / scaler.get_scale()}
        self.server["model"].push(**scale)
        self.server.clock()

    def evaluate(self, number: int) -> Tensor | None:
        self.server["model"].pull()
        return super().evaluate(number)

    def finish(self) -> None:
        super().finish()
        self.server["model"].pull()


def working(row: Row, place: Place, made: Made) -> Run:
    model = whole_of(made)
    server = ps.ParameterServer([ps.Dense("model", model, optimizer=ps.SGD(LR))])
    place.closing.append(server.close)
    where = {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return Working(row, place, made, model, model, **where, server=server)


@dataclass
class Saved(Run):
    """Saved and loaded behind the second step, in a model of other values."""

    def end(self, scaler: Any = None) -> None:
        super().end(scaler)
        self.count = getattr(self, "count", 0) + 1
        if self.count != 2:
            return
        folder = f"{self.place.folder}/checkpoint"
        self.made.before()
        trireme.save_checkpoint(folder, self.net, self.optimizer)
        zeros = {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else value
            for name, value in self.model.state_dict().items()
        }
        self.model.load_state_dict(zeros)
        self.place.meet()
        trireme.load_checkpoint(folder, self.net, self.optimizer)


# --- the columns -----------------------------------------------------------------------------------


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
        Column("DataParallel", in_replicas, chunked, world=1, pushers=1),
        Column("Pipeline, ranks", partial(piped, ranks=True), chunked, None, pushers=1),
        Column(
            "Pipeline, threads", partial(piped, devices=["cpu"] * 2), chunked, None, world=1, pushers=1
        ),
        Column("pipelining", staged, chunked, None, pushers=1),
        Column("checkpoint", of_ranks(in_checkpoint), checkpointed=True),
        Column("remote owner", owned_elsewhere, at_once, None, pushers=1, remote=True),
        Column("worker", working, keeps=own_part),
        Column("save_checkpoint", of_ranks(ddp, run=Saved)),
        Column("Join", of_ranks(ddp), uneven, last_with_inputs, train=train_unevenly, divisor=2),
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
        model = whole_of(made)
        net = Checkpointed(model, checkpoint_of_torch) if column.checkpointed else model
        keeps = column.keeps and partial(column.keeps, dist.get_rank())
        options = {"cut": column.cut, "keeps": keeps, "divisor": column.divisor}
        run = Alone(row, place, made, model, net, sgd(made, model), **options)
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
