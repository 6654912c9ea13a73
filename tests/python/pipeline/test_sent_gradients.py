"""Gradients that come to no parameter of a layer: sent away in a backward, to inputs, to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from trireme import ps, remote

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_ranks
from pipeline.ranks import WIDTH, accumulate, rows, tanh_layers

CHUNKS = 4
FORMS = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.table = table
        return x + table

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.table.pushed += gradient.sum(0)
        return gradient, None


class Table(nn.Module):
    """Adds a row that is not its own, and sends the gradient of that away."""

    sends_gradients = True

    def __init__(self) -> None:
        super().__init__()
        self.row = torch.linspace(0, 1, WIDTH)
        self.row.pushed = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _Send.apply(x, self.row)

    def take(self) -> Tensor:
        pushed, self.row.pushed = self.row.pushed, torch.zeros(WIDTH)
        return pushed


def with_tables() -> nn.Sequential:
    layers = list(tanh_layers())
    return nn.Sequential(layers[0], Table(), *layers[2:7], nn.Sequential(nn.Tanh(), Table()))


def tables_of(module: nn.Module) -> list[Table]:
    return [inner for inner in module.modules() if isinstance(inner, Table)]


def compare(ranks: bool, form: str, scale_grads: bool) -> None:
    one = with_tables()
    options: dict[str, Any] = {"ranks": True} if ranks else {"devices": ["cpu"] * 2}
    layers = with_tables()
    pipe = trireme.Pipeline(
        layers, CHUNKS, schedule=form, loss=mse_loss, scale_grads=scale_grads, **options
    )
    factor = 1.0 if scale_grads else CHUNKS
    for step in range(2):
        x, y = rows(step, 8), rows(step + 7, 8)
        for module in (one, pipe):
            module.zero_grad()
        (mse_loss(one(x), y) * factor).backward()
        pipe.step(x, target=y)
        theirs = dict(one.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
        expected = dict(zip(tables_of(layers), (table.take() for table in tables_of(one)),
                            strict=True))  # fmt: skip
        for table in tables_of(pipe):
            torch.testing.assert_close(table.take(), expected[table])


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_what_a_backward_sends_in_threads(form: str, scale_grads: bool) -> None:
    compare(False, form, scale_grads)


@on_shm_ranks(2)
def test_what_a_backward_sends_on_ranks(rank: int) -> None:
    for form in FORMS:
        for scale_grads in (True, False):
            compare(True, form, scale_grads)


def rows_pushed(rank: int, ranks: bool) -> None:
    """A pipeline whose first stage looks up rows pushes what one process would."""
    options: dict[str, Any] = {"ranks": True} if ranks else {"devices": ["cpu"] * 2}
    items = ps.Sparse("items", WIDTH, optimizer=ps.Sum(), init=ps.Uniform(1.0), reduction="sum")
    with ps.ParameterServer([items]) as server:
        table, ids, y = server["items"], torch.arange(8), rows(1, 8)
        torch.manual_seed(2)
        last = nn.Linear(WIDTH, WIDTH)
        net = nn.Sequential(ps.Embedding(table), nn.Tanh(), last)
        pipe = trireme.Pipeline(net, CHUNKS, loss=mse_loss, balance=[1, 2], **options)
        before = table.pull(ids).clone()
        leaf = before.clone().requires_grad_()
        mse_loss(last(leaf.tanh()), y).backward()
        expected, last.weight.grad = last.weight.grad, None
        pipe.step(ids, target=y)
        server.clock()
        torch.testing.assert_close(table.pull(ids), before + leaf.grad)
        if not ranks or rank == 1:
            torch.testing.assert_close(last.weight.grad, expected)


class Hides(nn.Module):
    """Looks rows up in what is no module in it."""

    def __init__(self, embedding: ps.Embedding) -> None:
        super().__init__()
        self.look_up = embedding.forward

    def forward(self, ids: Tensor) -> Tensor:
        return self.look_up(ids)


@on_shm_ranks(1)
def test_rows_of_a_server_in_threads(rank: int) -> None:
    rows_pushed(rank, False)
    items = ps.Sparse("items", WIDTH, optimizer=ps.Sum())
    with ps.ParameterServer([items]) as server:
        net = nn.Sequential(Hides(ps.Embedding(server["items"])), nn.Linear(WIDTH, WIDTH))
        pipe = trireme.Pipeline(net, CHUNKS, devices=["cpu"] * 2, loss=mse_loss)
        with pytest.raises(ValueError, match=r"got a backward of stage 0 .* that sends gradients"):
            pipe.step(torch.arange(8), target=rows(1, 8))
        mse_loss(pipe(torch.arange(8)), rows(1, 8)).backward()  # the caller's loss is a mean


@on_shm_ranks(2)
def test_rows_of_a_server_on_ranks(rank: int) -> None:
    rows_pushed(rank, True)


@remote.function
def make_linear() -> nn.Module:
    torch.manual_seed(6)
    return nn.Linear(WIDTH, WIDTH)


@on_shm_ranks(2)
def test_a_remote_module(rank: int) -> None:
    remote.start(f"p{rank}")
    if rank == 0:
        far = remote.Module("p1", make_linear, optimizer=ps.SGD(1.0))
        near = make_linear()
        torch.manual_seed(2)
        last = nn.Linear(WIDTH, WIDTH)
        net = nn.Sequential(far, nn.Tanh(), last)
        pipe = trireme.Pipeline(net, CHUNKS, devices=["cpu"] * 2, loss=mse_loss)
        x, y = rows(0, 8), rows(1, 8)
        mse_loss(last(near(x).tanh()), y).backward()
        pipe.step(x, target=y)
        far.step()
        for name, parameter in near.named_parameters():
            torch.testing.assert_close(far.state_dict()[name], parameter - parameter.grad)
    remote.stop()


def test_a_scaler_is_refused() -> None:
    pipe = trireme.Pipeline(with_tables(), CHUNKS, devices=["cpu"] * 2, loss=mse_loss)
    pipe.scale_losses(GradScaler("cpu"))
    with raises(
        NotImplementedError, "got a GradScaler and stage 0 (layers 0..3)", form=RANKLESS_FORM
    ):
        pipe.step(rows(0), target=rows(1))
    pipe.eval_step(rows(0), target=rows(1))


@on_shm_ranks(2)
def test_a_scaler_is_refused_on_all_ranks(rank: int) -> None:
    layers = nn.Sequential(*with_tables()[:7], nn.Tanh())  # the last stage sends nothing
    pipe = trireme.Pipeline(layers, CHUNKS, ranks=True, loss=mse_loss)
    pipe.scale_losses(GradScaler("cpu"))
    kind = NotImplementedError if rank == 0 else ValueError
    with raises(kind, "got a GradScaler and stage 0 (layers 0..3)"):
        pipe.step(rows(0), target=rows(1))


@on_shm_ranks(1)
def test_a_scaler_is_refused_where_a_layer_does_not_say_that_it_sends(rank: int) -> None:
    """By the first backward, also where the step divides nothing."""
    items = ps.Sparse("items", WIDTH, optimizer=ps.Sum())
    for chunks, scale_grads in ((1, True), (CHUNKS, False)):
        with ps.ParameterServer([items]) as server:
            last = nn.Linear(WIDTH, WIDTH)
            net = nn.Sequential(Hides(ps.Embedding(server["items"])), last)
            pipe = trireme.Pipeline(
                net, chunks, devices=["cpu"] * 2, loss=mse_loss, scale_grads=scale_grads
            )
            pipe.scale_losses(GradScaler("cpu"))
            with raises(
                ValueError,
                "got a backward of stage 0",
                "sends gradients away, to a table or another process, before a GradScaler divides",
                "Leave the scaler out",
                form=RANKLESS_FORM,
            ):
                pipe.step(torch.arange(8), target=rows(1, 8))
            assert last.weight.grad is None
            server.clock()
            assert not server["items"].pull(torch.arange(8)).any()  # nothing was sent


# --- leaves that no layer lists ------------------------------------------------------------------


class Closure:
    """A layer and a loss with weights that they do not have."""

    def __init__(self) -> None:
        torch.manual_seed(9)
        self.weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]

    def layers(self) -> nn.Sequential:
        class Uses(nn.Module):
            def forward(_, x: Tensor) -> Tensor:
                return x @ self.weights[0] @ self.weights[2]

        layers = list(tanh_layers())
        return nn.Sequential(layers[0], Uses(), *layers[2:6], Uses(), layers[7])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output @ self.weights[1], target)


def step_with_unlisted(ranks: bool, form: str, checkpoint: Any) -> None:
    expected, found = Closure(), Closure()
    one = expected.layers()
    options: dict[str, Any] = {"ranks": True} if ranks else {"devices": ["cpu"] * 2}
    pipe = trireme.Pipeline(
        found.layers(), CHUNKS, schedule=form, loss=found.loss, checkpoint=checkpoint, **options
    )
    before = [torch.ones_like(weight) for weight in found.weights]
    for weight, grad in zip(found.weights, before, strict=True):
        weight.grad = grad
    x, y = rows(3, 8), rows(4, 8)
    whole, pieces = x.clone().requires_grad_(), x.clone().requires_grad_()
    accumulate(one, whole, y, chunks=CHUNKS, loss=expected.loss)
    pipe.step(pieces, target=y)
    theirs = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, theirs[name].grad)
    if pipe._calls[0].stage.number == 0:
        torch.testing.assert_close(pieces.grad, whole.grad / CHUNKS)
    if ranks:  # each rank has what its stages use
        for weight in found.weights:
            torch.distributed.all_reduce(weight.grad)
            weight.grad -= 1
    for got, wanted, kept in zip(found.weights, expected.weights, before, strict=True):
        assert got.grad is kept
        torch.testing.assert_close(got.grad - 1, wanted.grad / CHUNKS)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("form", FORMS)
def test_leaves_that_no_layer_has_in_threads(form: str, checkpoint: Any) -> None:
    step_with_unlisted(False, form, checkpoint)


@on_shm_ranks(2)
def test_leaves_that_no_layer_has_on_ranks(rank: int) -> None:
    for form in FORMS:
        step_with_unlisted(True, form, "never")


def test_a_failed_step_leaves_them_as_they_were() -> None:
    closure = Closure()
    targets = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        targets.append(target)
        if len(targets) == CHUNKS:
            raise ArithmeticError("no luck")
        return closure.loss(output, target)

    pipe = trireme.Pipeline(
        closure.layers(), CHUNKS, schedule="1f1b", devices=["cpu"] * 2, loss=loss
    )
    closure.weights[1].grad = before = torch.ones(WIDTH, WIDTH)
    with pytest.raises(ArithmeticError):
        pipe.step(rows(0), target=rows(1))
    assert closure.weights[1].grad is before
    assert torch.equal(before, torch.ones(WIDTH, WIDTH))
    assert closure.weights[0].grad is None


@pytest.mark.parametrize("form", ["gpipe", "1f1b"])
def test_inputs_with_a_graph(form: str) -> None:
    """Nobody divides what their graph sends on: losses are."""
    found = []
    for runs_pipe in (True, False):
        net = tanh_layers()
        leaf = rows(0, 8).requires_grad_()
        x = leaf.clone()
        x.retain_grad()
        seen: list[Tensor] = []
        x.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        if runs_pipe:
            pipe = trireme.Pipeline(net, CHUNKS, schedule=form, devices=["cpu"] * 2, loss=mse_loss)
            pipe.step(x, target=rows(1, 8))
        else:
            mse_loss(net(x), rows(1, 8)).backward()
        grads = [parameter.grad for parameter in net.parameters()]
        found.append([leaf.grad, x.grad, sum(seen), *grads])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
