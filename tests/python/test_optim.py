"""trireme.optim against torch's fused optimizers, bit by bit, and as their drop-in."""

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import trireme.optim
from torch import Tensor, nn

ADAMS = ("Adam", "AdamW")
NAMES = (*ADAMS, "SGD")
SHAPES = [(1,), (7,), (64,), (33, 65), (0, 3), (300, 301)]
ADAM_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.3, 0.5), "eps": 1e-3},
]
SGD_OPTIONS = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "maximize": True},
]
CASES = [(name, options) for name in ADAMS for options in ADAM_OPTIONS]
CASES += [("SGD", options) for options in SGD_OPTIONS]


def ours(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = getattr(trireme.optim, name)
    return kind(params, **{"lr": 1e-2, **options})


def torchs(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind(params, **{"lr": 1e-2, **options})


def magnitudes(shape: Any, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-6, 1)).to(dtype)


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [nn.Parameter(magnitudes(shape, dtype)) for shape in SHAPES]


def set_grads(params: list[Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = magnitudes(param.shape, param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_grads([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()


def assert_same_but_for_the_tail(got: Tensor, expected: Tensor) -> None:
    """Torch rounds what its vectors of 32 bytes leave over in another order."""
    numel = expected.numel() // (32 // expected.element_size()) * (32 // expected.element_size())
    a, b = got.detach().flatten(), expected.detach().flatten()
    assert torch.equal(a[:numel], b[:numel])
    rounding = 1e-14 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(a[numel:], b[numel:], rtol=rounding, atol=rounding)


def assert_equal_states(got: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for (param, state), (twin, other) in zip(
        got.state.items(), expected.state.items(), strict=True
    ):
        assert_same_but_for_the_tail(param, twin)
        assert state.keys() == other.keys()
        for name in state:
            assert state[name].shape == other[name].shape
            assert_same_but_for_the_tail(state[name].reshape(-1), other[name].reshape(-1))


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_state_dicts_go_from_torchs_class_and_back(name: str, dtype: torch.dtype) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {"amsgrad": True}
    a, b = parameters(dtype), parameters(dtype)
    got, expected = ours(name, a, **options), torchs(name, b, fused=True, **options)
    train(expected, 2)
    saved = copy.deepcopy(expected.state_dict())
    got.load_state_dict(saved)
    assert got.param_groups[0]["fused"] is True
    single = torch.float32 if dtype == torch.bfloat16 else dtype
    buffer = "momentum_buffer" if name == "SGD" else "exp_avg_sq"
    for param, twin in zip(a, b, strict=True):
        assert got.state[param][buffer].dtype == single
        assert torch.equal(got.state[param][buffer], expected.state[twin][buffer].to(single))
    with torch.no_grad():
        for param, twin in zip(a, b, strict=True):
            param.copy_(twin)
    train(got, 3, first=2)
    back = torchs(name, b, fused=True, **options)
    back.load_state_dict(copy.deepcopy(got.state_dict()))
    assert back.state[b[0]].keys() == got.state[a[0]].keys()
    if dtype != torch.bfloat16:
        train(expected, 3, first=2)
        assert_equal_states(got, expected)


def test_fp32_states_of_bf16_parameters_survive_saving() -> None:
    params = parameters(torch.bfloat16)
    optimizer = ours("AdamW", params)
    train(optimizer, 3)
    twin = ours("AdamW", params)
    twin.register_load_state_dict_pre_hook(lambda _, given: {**given})
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in params:
        for name, value in optimizer.state[param].items():
            assert torch.equal(twin.state[param][name], value)


@pytest.mark.parametrize("name", NAMES)
def test_groups_schedulers_closures_and_missing_gradients(name: str) -> None:
    def run(make: Callable[..., torch.optim.Optimizer], **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(16)) for _ in range(4)]
        optimizer = make(name, [{"params": params[:1], "lr": 0.3}, {"params": params[1:3]}])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (params[0] * params[1]).sum() + params[3].square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            assert optimizer.step(closure).requires_grad
            assert params[2].grad is None
            scheduler.step()
        optimizer.add_param_group({"params": params[3:], "lr": torch.tensor(0.125)})
        optimizer.step(closure)
        return params

    for param, twin in zip(run(ours), run(torchs), strict=True):
        torch.testing.assert_close(param, twin)


@pytest.mark.parametrize("name", NAMES)
def test_states_that_users_replace_are_the_ones_used(name: str) -> None:
    param = nn.Parameter(torch.zeros(16))
    optimizer = ours(name, [param], **({"momentum": 0.9} if name == "SGD" else {}))
    param.grad = torch.ones(16)
    optimizer.step()
    state = optimizer.state[param]
    old = dict(state)
    for key, value in state.items():
        state[key] = value.clone()
    optimizer.step()
    assert all(not torch.equal(state[key], old[key]) for key in state)
    optimizer.state.clear()
    optimizer.step()
    assert set(optimizer.state[param]) == set(old)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("infinite", [False, True])
def test_grad_scaler_works_as_with_torchs_fused(name: str, infinite: bool) -> None:
    def run(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(64))
        optimizer = make(name, [param], **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        grads = []
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if infinite and step == 1 else 1.0
            scaler.scale((param.square() * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            grads.append(param.grad.clone())
        return param.detach(), grads, scaler.get_scale(), optimizer.state[param]

    options = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    got, grads, scale, state = run(ours, **options)
    expected, other_grads, other_scale, other_state = run(torchs, fused=True, **options)
    assert torch.equal(got, expected)
    assert scale == other_scale
    for grad, other in zip(grads, other_grads, strict=True):
        assert torch.equal(grad, other)
    for key in other_state:
        assert torch.equal(state[key], other_state[key])


def test_a_first_step_that_is_skipped_is_still_the_first() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer: Any = ours("SGD", [param], momentum=0.9, dampening=0.5)
    param.grad = torch.ones(4)
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    assert "momentum_buffer" not in optimizer.state[param]
    optimizer.found_inf = torch.zeros(1)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(4))


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_go_on_alike(name: str) -> None:
    params = parameters()
    optimizer = ours(name, params, **({"momentum": 0.9} if name == "SGD" else {}))
    train(optimizer, 2)
    twin = copy.deepcopy(optimizer)
    train(optimizer, 2, first=2)
    train(twin, 2, first=2)
    for param, other in zip(params, twin.param_groups[0]["params"], strict=True):
        assert torch.equal(param, other)


def test_step_hooks_and_versions() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = ours("AdamW", [param])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    saved = (param * param).sum()
    param.grad = torch.ones(4)
    optimizer.step()
    assert called == ["pre", "post"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_that_cannot_be_honoured_are_refused(name: str, flag: str) -> None:
    if flag not in inspect.signature(getattr(torch.optim, name)).parameters:
        pytest.skip("not an argument of this class")
    text = rf"\[optim\] got {flag}=True for {name}, expected False. Use torch's own class."
    with pytest.raises(ValueError, match=text):
        ours(name, [torch.ones(1)], **{flag: True})
    optimizer = ours(name, [torch.ones(1)])
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [torch.ones(1)], flag: True})
    assert len(optimizer.param_groups) == 1
    state = optimizer.state_dict()
    state["param_groups"][0][flag] = True
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_flags_that_choose_torchs_implementation_change_nothing(name: str, flag: str) -> None:
    a, b = parameters(), parameters()
    train(ours(name, a), 3)
    train(ours(name, b, **{flag: True}), 3)
    assert all(torch.equal(param, twin) for param, twin in zip(a, b, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_stepped_is_refused(name: str) -> None:
    area = "sgd_step" if name == "SGD" else "adam_step"
    table = nn.Embedding(5, 2, sparse=True)
    dense = nn.Parameter(torch.ones(3))
    optimizer = ours(name, [dense, table.weight])
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    text = rf"\[{area}\] got a gradient of layout Sparse for parameter 1, expected a strided one"
    with pytest.raises(TypeError, match=text):
        optimizer.step()
    assert torch.equal(dense, torch.ones(3))


def test_a_state_of_another_model_is_refused() -> None:
    small, large = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    other = ours("AdamW", [large])
    large.grad = torch.ones(4)
    other.step()
    optimizer = ours("AdamW", [small])
    optimizer.load_state_dict(other.state_dict())
    small.grad = torch.ones(3)
    text = r"\[adam_step\] got a state of shape \[4\] for parameter 0, expected \[3\]"
    with pytest.raises(ValueError, match=text):
        optimizer.step()


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
