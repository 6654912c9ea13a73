"""scatter, gather, parallel_apply and data_parallel against one process and torch.chunk."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trireme._data_parallel.parallel_apply import data_parallel, parallel_apply
from trireme._data_parallel.replicate import replicate
from trireme.scatter_gather import gather, scatter, scatter_kwargs

from harness.containers import KINDS, Pair, Record

CPUS = ["cpu", "cpu"]


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected)


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# scatter


def reference_scatter(value: Any, targets: int, dim: int) -> Any:
    """torch.nn.parallel.scatter with torch.chunk in the place of its CUDA copies."""
    if isinstance(value, Tensor):
        return value.chunk(targets, dim)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        columns = [reference_scatter(item, targets, dim) for item in value]
        return [type(value)(*row) for row in zip(*columns, strict=False)]
    if isinstance(value, (tuple, list)) and value:
        columns = [reference_scatter(item, targets, dim) for item in value]
        return [type(value)(row) for row in zip(*columns, strict=False)]
    if isinstance(value, dict) and value:
        columns = [reference_scatter(item, targets, dim) for item in value.values()]
        return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=False)]
    return [value for _ in range(targets)]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("targets", [1, 2, 3, 4])
def test_scatter_cuts_as_torch(rows: int, targets: int) -> None:
    x, y = torch.randn(rows, 3), torch.randn(2, rows, dtype=torch.complex64)
    devices = ["cpu"] * targets
    alone = scatter(x, devices)
    assert isinstance(alone, tuple)
    close(alone, x.chunk(targets))
    close(list(scatter(y, devices, -1)), list(y.chunk(targets, 1)))
    for value in [(x, "x"), [x, [x, 3]], {"a": x, "b": (None, x)}, Pair(x, x + 1), (x, ())]:
        nested = scatter(value, devices)
        assert isinstance(nested, list)
        assert str(nested) == str(reference_scatter(value, targets, 0))


@pytest.mark.parametrize("value", [3, "x", None, (), [], ("x", 3), {"a": None}])
def test_scatter_of_what_is_no_tensor(value: Any) -> None:
    assert scatter(value, CPUS) == reference_scatter(value, 2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_scatter_and_gather_of_nested_types(kind: str) -> None:
    pack, unpack = KINDS[kind]
    x, y = torch.randn(5, 2), torch.randn(5)
    parts = scatter(pack(x, y), CPUS)
    close([list(unpack(part)) for part in parts], [[x[:3], y[:3]], [x[3:], y[3:]]])
    whole = gather(parts, "cpu")
    assert type(whole) is type(pack(x, y))
    close(list(unpack(whole)), [x, y])


def test_scatter_gives_views_and_all_get_scalars() -> None:
    x, scalar = torch.randn(4, 2), torch.tensor(3.0, requires_grad=True)
    parts = scatter((x, scalar), CPUS)
    assert [part[0].data_ptr() for part in parts] == [x.data_ptr(), x[2:].data_ptr()]
    assert len(scatter(scalar, ["cpu"] * 3)) == 3
    (parts[0][1] + 2 * parts[1][1]).backward()
    close(scalar.grad, torch.tensor(3.0))


def test_parts_may_be_written_in_place() -> None:
    """So may the batch in one process; of what torch.chunk makes of it, none may."""
    x = torch.randn(4, 2, requires_grad=True)
    for part in scatter(x * 1, CPUS):
        part.mul_(2).sum().backward(retain_graph=True)
    close(x.grad, torch.full((4, 2), 2.0))


def test_scatter_and_gather_have_two_derivatives() -> None:
    x = torch.randn(5, 2, dtype=torch.double, requires_grad=True)

    def there_and_back(x: Tensor) -> Tensor:
        return gather([part.square() for part in scatter(x, CPUS)], "cpu")

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)


def test_sparse_scatter_and_gather() -> None:
    x = torch.randn(5, 3).relu().to_sparse()
    parts = scatter(x, CPUS)
    close([part.to_dense() for part in parts], list(x.to_dense().chunk(2)))
    close(gather(parts, "cpu").to_dense(), x.to_dense())


def test_scatter_kwargs_as_torch() -> None:
    x, y = torch.randn(3, 2), torch.randn(3)
    first, second = x.chunk(2)
    assert scatter_kwargs((), {}, CPUS) == ((), ())
    assert scatter_kwargs((), None, CPUS) == ((), ())
    inputs, kwargs = scatter_kwargs((x,), None, CPUS)
    close(list(inputs), [(first,), (second,)])
    assert kwargs == ({}, {}) and kwargs[0] is not kwargs[1]
    inputs, kwargs = scatter_kwargs((), {"x": x, "n": 3}, CPUS)
    assert inputs == ((), ())
    close(list(kwargs), [{"x": first, "n": 3}, {"x": second, "n": 3}])
    inputs, kwargs = scatter_kwargs((x, "a"), {"y": y}, CPUS)
    close([row[0] for row in inputs] + [row["y"] for row in kwargs], [first, second, *y.chunk(2)])
    inputs, kwargs = scatter_kwargs((x[:1],), {"n": 3}, CPUS)
    assert (len(inputs), kwargs) == (1, ({"n": 3},))
    assert scatter_kwargs(("a",), None, CPUS) == ((("a",), ("a",)), ({}, {}))
    close(scatter_kwargs(x, None, CPUS)[0], (first, second))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: scatter(x, []), ValueError, "got target_gpus=[], expected at least one device"),
        (lambda x: scatter(x, "cpu"), TypeError, "got 'cpu' as target_gpus, expected a sequence"),
        (lambda x: scatter(x, ["cpu", 1000]), ValueError, "1000"),
        (lambda x: scatter(x, ["meta"]), ValueError, "meta"),
        (lambda x: scatter(x, [None]), TypeError, "got None as a device"),
        (lambda x: scatter(x, CPUS, 2), ValueError,
         "got dim 2 for an input of 2 dimensions, expected -2 to 1"),
        (lambda x: scatter((x, x[0]), CPUS, 1), ValueError, "got dim 1 for an input of 1 dim"),
        (lambda x: scatter((x, x[:1]), CPUS), ValueError,
         "got tensors of [4, 1] rows along dim 0, which make [2, 1] parts for 2 devices"),
        (lambda x: scatter_kwargs((x,), {"y": x[:1]}, CPUS), ValueError, "of [4, 1] rows"),
        (lambda x: scatter(x.to_sparse().requires_grad_(), CPUS), ValueError,
         "got an input of torch.sparse_coo that requires a gradient, expected a dense one"),
        (lambda x: gather([], "cpu"), ValueError, "got no outputs to gather"),
        (lambda x: gather([x, x.double()], "cpu"), TypeError,
         "got torch.float64, torch.strided for output tensor 0 from replica 1 of 2, expected "
         "torch.float32"),
        (lambda x: gather([(x, x), (x, x[:, :1])], "cpu"), ValueError,
         "got shape [4, 1] for output tensor 1 from replica 1 of 2, expected one like [4, 2]"),
        (lambda x: gather([x, x[0]], "cpu"), ValueError, "got shape [2]"),
        (lambda x: gather([x, x], "cpu", 2), ValueError, "got dim 2 for an output of 2 dim"),
        (lambda x: gather([x, x], 1000), ValueError, "1000"),
        (lambda x: gather([x, None], "cpu"), TypeError,
         "got None for output from replica 1 of 2, expected a tensor"),
        (lambda x: gather([3, 4], "cpu"), ValueError, "got 4 for output from replica 1 of 2"),
    ],
)  # fmt: skip
def test_bad_scatter_and_gather(
    call: Callable[[Tensor], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call(torch.randn(4, 2))
    assert str(caught.value).startswith("[data_parallel] got ")
    assert text in str(caught.value)


# gather


def test_gather_joins_along_dim() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 1)
    close(gather([x, y], "cpu", 1), torch.cat([x, y], 1))
    close(gather((x, y), -1, -1), torch.cat([x, y], 1))  # -1: the CPU
    assert gather([x], torch.device("cpu")).data_ptr() != x.data_ptr()
    close(gather([x, x[:0]], "cpu"), x)


def test_gather_of_scalars_is_a_vector() -> None:
    parts = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    with pytest.warns(UserWarning, match="all input tensors were scalars; will instead") as said:
        vector = gather(parts, "cpu")
    assert [warning.filename for warning in said] == [__file__]  # where it was called
    close(vector.detach(), torch.tensor([0.0, 1.0, 2.0]))
    (vector * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    close([part.grad for part in parts], [torch.tensor(float(i)) for i in (1, 2, 3)])


def test_gather_keeps_equal_values_and_matches_keys() -> None:
    x = torch.randn(4)
    first, second = {"x": x[:2], "n": 3, "none": None}, {"none": None, "n": 3, "x": x[2:]}
    close(gather([first, second], "cpu"), {"x": x, "n": 3, "none": None})
    record = gather([Record(x[:1], "a", x[:1]), Record(x[1:], "a", x[1:])], "cpu")
    assert isinstance(record, Record) and record.note == "a"
    close(record.right, x)


# parallel_apply


def test_modules_run_at_the_same_time_in_threads_of_their_own() -> None:
    meet = threading.Barrier(3, timeout=60)

    def module(x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, int, bool]:
        meet.wait()
        return x * scale, threading.get_ident(), torch.is_grad_enabled()

    inputs: list[Any] = [torch.ones(1), (torch.ones(2),), [torch.ones(3)]]
    with torch.no_grad():
        results = parallel_apply([module] * 3, inputs, [{}, {"scale": 2.0}, {}])
    close([result[0] for result in results], [torch.ones(1), torch.full((2,), 2.0), torch.ones(3)])
    assert len({result[1] for result in results} | {threading.get_ident()}) == 4
    assert not any(result[2] for result in results)


def test_autocast_holds_in_threads() -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        results = parallel_apply([layer] * 2, [torch.randn(2, 4)] * 2, devices=CPUS)
    assert {result.dtype for result in results} == {torch.bfloat16}


def test_packed_sequences_are_inputs_of_parallel_apply() -> None:
    lstm = nn.LSTM(2, 3)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    results = parallel_apply([lstm, lstm], [[packed], [packed]])
    close(results[1][0].data, lstm(packed)[0].data)


def test_failure_has_the_name_of_its_replica() -> None:
    def module(x: Tensor) -> Tensor:
        if len(x) == 2:
            raise KeyError("missing")
        return x

    with pytest.raises(KeyError, match="missing") as caught:
        parallel_apply([module] * 2, [torch.ones(1), torch.ones(2)])
    assert "replica 1 of 2 (cpu)" in text_of(caught.value)
    assert "in module" in "".join(str(entry) for entry in caught.traceback)


# torch's types: it asserts that lists have one length.
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([], []), ValueError, "got no modules, expected at least one"),
        (([abs], [1, 2]), AssertionError, "got 2 inputs for 1 modules, expected as many"),
        (([abs], [1], []), AssertionError, "got 0 kwargs_tup for 1 modules"),
        (([abs], [1], None, CPUS), AssertionError, "got 2 devices for 1 modules"),
        (([abs], [1], None, [1000]), ValueError, "1000"),
    ],
)
def test_bad_parallel_apply(arguments: Sequence[Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        parallel_apply(*arguments)
    assert str(caught.value).startswith("[data_parallel] got ") and text in str(caught.value)


# data_parallel


def test_two_derivatives_of_data_parallel() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.double, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return data_parallel(net, x, CPUS)

    inputs = (x, *net.parameters())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_gradient_penalty() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    gradients = []
    for run in (net, lambda x: data_parallel(net, x, CPUS)):
        net.zero_grad()
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    close(gradients[1], gradients[0])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor | None = None, *, scale: Any = 1, log: Any = None) -> Any:
        if log is not None:
            log.append(0 if x is None else len(x))
        return self.weight * (1 if x is None else x) * scale


def test_data_parallel_inputs() -> None:
    net, x = Named(), torch.randn(5, 2)
    log: list[int] = []
    whole = net(x)
    close(data_parallel(net, x, CPUS, module_kwargs={"log": log}), whole)
    assert sorted(log) == [2, 3]
    close(data_parallel(net, (x,), ["cpu"] * 8), whole)  # more replicas than rows
    close(data_parallel(net, x, output_device="cpu"), whole)  # two replicas
    close(data_parallel(net, x, ["cpu"]), whole)
    kwargs = {"x": x, "scale": torch.tensor(2.0)}
    close(data_parallel(net, None, CPUS, module_kwargs=kwargs), 2 * whole)
    log.clear()
    close(data_parallel(net, None, CPUS, module_kwargs={"log": log}), net().repeat(2))
    close(data_parallel(net, None, CPUS), net())  # without inputs it runs once
    close(data_parallel(nn.Tanh(), x, CPUS, dim=1), x.tanh())
    with torch.no_grad():
        assert not data_parallel(net, x, CPUS).requires_grad


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((nn.Linear(2, 2), torch.ones(2, 2), []), ValueError, "got device_ids=[], expected"),
        ((nn.Linear(2, 2, device="meta"), torch.ones(2, 2), CPUS), ValueError,
         "got 'weight' on meta, expected it on cpu, the first of device_ids"),
        ((abs, torch.ones(2, 2), CPUS), TypeError, "expected a torch.nn.Module"),
        ((nn.Linear(2, 2), torch.ones(2, 2), CPUS, None, 2), ValueError, "got dim 2"),
        ((nn.Linear(2, 2), torch.ones(2, 2), CPUS, 1000), ValueError, "1000"),
    ],
)  # fmt: skip
def test_bad_data_parallel(arguments: Sequence[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        data_parallel(*arguments)
    assert str(caught.value).startswith("[data_parallel] got ") and text in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_functions_on_cuda() -> None:
    """Two replicas on one device, inputs from the host, outputs back to it."""
    net, x = nn.Linear(3, 2).cuda(), torch.randn(5, 3)
    got = data_parallel(net, x, [0, 0], "cpu")
    close(got, net(x.cuda()).cpu())
    got.sum().backward()
    mine = net.weight.grad
    net.weight.grad = None
    net(x.cuda()).sum().backward()
    close(mine, net.weight.grad)
    assert scatter(x, [0, "cpu"])[0].is_cuda
    on_host, on_cuda = replicate(net, ["cpu", 0])
    assert on_cuda.weight.is_cuda and not on_host.weight.is_cuda
