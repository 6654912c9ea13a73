"""trireme.optim where torch's classes stand: states, schedulers, GradScaler, copies, refusals."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from core.optim_cases import NAMES, assert_equal_states, ours, parameters, torchs, train


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
    with pytest.raises(RuntimeError, match=text):
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


@pytest.mark.parametrize("name", NAMES)
def test_dtensors_are_stepped_in_their_local_memory(name: str, lone_rank: trireme.Context) -> None:
    mesh = init_device_mesh("cpu", (lone_rank.world,))
    options = {"momentum": 0.9} if name == "SGD" else {}
    plain = nn.Parameter(torch.randn(6, 4))
    sharded = nn.Parameter(distribute_tensor(plain.detach().clone(), mesh, [Shard(0)]))
    memory = sharded._local_tensor.data_ptr()
    got, expected = ours(name, [sharded], **options), ours(name, [plain], **options)
    for _ in range(3):
        plain.grad = torch.randn(6, 4)
        sharded.grad = distribute_tensor(plain.grad.clone(), mesh, [Shard(0)])
        got.step()
        expected.step()
    assert sharded._local_tensor.data_ptr() == memory
    assert torch.equal(sharded.full_tensor(), plain)
    for key, value in expected.state[plain].items():
        state = got.state[sharded][key]
        assert torch.equal(state if key == "step" else state.full_tensor(), value)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_placed_otherwise_is_refused(name: str, lone_rank: trireme.Context) -> None:
    """Its local part is not the parameter's, though it has the same shape."""
    rows = distribute_tensor(torch.ones(3, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    parameter = nn.Parameter(rows)
    optimizer = ours(name, [parameter], **({"momentum": 0.9} if name == "SGD" else {}))
    parameter.grad = rows.clone()
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[parameter]
    key = "momentum_buffer" if name == "SGD" else "exp_avg_sq"
    state[key] = state[key].redistribute(placements=[Replicate()])
    text = (
        rf"_step\] got {key} with placements \(Replicate\(\),\) for parameter 0, expected \(Shard"
    )
    with pytest.raises(ValueError, match=text):
        optimizer.step()
