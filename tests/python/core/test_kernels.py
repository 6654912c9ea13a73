"""torch.ops.trireme.flatten, flatten_accumulate and unflatten against plain torch."""

from collections.abc import Sequence

import pytest
import torch
import trireme  # noqa: F401  (registers the operators)
from torch import Tensor

ops = torch.ops.trireme

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (0, 3), (7,), (64,), (33, 65), (2, 3, 4, 5), (8193,)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    return torch.device(request.param)


def draw(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Ordinary numbers, with what conversions stumble over among them."""
    values = torch.randn(shape, dtype=torch.float64)
    delicate = [0.0, -0.0, torch.nan, torch.inf, 65520.0, 1 + 2**-11, 1 + 2**-8, 1e-40, 2.0**-25]
    for i, value in enumerate(delicate[: values.numel() // 4]):
        values.view(-1)[4 * i] = value
    return values.to(device=device, dtype=dtype)


def mixed(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Tensor]:
    """Uneven shapes, dtypes in turn, and one tensor that is dense but not contiguous."""
    tensors = [
        draw(shape, dtypes[i % len(dtypes)], device) for i, shape in enumerate(SHAPES * len(dtypes))
    ]
    image = draw((2, 3, 8, 8), dtypes[0], device).to(memory_format=torch.channels_last)
    return [*tensors, image, draw((5, 4), dtypes[-1], device).t()]


def reals(tensor: Tensor) -> Tensor:
    """All reals of a dense tensor in memory order."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.as_strided((real.numel(),), (1,))


def scaled(tensor: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0 and tensor.dtype == dtype:
        return tensor
    compute = torch.float64 if torch.float64 in (tensor.dtype, dtype) else torch.float32
    return (tensor.to(compute) * scale).to(dtype)


def plain_flatten(tensors: Sequence[Tensor], dtype: torch.dtype, scale: float) -> Tensor:
    return torch.cat([scaled(reals(tensor), dtype, scale) for tensor in tensors])


def plain_unflatten(flat: Tensor, outputs: Sequence[Tensor], scale: float) -> None:
    parts = reals(flat).split([reals(output).numel() for output in outputs])
    for part, output in zip(parts, outputs, strict=True):
        run = reals(output)
        run.copy_(scaled(part, run.dtype, scale))


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_equals_plain_torch(device: torch.device, dtype: torch.dtype, scale: float) -> None:
    inputs = mixed(device)
    expected = plain_flatten(inputs, dtype, scale)
    assert_same(ops.flatten(inputs, dtype, scale), expected)
    flat = torch.empty_like(expected)
    assert ops.flatten(inputs, flat, scale) is None
    assert_same(flat, expected)


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flatten_accumulate_equals_plain_torch(
    device: torch.device, dtype: torch.dtype, scale: float
) -> None:
    inputs = mixed(device)
    flat = draw((plain_flatten(inputs, dtype, 1.0).numel(),), dtype, device)
    expected = flat + plain_flatten(inputs, dtype, scale)
    ops.flatten_accumulate(inputs, flat, scale)
    assert_same(flat, expected)


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unflatten_equals_plain_torch(
    device: torch.device, dtype: torch.dtype, scale: float
) -> None:
    outputs = mixed(device)
    expected = [output.clone() for output in outputs]
    flat = draw((sum(output.numel() for output in outputs),), dtype, device)
    ops.unflatten(flat, outputs, scale)
    plain_unflatten(flat, expected, scale)
    for got, wanted in zip(outputs, expected, strict=True):
        assert_same(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_complex_is_twice_as_many_reals(device: torch.device, dtype: torch.dtype) -> None:
    inputs = mixed(device, COMPLEX)
    expected = plain_flatten(inputs, dtype.to_real(), 0.5)
    flat = ops.flatten(inputs, dtype, 0.5)
    assert flat.dtype == dtype
    assert_same(reals(flat), expected)
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    wanted = [torch.empty_like(tensor) for tensor in inputs]
    ops.unflatten(flat, outputs, 3.0)
    plain_unflatten(flat, wanted, 3.0)
    for got, want in zip(outputs, wanted, strict=True):
        assert_same(torch.view_as_real(got), torch.view_as_real(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_one_keeps_every_bit(device: torch.device, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (8 * 10007,), dtype=torch.uint8, device=device)
    source = bits.view(dtype)
    flat = ops.flatten([source], dtype)
    assert torch.equal(flat.view(torch.uint8), bits)
    back = torch.zeros_like(source)
    ops.unflatten(flat, [back])
    assert torch.equal(back.view(torch.uint8), bits)


def test_parts_of_flat_that_are_not_aligned(device: torch.device) -> None:
    numels = [1, 8192, 3, 8193, 5, 20000, 1]
    inputs = [draw((numel + 1,), torch.float32, device)[1:] for numel in numels]
    for dtype in (torch.float32, torch.bfloat16):
        assert_same(ops.flatten(inputs, dtype, 0.5), plain_flatten(inputs, dtype, 0.5))


def test_more_tensors_than_one_launch_takes(device: torch.device) -> None:
    inputs = [draw((1 + i % 5,), torch.float32, device) for i in range(1300)]
    assert_same(ops.flatten(inputs, torch.float64, 0.5), plain_flatten(inputs, torch.float64, 0.5))


def test_one_launch_moves_a_bucket(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("only CUDA launches")
    inputs = [draw((1 + i,), DTYPES[i % 4], device) for i in range(512)]
    flat = torch.empty(sum(tensor.numel() for tensor in inputs), device=device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        ops.flatten(inputs, flat, 0.5)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "flatten_kernel" in event.name]
    assert len(kernels) == 1


def test_runs_on_the_current_stream(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the CPU has no streams")
    source = torch.zeros(1 << 20, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        source.fill_(1.0)
        flat = ops.flatten([source], torch.float32)
    stream.synchronize()
    assert bool((flat == 1.0).all())


def test_nothing_to_flatten(device: torch.device) -> None:
    assert ops.flatten([], torch.float16).shape == (0,)
    empty = ops.flatten([torch.empty(0, 3, device=device)], torch.float16)
    assert empty.shape == (0,)
    assert empty.device.type == device.type
    ops.unflatten(empty, [])


def test_lazily_conjugated_inputs_are_taken_as_they_read(device: torch.device) -> None:
    tensor = draw((5,), torch.complex64, device).nan_to_num()
    assert_same(ops.flatten([tensor.conj()], torch.complex64), tensor.conj().resolve_conj())


def test_written_tensors_have_their_version_moved(device: torch.device) -> None:
    flat, output = torch.empty(3, device=device), torch.empty(3, device=device)
    ops.flatten([output], flat)
    ops.flatten_accumulate([output], flat)
    ops.unflatten(flat, [output])
    assert (flat._version, output._version) == (2, 1)


def test_there_is_no_derivative(device: torch.device) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="derivative for trireme::flatten is not implemented"):
        ops.flatten([weight], torch.float32).sum().backward()


@pytest.mark.parametrize(
    ("inputs", "flat", "error", "text"),
    [
        ([torch.ones(3, dtype=torch.int64)], torch.ones(3), TypeError, "got dtype Long"),
        ([torch.ones(3)], torch.ones(3, dtype=torch.int32), TypeError, "got dtype Int"),
        ([torch.ones(3).to_sparse()], torch.ones(3), TypeError, "layout Sparse"),
        ([torch.ones(8)[::2]], torch.ones(4), ValueError, "strides .2., expected non-overlapping"),
        ([torch.ones(1).expand(4)], torch.ones(4), ValueError, "expected non-overlapping"),
        ([torch.ones(4)], torch.ones(5), ValueError, "got a flat tensor of 5 real elements"),
        ([torch.ones(4)], torch.ones(2, 2), ValueError, "expected one contiguous dimension"),
        ([torch.ones(4, device="meta")], torch.ones(4), ValueError, "tensor 0 on meta"),
    ],
)
def test_what_cannot_be_flattened_is_refused(
    inputs: list[Tensor], flat: Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=r"\[flatten\].*" + text):
        ops.flatten(inputs, flat)
    with pytest.raises(error, match=r"\[flatten_accumulate\].*" + text):
        ops.flatten_accumulate(inputs, flat)
    with pytest.raises(error, match=r"\[unflatten\].*" + text):
        ops.unflatten(flat, inputs)


def test_fake_kernels_refuse_what_the_real_ones_refuse() -> None:
    meta = torch.empty(4, device="meta")
    assert ops.flatten([meta, meta], torch.float16).shape == (8,)
    with pytest.raises(ValueError, match="expected non-overlapping"):
        ops.flatten([meta[::2]], torch.float32)
    with pytest.raises(ValueError, match="got a flat tensor of 4 real elements, expected 8"):
        ops.unflatten(meta, [meta, meta])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [DTYPES, [torch.float32], COMPLEX], ids=str)
def test_opcheck(device: torch.device, kinds: list[torch.dtype], dtype: torch.dtype) -> None:
    tensors = [tensor.nan_to_num() for tensor in mixed(device, kinds)[::3]]
    flat = ops.flatten(tensors, dtype)
    torch.library.opcheck(ops.flatten.default, (tensors, dtype), {"scale": 0.5})
    torch.library.opcheck(ops.flatten.into, (tensors, flat), {"scale": 0.5})
    torch.library.opcheck(ops.flatten_accumulate.default, (tensors, flat, 0.5))
    torch.library.opcheck(ops.unflatten.default, (flat, tensors, 0.5))


def test_compiled_code_keeps_memory_order(device: torch.device) -> None:
    def step(image: Tensor, flat: Tensor) -> Tensor:
        ops.flatten([image * 2], flat, 0.5)
        return flat + 1

    image = draw((2, 3, 4, 5), torch.float32, device).to(memory_format=torch.channels_last)
    expected = reals(image) + 1
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same(compiled(image, torch.zeros(image.numel(), device=device)), expected)
