"""Measuring layers, and placing them on devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trireme
from torch import nn

from pipeline.ranks import WIDTH, rows, tanh_layers


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(300):
            x = x * self.weight
        return x


def test_layers_are_measured_in_time_and_bytes() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Slow(), nn.ReLU(inplace=True))
    module[0].bias.requires_grad_(False)
    first, slow, relu = trireme.measure_layers(module, rows(0, 5))
    assert slow.seconds > 3 * first.seconds > 0 and slow.backward_seconds > 0
    assert [layer.name for layer in (first, slow, relu)] == ["0", "1", "2"]
    assert first.parameter_bytes == 4 * (4 * WIDTH * WIDTH + WIDTH)
    assert relu.parameter_bytes == 0
    row_bytes = 4 * 5 * WIDTH
    assert first.activation_bytes == row_bytes  # its input
    assert slow.activation_bytes in range(299 * row_bytes, 302 * row_bytes)
    assert first.bytes == first.parameter_bytes + row_bytes
    (momentum, *_) = trireme.measure_layers(module, rows(0, 5), optimizer_states=1)
    assert momentum.parameter_bytes == 4 * (3 * WIDTH * WIDTH + WIDTH)
    on_meta = trireme.measure_layers(module.to("meta"), rows(0, 5).to("meta"))
    assert on_meta[0].bytes == first.bytes


def test_measuring_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.ReLU(inplace=True)
    )
    module(rows(1)).sum().backward()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    grads = [(parameter.grad, parameter.grad.clone()) for parameter in module.parameters()]
    buffers = list(module.buffers())
    state = torch.get_rng_state()
    fired: list[int] = []
    module[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    sample = rows(2)
    with torch.no_grad():
        trireme.measure_layers(module, sample)
    assert torch.equal(state, torch.get_rng_state()) and module.training and not fired
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))
    for parameter, (grad, copy) in zip(module.parameters(), grads, strict=True):
        assert parameter.grad is grad and torch.equal(grad, copy)
    assert torch.equal(sample, rows(2)) and sample.grad is None
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Sequential"):
        trireme.measure_layers(nn.Linear(2, 2), sample)  # type: ignore[arg-type]


def devices_of(module: nn.Module) -> list[str]:
    return [parameter.device.type for parameter in module.parameters()]


def test_a_sequential_is_placed_evenly() -> None:
    module = tanh_layers()
    assert trireme.place(module, ["cpu", "meta"]) is module
    assert devices_of(module) == ["cpu"] * 4 + ["meta"] * 4
    assert module(rows(0)).device.type == "meta"
    alone = trireme.place(tanh_layers(), ["cpu"])
    assert torch.equal(alone(rows(0)), tanh_layers()(rows(0)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = Head()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head({"x": [x]}, scale=x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, given: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
        return self.linear(given["x"][0] * scale)


def test_parts_are_placed_by_name() -> None:
    module = trireme.place(Blocks(), {"embed": "cpu", "blocks.1-2": "meta", "head": "meta"})
    assert devices_of(module) == ["cpu"] * 4 + ["meta"] * 4 + ["cpu"] * 2 + ["meta"] * 2
    with pytest.raises(RuntimeError, match="meta"):  # the last block was left where it is
        module(rows(0))
    module = trireme.place(Blocks(), {"blocks.1-3": "meta", "head": "meta"})
    assert module(rows(0)).device.type == "meta"


@pytest.mark.parametrize(
    ("placement", "kind", "part"),
    [
        ({"block.0": "cpu"}, ValueError, "got 'block.0', which the module does not have"),
        ({"blocks.2-5": "cpu"}, ValueError, "got 'blocks.4'"),
        ({"blocks.3-1": "cpu"}, ValueError, "a range without members"),
        ({"blocks.0-2": "cpu", "blocks.2": "meta"}, ValueError, "which both place 'blocks.2'"),
        ({"blocks": "cpu", "blocks.2": "meta"}, ValueError, "which both place"),
        (["cpu"], TypeError, "Give a list to a Sequential"),
    ],
)
def test_placements_that_are_refused(placement: Any, kind: type[Exception], part: str) -> None:
    module = Blocks()
    with pytest.raises(kind) as caught:
        trireme.place(module, placement)
    assert part in str(caught.value) and devices_of(module) == ["cpu"] * 12


def test_what_two_devices_would_share_is_refused() -> None:
    module = Blocks()
    module.blocks[0].weight = module.embed.weight
    with pytest.raises(ValueError, match="got 'weight' in layers for cpu and meta"):
        trireme.place(module, {"embed": "cpu", "blocks.0": "meta"})
    norms = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False))
    norms[1].running_mean = norms[0].running_mean
    with pytest.raises(ValueError, match="got 'running_mean' in layers for cpu and meta"):
        trireme.place(norms, ["cpu", "meta"])
    with pytest.raises(ValueError, match="twice, for two devices"):
        layer = nn.Linear(2, 2)
        trireme.place(nn.Sequential(layer, layer), ["cpu", "meta"])
