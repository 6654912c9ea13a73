"""SyncBatchNorm on N ranks equals BatchNorm on the whole batch."""

import copy
import inspect
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from harness.ranks import run_ranks

STEPS = 2
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


@dataclass(frozen=True)
class Case:
    """A layer, and what each rank feeds it."""

    rows: tuple[int, ...] = (3, 1, 2)
    shape: tuple[int, ...] = (5, 4, 3)  # channels and space
    dtype: torch.dtype = torch.float32
    layer_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"
    offset: float = 0.0
    input_needs_grad: bool = True
    frozen: bool = False

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The input and the gradient of the output, for each rank."""
        generator = torch.Generator().manual_seed(100 + step)

        def draw(rows: int) -> torch.Tensor:
            sizes = (rows, *self.shape)
            tensor = torch.randn(sizes, generator=generator, dtype=torch.float64)
            return self.laid_out(tensor.to(self.dtype))

        return [(draw(rows) * (1 + step) + self.offset, draw(rows)) for rows in self.rows]

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.layout == "channels_last":
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            return tensor.contiguous(memory_format=form)
        if self.layout == "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        return tensor

    def prepare(self, layer: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Weights other than 1 and 0, as exact in every dtype."""
        layer.to(dtype)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.arange(1, 1 + len(parameter)) / 4)
        return layer.requires_grad_(not self.frozen)

    def dense(self, tensor: torch.Tensor) -> bool:
        form = torch.contiguous_format
        if self.layout == "channels_last":
            form = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.is_contiguous(memory_format=form)


CASES = {
    "1d_rows": Case(shape=(5,)),
    "1d": Case(shape=(5, 7)),
    "2d": Case(),
    "3d": Case(shape=(3, 2, 3, 4)),
    "even": Case(rows=(2, 2, 2)),
    "one_value_per_rank": Case(rows=(1, 1, 1), shape=(4,)),
    "empty_on_one_rank": Case(rows=(2, 0, 3)),
    "empty_on_the_first_ranks": Case(rows=(0, 0, 3)),
    "empty_everywhere": Case(rows=(0, 0, 0)),
    "cumulative": Case(options={"momentum": None}),
    "untracked": Case(options={"track_running_stats": False}),
    "not_affine": Case(options={"affine": False}),
    "nothing_but_normalize": Case(options={"affine": False, "track_running_stats": False}),
    "large_eps": Case(options={"eps": 0.5, "momentum": 0.7}),
    "frozen": Case(frozen=True),
    "first_layer": Case(input_needs_grad=False),
    "first_layer_empty": Case(rows=(2, 0, 3), input_needs_grad=False),
    "transposed": Case(layout="transposed"),
    "channels_last": Case(layout="channels_last", rows=(3, 0, 2)),
    "channels_last_3d": Case(layout="channels_last", shape=(4, 2, 3, 2)),
    "double": Case(dtype=torch.float64),
    "double_empty": Case(dtype=torch.float64, rows=(0, 2, 3), shape=(5,)),
    # Squares of 4096 do not fit beside a variance of 1 in fp32.
    "far_from_zero": Case(dtype=torch.float32, offset=4096.0, rows=(2, 3, 0), shape=(2, 40)),
    "half": Case(dtype=torch.float16, rows=(0, 3, 2)),
    "half_with_float_layer": Case(dtype=torch.float16, layer_dtype=torch.float32),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16_with_float_layer": Case(dtype=torch.bfloat16, layer_dtype=torch.float32),
    "bfloat16_channels_last": Case(
        dtype=torch.bfloat16, layer_dtype=torch.float32, layout="channels_last", rows=(2, 0, 1)
    ),
    "bfloat16_not_affine": Case(dtype=torch.bfloat16, options={"affine": False}),
}
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # not in torch 2.11
    CASES["without_bias"] = Case(options={"bias": False})
# fp32 inputs around 4096 have 3e-4 between neighbours.
LOOSER = {"far_from_zero": 2e-3}


def outcome_of(layer: nn.Module, batches: list[Any], case: Case) -> dict[str, Any]:
    """What the layer computes from these batches in training, and then in evaluation."""
    outputs, input_grads = [], []
    for input, grad_output in batches:
        input = input.clone().requires_grad_(case.input_needs_grad)  # clone keeps the strides
        output = layer(input)
        if output.requires_grad:
            output.backward(grad_output)
        outputs.append(output.detach())
        input_grads.append(input.grad)
    result = {
        "outputs": outputs,
        "input_grads": input_grads,
        "grads": {name: p.grad for name, p in layer.named_parameters()},
        "buffers": dict(layer.named_buffers()),
    }
    if layer.track_running_stats:
        with torch.no_grad():
            result["evaluated"] = layer.eval()(batches[0][0])
    return result


