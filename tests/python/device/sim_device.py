"""A device with streams and an engine of its own, on every machine: see [Note: a device of threads]
in tests/cpp/device/sim_stream.h. Ranks have it, and not the process that runs the tests: torch
takes it for the accelerator of a process."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trireme import _C

from ddp.ranks import on_ranks

# These stand for "cpu:gloo,cuda:nccl" and for "nccl".
BESIDE_GLOO = "cpu:gloo,sim:simccl"
ALONE = "simccl"

_FOLDER = Path(_C.__file__).parents[2] / "tests" / "cpp"
_FILES = sorted(_FOLDER.glob("_sim_device.*.so"))
if not _FILES:
    pytest.skip(f"no C++ tests were built in {_FOLDER}", allow_module_level=True)


def on_sim_ranks(world: int = 2, backend: str = BESIDE_GLOO, **options: Any) -> Any:
    """Does what on_ranks does; rank r computes on device_of(r)."""
    return on_ranks(world, backend=backend, prepare=_begin, **options)


def device_of(rank: int) -> torch.device:
    return torch.device("sim", rank)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module there; torch cannot change a parameter's memory to such a device's."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _begin(rank: int) -> None:
    core().set_device(rank)


@functools.cache
def core() -> Any:
    """Loads and registers the device."""
    spec = importlib.util.spec_from_file_location("_sim_device", _FILES[0])
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return loaded.current_device() if index is None else index

    module = types.ModuleType("torch.sim")
    answers = {
        "device_count": loaded.device_count,
        "current_device": loaded.current_device,
        "set_device": lambda device: loaded.set_device(index_of(device)),
        "synchronize": lambda device="sim": loaded.synchronize(index_of(device)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    sys.modules["torch.sim"] = module
    torch._register_device_module("sim", module)
    dist.Backend.register_backend("simccl", loaded.make_engine, devices=["sim"])
    return loaded
