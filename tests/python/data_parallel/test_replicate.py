"""replicate and what modules do in replicas; copies and sums of many tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from trireme._data_parallel import coalesced
from trireme._data_parallel.coalesced import broadcast_coalesced, reduce_add_coalesced
from trireme._data_parallel.parallel_apply import data_parallel
from trireme._data_parallel.replicate import replicate

CPUS = ["cpu", "cpu"]


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


class Tied(nn.Module):
    """One weight at two places, one layer at two, a child that is None, and a parameter that is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.absent = None
        self.register_module("none", None)
        self.register_parameter("nothing", None)
        self.register_buffer("no_buffer", None)

    def forward(self, x: Tensor) -> Tensor:
        assert self.none is None and self.nothing is None and self.no_buffer is None
        assert self.again is self.first and self.second.weight is self.first.weight
        return self.second(self.again(self.first(x)))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.dict = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert len(self.list) == 2 and sorted(self.dict) == ["a", "b"]
        return x * self.list[0] + self.list[1] * self.dict["a"] + self.dict["b"] * self.frozen


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unflatten(1, (2, 2)))[0]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.weight)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x.argsort(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    "tied": Tied,
    "parameter lists": Lists,
    "lstm": Recurrent,
    "complex": Complex,
    "sparse gradient": Words,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
    "batch norm in eval": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval(),
    "no parameters": nn.Tanh,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", NETS)
def test_equals_one_process(kind: str) -> None:
    """Outputs and gradients of parameters and inputs, three replicas of uneven parts."""
    torch.manual_seed(0)
    net = NETS[kind]()
    x = torch.randn(7, 4, requires_grad=True)
    results = []
    for run in (net, lambda x: data_parallel(net, x, ["cpu"] * 3)):
        x.grad = None
        net.zero_grad()
        output = run(x)
        output.square().sum().backward()
        results.append(
            (output.detach(), x.grad, [parameter.grad for parameter in net.parameters()])
        )
    for got, expected in zip(results[1][2], results[0][2], strict=True):
        if expected is not None and expected.is_sparse:
            assert got.is_sparse
            got, expected = got.to_dense(), expected.to_dense()
        close(got, expected)
    close(results[1][:2], results[0][:2])


def test_replicas_share_memory_and_are_functions_of_the_module() -> None:
    net = Tied()
    first, second = replicate(net, CPUS)
    assert type(first) is Tied and first._is_replica
    assert list(first.parameters()) == []
    assert first.first.weight.data_ptr() == second.first.weight.data_ptr()
    assert first.first.weight.data_ptr() == net.first.weight.data_ptr()
    assert first.first is first.again and first.first is not net.first
    assert first.second.weight is first.first.weight
    assert list(first.first._former_parameters) == ["weight", "bias"]
    assert first.first._former_parameters["weight"] is first.first.weight
    (2 * first.first.bias + 3 * second.first.bias).sum().backward()
    close(net.first.bias.grad, torch.full((4,), 5.0))


def test_detached_replicas_have_no_graph() -> None:
    net = Tied()
    net.register_buffer("learned", torch.randn(2, requires_grad=True))
    for replica in replicate(net, CPUS, detach=True):
        assert not replica.first.weight.requires_grad and not replica.learned.requires_grad
        close(replica.first.weight, net.first.weight.detach())


def test_buffers_that_require_a_gradient() -> None:
    net = nn.Tanh()
    net.register_buffer("learned", torch.randn(2, requires_grad=True))
    first, second = replicate(net, CPUS)
    (first.learned + 2 * second.learned).sum().backward()
    close(net.learned.grad, torch.full((2,), 3.0))


def test_buffers_of_the_first_replica_are_the_modules() -> None:
    """What its forward writes there in place stays; the others have copies."""
    torch.manual_seed(0)
    net, alone = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    first, second = replicate(net, CPUS)
    assert first.running_mean.data_ptr() == net.running_mean.data_ptr()
    assert second.running_mean.data_ptr() != net.running_mean.data_ptr()
    x = torch.randn(8, 3)
    data_parallel(net, x, CPUS)
    alone(x[:4])
    close(net.state_dict(), alone.state_dict())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: replicate(abs, CPUS), TypeError, "got builtin_function_or_method as module"),
        (lambda: replicate(nn.Tanh(), []), ValueError, "got devices=[], expected at least one"),
        (lambda: replicate(nn.Tanh(), [1000]), ValueError, "1000"),
        (lambda: replicate(nn.Sequential(torch.jit.script(nn.Tanh())), CPUS), ValueError,
         "got a ScriptModule at '0', expected plain modules"),
        (lambda: replicate(nn.LazyLinear(2), CPUS), ValueError, "a lazy parameter"),
        (lambda: broadcast_coalesced([torch.ones(1)], []), ValueError, "got devices=[], expected"),
        (lambda: broadcast_coalesced(torch.ones(1), CPUS), TypeError, "got a tensor as tensors"),
        (lambda: broadcast_coalesced([3], CPUS), TypeError, "got int at 0 as tensors"),
        (lambda: broadcast_coalesced([torch.ones(1), torch.ones(1, device="meta")], CPUS),
         ValueError, "got tensors on cpu, meta, expected one device"),
        (lambda: reduce_add_coalesced([]), ValueError, "got no inputs to sum"),
        (lambda: reduce_add_coalesced([[torch.ones(1)], []]), ValueError,
         "got 0 tensors in input 1, expected 1 as in input 0"),
        (lambda: reduce_add_coalesced([[torch.ones(1)], [torch.ones(2)]]), ValueError,
         "got shape [2] for tensor 0 of input 1, expected [1] as in input 0"),
        (lambda: reduce_add_coalesced([[torch.ones(1)], [torch.ones(1).double()]]), TypeError,
         "got torch.float64 for tensor 0 of input 1, expected torch.float32"),
        (lambda: reduce_add_coalesced([[torch.ones(1)]], 1000), ValueError, "1000"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(torch.jit|Lazy).*")
def test_bad_input(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("[data_parallel] got ") and text in str(caught.value)


# coalesced


def mixed(seed: int = 0) -> list[Tensor]:
    """Makes small integers of several dtypes and layouts: sums are exact."""
    torch.manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-8, 8, shape)

    return [
        draw(3, 2).float(),
        draw(5).double(),
        draw(2, 2),
        nn.Parameter(draw(4).float()),
        torch.complex(draw(3).float(), draw(3).float()),
        draw(4, 3).float().relu().to_sparse(),
        draw(2, 3).float().t(),
        draw(2, 3, 2, 2).float().to(memory_format=torch.channels_last),
        draw(6).bfloat16(),
        draw(7),
        torch.tensor(3.0),
        draw(0, 3).float(),
    ]


def dense(tensors: Any) -> list[Tensor]:
    return [tensor.detach().to_dense() for tensor in tensors]


def test_broadcast_gives_the_tensors_and_copies() -> None:
    given = mixed()
    own, copies = broadcast_coalesced(given, CPUS)
    assert all(a is b for a, b in zip(own, given, strict=True))
    close(dense(copies), dense(given))
    assert [tensor.layout for tensor in copies] == [tensor.layout for tensor in given]
    assert not any(copy.requires_grad for copy in copies)
    copies[0].zero_()
    close(own[0], mixed()[0])
    assert broadcast_coalesced([], CPUS) == ([], [])


@pytest.mark.parametrize("limit", [0, 24, 10485760])
def test_sums_are_those_of_the_inputs(limit: int) -> None:
    lists = [mixed(seed) for seed in range(3)]
    sums = reduce_add_coalesced(lists, "cpu", limit)
    assert isinstance(sums, tuple)
    expected = [a + b + c for a, b, c in zip(*map(dense, lists), strict=True)]
    close(dense(sums), expected)
    assert [tensor.dtype for tensor in sums] == [tensor.dtype for tensor in lists[0]]
    assert sums[5].is_sparse
    assert not any(total.requires_grad for total in sums)
    close([dense(mixed(seed)) for seed in range(3)], [dense(own) for own in lists])  # unchanged


def test_sums_are_made_in_order_of_the_inputs() -> None:
    parts = [torch.tensor([value, value]) for value in (1e8, 1.0, -1e8)]
    pairs = reduce_add_coalesced([[part, part] for part in parts])
    assert [pair.tolist() for pair in pairs] == [((parts[0] + parts[1]) + parts[2]).tolist()] * 2
    (alone,) = reduce_add_coalesced([[part] for part in parts])
    close(alone, pairs[0])


def test_sum_of_sparse_and_dense_is_dense() -> None:
    x = torch.randn(3, 2).relu()
    (total,) = reduce_add_coalesced([[x.to_sparse()], [x]])
    close(total, 2 * x)
    (alone,) = reduce_add_coalesced([[x]])
    assert alone.data_ptr() != x.data_ptr()


def test_what_travels_together() -> None:
    """Tensors travel by dtype, up to the limit; what is not contiguous goes alone."""
    given = [torch.ones(2), torch.ones(2).double(), torch.ones(2), torch.ones(2, 2).t()[:1],
             torch.ones(4), torch.ones(1)]  # fmt: skip
    joins = [coalesced._joins(tensor) for tensor in given]
    groups = coalesced._together(given, joins, limit=20)
    assert sorted(groups) == [[0, 2], [1], [3], [4, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool])
def test_packed_and_unpacked(dtype: torch.dtype) -> None:
    given = [torch.randint(0, 2, (i, 3)).to(dtype) for i in range(3)]
    parts = coalesced._unflat(coalesced._flat(given), given)
    close(parts, given)
    before = parts[1]._version
    parts[2].zero_()
    assert parts[1]._version == before
