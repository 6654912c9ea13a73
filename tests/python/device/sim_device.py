"""A device with streams and an engine of its own, on every machine: see [Note: a device of threads]
in tests/cpp/device/sim_stream.h. Ranks have it, and not the process that runs the tests: torch
takes it for the accelerator of a process."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from harness import cpp_modules

WHY_NOT = cpp_modules.why_not("_sim_device")


@functools.cache
def core() -> Any:
    """Loads and registers the device."""
    loaded = cpp_modules.load("_sim_device")

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
