"""The C++ core, as Python sees it. tests/python/test_stub.py compares this file with the module.

Contracts stand in the headers of the same names: csrc/strategies/ddp/ddp.h,
csrc/grad/grad_reducer.h, csrc/comm/communicator.h, csrc/comm/rendezvous.h, csrc/common/env.h,
csrc/shm/doctor.h, csrc/memory/memory_estimate.h,
csrc/kernels/optimizer_step.h.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import ProcessGroup, Store

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def failure(self) -> str | None: ...

class WireRecord:
    @property
    def verb(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtypes(self) -> list[str]: ...

class RecordingCommunicator(Communicator):
    def __init__(self, inner: Communicator) -> None: ...
    @property
    def records(self) -> list[WireRecord]: ...
    def clear(self) -> None: ...

def make_c10d_communicator(group: ProcessGroup, store: Store | None) -> Communicator: ...
def make_shm_backend(
    store: Store, rank: int, world: int, timeout: timedelta, host_partition: str = ""
) -> Backend: ...
def close_all_p2p() -> None: ...
def estimate_memory(
    parameters: Sequence[tuple[Sequence[int], torch.dtype, bool]],
    *,
    strategy: str,
    world: int,
    ranks_per_host: int,
    accounting: str,
    optimizer: int | str,
    grad_dtype: torch.dtype | None,
    host_params: bool,
    activation_bytes: int,
    module_buffer_bytes: int,
) -> dict[str, dict[str, int]]: ...
def examine_host(pids: Sequence[int], patience: timedelta, history: int) -> dict[str, Any]: ...

class DdpOptions:
    init_sync: bool
    init_sync_buffers: bool
    bucket_cap_mb: float | None
    bucket_cap_mb_list: list[float]
    gradient_as_bucket_view: bool
    reduce_dtype: torch.dtype | None
    def __init__(self) -> None: ...

class Ddp:
    def __init__(
        self,
        *,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sparse_gradient: Sequence[bool],
        buffers: Sequence[torch.Tensor],
        communicator: Communicator,
        options: DdpOptions,
    ) -> None: ...
    def before_forward(self) -> None: ...
    def after_forward(
        self, outputs: Sequence[torch.Tensor], synchronize: bool, all_found: bool
    ) -> None: ...
    def sync_buffers(self, buffers: Sequence[torch.Tensor], root: int) -> None: ...
    def sync_module(self, buffers: Sequence[torch.Tensor], root: int) -> None: ...
    def prepare_for_backward(self) -> None: ...
    def shadow_backward(self) -> None: ...
    def finalize_backward(self) -> None: ...
    def should_finalize_after_backward(self) -> bool: ...
    def set_manual_finalization(self, manual: bool) -> None: ...
    def set_delivered_callback(self, callback: Callable[[list[int]], None]) -> None: ...
    def set_divisor(self, divisor: float) -> None: ...
    def register_comm_hook(self, state: object, hook: object) -> None: ...
    def last_step(self) -> dict[str, float]: ...
    def describe_plan(self) -> str: ...
    def plan(self) -> list[list[str]]: ...

class BatchNormSync:
    def __init__(self, communicator: Communicator) -> None: ...
    def forward(
        self,
        input: torch.Tensor,
        *,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor: ...

class AdamStepOptions:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    amsgrad: bool
    maximize: bool
    def __init__(self) -> None: ...

class SgdStepOptions:
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    first_step: bool
    def __init__(self) -> None: ...

def adam_step(
    *,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    options: AdamStepOptions,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None: ...
def sgd_step(
    *,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    momentum_buffers: Sequence[torch.Tensor],
    options: SgdStepOptions,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None: ...

class Launcher:
    ALONE: ClassVar[Launcher]
    VARIABLES: ClassVar[Launcher]
    OPEN_MPI: ClassVar[Launcher]
    SLURM: ClassVar[Launcher]
    CALLER: ClassVar[Launcher]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class LaunchEnvironment:
    @property
    def launcher(self) -> Launcher: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world(self) -> int: ...
    @property
    def master_addr(self) -> str: ...
    @property
    def master_port(self) -> int: ...
    @property
    def init_method(self) -> str: ...

class Rendezvous:
    def __init__(
        self, environment: LaunchEnvironment, init_method: str, timeout: timedelta | None
    ) -> None: ...
    @property
    def store(self) -> Store: ...
    def leave(self, patience: timedelta) -> bool: ...

def read_launch_environment(
    rank: int | None = None, world: int | None = None
) -> LaunchEnvironment: ...
def threads_per_rank(environment: LaunchEnvironment, cpus: int) -> int | None: ...
def usable_cpus() -> int: ...
def error_text(area: str, what: str, next_step: str, *, rank: int = -1, world: int = -1) -> str: ...
