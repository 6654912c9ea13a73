"""DataParallel trains as one process on whole batches, whatever the module is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from data_parallel.cases import (
    DP,
    EXACT,
    TIME_LIMIT,
    Called,
    Make,
    assert_close,
    assert_same_backward,
    in_whole_numbers,
    pair,
    square_mean,
    whole_numbers,
)
from harness.models import Shapes, Tied, batch, mlp
from harness.training import assert_close as assert_close_by_dtype
from harness.training import gradients, values

pytestmark = TIME_LIMIT

ROWS = 7  # 4 + 3 for two replicas, 3 + 3 + 1 for three
Inputs = Callable[[int], Tensor]


def numbers(step: int) -> Tensor:
    return batch(step, rows=ROWS, dtype=torch.float64)


def words(step: int) -> Tensor:
    return (batch(step, rows=ROWS, width=4).abs() * 10).long() % 11


def images(step: int) -> Tensor:
    return batch(step, rows=ROWS, width=3 * 36, dtype=torch.float64).view(ROWS, 3, 6, 6)


def sequences(step: int) -> Tensor:
    return batch(step, rows=ROWS, width=5 * 6, dtype=torch.float64).view(ROWS, 5, 6)


def marked(step: int) -> Tensor:
    """Only the last row is."""
    rows = numbers(step)
    rows[-1, 0] = 9
    return rows


def of_marked_rows(module: Any, rows: Tensor) -> Tensor:
    is_marked = rows[:, :1] > 5
    common = module.common(rows)
    return common + module.rare(rows) * is_marked if is_marked.any() else common


def frozen() -> nn.Module:
    module = mlp()
    module[2].requires_grad_(False)
    return module


def with_none() -> nn.Module:
    module = Called(lambda m, x: m.layer(x), layer=nn.Linear(6, 3, bias=False))
    module.register_parameter("absent", None)
    module.register_buffer("missing", None)
    module.register_module("nobody", None)
    return module


def twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return Called(lambda m, x: m.again(m.layer(x).tanh()), layer=layer, again=layer)


def lists(module: Any, x: Tensor) -> Tensor:
    return module.several[0] * module.named["b"] * x @ module.several[1] + module.named["a"]


def in_single_steps(module: Any, x: Tensor) -> Tensor:
    state = x.new_zeros(len(x), 6)
    for moment in x.unbind(1):
        state = module.cell(moment, state)
    return state


def weight_norm() -> nn.Module:
    module = Called(lambda m, x: m.layer(x), layer=nn.Linear(6, 3))
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(module.layer)
    return module


# A module and what it is given.
CASES: dict[str, tuple[Make, Inputs]] = {
    "mlp": (mlp, numbers),
    "tied": (Tied, numbers),
    "frozen": (frozen, numbers),
    "none": (with_none, numbers),
    "a layer twice": (twice, numbers),
    "unused": (
        lambda: Called(lambda m, x: m.used(x), used=nn.Linear(6, 2), unused=nn.Linear(6, 2)),
        numbers,
    ),
    "used by one replica": (
        lambda: Called(of_marked_rows, common=nn.Linear(6, 3), rare=nn.Linear(6, 3)),
        marked,
    ),
    "one gradient for two": (
        lambda: Called(
            lambda m, x: x * (m.first + m.second),
            first=nn.Parameter(torch.randn(6)),
            second=nn.Parameter(torch.randn(6)),
        ),
        numbers,
    ),
    "lists": (
        lambda: Called(
            lists,
            several=nn.ParameterList([torch.randn(6), torch.randn(6, 3)]),
            named=nn.ParameterDict({"a": torch.randn(3), "b": torch.randn(1)}),
        ),
        numbers,
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=2), mlp()), words),
    "bags": (lambda: nn.EmbeddingBag(11, 6), words),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), mlp()), numbers),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), images),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 2)).to(
            memory_format=torch.channels_last
        ),
        images,
    ),
    "lstm": (
        lambda: Called(
            lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
        ),
        sequences,
    ),
    "gru": (
        lambda: Called(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(6, 4, batch_first=True)),
        sequences,
    ),
    "cell": (lambda: Called(in_single_steps, cell=nn.GRUCell(6, 6)), sequences),
    "attention": (
        lambda: Called(
            lambda m, x: m.mix(x, x, x)[0], mix=nn.MultiheadAttention(6, 2, batch_first=True)
        ),
        sequences,
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
        sequences,
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 3)), numbers),
    "weight norm by hooks": (weight_norm, numbers),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 3)), numbers),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), numbers),
}


def doubled(make: Make) -> Make:
    return lambda: make().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def train_both(
    make: Make, inputs: Inputs, replicas: int, make_optimizer: Any = sgd, steps: int = 3
) -> None:
    ours, one = pair(make, replicas)
    optimizers = [make_optimizer(module.parameters()) for module in (ours, one)]
    for step in range(steps):
        assert_same_backward(ours, one, inputs(step))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(values(ours), values(one))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_steps_of(name: str, replicas: int) -> None:
    make, inputs = CASES[name]
    train_both(doubled(make), inputs, replicas)


def our_adamw(parameters: Any) -> torch.optim.Optimizer:
    return trireme.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("make_optimizer", [sgd, adamw, our_adamw])
@pytest.mark.parametrize("make", [mlp, Tied])
def test_many_steps(make: Make, make_optimizer: Any) -> None:
    train_both(doubled(make), numbers, 2, make_optimizer, steps=20)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_the_same_bits_where_sums_are_exact(replicas: int) -> None:
    ours, one = pair(lambda: in_whole_numbers(nn.Linear(6, 3)), replicas)
    for step in range(3):
        x = whole_numbers(12, 6, seed=step)
        assert_same_backward(ours, one, x, loss=lambda y: (y * y).sum(), tolerance=EXACT)


def test_the_same_bits_in_every_run() -> None:
    """Whoever of the replicas comes first."""
    x = batch(0, rows=33, width=64)
    seen = []
    for _ in range(3):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        ours = DP(module, replicas=3)
        for _ in range(5):
            ours.zero_grad()
            ours(x).square().sum().backward()
            seen.append(gradients(ours))
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], **EXACT)


@pytest.mark.parametrize("replicas", [2, 3])
def test_several_dtypes_and_shapes(replicas: int) -> None:
    """A scalar, no elements, turned memory; single, double, bfloat16 and complex."""
    ours, one = pair(Shapes, replicas)
    optimizers = [sgd(module.parameters()) for module in (ours, one)]
    for step in range(3):
        for module, optimizer in zip((ours, one), optimizers, strict=True):
            optimizer.zero_grad()
            module(batch(step, rows=ROWS)).square().mean().backward()
        for name, grad in gradients(ours).items():
            assert_close_by_dtype(name, grad, gradients(one)[name])
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype) -> None:
    ours, one = pair(lambda: nn.Linear(6, 3, dtype=dtype))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.complex64 else {}
    for step in range(3):
        x = torch.complex(batch(step), batch(step + 10)).to(dtype)
        assert_same_backward(ours, one, x, tolerance=tolerance)


def test_bfloat16() -> None:
    ours, one = pair(lambda: mlp(torch.bfloat16))
    rough = {"rtol": 0.05, "atol": 0.01}
    for step in range(3):
        assert_same_backward(ours, one, batch(step, dtype=torch.bfloat16), tolerance=rough)


@pytest.mark.parametrize("replicas", [2, 3])
def test_sparse_gradients(replicas: int) -> None:
    """Also of a row that all replicas look up, and added to an earlier gradient."""
    ours, one = pair(doubled(lambda: nn.Embedding(11, 4, sparse=True)), replicas)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (ours, one)]
    for step in range(4):
        for module in (ours, one):
            if step % 2 == 0:
                module.zero_grad()
            square_mean(module(words(step))).backward()
        got, expected = gradients(ours)["weight"], gradients(one)["weight"]
        assert got is not None and expected is not None
        assert got.is_sparse
        assert_close(got.to_dense(), expected.to_dense())
        for optimizer in optimizers:
            optimizer.step()
    assert_close(values(ours), values(one))


def test_a_buffer_that_learns() -> None:
    def make() -> nn.Module:
        module = Called(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(6, 3)).double()
        module.register_buffer("scale", torch.ones(3, dtype=torch.float64, requires_grad=True))
        return module

    ours, one = pair(make)
    for step in range(2):
        assert_same_backward(ours, one, numbers(step))
        assert_close(ours.module.scale.grad, one.scale.grad)


def test_a_parameter_that_is_no_parameter() -> None:
    """torch.func.functional_call, given a module around it, puts tensors with a history there."""
    ours, one = pair(doubled(mlp))
    seen = []
    for module in (ours, one):
        factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        around = nn.Sequential(module)
        tensors = {name: p * factor for name, p in around.named_parameters()}
        for step in range(2):
            output = torch.func.functional_call(around, tensors, numbers(step))
            square_mean(output).backward(retain_graph=True)
        seen.append([output, factor.grad, gradients(module)])
    assert_close(*seen)
    # Without it all is as before.
    assert_same_backward(ours, one, numbers(3))


def test_default_number_of_replicas() -> None:
    one = mlp().double()
    ours = DP(mlp().double())
    assert len(ours.device_ids) >= 1
    assert_same_backward(ours, one, numbers(0))
    assert_same_backward(DP(mlp().double(), ["cpu"] * 3), one, numbers(0))
    assert_same_backward(DP(mlp().double(), replicas=1), one, numbers(0))
