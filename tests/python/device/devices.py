"""What the tests of this room run on: the device of threads (sim_device.py), and GPUs.

    @on_device_ranks(2)
    def test_something(rank: int) -> None:
        device = device_of(rank)

A test runs once per kind of device, and says so where there is no GPU. Ranks share GPUs where there
are fewer of these. NCCL refuses that to ranks of one host, so each rank calls itself a host.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from device import sim_device
from harness.on_ranks import on_ranks, signature_without_rank


@dataclass(frozen=True)
class Kind:
    name: str
    """The type of torch.device."""
    backend: str
    """An engine for the device, and Gloo for the CPU."""
    backend_alone: str
    """The engine for the device alone."""
    why_not: str | None
    """Why this machine has no such device; None if it has one."""


SIM = Kind("sim", "cpu:gloo,sim:simccl", "simccl", sim_device.WHY_NOT)
CUDA = Kind(
    "cuda",
    "cpu:gloo,cuda:nccl",
    "nccl",
    None if torch.cuda.device_count() > 0 else "no CUDA device",
)
KINDS = {kind.name: kind for kind in (SIM, CUDA)}

_own: Kind | None = None
"""What this rank runs on."""


def on_device_ranks(
    world: int = 2, *, alone: bool = False, kinds: Sequence[Kind] = (SIM, CUDA), **options: Any
) -> Any:
    """Does what on_ranks does, once per kind; with ``alone`` there is no engine for the CPU."""

    def decorate(program: Callable[..., None]) -> Any:
        tests = {
            kind.name: on_ranks(
                world,
                backend=kind.backend_alone if alone else kind.backend,
                prepare=functools.partial(_prepare, kind.name),
                fresh=True,
                **options,
            )(program)
            for kind in kinds
        }

        @functools.wraps(program)
        def test(runs_on: str, **case: Any) -> None:
            if (reason := KINDS[runs_on].why_not) is not None:
                pytest.skip(reason)
            tests[runs_on](**case)

        own = signature_without_rank(program)
        test.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*own.parameters.values(), _RUNS_ON]
        )
        return pytest.mark.parametrize("runs_on", [kind.name for kind in kinds])(test)

    return decorate


_RUNS_ON = inspect.Parameter("runs_on", inspect.Parameter.KEYWORD_ONLY)


def _prepare(kind: str, rank: int) -> None:
    """Is called in a rank before there is a group."""
    global _own
    _own = KINDS[kind]
    if _own is SIM:
        sim_device.core().set_device(rank)
    else:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(device_of(rank))


def device_type() -> str:
    assert _own is not None
    return _own.name


def device_of(rank: int) -> torch.device:
    return torch.device(device_type(), rank % device_count())


def device_count() -> int:
    return torch.get_device_module(device_type()).device_count()


def two_devices() -> list[str]:
    """For a process that uses several: the CPU is the second where there is one GPU."""
    second = f"{device_type()}:1" if device_count() > 1 else "cpu"
    return [f"{device_type()}:0", second]


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module there. torch cannot change a parameter's memory to that of the sim device."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(device.type == "sim" or before)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
