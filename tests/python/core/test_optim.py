"""trireme.optim against torch's fused optimizers, bit by bit."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trireme.optim
from torch import Tensor, nn

from core.optim_cases import (
    CASES,
    NAMES,
    assert_equal_states,
    assert_same_but_for_the_tail,
    ours,
    parameters,
    set_grads,
    torchs,
    train,
)


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_twelve_steps_have_the_bits_of_torchs_fused(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    a, b = parameters(dtype), parameters(dtype)
    got, expected = ours(name, a, **options), torchs(name, b, fused=True, **options)
    train(got, 12)
    train(expected, 12)
    for param, twin in zip(a, b, strict=True):
        assert_same_but_for_the_tail(param, twin)
    assert_equal_states(got, expected)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_one_step_from_the_same_state_is_within_a_rounding(
    name: str, options: dict[str, Any]
) -> None:
    """The tail, too: no term of a sum is off by more than a unit in its last place."""
    torch.manual_seed(0)
    a = [nn.Parameter(torch.rand(7) + 1) for _ in range(100)]
    b = [nn.Parameter(param.detach().clone()) for param in a]
    got, expected = ours(name, a, **options), torchs(name, b, fused=True, **options)
    train(expected, 3)
    got.load_state_dict(copy.deepcopy(expected.state_dict()))
    with torch.no_grad():
        for param, twin in zip(a, b, strict=True):
            param.copy_(twin)
    before = [param.detach().clone() for param in b]
    train(got, 1, first=3)
    train(expected, 1, first=3)
    for param, twin, old in zip(a, b, before, strict=True):
        new = twin.detach()
        largest = torch.stack([old.abs(), new.abs(), (new - old).abs()]).amax(0)
        assert bool(((param - twin).abs() <= largest * 2**-23).all())


@pytest.mark.parametrize("name", NAMES)
def test_signature_defaults_and_class_are_torchs(name: str) -> None:
    kind, original = getattr(trireme.optim, name), getattr(torch.optim, name)
    assert issubclass(kind, original)
    assert inspect.signature(kind) == inspect.signature(original)
    assert kind([nn.Parameter(torch.ones(1))]).defaults == original([torch.ones(1)]).defaults
    with pytest.raises(ValueError, match="Invalid learning rate"):
        kind([torch.ones(1)], lr=-1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp32_grads", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_half_precision_is_rounded_once(
    name: str, options: dict[str, Any], dtype: torch.dtype, fp32_grads: bool
) -> None:
    torch.manual_seed(0)
    low = nn.Parameter(torch.randn(1000).to(dtype))
    single = nn.Parameter(low.detach().float())
    if fp32_grads:
        if not hasattr(low, "grad_dtype"):
            pytest.skip("this torch ties a gradient's dtype to its parameter's")
        low.grad_dtype = torch.float32
    got, expected = ours(name, [low], **options), ours(name, [single], **options)
    for step in range(4):
        torch.manual_seed(step)
        grad = torch.randn(1000)
        low.grad = grad if fp32_grads else grad.to(dtype)
        single.grad = low.grad.float()
        got.step()
        expected.step()
        assert torch.equal(low, single.to(dtype))
        for key, value in expected.state[single].items():
            assert got.state[low][key].dtype == torch.float32
            assert torch.equal(got.state[low][key], value)
        with torch.no_grad():
            single.copy_(low)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_complex_is_pairs_of_reals(name: str, options: dict[str, Any]) -> None:
    a, b = (nn.Parameter(torch.arange(12.0).view(6, 2).view(torch.complex64)) for _ in range(2))
    got, expected = ours(name, [a], **options), torchs(name, [b], **options)
    for step in range(5):
        torch.manual_seed(step)
        a.grad = torch.randn(6, 1, dtype=torch.complex64)
        b.grad = a.grad.clone()
        got.step()
        expected.step()
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_memory_in_any_order(name: str) -> None:
    def tensors() -> list[Tensor]:
        torch.manual_seed(1)
        return [
            nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(30, 20).t()),
            nn.Parameter(torch.randn(6, 40)[:, ::2]),
        ]

    a, b = tensors(), tensors()
    got, expected = ours(name, a), torchs(name, b, foreach=False)
    for step in range(3):
        for params in (a, b):
            torch.manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape)  # contiguous, whatever the parameter is
            params[1].grad = torch.randn(1).expand(20, 30)
        got.step()
        expected.step()
    for param, twin in zip(a, b, strict=True):
        torch.testing.assert_close(param, twin)


def test_devices_and_dtypes_may_be_mixed_in_a_group() -> None:
    params = [nn.Parameter(torch.ones(5, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    params.append(nn.Parameter(torch.ones(5, dtype=torch.complex128)))
    optimizer = ours("AdamW", params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all(bool((param != 1).all()) for param in params)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_cuda_has_the_bits_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        host = parameters(dtype)
        device = [nn.Parameter(param.detach().cuda()) for param in host]
        a, b = ours(name, host, **options), ours(name, device, **options)
        for step in range(3):
            set_grads(host, step)
            for param, twin in zip(device, host, strict=True):
                assert twin.grad is not None
                param.grad = twin.grad.cuda()
            a.step()
            b.step()
        for param, twin in zip(device, host, strict=True):
            torch.testing.assert_close(param.cpu(), twin, rtol=1e-6, atol=1e-7)
