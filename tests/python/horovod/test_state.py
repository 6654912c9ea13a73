"""broadcast_parameters and broadcast_optimizer_state: all ranks go on as the root does."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import trireme.horovod as hvd
from torch import nn
from torch.optim.lr_scheduler import StepLR

from harness.faults import in_case, raises
from harness.ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True, lr=torch.tensor(0.1), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made[2].bias.requires_grad_(False)
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()


def assert_alike(one: Any, other: Any) -> None:
    """Types, too."""
    assert type(one) is type(other), f"{one!r}, {other!r}"
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    else:
        assert one == other or (one != one and other != other)


def assert_equal_on_ranks(value: Any) -> None:
    first, *others = hvd.allgather_object(value)
    for other in others:
        assert_alike(other, first)


def parameters_of(rank: int) -> None:
    hvd.init()
    root = hvd.size() - 1
    expected = model_of(root).state_dict()
    forms: dict[str, Any] = {
        "state_dict": lambda model: model.state_dict(),
        "named": lambda model: list(model.state_dict().items()),
        "tensors": lambda model: list(model.state_dict().values()),
        "one by one": lambda model: {"w": model[0].weight, "b": model[0].bias},
    }
    for name, form in forms.items():
        model = model_of(rank)
        given = form(model)
        with in_case(name):
            hvd.broadcast_parameters(given, root)
        if name != "one by one":
            assert_alike(dict(model.state_dict()), dict(expected))
        assert torch.equal(model[0].weight, expected["0.weight"])
        assert model[0].weight.requires_grad
    backwards = OrderedDict(reversed(model_of(rank).state_dict().items()))
    own = model_of(rank).state_dict() if rank == 0 else backwards  # each rank in its order
    hvd.broadcast_parameters(own, root)
    assert_alike(own["0.weight"], expected["0.weight"])
    bad: list[tuple[type[Exception], Any, str]] = [
        (ValueError, model_of(0).named_parameters(), "got generator as params"),
        (ValueError, torch.ones(1), "got Tensor as params"),
        (ValueError, [("a", torch.ones(1), 2)], "expected a pair"),
        (ValueError, [("a", torch.ones(1)), ("a", torch.ones(1))], "the name 'a' twice"),
        (TypeError, {"a": 3}, "got int as tensor"),
    ]
    for kind, params, part in bad:
        with raises(kind, part):
            hvd.broadcast_parameters(params, 0)
    if hvd.size() > 1:
        with raises(hvd.HorovodInternalError, "broadcast 'b'", "[2]", "[3]"):
            shape = 2 if rank == 0 else 3
            hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(shape)}, 0)
    hvd.broadcast_parameters({"a": torch.ones(1)}, 0)
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters(world: int) -> None:
    run_ranks(parameters_of, world, timeout=60, fresh=True)


def states_of_one(rank: int) -> None:
    """The root has trained, others have or have not; all go on as it does."""
    hvd.init()
    root = 1
    for name, make in OPTIMIZERS.items():
        for of_root, of_other in ((3, 0), (3, 1), (0, 2)):
            with in_case(f"{name}, after {of_root} steps of the root, {of_other} of the other"):
                model = model_of(rank)
                optimizer = make(model.parameters())
                train(model, optimizer, range(of_root if rank == root else of_other))
                if rank == root:
                    optimizer.param_groups[0]["initial_lr"] = 0.25  # as schedulers have it
                kept = {key: value.clone() for key, value in model.state_dict().items()}
                groups = optimizer.param_groups[0]
                hvd.broadcast_optimizer_state(optimizer, root, model)
                assert optimizer.param_groups[0] is groups  # a scheduler has it
                assert_alike(dict(model.state_dict()), kept)
                assert_equal_on_ranks(optimizer.state_dict())
                assert groups["initial_lr"] == 0.25
                hvd.broadcast_parameters(model.state_dict(), root)
                train(model, optimizer, range(3, 5))
                assert_equal_on_ranks(model.state_dict())
    hvd.shutdown()


def test_a_state_of_another_root() -> None:
    run_ranks(states_of_one, 2, timeout=120, fresh=True)


def made_states(rank: int) -> None:
    """Where there is none a state is made, and training goes on as if it had not been."""
    hvd.init()
    for name, make in OPTIMIZERS.items():
        with in_case(name):
            model, alone = model_of(3), model_of(3)
            optimizer, plain = make(model.parameters()), make(alone.parameters())
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            kept = {key: value.clone() for key, value in model.state_dict().items()}
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert_alike(dict(model.state_dict()), kept)
            assert_equal_on_ranks(optimizer.state_dict())
            has_state = bool(optimizer.state_dict()["state"])
            assert has_state or name == "SGD"
            if name != "Adagrad":  # which has a state from the beginning
                for one in model.parameters():
                    assert (one.grad is not None and not one.grad.any()) == one.requires_grad
            assert scheduler.last_epoch == 0
            train(model, optimizer, range(3))
            train(alone, plain, range(3))
            for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one, other)
    hvd.shutdown()


def test_a_state_is_made_without_moving_a_parameter() -> None:
    run_ranks(made_states, 2, timeout=60, fresh=True)


def kept_gradients(rank: int) -> None:
    hvd.init()
    model = model_of(0)
    optimizer = torch.optim.Adam(model.parameters())
    model(batch(0)).sum().backward()
    kept = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    for one, before in zip(model.parameters(), kept, strict=True):
        assert one.grad is None if before is None else torch.equal(one.grad, before)
    embedding = nn.Embedding(4, 2, sparse=True)
    sparse = torch.optim.SparseAdam(list(embedding.parameters()))
    hvd.broadcast_optimizer_state(sparse, 1)
    assert_equal_on_ranks(sparse.state_dict())
    tensors = list(optimizer.state[model[0].weight].values())
    hvd.broadcast_optimizer_state(optimizer, 1)  # written in place
    found = list(optimizer.state[model[0].weight].values())
    assert all(a is b for a, b in zip(tensors, found, strict=True)) or rank == 0
    hvd.shutdown()


def test_gradients_and_tensors_of_a_state_stay() -> None:
    run_ranks(kept_gradients, 2, timeout=60, fresh=True)


class Options(torch.optim.SGD):
    """An optimizer with options and a state of many kinds."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(options)


