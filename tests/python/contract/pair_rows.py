"""What a model, a loss or a program brings: the rows of pairs.py, one small function each.

    with ROWS["tied parameters"].opened(place) as made:
        ...  # a column trains made.model

A row makes the same model on every rank, with what has to happen around its passes. In one process
(``place.alone``) it makes what this stands for: a plain Embedding for rows of a server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from trireme import ps, remote

from contract.pair_layers import (
    IDS,
    WIDTH,
    Again,
    Conjugated,
    Counted,
    LazyMinus,
    Lookup,
    Packed,
    Phases,
    Real,
    Scaled,
    Tempered,
    square_mean,
)
from contract.pair_manners import (
    Manner,
    accumulating,
    calling_from_afar,
    freezing,
    from_threads,
    inferring,
    plainly,
    scaling,
    writing,
)

LR = 0.125


def nothing() -> None:
    """Is what most rows do between a column's passes."""


@dataclass
class Place:
    """Where a model is trained, and what a row has to know of that."""

    alone: bool = False
    pushers: int = 1
    """How many callers have a part of each batch, and so of each gradient."""
    folder: str = ""
    lonely: bool = False
    """Whether the others have run out of inputs: nobody waits for them."""
    group: Any = None
    """A group of this rank alone."""
    owner: str = ""
    """Who is called, where remote calls have been started already."""
    closing: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end, whatever has happened."""

    def meet(self) -> None:
        """Waits for all ranks, so that nobody reads what another one steps."""
        if not (self.alone or self.lonely):
            dist.barrier()


@dataclass
class Made:
    """What a row brings to training."""

    model: nn.Module
    loss: Any = square_mean
    before: Callable[[], None] = nothing
    """Called before a step,"""
    between: Callable[[], None] = nothing
    """between a forward and its backward,"""
    after: Callable[[], None] = nothing
    """and behind its backward, once for all that it has pushed."""
    leave: Callable[[], None] = nothing
    """Called when a rank has run out of inputs, before others have."""
    seen: Callable[[], dict[str, Tensor]] = dict
    """What is trained, or came about, beside the model's parameters and buffers."""
    foreign: tuple[nn.Parameter, ...] = ()
    """Parameters that a server steps, and no optimizer."""


@dataclass(frozen=True, repr=False)
class Row:
    name: str
    open: Callable[[Place], AbstractContextManager[Made]]
    forward: Callable[[Place], AbstractContextManager[Any]] = lambda place: nullcontext()
    """What lies around a forward."""
    manner: Manner = plainly
    """How a step is made, and what else the program does."""
    whole: bool = False
    """Whether the parts of a batch know of each other."""
    precise: bool = True
    """Whether differences are those of the order of sums in fp32."""
    stand_in: str = ""
    """With what names begin of a layer that is there in one process only."""

    def stands_in(self, name: str) -> bool:
        return bool(self.stand_in) and name.startswith(self.stand_in)


def layers(*middle: nn.Module) -> nn.Sequential:
    """Two halves of a pipeline; ``middle`` is in the first, or is the first."""
    torch.manual_seed(5)
    return nn.Sequential(
        *(middle or [nn.Linear(WIDTH, WIDTH)]), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )


def simply(make: Callable[[], nn.Module]) -> Callable[[Place], AbstractContextManager[Made]]:
    """Opens what needs nothing but a model."""

    @contextmanager
    def opened(place: Place) -> Iterator[Made]:
        yield Made(make())

    return opened


# --- rows and tables of a server, remote modules -------------------------------------------------


def lookup(mode: str, bags: bool) -> Callable[[Place], AbstractContextManager[Made]]:
    """A layer with rows of a server behind a first one, which trains through them."""

    def model_with(table: nn.Module) -> nn.Module:
        return layers(Lookup(table, bags, mode == "bsp"), nn.Linear(WIDTH, WIDTH))

    @contextmanager
    def opened(place: Place) -> Iterator[Made]:
        if place.alone:
            kind = partial(nn.EmbeddingBag, mode="sum") if bags else nn.Embedding
            plain = kind(IDS, WIDTH, _weight=torch.zeros(IDS, WIDTH))
            yield Made(model_with(plain), seen=lambda: {"rows": plain.weight})
            return
        optimizer = ps.SGD(LR / place.pushers)
        described = ps.Sparse("rows", WIDTH, optimizer=optimizer, reduction="sum")
        options = {"staleness": 2} if mode == "ssp" else {}
        with ps.ParameterServer([described], mode=mode, **options) as server:
            table = server["rows"]

            def after() -> None:
                server.clock()
                place.meet()

            yield Made(
                model_with(ps.EmbeddingBag(table, mode="sum") if bags else ps.Embedding(table)),
                # Nobody pulls what another one has pushed in the same step.
                between=place.meet if place.pushers > 1 else nothing,
                after=after,
                leave=server.leave,
                seen=lambda: {"rows": table.pull(torch.arange(IDS))},
            )
            place.meet()

    return opened


