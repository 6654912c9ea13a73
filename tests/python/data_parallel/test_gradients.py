"""What a caller does with the graph of a DataParallel: it is that of one module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel.cases import (
    DP,
    TIME_LIMIT,
    Called,
    assert_close,
    assert_same_backward,
    pair,
    square_mean,
)
from harness.models import batch, mlp
from harness.training import gradients

pytestmark = TIME_LIMIT


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0, requires_grad: bool = False) -> Tensor:
    return batch(step, rows=7, dtype=torch.float64).requires_grad_(requires_grad)


def both(replicas: int = 2, **options: Any) -> tuple[nn.Module, nn.Module]:
    return pair(make, replicas, **options)


def input_gradient(module: nn.Module, x: Tensor) -> Tensor:
    square_mean(module(x)).backward()
    assert x.grad is not None
    return x.grad.clone()


@pytest.mark.parametrize("replicas", [2, 3])
def test_gradients_of_inputs(replicas: int) -> None:
    ours, one = both(replicas)
    assert_close(input_gradient(ours, data(0, True)), input_gradient(one, data(0, True)))
    assert_close(gradients(ours), gradients(one))


def test_gradients_of_some_inputs() -> None:
    """In two dtypes; one 0-dim, which every replica has a part in; one without a gradient."""
    ours, one = pair(
        lambda: Called(lambda m, a, b, c: m.net(a) * b.sum(1, True).double() + c, net=make())
    )
    seen = []
    for module in (ours, one):
        a, c = data(0, True), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        b, idle = data(1).float().requires_grad_(), data(2)
        square_mean(module(a, b, c) + idle[:, :1]).backward()
        seen.append([a.grad, b.grad, c.grad, gradients(module)])
    assert_close(seen[0], seen[1], rtol=1e-6)
    assert seen[0][1].dtype == torch.float32


def test_frozen_module_passes_gradients_on() -> None:
    ours, one = both()
    for module in (ours, one):
        module.requires_grad_(False)
    assert_close(input_gradient(ours, data(0, True)), input_gradient(one, data(0, True)))


def test_frozen_between_forward_and_backward() -> None:
    """As for the part of a GAN that is not trained."""
    ours, one = both()
    for _ in range(2):
        for module in (ours, one):
            loss = square_mean(module(data(0)))
            module.requires_grad_(False)
            square_mean(module(data(1, True))).backward()
            assert not any(one is not None for one in gradients(module).values())
            module.requires_grad_(True)
            loss.backward()
        assert_close(gradients(ours), gradients(one))
        for module in (ours, one):
            module.zero_grad()


def test_one_tensor_as_two_inputs() -> None:
    ours, one = pair(lambda: Called(lambda m, a, b: m.net(a) * m.net(b), net=make()))
    seen = []
    for module in (ours, one):
        x = data(0, True)
        square_mean(module(x, x)).backward()
        seen.append([x.grad, gradients(module)])
    assert_close(*seen)


@pytest.mark.parametrize("first", ["relu", "in place"])
def test_inputs_with_a_history(first: str) -> None:
    """Also where the module overwrites what it is given, as one process may with such a tensor."""

    def whole() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=first == "in place"), mlp(torch.float64))

    ours, one = pair(whole)
    seen = []
    for module in (ours, one):
        x = data(0, True)
        hidden = x * 2
        square_mean(module(hidden)).backward()
        seen.append([x.grad, hidden, gradients(module)])
    assert_close(*seen)


@pytest.mark.parametrize("replicas", [2, 3])
def test_inputs_written_in_place(replicas: int) -> None:
    """One replica's graph has saved them while another one writes its part."""

    def forward(module: Any, x: Tensor) -> Tensor:
        return module.net(x.mul_(2)) + x.square()[:, :3]

    ours, one = pair(lambda: Called(forward, net=make()), replicas)
    for step in range(5):
        inputs = [data(step), data(step)]
        for module, x in zip((ours, one), inputs, strict=True):
            module.zero_grad()
            square_mean(module(x)).backward()
        assert_close([inputs[0], gradients(ours)], [inputs[1], gradients(one)])
    # The caller's graph knows that they were.
    for module in (ours, one):
        x, weight = data(), torch.ones(6, dtype=torch.float64, requires_grad=True)
        kept = (x * weight).sum()
        module(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_two_of_them_in_a_row() -> None:
    first, second = both()[0], DP(nn.Linear(3, 2).double(), replicas=3)
    alone = nn.Sequential(make(), nn.Linear(3, 2).double())
    alone[1].load_state_dict(second.module.state_dict())
    square_mean(second(first(data()))).backward()
    square_mean(alone(data())).backward()
    assert_close(
        [*gradients(first).values(), *gradients(second).values()], [*gradients(alone).values()]
    )


def test_gradients_are_the_callers_own() -> None:
    """What is done to one changes no other, and no later one."""
    ours, one = both()
    assert_same_backward(ours, one, data())
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(7)
    pointers = [p.grad.data_ptr() for p in ours.parameters() if p.grad is not None]
    assert len(set(pointers)) == len(pointers)
    assert_same_backward(ours, one, data(1))


def test_autograd_grad() -> None:
    ours, one = both()
    seen = []
    for module in (ours, one):
        x, first = data(0, True), next(module.parameters())
        loss = square_mean(module(x))
        seen.append(torch.autograd.grad(loss, [first], retain_graph=True))
        seen.append(torch.autograd.grad(loss, [x], retain_graph=True))
        seen.append(torch.autograd.grad(loss, [*module.parameters(), x]))
        assert all(grad is None for grad in gradients(module).values())
        assert x.grad is None
    assert_close(seen[:3], seen[3:])


def test_backward_to_some_parameters() -> None:
    ours, one = both()
    for module in (ours, one):
        chosen = list(module.parameters())[1]
        square_mean(module(data())).backward(inputs=[chosen])
        assert [p.grad is not None for p in module.parameters()] == [
            False,
            True,
            False,
            False,
            False,
        ]
    assert_close(gradients(ours), gradients(one))


def test_backward_of_some_outputs() -> None:
    ours, one = pair(
        lambda: Called(
            lambda m, x: (m.a(x), m.b(x), x[:, 0].long(), m.a(x).detach()), a=make(), b=make()
        )
    )
    for module in (ours, one):
        first, second, whole, constant = module(data())
        assert [t.requires_grad for t in (first, second, whole, constant)] == [
            True,
            True,
            False,
            False,
        ]
        (first * constant).mean().backward(retain_graph=True)
    assert_close(gradients(ours), gradients(one))
    assert ours.module.b[0].weight.grad is None


def test_a_scaled_loss_and_given_gradients() -> None:
    ours, one = both()
    weights = torch.linspace(0, 1, 21, dtype=torch.float64).view(7, 3)
    for module in (ours, one):
        (square_mean(module(data())) * 1024).backward()
        module(data(1)).backward(weights)
        module(data(2)).backward(weights[:, :1].expand(7, 3))
    assert_close(gradients(ours), gradients(one))


def test_hooks_on_parameters() -> None:
    """Once per backward, with the gradient of the whole batch."""
    seen: list[Any] = []
    modules = both(3)
    for module in modules:
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        square_mean(module(data())).backward()
        seen.append(gradients(module))
    count = 2 * len(list(make().parameters())) + 1
    assert len(seen) == 2 * count
    assert_close(seen[count - 1], seen[-1])
    ordered = [
        sorted((t.shape, t.sum().item()) for t in part[:-1])
        for part in (seen[:count], seen[count:])
    ]
    assert_close([total for _, total in ordered[0]], [total for _, total in ordered[1]])


def test_an_optimizer_in_backward() -> None:
    def sgd(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    modules = both()
    for module in modules:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(sgd)
        for step in range(3):
            square_mean(module(data(step))).backward()
    assert_close(list(modules[0].parameters()), list(modules[1].parameters()))


def test_hooks_on_outputs() -> None:
    seen = []
    modules = both()
    for module in modules:
        output = module(data())
        output.retain_grad()
        output.register_hook(lambda grad: grad * 3)
        square_mean(output).backward()
        seen.append([output.grad, gradients(module)])
    assert_close(*seen)


def test_outputs_written_in_place() -> None:
    modules = both()
    for module in modules:
        output = module(data())
        output[0] = 1
        output.mul_(2)
        square_mean(output).backward()
    assert_close(gradients(modules[0]), gradients(modules[1]))


def test_outputs_that_are_inputs_or_parameters() -> None:
    ours, one = pair(
        lambda: Called(
            lambda m, x: (x, m.net(x), m.row.expand(len(x), 6)),
            net=make(),
            row=nn.Parameter(torch.ones(6).double()),
        )
    )
    seen = []
    for module in (ours, one):
        x = data(0, True)
        same, net, row = module(x)
        (square_mean(same) + square_mean(net) + square_mean(row * same.detach())).backward()
        seen.append([x.grad, gradients(module)])
    assert_close(*seen)


def test_anomaly_detection() -> None:
    ours, one = both()
    with torch.autograd.set_detect_anomaly(True):
        assert_same_backward(ours, one, data())


def test_gradcheck() -> None:
    ours, _ = both()
    x = batch(0, rows=3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(ours, (x,), check_batched_grad=False)


def test_the_node_of_the_graph() -> None:
    seen: list[str] = []
    ours, _ = both()
    output = ours(data())
    assert output.grad_fn.name() == "TriremeDataParallel"
    assert len(output.grad_fn.next_functions) == len(list(ours.parameters()))
    output.grad_fn.register_prehook(lambda *_: seen.append("before"))
    output.grad_fn.register_hook(lambda *_: seen.append("after"))
    output.sum().backward()
    assert seen == ["before", "after"]


def test_gradients_of_a_module_in_pieces() -> None:
    """Each replica's graph ends at its leaves: what is outside of the module goes on as usual."""
    modules = both()
    outer = nn.Linear(6, 6).double()
    for module in modules:
        outer.zero_grad()
        square_mean(module(outer(data()))).backward()
        module.outer_gradient = outer.weight.grad.clone()
    assert_close(modules[0].outer_gradient, modules[1].outer_gradient)
    assert_close(gradients(modules[0]), gradients(modules[1]))
