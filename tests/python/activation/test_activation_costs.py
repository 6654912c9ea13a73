"""measure_activations(): what autograd saves, by layer, beside what a real graph holds."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trireme
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from trireme import LayerCost, measure_activations
from trireme._activation import activation_costs

ROWS, WIDTH = 6, 8
WHOLE = ROWS * WIDTH * 4  # bytes of what goes from layer to layer


def costs_of(*layers: Any, x: Tensor | None = None) -> list[LayerCost]:
    return measure_activations(list(layers), torch.randn(ROWS, WIDTH) if x is None else x)


def bytes_of(costs: list[LayerCost]) -> list[int]:
    return [cost.bytes for cost in costs]


class Attention(nn.Module):
    """A block whose graph holds views, shared tensors, statistics, and random masks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        inner: Tensor = self.drop(F.gelu(self.out(found.transpose(1, 2).flatten(2))))
        return x + inner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.unused = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        normed: Tensor = self.norm(x.flatten(0, 1))
        return normed.exp()


def held_by_graph(module: nn.Module, *inputs: Tensor) -> int:
    """The storages of all tensors that the graph of a forward holds, walked by hand."""
    output = module(*inputs)
    of_others = {t.untyped_storage().data_ptr() for t in [*inputs, *module.parameters()]}
    of_others |= {t.untyped_storage().data_ptr() for t in module.buffers()}
    pending, seen = [output.grad_fn], set()
    found: dict[int, int] = {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for saved in value if isinstance(value, list | tuple) else [value]:
                if isinstance(saved, Tensor):
                    storage = saved.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in found.items() if pointer not in of_others)


def test_all_layers_together_are_what_the_graph_holds() -> None:
    module, tokens = Net(), torch.randint(0, 20, (2, 5))
    costs = measure_activations(module, tokens)
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", ""]
    assert [cost.name for cost in costs] == names
    assert sum(bytes_of(costs)) == held_by_graph(module, tokens)
    x = 2 * 5 * 16 * 4
    assert [cost.kept for cost in costs] == [0, x, x, x, x, 0]
    assert [cost.output_bytes for cost in costs] == [x] * 6
    assert costs[1].bytes == costs[2].bytes == costs[3].bytes
    assert bytes_of(costs)[-1] == x  # exp() saves its result
    assert all(cost.time > 0 for cost in costs)


def test_what_two_layers_save_counts_for_the_first() -> None:
    relus = costs_of(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    # The first Linear saves its input, which is not counted; the second what ReLU saved before.
    assert bytes_of(relus) == [0, WHOLE, 0, WHOLE]
    assert [cost.kept for cost in relus] == [0, WHOLE, WHOLE, WHOLE]
    assert [cost.name for cost in relus] == ["0", "1", "2", "3"]


def test_frozen_layers_and_views() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    assert bytes_of(costs_of(frozen, nn.Tanh())) == [0, 0]
    trained = nn.Linear(WIDTH, WIDTH)
    assert bytes_of(costs_of(trained, frozen, nn.Tanh())) == [0, 0, WHOLE]
    # A view is its whole storage: half of the columns go on, all remain.
    assert bytes_of(costs_of(trained, lambda x: x[:, ::2], torch.exp, torch.sin))[2:] == [
        WHOLE // 2,
        0,
    ]
    assert bytes_of(costs_of(trained, lambda x: x[:, ::2], torch.sin))[2] == WHOLE


def test_parameters_behind_functions_are_none_of_the_activations() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    found = costs_of(
        functools.partial(linear),
        lambda x: linear(x) + 1,
        lambda x: x @ weight,
        linear.forward,
    )
    assert bytes_of(found) == [0, WHOLE, WHOLE, WHOLE]


def test_dtypes_and_autocast() -> None:
    x = torch.randn(ROWS, WIDTH)
    half = nn.Linear(WIDTH, WIDTH).bfloat16()
    assert bytes_of(costs_of(half, nn.Tanh(), x=x.bfloat16())) == [0, WHOLE // 2]
    with torch.autocast("cpu", torch.bfloat16):
        cast, tanh = costs_of(nn.Linear(WIDTH, WIDTH), nn.Tanh(), x=x.requires_grad_())
    # The input and the weight in bf16 are made and saved by the layer itself.
    assert (cast.bytes, tanh.bytes) == (WHOLE // 2 + WIDTH * WIDTH * 2, WHOLE // 2)


def test_checkpoints_inside_count_as_they_keep() -> None:
    def inner(x: Tensor) -> Tensor:
        return x.exp().sin().exp()

    linear = nn.Linear(WIDTH, WIDTH)
    plain = costs_of(linear, inner)[1].bytes
    assert plain == 2 * WHOLE  # sin() saves what the exp() before it has saved
    by_torch = functools.partial(torchs_checkpoint, inner, use_reentrant=False)
    ours = functools.partial(trireme.checkpoint, inner)
    for checkpointed in (by_torch, ours):
        assert costs_of(linear, checkpointed)[1].bytes == WHOLE


def test_values_of_all_kinds_go_from_layer_to_layer() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    found = costs_of(
        lambda x: {"rows": [linear(x), linear(x[:2])], "word": "w", "none": None},
        lambda value: (value["rows"][0].exp(), value["rows"][1].exp(), value["word"]),
        lambda value: value[0].sum() + value[1].sum(),
    )
    ragged = WHOLE + WHOLE // ROWS * 2
    assert bytes_of(found) == [0, ragged, 0]
    assert [cost.kept for cost in found] == [0, ragged, ragged]
    assert [cost.output_bytes for cost in found] == [ragged, ragged, 4]


def test_what_the_forward_drops_does_not_count() -> None:
    linear = nn.Linear(WIDTH, WIDTH)

    def picks(x: Tensor) -> Tensor:
        best = x.exp().exp().argmax(dim=1)
        return x[torch.arange(ROWS), best]

    assert costs_of(linear, picks)[1].bytes < WHOLE


def test_a_backward_inside_of_a_layer_works() -> None:
    def force(x: Tensor) -> Tensor:
        energy = x.square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    linear = nn.Linear(WIDTH, WIDTH)
    assert costs_of(linear, force, torch.sin)[2].bytes == WHOLE

    def over_both(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), linear.weight, retain_graph=True)[0]

    with pytest.raises(RuntimeError, match="goes back over several layers"):
        costs_of(nn.Linear(WIDTH, WIDTH), linear, torch.exp, over_both)


def test_the_module_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)
    )
    module[3].eval()
    before = copy.deepcopy(module)
    version = module[3].running_mean._version
    random = torch.get_rng_state()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with torch.no_grad():
        assert sum(bytes_of(measure_activations(module, x))) > 0
    measure_activations([lambda y: module(y)], x)
    assert torch.equal(torch.get_rng_state(), random) is False  # randn has drawn
    random = torch.get_rng_state()
    measure_activations(module, x)
    assert torch.equal(torch.get_rng_state(), random)
    for (name, one), (_, other) in zip(
        [*module.named_parameters(), *module.named_buffers()],
        [*before.named_parameters(), *before.named_buffers()],
        strict=True,
    ):
        assert torch.equal(one, other), name
        assert one.grad is None
    assert x.grad is None
    assert [layer.training for layer in module.modules()] == [
        layer.training for layer in before.modules()
    ]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert module[3].running_mean._version == version