@contextmanager
def bound(place: Place) -> Iterator[Made]:
    """A layer whose parameters are a table."""
    model = layers()
    if place.alone:
        yield Made(model)
        return
    reduction = "mean" if place.pushers > 1 else "sum"
    described = ps.Dense("layer", model[0], optimizer=ps.SGD(LR), reduction=reduction)
    with ps.ParameterServer([described]) as server:
        table = server["layer"]

        def after() -> None:
            table.push()
            server.clock()

        def leave() -> None:
            table.pull()  # what it holds from now on
            server.leave()

        parameters = tuple(model[0].parameters())
        yield Made(model, before=table.pull, after=after, leave=leave, foreign=parameters)
        place.meet()


_afar: list[nn.Module] = []
_making_afar = threading.Lock()


@remote.function
def layer_of_pairs() -> nn.Module:
    """The same one for all callers, who may come at once while this rank makes its own layers."""
    with _making_afar:
        if not _afar:
            layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
            drawn = torch.Generator().manual_seed(6)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.uniform_(-0.4, 0.4, generator=drawn)
            _afar.append(layer)
        return _afar[0]


@contextmanager
def started(place: Place) -> Iterator[str]:
    """Runs remote calls; yields the name of the last rank."""
    remote.start(f"p{dist.get_rank()}")
    try:
        yield f"p{dist.get_world_size() - 1}"
    except BaseException:
        remote.stop()
        raise
    remote.stop()
    _afar.clear()


@contextmanager
def remote_layer(place: Place) -> Iterator[Made]:
    if place.alone:
        plain = layer_of_pairs()
        _afar.clear()
        yield Made(layers(nn.Linear(WIDTH, WIDTH), plain), seen=partial(_values_of, plain))
        return
    with nullcontext(place.owner) if place.owner else started(place) as owner:
        net = remote.Module(owner, layer_of_pairs, optimizer=ps.SGD(LR / place.pushers))

        def after() -> None:
            place.meet()
            net.step()
            net.zero_grad()
            place.meet()

        yield Made(layers(nn.Linear(WIDTH, WIDTH), net), after=after, seen=partial(_values_of, net))
        place.meet()


def _values_of(module: nn.Module) -> dict[str, Tensor]:
    return {f"remote {name}": value.clone() for name, value in module.state_dict().items()}


# --- layers --------------------------------------------------------------------------------------


@contextmanager
def synchronized(place: Place) -> Iterator[Made]:
    model = normalized()
    group = place.group if place.pushers == 1 else None  # one rank has whole batches
    yield Made(model if place.alone else trireme.convert_sync_batchnorm(model, group))


def normalized() -> nn.Module:
    return layers(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


@contextmanager
def tempered(place: Place) -> Iterator[Made]:
    yield Made(layers(), Tempered())


def in_place() -> nn.Module:
    return layers(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))


def tied() -> nn.Module:
    model = layers()
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = layers(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(False)
    return model


def deep() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(Scaled(0.2 * number) for number in range(1, 5)))


def again(run: Callable[..., Any]) -> Callable[[Place], AbstractContextManager[Made]]:
    return simply(lambda: layers(Again(run)))


@contextmanager
def offloaded(place: Place) -> Iterator[Made]:
    run = partial(trireme.checkpoint, offload=place.folder)
    yield Made(layers(Again(checkpoint_of_torch if place.alone else run)))


checkpoint_of_torch = partial(checkpoint, use_reentrant=False)


def lazy() -> nn.Module:
    """Half of what crosses from stage to stage has a lazy minus, the other half a conjugation."""
    torch.manual_seed(5)
    return nn.Sequential(
        LazyMinus(WIDTH, WIDTH), Conjugated(), Real(), LazyMinus(WIDTH, WIDTH), nn.Tanh()
    )


