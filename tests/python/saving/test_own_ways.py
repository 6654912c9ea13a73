"""Modules whose state dict is their own: what would be lost is refused, what is harmless is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD

from harness.faults import raises
from harness.on_ranks import WORLD, on_shm_ranks
from harness.tensors import assert_bits


class Packed(nn.Module):
    """Keeps its weight where nobody looks, as torch's quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = [torch.ones(3)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.packed[0]


class Halved(nn.Linear):
    """Saves something else than it has."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach() / 2


class Renamed(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        for name in [name for name in state if name.endswith("weight")]:
            state[name + "_"] = state.pop(name)
        return state


class Same(nn.Linear):
    """Saves in its own way what every module saves."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.data


class Derived(nn.Linear):
    """Has a value that is made of others when it loads them."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.loads = 0
        self.total = 0.0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.loads += 1
        self.total = float(state_dict[prefix + "weight"].sum())


def hooked(register: Callable[[nn.Module], Any]) -> nn.Module:
    layer = nn.Linear(3, 3)
    register(layer)
    return layer


def dropping(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(prefix + "bias")


def looking(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert prefix + "bias" in state


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is called deprecated
        return torch.ao.nn.quantized.dynamic.Linear(3, 3)


def instance_with_its_own() -> nn.Module:
    layer: Any = nn.Linear(3, 3)
    layer.state_dict = lambda *args, destination=None, **kwargs: destination or {}
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "more": (Packed, "a Packed whose state_dict() has 'packed'"),
    "another value": (
        lambda: Halved(3, 3),
        "a Halved whose state_dict() has another value as 'weight'",
    ),
    "another name": (lambda: Renamed(3, 3), "a Renamed whose state_dict() has 'weight_'"),
    "less": (
        lambda: hooked(lambda it: it.register_state_dict_post_hook(dropping)),
        "a Linear whose state_dict() lacks 'bias'",
    ),
    "quantized": (quantized, "a Linear whose state_dict() has '"),
    "of an instance": (instance_with_its_own, "a Linear whose state_dict() lacks 'weight'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused(tmp_path: Path, case: str) -> None:
    make, said = REFUSED[case]
    trireme.save_checkpoint(tmp_path / "ck", nn.Sequential(nn.Linear(3, 3)))
    for model, name in ((nn.Sequential(make()), "'0'"), (make(), "''")):
        with raises(ValueError, f"got {name}, {said}"):
            trireme.save_checkpoint(tmp_path / "ck", model)
        with raises(ValueError, f"got {name}, {said}"):
            trireme.load_checkpoint(tmp_path / "ck", model)


def looked_at(layer: nn.Module) -> nn.Module:
    model = nn.Sequential(layer)
    model.register_state_dict_post_hook(lambda *args: None)
    return model


def fake_quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.FakeQuantize()


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "norms": lambda: nn.Sequential(
        nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.LayerNorm(3)
    ),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "recurrent": lambda: nn.LSTM(3, 3, 2),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "checkpoint_wrapper": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3))),
    "fake quantized": fake_quantized,
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(3, 3))),
    "a hook around wrappers": lambda: looked_at(checkpoint_wrapper(nn.Linear(3, 3))),
    "its own way": lambda: Same(3, 3),
    "tied in its own way": lambda: nn.Sequential(*[Same(3, 3)] * 2),
    "a hook that looks": lambda: hooked(lambda it: it.register_state_dict_post_hook(looking)),
    "a hook before": lambda: hooked(lambda it: it.register_state_dict_pre_hook(lambda *args: None)),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_harmless_is_saved_and_loaded(tmp_path: Path, case: str) -> None:
    model, other = HARMLESS[case](), HARMLESS[case]()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor)
    trireme.save_checkpoint(tmp_path / "ck", model)
    trireme.load_checkpoint(tmp_path / "ck", other)
    expected = model.state_dict()
    for name, tensor in other.state_dict().items():
        assert_bits(tensor, expected[name])


def test_a_module_loads_in_its_own_way(tmp_path: Path) -> None:
    model = nn.Sequential(Derived())
    trireme.save_checkpoint(tmp_path / "ck", model)
    called: list[str] = []
    other = nn.Sequential(Derived(), nn.Linear(1, 1))[:1]
    other[0].register_load_state_dict_post_hook(lambda module, keys: called.append("after"))
    other[0].register_load_state_dict_pre_hook(lambda *args: called.append("before"))
    trireme.load_checkpoint(tmp_path / "ck", other)
    layer = other[0]
    assert layer.loads == 1 and layer.total == float(model[0].weight.detach().sum())
    assert called == ["before", "after"]
    assert_bits(layer.weight.detach(), model[0].weight.detach())


class Summing(nn.Module):
    """Reads what is below it, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Derived()
        self.seen: list[float] = []
        self.register_load_state_dict_post_hook(
            lambda module, keys: module.seen.append(module.inner.total)
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.seen.append(float(state_dict[prefix + "inner.weight"].sum()))


def test_a_module_reads_what_is_below_it(tmp_path: Path) -> None:
    model = nn.Sequential(Summing())
    trireme.save_checkpoint(tmp_path / "ck", model)
    other = nn.Sequential(Summing())
    trireme.load_checkpoint(tmp_path / "ck", other)
    assert other[0].seen == [float(model[0].inner.weight.detach().sum())] * 2


@on_shm_ranks(WORLD)
def test_a_module_derives_values_of_all_shards(rank: int, tmp_path: Path) -> None:
    """Where ranks have parameters of their own, each has read its shards only."""
    folder = tmp_path / "ck"
    model = nn.Sequential(Derived())
    dist.broadcast(model[0].weight.detach(), 0)
    total = float(model[0].weight.detach().sum())
    trireme.save_checkpoint(folder, model)
    other = nn.Sequential(Derived())
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    optimizer = trireme.ZeroRedundancyOptimizer(
        other.parameters(), SGD, stage=2, lr=0.5, host_params=False
    )
    trireme.load_checkpoint(folder, other)
    assert other[0].total == total
    assert_bits(other[0].weight.detach(), model[0].weight.detach())
    other(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert_bits(other[0].bias.detach(), model[0].bias.detach() - 1)


def test_a_module_that_does_not_take_its_own_values(tmp_path: Path) -> None:
    class Picky(nn.Linear):
        def _load_from_state_dict(
            self, state_dict: dict[str, Tensor], prefix: str, *args: Any
        ) -> None:
            args[-1].append("these are not mine")

    trireme.save_checkpoint(tmp_path / "ck", nn.Linear(3, 3))
    with raises(ValueError, "Picky that does not load what it had saved: these are not mine"):
        trireme.load_checkpoint(tmp_path / "ck", Picky(3, 3))
    trireme.load_checkpoint(tmp_path / "ck", nn.Linear(3, 3))