def run_cases(rank: int, device: str) -> dict[str, Any]:
    """The outcome of every case on this rank."""
    with trireme.init(device="cpu"):
        group = dist.new_group(backend="gloo") if device == "cuda" else None
        layers = {
            name: trireme.SyncBatchNorm(case.shape[0], process_group=group, **case.options)
            for name, case in CASES.items()
        }
        outcomes = {}
        for name, case in CASES.items():
            layer = case.prepare(layers[name], case.layer_dtype or case.dtype).to(device)
            own = [case.batches(step)[rank] for step in range(STEPS)]
            outcome = outcome_of(layer, [(x.to(device), dy.to(device)) for x, dy in own], case)
            outcome["dense"] = all(map(case.dense, outcome["outputs"]))
            outcomes[name] = torch.utils._pytree.tree_map_only(
                torch.Tensor, torch.Tensor.cpu, outcome
            )
        return outcomes


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    yield run_ranks(run_cases, 3, request.param)


def expected_outcome(case: Case) -> dict[str, Any]:
    """Computes them by BatchNorm in double precision on the whole batch."""
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}
    layer = kind[len(case.shape)](case.shape[0], **case.options)
    case.prepare(layer, torch.float64)
    whole = []
    for step in range(STEPS):
        inputs, grad_outputs = zip(*case.batches(step), strict=True)
        whole.append((torch.cat(inputs).double(), torch.cat(grad_outputs).double()))
    return outcome_of(layer, whole, case)


@pytest.mark.parametrize("name", CASES)
def test_equals_batch_norm_on_the_whole_batch(name: str, outcomes: list[dict[str, Any]]) -> None:
    case = CASES[name]
    ranks = [outcome[name] for outcome in outcomes]
    expected = expected_outcome(case)
    tolerance = LOOSER.get(name, TOLERANCES[case.dtype])

    def check(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            got.double(), wanted.double(), rtol=tolerance, atol=tolerance, msg=lambda m: what + m
        )

    def check_parts(key: str, parts: list[torch.Tensor], wanted: torch.Tensor) -> None:
        assert all(part.dtype == case.dtype for part in parts)
        check(torch.cat(parts), wanted, f"{key}: ")

    for step in range(STEPS):
        outputs = [rank["outputs"][step] for rank in ranks]
        check_parts("output", outputs, expected["outputs"][step])
        if case.input_needs_grad:
            input_grads = [rank["input_grads"][step] for rank in ranks]
            check_parts("input gradient", input_grads, expected["input_grads"][step])
    if "evaluated" in expected:
        check_parts("evaluated", [rank["evaluated"] for rank in ranks], expected["evaluated"])
    for rank in ranks:
        assert rank["dense"]
        assert rank["buffers"].keys() == expected["buffers"].keys()
        assert rank["grads"].keys() == expected["grads"].keys()
        for buffer, value in expected["buffers"].items():
            check(rank["buffers"][buffer], value, f"{buffer}: ")
    for parameter, grad in expected["grads"].items():
        if case.frozen:
            assert all(rank["grads"][parameter] is None for rank in ranks)
            continue
        parts = [rank["grads"][parameter] for rank in ranks]
        assert all(part.dtype == (case.layer_dtype or case.dtype) for part in parts)
        check(torch.stack(parts).double().sum(0), grad, f"gradient of {parameter}: ")


def total_loss(layer: nn.Module, input: torch.Tensor, weights: torch.Tensor) -> float:
    with torch.no_grad():
        loss = (layer(input) * weights).square().sum()
    dist.all_reduce(loss)
    return float(loss)


def compare_with_differences(rank: int) -> list[tuple[float, float]]:
    """Pairs of a derivative of the ranks' total loss: by backward, and by finite differences."""
    with trireme.init(device="cpu"):
        torch.manual_seed(rank)
        layer = trireme.SyncBatchNorm(2, dtype=torch.float64)
        input = torch.randn(2 + rank, 2, 2, dtype=torch.float64, requires_grad=True)
        weights = torch.rand_like(input)
        (layer(input) * weights).square().sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        pairs = []
        # All ranks shift the parameters; the input of one rank at a time.
        for tensor, owner in [(input, 0), (input, 1), (layer.weight, None), (layer.bias, None)]:
            entries = 4 if owner is not None else 2
            for entry in range(entries):
                values = []
                for shift in (1e-5, -1e-5):
                    with torch.no_grad():
                        flat = tensor.view(-1)
                        shift_here = shift if owner in (None, rank) else 0.0
                        before = flat[entry].clone()
                        flat[entry] += shift_here
                        values.append(total_loss(layer, input, weights))
                        flat[entry] = before
                if owner in (None, rank):
                    derivative = float(tensor.grad.view(-1)[entry])
                    pairs.append((derivative, (values[0] - values[1]) / 2e-5))
        return pairs