def sparse() -> nn.Module:
    table = nn.Embedding(IDS, WIDTH, sparse=True)
    return layers(Lookup(table, False, True), nn.Linear(WIDTH, WIDTH))


@contextmanager
def compiled(place: Place) -> Iterator[Made]:
    """Layer by layer, as a program for any strategy may have it."""
    model = layers(Again(lambda inner, x: inner(x)))
    if not place.alone:
        for layer in (model[0], model[2]):
            layer.compile(backend="eager")
    yield Made(model)
    torch._dynamo.reset()


@contextmanager
def hooked(place: Place) -> Iterator[Made]:
    model = layers()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    yield Made(model)


@contextmanager
def averaged_inside(place: Place) -> Iterator[Made]:
    model = layers()
    if not place.alone:
        group = None if place.pushers > 1 else place.group
        model[0] = trireme.DistributedDataParallel(model[0], process_group=group)
    yield Made(model)


# --- around --------------------------------------------------------------------------------------


@dataclass
class Packs:
    """Knows whether hooks were given what layers save."""

    has_seen_weights: bool = field(default=False)

    def pack(self, tensor: Tensor) -> Tensor:
        self.has_seen_weights |= tensor.shape == (WIDTH, WIDTH)
        return tensor.clone()

    def around(self, place: Place) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self.pack, lambda kept: kept)


PACKS = Packs()


@contextmanager
def packed(place: Place) -> Iterator[Made]:
    PACKS.has_seen_weights = False
    yield Made(
        layers(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        seen=lambda: {"hooks were called": torch.tensor(PACKS.has_seen_weights)},
    )


def on_the_cpu(place: Place) -> AbstractContextManager[Any]:
    return save_on_cpu()


def autocast(place: Place) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def _assigned(model: nn.Module) -> None:
    state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _moved(model: nn.Module) -> None:
    """As to() does it from device to device."""
    model._apply(torch.clone)


def _loaded(model: nn.Module) -> None:
    state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


ROWS = {
    row.name: row
    for row in (
        Row("`ps.Embedding`, bsp", lookup("bsp", False), stand_in="0.table."),
        Row("`ps.EmbeddingBag`, ssp", lookup("ssp", True), stand_in="0.table."),
        Row("`ps.Embedding`, async", lookup("async", False), stand_in="0.table."),
        Row("a layer whose parameters are a dense table", bound),
        Row("`remote.Module`", remote_layer, stand_in="1."),
        Row("a remote function that calls it", simply(layers), manner=calling_from_afar),
        Row("SyncBatchNorm", synchronized, whole=True),
        Row("BatchNorm", simply(normalized)),
        Row("a loss with parameters", tempered),
        Row("a first layer that works in place", simply(in_place)),
        Row("tied parameters", simply(tied)),
        Row("frozen parameters", simply(frozen)),
        Row("`Freeze`", simply(deep), manner=freezing),
        Row("`checkpoint()`", again(trireme.checkpoint)),
        Row("`checkpoint(offload=)`", offloaded),
        Row("torch's `checkpoint`", again(checkpoint_of_torch)),
        Row("`saved_tensors_hooks` around it", packed, forward=PACKS.around),
        Row("`save_on_cpu` around it", simply(layers), forward=on_the_cpu),
        Row("autocast", simply(layers), forward=autocast, precise=False),
        Row("GradScaler", simply(layers), manner=scaling),
        Row("`no_sync`", simply(layers), manner=accumulating),
        Row("hooks of parameters", hooked),
        Row("`get_extra_state`", simply(lambda: layers(Counted(WIDTH, WIDTH)))),
        Row("`_save_to_state_dict` of its own", simply(lambda: layers(Packed(WIDTH, WIDTH)))),
        Row("complex parameters", simply(lambda: layers(Phases(), nn.Linear(WIDTH, WIDTH)))),
        Row("tensors negated or conjugated lazily", simply(lazy)),
        Row("sparse gradients", simply(sparse)),
        Row("`torch.compile`", compiled),
        Row("`inference_mode`", simply(layers), manner=inferring),
        Row("several threads of the user's", simply(layers), manner=from_threads),
        Row("DistributedDataParallel inside", averaged_inside),
        Row("`load_state_dict` in `writing()`", simply(layers), manner=writing(_loaded)),
        Row(
            "`load_state_dict(assign=True)` in `writing()`",
            simply(layers),
            manner=writing(_assigned),
        ),
        Row("`to()` in `writing()`", simply(layers), manner=writing(_moved)),
    )
}