def refused_states(rank: int) -> None:
    hvd.init()
    model = model_of(rank)
    with raises(ValueError, "got LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with raises(TypeError, "got int as optimizer"):
        hvd.broadcast_optimizer_state(3, 0)
    own = Options(
        model.parameters(),
        **({"pair": (0.5, 2), "none": None, "count": 2**70} if rank == 0 else {"mine": 1}),
    )
    own.state[model[0].weight] = {"a": 1, "b": (2.0, None), "c": [torch.full((2,), rank)]}
    hvd.broadcast_optimizer_state(own, 0)
    group = own.param_groups[0]
    assert group["pair"] == (0.5, 2) and group["none"] is None and group["count"] == 2**70
    assert "mine" not in group
    state = own.state[model[0].weight]
    assert (state["a"], state["b"]) == (1, (2.0, None)) and not state["c"][0].any()
    if rank == 0:
        group["call"] = print
    with raises(TypeError, "obj['groups'][0]['call'] is a builtin_function_or_method"):
        hvd.broadcast_optimizer_state(own, 0)
    group.pop("call", None)
    two = [torch.optim.SGD, torch.optim.Adam][rank](model.parameters(), lr=0.1)
    with raises(hvd.HorovodInternalError, "rank 0 has SGD, rank 1 has Adam"):
        hvd.broadcast_optimizer_state(two, 0)
    fewer = torch.optim.SGD(list(model.parameters())[rank:], lr=0.1)
    with raises(hvd.HorovodInternalError, "rank 0 has [6], rank 1 has [5]"):
        hvd.broadcast_optimizer_state(fewer, 0)
    hvd.broadcast_optimizer_state(own, 0)
    hvd.shutdown()


def test_options_keep_their_types_and_others_are_refused() -> None:
    run_ranks(refused_states, 2, timeout=60, fresh=True)
