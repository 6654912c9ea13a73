"""Freeze in one process: modes, state, what it refuses."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
import trireme
from torch import nn

from harness.faults import RANKLESS_FORM, in_case, raises
from harness.models import Tied, batch


class Blocks(nn.Module):
    """An embedding of a kind, blocks with dropout and statistics, and a head."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh())
            for _ in range(count)
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


LAYERS = [["embed", "blocks.0"], "blocks.1", "blocks.2", "blocks.3"]


def step(model: nn.Module, freeze: trireme.Freeze, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    freeze.step()
    optimizer.step()


def made(**options: Any) -> tuple[Blocks, trireme.Freeze, torch.optim.AdamW]:
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    given = {"layers": LAYERS, "rule": "schedule", "optimizer": optimizer, **options}
    return model, trireme.Freeze(model, **given), optimizer


def frozen_names(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if not one.requires_grad]


def test_a_frozen_layer_is_evaluated_and_forgotten() -> None:
    model, freeze, optimizer = made()
    model.train()
    step(model, freeze, optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert (freeze.advance(), freeze.history) == (2, [2])
    layers = [model.embed, model.blocks[0], model.blocks[1]]
    frozen = [one for layer in layers for one in layer.parameters()]
    assert not any(one.requires_grad or one in optimizer.state for one in frozen)
    assert all(one.grad is None for one in frozen)
    before = copy.deepcopy(model.state_dict())
    for epoch in range(2):
        model.train()  # as programs do in each epoch
        step(model, freeze, optimizer, epoch)
        modes = [inner.training for layer in layers for inner in layer.modules()]
        assert not any(modes)
        assert model.blocks[2].training and model.head.training
    after = model.state_dict()
    for name in before:
        is_frozen = name.startswith(("embed.", "blocks.0.", "blocks.1."))
        assert torch.equal(before[name], after[name]) == is_frozen, name


def test_training_mode_where_it_is_asked_for() -> None:
    model, freeze, optimizer = made(eval_frozen=False)
    step(model, freeze, optimizer)
    freeze.advance()
    assert all(inner.training for inner in model.modules())


def test_what_was_frozen_already_stays_so() -> None:
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    model.blocks[2][1].eval()
    freeze = trireme.Freeze(model, LAYERS, rule="schedule", alpha=0.9)
    assert freeze.advance() == 4
    assert frozen_names(model) == [
        name for name, _ in model.named_parameters() if not name.startswith("head.")
    ]
    freeze.unfreeze()
    assert frozen_names(model) == [f"blocks.1.{n}" for n, _ in model.blocks[1].named_parameters()]
    assert not model.blocks[2][1].training and model.blocks[2][2].training
    assert not any(inner._forward_pre_hooks for inner in model.modules())


def test_layers_may_be_modules_names_or_found() -> None:
    model = Blocks()
    as_modules = [[model.embed, model.blocks[0]], *model.blocks[1:]]
    assert trireme.Freeze(model, as_modules).state_dict()["layers"] == [
        "embed + blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
    ]
    found = trireme.Freeze(model).state_dict()["layers"]
    assert found == [f"blocks.{number}" for number in range(4)]
    layers = [nn.Flatten(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)]
    found = trireme.Freeze(nn.Sequential(*layers)).state_dict()["layers"]
    assert found == ["0 + 1 + 2", "3"]


def test_gradients_are_measured_now_and_then() -> None:
    """The smallest gradient is that of the second layer in the steps that are measured."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in "abcdef"))
    freeze = trireme.Freeze(model, measure_every=3, alpha=0.6)
    for number in range(5):
        smallest = 1 if number % 3 == 0 else 3
        for layer, its in enumerate(model):
            for one in its.parameters():
                one.grad = torch.full_like(one, 0.1 if layer == smallest else 1.0)
        freeze.step()
    assert freeze.advance() == 2
    assert freeze.advance() == 2, "without a step nothing is known"
    for its in model[2:]:
        for one in its.parameters():
            one.grad = torch.full_like(one, math.inf if its is model[3] else 1.0)
    freeze.step()
    assert freeze.advance() == 3
    for its in model[3:]:
        for one in its.parameters():
            one.grad = None if its is model[3] else torch.ones_like(one)
    freeze.step()
    assert freeze.advance() == 3, "a layer without a gradient has not converged"


def test_the_last_layer_stays_where_nothing_else_is_trained() -> None:
    def all_of_them(point: trireme.FreezePoint) -> int:
        return point.layers

    for rule in ("schedule", all_of_them):
        alone = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        freeze = trireme.Freeze(alone, rule=rule, alpha=0.9)
        assert [freeze.advance() for _ in range(3)] == [2, 2, 2]
        with_head = Blocks()
        freeze = trireme.Freeze(with_head, LAYERS, rule=rule, alpha=0.9)
        assert freeze.advance() == 4
        with_head.head.requires_grad_(False)
        freeze.unfreeze(2)
        assert freeze.advance() == 3, "nobody else is trained any more"


def test_a_hold_and_a_rule_of_ones_own() -> None:
    seen: list[tuple[int, int, int]] = []

    def one_more(point: trireme.FreezePoint) -> int:
        seen.append((point.layers, point.frozen, point.interval))
        assert len(point.norms) == point.layers - point.frozen
        return point.frozen + 1

    _, freeze, _ = made(rule=one_more, hold=2)
    assert [freeze.advance() for _ in range(4)] == [0, 0, 1, 2]
    assert seen == [(4, 0, 2), (4, 1, 3)]
    _, freeze, _ = made(hold=1, alpha=1 / 2)
    assert [freeze.advance() for _ in range(4)] == [0, 2, 3, 4]

    def breaks(point: trireme.FreezePoint) -> int:
        raise ArithmeticError("no idea")

    _, freeze, _ = made(rule=breaks)
    with pytest.raises(ArithmeticError, match="no idea"):
        freeze.advance()
    assert freeze.history == []
    _, freeze, _ = made(rule=lambda point: -1)
    with raises(ValueError, "got -1 layers from rule, expected 0 to 4", form=RANKLESS_FORM):
        freeze.advance()


def test_a_state_goes_on() -> None:
    model, freeze, optimizer = made()
    for number in range(2):
        step(model, freeze, optimizer, number)
        freeze.advance()
    state = freeze.state_dict()
    assert state == {
        "layers": ["embed + blocks.0", "blocks.1", "blocks.2", "blocks.3"],
        "frozen": 3,
        "history": [2, 3],
    }
    again, other, _ = made()
    other.load_state_dict(state)
    assert frozen_names(again) == frozen_names(model)
    assert not again.blocks[2].training and again.blocks[3].training
    assert other.advance() == freeze.advance() == 3
    assert other.history == freeze.history == [2, 3, 3]
    other.load_state_dict(state | {"frozen": 0, "history": []})
    assert frozen_names(again) == [] and again.blocks[0][2].training
    wrong = "got a state of 1 layers, expected one of the same 4 by name"
    with raises(ValueError, wrong, form=RANKLESS_FORM):
        other.load_state_dict(state | {"layers": ["head"]})
    with raises(ValueError, "got a state of 9 frozen layers", form=RANKLESS_FORM):
        other.load_state_dict(state | {"frozen": 9})
    with raises(ValueError, "without ['frozen']", form=RANKLESS_FORM):
        other.load_state_dict({"layers": [], "history": []})
    with raises(ValueError, "got 5 layers that stay frozen, expected 0 to 0", form=RANKLESS_FORM):
        other.unfreeze(5)


def test_a_model_with_frozen_layers_can_be_copied() -> None:
    model, freeze, _ = made()
    freeze.advance()
    clone = copy.deepcopy(model).train()
    clone(batch(0))
    assert not clone.blocks[0].training


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "alpha 0": (lambda: made(alpha=0.0), ValueError, "got alpha 0, expected a number between"),
    "alpha 1": (lambda: made(alpha=1), ValueError, "got alpha 1, expected a number between"),
    "alpha of text": (lambda: made(alpha="1/3"), TypeError, "alpha is str, expected a number"),
    "rule": (lambda: made(rule="norm"), ValueError, "got rule 'norm', expected 'gradient'"),
    "kind of rule": (lambda: made(rule=3), TypeError, "rule is int, expected a name"),
    "measure_every": (lambda: made(measure_every=0), ValueError, "got measure_every 0"),
    "hold": (lambda: made(hold=-1), ValueError, "got hold -1, expected 0 or more"),
    "no module": (lambda: trireme.Freeze(3), TypeError, "got int as module"),
    "no layers": (lambda: made(layers=[]), ValueError, "got no layers"),
    "name": (lambda: made(layers=["blocks.9"]), ValueError, "got 'blocks.9' as a layer"),
    "number": (lambda: made(layers=[3]), TypeError, "got int as a layer"),
    "foreign": (lambda: made(layers=[nn.Linear(2, 2)]), ValueError, "not in the model"),
    "nothing in it": (
        lambda: made(layers=["blocks.0", "blocks.1.3"]),
        ValueError,
        "got layer 'blocks.1.3' without parameters",
    ),
    "shared outside": (
        lambda: trireme.Freeze(Tied(), ["embed", "mid"]),
        ValueError,
        "got parameter 'embed.weight', which is 'head.weight' as well",
    ),
    "shared by two layers": (
        lambda: trireme.Freeze(Tied()),
        ValueError,
        "got parameter 'embed.weight', which is 'head.weight' as well",
    ),
    "a layer in another": (
        lambda: made(layers=["blocks", "blocks.1"]),
        ValueError,
        "got 'blocks.1' as a layer, which lies in 'blocks'",
    ),
    "other optimizer": (
        lambda: made(optimizer=torch.optim.SGD(Blocks().parameters(), lr=0.1)),
        ValueError,
        "got an optimizer without 'embed.weight'",
    ),
    "no optimizer": (lambda: made(optimizer="sgd"), TypeError, "got str as optimizer"),
    "no list": (
        lambda: trireme.Freeze(nn.Linear(2, 2)),
        ValueError,
        "got a model without repeated layers",
    ),
}


def test_what_it_refuses() -> None:
    for name, (make, kind, text) in REFUSED.items():
        with in_case(name), raises(kind, "[freeze]", text, form=RANKLESS_FORM):
            make()


def test_what_is_shared_but_never_trained_is_welcome() -> None:
    model = Tied()
    model.head.weight.requires_grad_(False)
    trireme.Freeze(model, ["embed", "mid"])
    trireme.Freeze(Tied(), [["embed", "head"], "mid"])