def test_memory_is_that_of_one_layer() -> None:
    """What a layer has saved is gone when the next one runs."""
    alive: list[int] = []

    def layer(x: Tensor) -> Tensor:
        kept = x.exp()
        storages.append(activation_costs.StorageWeakRef(kept.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in storages))
        return kept.sin()

    storages: list[activation_costs.StorageWeakRef] = []
    costs_of(nn.Linear(WIDTH, WIDTH), *[layer] * 5)
    assert alive == [1] * 5


def test_layers_of_choice() -> None:
    module, tokens = Net(), torch.randint(0, 20, (2, 5))
    whole = measure_activations(module, tokens)
    linears = [block.out for block in module.blocks]  # type: ignore[union-attr]
    found = measure_activations(module, tokens, layers=linears)  # type: ignore[arg-type]
    assert [cost.name for cost in found] == [f"blocks.{i}.out" for i in range(3)] + [""]
    assert sum(bytes_of(found)) == sum(bytes_of(whole))
    assert sum(layer.time for layer in found) == pytest.approx(sum(layer.time for layer in whole))
    with pytest.raises(ValueError, match=r"\[checkpoint\] got a Linear that is not in the module"):
        measure_activations(module, tokens, layers=[nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="a list of layers and layers="):
        measure_activations([torch.exp], tokens, layers=[])


def test_tensors_without_memory_cost_alike() -> None:
    """Attention included, which on the meta device would be another operator."""
    tokens = torch.randint(0, 20, (2, 5))
    real = measure_activations(Net(), tokens)
    of_memory, random = Net(), torch.get_rng_state()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (Net(), of_memory):
            assert measure_activations(module, torch.zeros(2, 5, dtype=torch.long)) == real
    assert torch.equal(torch.get_rng_state(), random)
    assert of_memory.norm.num_batches_tracked == 0


def test_time_is_operations_and_bytes() -> None:
    (linear, relu) = costs_of(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU())
    written = activation_costs.FLOPS_PER_BYTE * 4 * WHOLE
    assert linear.time == 2 * ROWS * WIDTH * 4 * WIDTH + written
    assert relu.time == written
    with torch.device("meta"):
        q = torch.empty(1, 2, 5, 4)
    attention = measure_activations([lambda x: F.scaled_dot_product_attention(x, x, x)], q)
    assert attention[0].time > 0
    real = costs_of(lambda x: F.scaled_dot_product_attention(x, x, x), x=torch.randn(1, 2, 5, 4))
    assert real[0].time >= 2 * 2 * 2 * 5 * 4 * 5
