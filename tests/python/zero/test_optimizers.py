"""Whatever the optimizer, its shards train as the whole does: torch's classes, ours, the user's."""

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import trireme.optim
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from harness.models import Shapes, mlp
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from harness.training import Training, alone, assert_equal_parameters
from zero.ranks import DDP, Zero, assert_trains_as_one_process, sharded, whole_state

STAGES = (1, 2)
Case = tuple[Any, dict[str, Any]]

TORCHS: list[Case] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.AdamW, {"lr": 0.01, "foreach": False, "maximize": True}),
    (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    (optim.Adadelta, {"lr": 1.0}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.RAdam, {"lr": 0.01}),
    (optim.ASGD, {"lr": 0.1}),
    (optim.Rprop, {"lr": 0.01}),
    (optim.Adafactor, {"lr": 0.1}),
]
OURS: list[Case] = [
    (trireme.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (trireme.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (trireme.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
]


class NormedDescent(optim.Optimizer):
    """A user's own: divides each gradient by the norm of all of it."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() > 0:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class RenamedAdamW(optim.AdamW):
    """Nobody can know that it treats elements alike."""


def owners(optimizer: Zero) -> list[int]:
    """How many ranks have some of each parameter."""
    return [
        sum(numel > 0 for _, numel in ranges) for core in optimizer._cores for ranges in core.plan()
    ]


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_torchs_optimizers(rank: int, world: int) -> None:
    for optimizer_class, defaults in TORCHS:
        for stage in STAGES:
            ours = sharded(mlp, optimizer_class, stage, **defaults)
            is_sliced = optimizer_class is not optim.Adafactor
            assert (max(owners(ours.optimizer)) > 1) == is_sliced, optimizer_class
            assert_trains_as_one_process(ours, alone(mlp, optimizer_class, **defaults))


@on_shm_and_gloo_ranks(3)
def test_our_optimizers(rank: int) -> None:
    for optimizer_class, defaults in OURS:
        for stage in STAGES:
            for make in (mlp, Shapes):
                ours = sharded(make, optimizer_class, stage, **defaults)
                assert_trains_as_one_process(ours, alone(make, optimizer_class, **defaults))


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_an_optimizer_of_the_user_gets_whole_parameters(rank: int, world: int) -> None:
    for optimizer_class in (NormedDescent, RenamedAdamW):
        for stage in STAGES:
            ours = sharded(mlp, optimizer_class, stage, lr=0.01)
            assert set(owners(ours.optimizer)) == {1}
            assert_trains_as_one_process(ours, alone(mlp, optimizer_class, lr=0.01))


@on_shm_ranks(2)
def test_placement_can_be_chosen(rank: int) -> None:
    for placement, optimizer_class in (("shards", RenamedAdamW), ("whole", optim.AdamW)):
        ours = sharded(mlp, optimizer_class, 2, {"placement": placement}, lr=0.01)
        assert max(owners(ours.optimizer)) == (2 if placement == "shards" else 1)
        assert_trains_as_one_process(ours, alone(mlp, optimizer_class, lr=0.01))


def _muon_and_adamw(model: nn.Module, make: Any) -> list[Any]:
    """Muon for matrices, AdamW for the rest, as its authors say."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [
        make(matrices, optim.Muon, lr=0.02, weight_decay=0.1),
        make(rest, optim.AdamW, lr=0.01),
    ]


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_muon_beside_adamw(rank: int, world: int) -> None:
    """Two sharded optimizers; Muon's works on whole matrices."""
    for stage in STAGES:
        model, one = mlp(), mlp()
        net = DDP(model) if stage == 1 else model
        ours = _muon_and_adamw(model, partial(Zero, stage=stage))
        theirs = _muon_and_adamw(one, lambda params, kind, **rest: kind(params, **rest))
        assert set(owners(ours[0])) == {1} and max(owners(ours[1])) > 1
        both = [
            (Training(model, net, ours[0], rank, world), ours),
            (Training(one, one, theirs[0]), theirs),
        ]
        for step in range(4):
            for training, optimizers in both:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                training.backward(step)
                for optimizer in optimizers:
                    optimizer.step()
            # Muon computes in bfloat16: what differs by the order of a sum may round elsewhere.
            assert_equal_parameters(model, one, rtol=1e-2, atol=1e-3)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].named_parameters()), "lr": 0.02, "betas": (0.8, 0.99)},
        {"params": list(model[2].named_parameters()), "weight_decay": 0.3},
    ]