def test_gradients_are_those_of_the_loss_of_all_ranks() -> None:
    for pairs in run_ranks(compare_with_differences, 2):
        assert len(pairs) == 8
        for derivative, difference in pairs:
            assert derivative == pytest.approx(difference, rel=1e-6, abs=1e-7)


def convolutional(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
        nn.BatchNorm1d(3, momentum=None),
    ).double()


# Rows of each rank in each step; the second rank runs dry.
ROWS = [(3, 1), (2, 2), (4, 0)]


def train(model: nn.Module, rank: int | None) -> dict[str, torch.Tensor]:
    """Three steps; of the whole batch without a rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for rows in ROWS:
        inputs = torch.randn(4, 2, 4, 4, generator=generator, dtype=torch.float64)
        targets = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        world = 1
        if rank is not None:
            inputs, targets = inputs.split(rows)[rank], targets.split(rows)[rank]
            world = len(rows)
        loss = (model(inputs) - targets).square().sum() * world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def train_wrapped(rank: int) -> dict[str, Any]:
    with trireme.init(device="cpu"):
        model = trireme.convert_sync_batchnorm(convolutional())
        result = {"trained": train(trireme.DistributedDataParallel(model), rank)}
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        inputs = torch.ones(2 - rank, 2, 4, 4, dtype=torch.float64)
        copied = copy.deepcopy(model)
        result["same"] = [torch.equal(model(inputs), other(inputs)) for other in (loaded, copied)]
        return result


def test_training_under_ddp_equals_one_process() -> None:
    expected = train(convolutional(), None)
    for result in run_ranks(train_wrapped, 2):
        for name, value in expected.items():
            torch.testing.assert_close(result["trained"]["module." + name], value)
        assert result["same"] == [True, True]


def run_in_groups(rank: int) -> dict[str, Any]:
    with trireme.init(device="cpu"):
        pair, alone = dist.new_group([0, 2]), dist.new_group([1])
        own, other = (alone, pair) if rank == 1 else (pair, alone)
        layer = trireme.convert_sync_batchnorm(nn.BatchNorm1d(3), own)
        input = torch.arange(6.0).view(2, 3) * (rank + 1)
        result = {"output": layer(input), "kept": copy.deepcopy(layer).process_group is own}
        again = trireme.convert_sync_batchnorm(nn.Sequential(layer))[0]
        result["kept"] &= again.process_group is own
        with pytest.raises(ValueError) as caught:
            trireme.SyncBatchNorm(3, process_group=other)
        result["outsider"] = str(caught.value)
        return result


def test_process_groups_are_separate_batches() -> None:
    results = run_ranks(run_in_groups, 3)
    inputs = [torch.arange(6.0).view(2, 3) * (rank + 1) for rank in range(3)]
    together = nn.BatchNorm1d(3)(torch.cat([inputs[0], inputs[2]]))
    torch.testing.assert_close(results[0]["output"], together[:2])
    torch.testing.assert_close(results[1]["output"], nn.BatchNorm1d(3)(inputs[1]))
    torch.testing.assert_close(results[2]["output"], together[2:])
    for rank, result in enumerate(results):
        assert result["kept"]
        assert result["outsider"] == (
            f"[sync_batch_norm] got a process group without rank {rank}, expected one that has it "
            f"(rank {rank} of 3). Build the layer on the ranks of its group only."
        )


def compile_and_cast(rank: int) -> bool:
    with trireme.init(device="cpu"):
        model = trireme.convert_sync_batchnorm(convolutional().float())
        compiled = torch.compile(copy.deepcopy(model), backend="eager")
        for rows in (2, 2 + rank):
            inputs = torch.randn(rows, 2, 4, 4)
            for net in (model, compiled):
                net(inputs).square().sum().backward()
        for got, wanted in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad)
        whole = torch.compile(copy.deepcopy(model).eval(), backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(inputs), model.eval()(inputs))

        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model.train()(inputs)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        return True


def test_compiled_and_under_autocast() -> None:
    assert run_ranks(compile_and_cast, 2) == [True, True]
