"""A run trains what a row of pairs.py has made; a column makes it.

run.begin()
loss = run.backward(number)  # this rank's part of a batch
run.end()
seen = run.result()  # outputs, parameters, buffers, and what the row has beside them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import trireme
import trireme.horovod as hvd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from trireme._core.owners import table_of

from contract.pair_manners import FREEZING, Seen, new_scaler
from contract.pair_rows import LR, Made, Place, Row
from harness.models import batch

STEPS = 3
BATCH = 8  # parts of it have fewer rows than there are features
EVALUATED = 80
CHUNKS = 2


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


def judged(made: Made) -> nn.Module:
    """What a strategy wraps."""
    return Judged(made.model, made.loss) if isinstance(made.loss, nn.Module) else made.model


def plain_name(name: str) -> str:
    """A parameter's name in the model, or "loss." before its name in the loss."""
    return name.replace("module.", "").removeprefix("model.").replace("_loss.", "loss.")


def sgd(made: Made, model: nn.Module) -> Any:
    parameters = owned(made, model)
    return SGD(parameters, lr=LR) if parameters else None


def owned(made: Made, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer of the program steps."""
    foreign = set(made.foreign)
    return [it for it in model.parameters() if it not in foreign and it.requires_grad]


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


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
    freeze: Any = None

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        """Those that this rank has; each of them is a pass."""
        return [whole[self.rank :: self.world]]

    def share(self, count: int) -> int:
        """By what the loss of one of so many passes is divided."""
        return count

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
            self.made.between()
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
        if self.world > 1 and not self.place.lonely:
            dist.all_reduce(total)
        return total / self.world

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        if isinstance(self.model, Judged):
            return self.net(x, y).mean()  # replicas each return a loss
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

    def layered(self) -> nn.Module:
        """What a Freeze is made of: a net that wraps the model, or the model."""
        return self.net if isinstance(self.net, nn.Module) else self.model

    def measure(self) -> None:
        """Shows gradients to what freezes layers."""
        if self.freeze is None:
            self.freeze = trireme.Freeze(self.layered(), optimizer=self.optimizer, **FREEZING)
        self.freeze.step()

    def advance(self) -> list[int]:
        """Freezes layers; returns how many are frozen, and were before."""
        self.freeze.advance()
        history: list[int] = self.freeze.history
        return history

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


@dataclass
class Alone(Run):
    """One process on whole batches, or on their parts one after another."""

    cut: Callable[[Tensor, int], list[Tensor]] = lambda whole, number: [whole]
    keeps: Callable[[int], int] | None = None
    """Which part's statistics stay in a step; None for those of all."""
    divisor: int | None = None
    """By what losses are divided; None for as many as there are parts."""

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        parts = self.cut(whole, number)
        return [torch.cat(parts)] if self.row.whole and self.keeps is not None else parts

    def share(self, count: int) -> int:
        return self.divisor or count

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        buffers = list(self.model.buffers())
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


class AloneJudged(Alone):
    """Shows the loss of an evaluation, and no outputs."""

    def evaluate(self, number: int) -> Tensor | None:
        loss: Tensor = self.made.loss(super().evaluate(number), targets(number))
        return loss


@dataclass
class Zero2(Run):
    def no_sync(self) -> AbstractContextManager[Any]:
        return self.optimizer.no_sync()


class Rounded(Run):
    """Workers of LocalSGD, whose rounds know one optimizer."""

    def follow(self) -> None:
        """Parameters were written in place."""


class Horovod(Run):
    """A bare model, whose optimizer reduces gradients."""

    def wrap(self) -> None:
        if self.optimizer is not None:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.optimizer.set_backward_passes_per_step(2)
        yield

    def follow(self) -> None:
        super().follow()
        self.wrap()


@dataclass
class Sharded(Run):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


@dataclass
class Checkpointed:
    """A net in a checkpoint."""

    net: nn.Module
    run: Callable[..., Any]

    def __call__(self, *given: Tensor) -> Tensor:
        return self.run(self.net, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


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


@dataclass
class Elastic(Run):
    """A run of PipeTransformer: a step is all of it. Behind the first one it goes to replicas of
    the whole model, and back to a pipeline."""

    count: int = 0

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        if scaler is not None and number == 0:
            self.model.scale_losses(scaler)
        with self.row.forward(self.place):
            loss: Tensor = self.model.step(inputs(number), target=targets(number))
        return loss

    def measure(self) -> None:
        """Each step does."""

    def advance(self) -> list[int]:
        self.model.end_epoch()
        history: list[int] = self.model.freeze.history
        return history

    def end(self, scaler: Any = None) -> None:
        self.made.after()
        self.count += 1
        if self.count > 1:
            return
        before, layers = self.model.plan, len(list(self.model.children()))
        whole_on_each = {"ranks_per_pipeline": 1, "replicas": self.world, "balance": [layers]}
        for plan in (trireme.ElasticPlan(**whole_on_each), before):
            self.model.transform(plan)

    def follow(self) -> None:
        """Parameters were written in place."""

    def evaluate(self, number: int) -> Tensor | None:
        loss: Tensor = self.model.eval_step(inputs(number), targets(number))
        return loss

    def values(self) -> Seen:
        """Those of layers that other ranks hold have no memory here."""
        model = self.made.model
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        return {name: whole(value) for name, value in named if trireme._C.has_memory(value)}


@dataclass
class Staged(Run):
    """A stage of torch's names; ``net`` is the schedule."""

    def backward(self, number: int, scaler: Any = None) -> Tensor | None:
        losses: list[Tensor] = []
        last = self.rank == self.world - 1
        with self.row.forward(self.place):
            given = {"target": targets(number), "losses": losses} if last else {}
            self.net.step(*([] if self.rank else [inputs(number)]), **given)
        return torch.stack(losses).mean() if last else None

    def end(self, scaler: Any = None) -> None:
        if isinstance(self.model, Judged):
            for parameter in self.model.loss.parameters():
                parameter.grad /= CHUNKS  # torch leaves sums
        super().end(scaler)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def evaluate(self, number: int) -> Tensor | None:
        given = {"target": targets(number)} if self.rank == self.world - 1 else {}
        return self.net.eval(*([] if self.rank else [inputs(number)]), **given)


@dataclass
class Owned(Run):
    """The first rank calls the model of the second, which does nothing but serve meanwhile."""

    scale: Any = None

    def parts(self, whole: Tensor, number: int) -> list[Tensor]:
        return [whole]

    def begin(self) -> None:
        self.made.before()
        self.place.meet()

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

    def end(self, scaler: Any = None) -> None:
        self.made.after()
        if self.rank == 0:
            self.net.step()
            self.net.zero_grad()
        self.place.meet()

    def modules(self) -> list[nn.Module]:
        return [] if self.net is None else [self.net]

    def evaluate(self, number: int) -> Tensor | None:
        return super().evaluate(number) if self.rank == 0 else None

    def values(self) -> Seen:
        if self.rank > 0:
            return {}
        self.model.load_state_dict(self.net.state_dict())
        return super().values()


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


@dataclass
class Saved(Run):
    """Saved beside what follows the second step, and loaded in a model of other values."""

    count: int = 0

    def end(self, scaler: Any = None) -> None:
        super().end(scaler)
        self.count += 1
        if self.count != 2:
            return
        folder = f"{self.place.folder}/checkpoint"
        self.made.before()
        beside = not any(map(table_of, self.model.parameters()))  # which a server refuses
        pending = trireme.save_checkpoint(folder, self.net, self.optimizer, asynchronous=beside)
        self.place.meet()  # ranks share a remote module, whose values rank 0 fetches in its call
        zeros = {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else value
            for name, value in self.model.state_dict().items()
        }
        with trireme.writing(self.model):
            self.model.load_state_dict(zeros)
            pending.wait()
            self.place.meet()
            trireme.load_checkpoint(folder, self.net, self.optimizer)