def _last_group(model: nn.Module) -> dict[str, Any]:
    return {"params": list(model[4].named_parameters()), "lr": 0.005}


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_groups_and_schedulers(rank: int, world: int) -> None:
    for stage in STAGES:
        model, one = mlp(), mlp()
        ours = Zero(_groups(model), optim.AdamW, stage=stage, lr=0.01)
        theirs = optim.AdamW(_groups(one), lr=0.01)
        net = DDP(model) if stage == 1 else model
        both = [Training(model, net, ours, rank, world), Training(one, one, theirs)]
        schedulers = [StepLR(training.optimizer, 2, gamma=0.5) for training in both]
        for step in range(8):
            if step == 3:
                ours.add_param_group(_last_group(model))
                theirs.add_param_group(_last_group(one))
                schedulers = [
                    OneCycleLR(training.optimizer, 0.02, total_steps=5) for training in both
                ]
            for training, scheduler in zip(both, schedulers, strict=True):
                training.train(step)
                scheduler.step()
            assert_equal_parameters(model, one)
        shown, expected = ours.param_groups, theirs.param_groups
        for group, other in zip(shown, expected, strict=True):
            for key in set(other) - {"params"}:
                assert group[key] == other[key], key


SPARSE: list[Case] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.SparseAdam, {"lr": 0.01}),
]


def _words(step: int, rank: int) -> Tensor:
    return torch.tensor([(2 * rank + step) % 7, 5, 5])


@pytest.mark.parametrize("world", [2, 3])
@on_shm_ranks("world")
def test_sparse_gradients_stay_sparse(rank: int, world: int) -> None:
    """Owners step rows of theirs, or whole matrices."""
    for (optimizer_class, defaults), placement in product(SPARSE, ("shards", "whole")):
        torch.manual_seed(4)
        model, one = (nn.Embedding(7, 3, sparse=True) for _ in range(2))
        one.load_state_dict(model.state_dict())
        net = DDP(model)
        ours = Zero(model.parameters(), optimizer_class, placement=placement, **defaults)
        theirs = optimizer_class(one.parameters(), **defaults)
        for step in range(4):
            ours.zero_grad()
            theirs.zero_grad()
            net(_words(step, rank)).square().sum().backward()
            for other in range(world):
                (one(_words(step, other)).square().sum() / world).backward()
            assert model.weight.grad.is_sparse
            gradient = one.weight.grad.coalesce()
            expected = gradient.values().norm()
            torch.testing.assert_close(ours.clip_grad_norm_(expected.item() / 2), expected)
            one.weight.grad = gradient * 0.5
            ours.step()
            theirs.step()
            assert_equal_parameters(model, one)
        state = whole_state(ours)
        torch.testing.assert_close(state["state"], theirs.state_dict()["state"])


@on_shm_ranks(3)
def test_ranks_that_own_nothing(rank: int) -> None:
    """One row, for three ranks; and one matrix, whole."""
    for optimizer_class in (optim.AdamW, RenamedAdamW):
        for stage in STAGES:

            def make() -> nn.Module:
                torch.manual_seed(1)
                return nn.Linear(6, 1, bias=False)

            ours = sharded(make, optimizer_class, stage, lr=0.01)
            assert owners(ours.optimizer) == [1]
            assert_trains_as_one_process(ours, alone(make, optimizer_class, lr=0.01))
