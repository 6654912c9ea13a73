"""The C++ core, as Python sees it. tests/python/core/test_stub.py compares this file with
the module.

Contracts stand in the headers of csrc/ that declare the same names; csrc/README.md is their map.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Backend, Work
from torch.distributed.distributed_c10d import ProcessGroup, Store

from trireme._c_activation import ActivationCache as ActivationCache
from trireme._c_activation import CacheStats as CacheStats
from trireme._c_activation import PartitionMemory as PartitionMemory
from trireme._c_activation import PartitionPacker as PartitionPacker
from trireme._c_activation import PrefixCache as PrefixCache
from trireme._c_activation import SavedTensorPacker as SavedTensorPacker
from trireme._c_activation import StopRecomputation as StopRecomputation
from trireme._c_activation import checkpoint as checkpoint
from trireme._c_activation import checkpoint_plan as checkpoint_plan
from trireme._c_activation import make_offload_packer as make_offload_packer
from trireme._c_activation import make_partition_packer as make_partition_packer
from trireme._c_activation import offloaded_bytes as offloaded_bytes
from trireme._c_activation import plan_of as plan_of
from trireme._c_activation import run_with_packer as run_with_packer
from trireme._c_activation import segment_bounds as segment_bounds
from trireme._c_activation import square_root_segments as square_root_segments
from trireme._c_pipeline import BatchVersions as BatchVersions
from trireme._c_pipeline import CallTurn as CallTurn
from trireme._c_pipeline import DeferredSync as DeferredSync
from trireme._c_pipeline import ElasticPlan as ElasticPlan
from trireme._c_pipeline import LossCollector as LossCollector
from trireme._c_pipeline import PipelineAction as PipelineAction
from trireme._c_pipeline import PipelineEngine as PipelineEngine
from trireme._c_pipeline import PipelinePass as PipelinePass
from trireme._c_pipeline import PipelineRunner as PipelineRunner
from trireme._c_pipeline import PipelineSchedule as PipelineSchedule
from trireme._c_pipeline import PipelineStageRequest as PipelineStageRequest
from trireme._c_pipeline import PipelineThreads as PipelineThreads
from trireme._c_pipeline import TensorChannels as TensorChannels
from trireme._c_pipeline import elastic_plan as elastic_plan
from trireme._c_pipeline import find_tied as find_tied
from trireme._c_pipeline import is_checkpointing as is_checkpointing
from trireme._c_pipeline import is_recomputing as is_recomputing
from trireme._c_pipeline import layer_holders as layer_holders
from trireme._c_pipeline import lone_communicator as lone_communicator
from trireme._c_pipeline import make_pipeline_schedule as make_pipeline_schedule
from trireme._c_pipeline import partition as partition
from trireme._c_pipeline import pipeline_loss as pipeline_loss
from trireme._c_pipeline import pipeline_pool as pipeline_pool
from trireme._c_pipeline import read_pipeline_schedule as read_pipeline_schedule
from trireme._c_pipetransformer import ElasticCourse as ElasticCourse
from trireme._c_pipetransformer import ElasticEpoch as ElasticEpoch
from trireme._c_pipetransformer import FreezeCourse as FreezeCourse
from trireme._c_pipetransformer import FreezePoint as FreezePoint
from trireme._c_pipetransformer import LayerMove as LayerMove
from trireme._c_pipetransformer import MovedState as MovedState
from trireme._c_pipetransformer import free_memory as free_memory
from trireme._c_pipetransformer import freeze_schedule as freeze_schedule
from trireme._c_pipetransformer import frozen_by_gradient as frozen_by_gradient
from trireme._c_pipetransformer import has_memory as has_memory
from trireme._c_pipetransformer import move_layers as move_layers
from trireme._c_rounds import PrefixedSource as PrefixedSource
from trireme._c_rounds import RoundOptions as RoundOptions
from trireme._c_rounds import RoundPart as RoundPart
from trireme._c_rounds import Rounds as Rounds
from trireme._c_rounds import WorkerRanks as WorkerRanks
from trireme._c_rounds import anchors_to_save as anchors_to_save
from trireme._c_rounds import counterparts_on_hosts as counterparts_on_hosts
from trireme._c_rounds import cut_by_bytes as cut_by_bytes
from trireme._c_rounds import deal_by_bytes as deal_by_bytes
from trireme._c_rounds import load_rounds as load_rounds
from trireme._c_rounds import merge_texts_of as merge_texts_of
from trireme._c_rounds import ranks_by_host as ranks_by_host
from trireme._c_rounds import renamed as renamed
from trireme._c_rounds import rounds_to_save as rounds_to_save
from trireme._c_rounds import text_as_tensor as text_as_tensor
from trireme._c_sharded import Fsdp as Fsdp
from trireme._c_sharded import FsdpRanks as FsdpRanks
from trireme._c_sharded import FusedAdamGroup as FusedAdamGroup
from trireme._c_sharded import GradNormPart as GradNormPart
from trireme._c_sharded import JoinCall as JoinCall
from trireme._c_sharded import JoinMeeting as JoinMeeting
from trireme._c_sharded import ParamGroup as ParamGroup
from trireme._c_sharded import ParamPlace as ParamPlace
from trireme._c_sharded import ShardedParamSpec as ShardedParamSpec
from trireme._c_sharded import ShardPlacement as ShardPlacement
from trireme._c_sharded import UnitOffload as UnitOffload
from trireme._c_sharded import Zero as Zero
from trireme._c_sharded import ZeroCores as ZeroCores
from trireme._c_sharded import ZeroOptions as ZeroOptions
from trireme._c_sharded import clip_grad_norm_ as clip_grad_norm_
from trireme._c_sharded import plan_offload as plan_offload
from trireme.ps._c_ps import AdagradSpec as AdagradSpec
from trireme.ps._c_ps import AdamSpec as AdamSpec
from trireme.ps._c_ps import AdamWSpec as AdamWSpec
from trireme.ps._c_ps import PsDenseTable as PsDenseTable
from trireme.ps._c_ps import PsNormal as PsNormal
from trireme.ps._c_ps import PsOptions as PsOptions
from trireme.ps._c_ps import PsPending as PsPending
from trireme.ps._c_ps import PsServer as PsServer
from trireme.ps._c_ps import PsSparseOptions as PsSparseOptions
from trireme.ps._c_ps import PsSparseTable as PsSparseTable
from trireme.ps._c_ps import PsTableSpec as PsTableSpec
from trireme.ps._c_ps import PsUniform as PsUniform
from trireme.ps._c_ps import PsZeros as PsZeros
from trireme.ps._c_ps import RowwiseAdagradSpec as RowwiseAdagradSpec
from trireme.ps._c_ps import SgdSpec as SgdSpec
from trireme.ps._c_ps import SumSpec as SumSpec
from trireme.remote._c_remote import RemoteEndpoint as RemoteEndpoint
from trireme.remote._c_remote import RemoteModuleHandle as RemoteModuleHandle
from trireme.remote._c_remote import RemotePending as RemotePending
from trireme.remote._c_remote import RemoteRef as RemoteRef
from trireme.remote._c_remote import remote_define as remote_define
from trireme.remote._c_remote import remote_use_describer as remote_use_describer
from trireme.remote._c_remote import remote_use_raiser as remote_use_raiser
from trireme.remote._c_remote import remote_use_ref_type as remote_use_ref_type

_Tensors = Sequence[torch.Tensor]
_Devices = Sequence[torch.device]
_Job = Callable[[int], None]
_Call = Callable[[], None]

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def failure(self) -> str | None: ...
    def announce_failure(self, reason: str) -> None: ...
    def recover(self) -> None: ...

class CustomCommunicator(Communicator):
    def __init__(self, inner: Communicator) -> None: ...
    def set_all_gather(
        self,
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None,
        start: Callable[[torch.Tensor, torch.Tensor], Work | None] | None,
    ) -> None: ...
    def set_reduce_scatter(
        self,
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None,
        start: Callable[[torch.Tensor, torch.Tensor], Work | None] | None,
    ) -> None: ...

class NamedOperation:
    def __init__(
        self,
        name: str,
        set: int,
        kind: str,
        terms: Sequence[tuple[str, str]],
        payload: str,
        can_have_zeros: bool,
    ) -> None: ...

class AgreedOperation:
    @property
    def name(self) -> str: ...
    @property
    def set(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def terms(self) -> list[tuple[str, str]]: ...
    @property
    def payloads(self) -> list[str]: ...
    @property
    def error(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def last_joined(self) -> int: ...

class NamedOrder:
    def __init__(
        self, communicator: Communicator, report_after: timedelta, fail_after: timedelta
    ) -> None: ...
    def announce(self, operation: NamedOperation) -> None: ...
    def define_set(self, set: int, ranks: Sequence[int]) -> None: ...
    def wait_for_next(self) -> bool: ...
    def take_report(self) -> str | None: ...
    def next(self) -> AgreedOperation | None: ...
    def begin_turn(self) -> bool: ...
    def next_in_turn(self) -> AgreedOperation | None: ...
    def end_turn(self) -> None: ...
    def close(self) -> None: ...

class GradientOp:
    AVERAGE: ClassVar[GradientOp]
    SUM: ClassVar[GradientOp]
    NONE: ClassVar[GradientOp]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class OptimizerGradients:
    def __init__(
        self,
        *,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        sparse: Sequence[bool],
        communicator: Communicator,
        op: GradientOp,
        predivide_factor: float,
        backward_passes_per_step: int,
        reduce_dtype: torch.dtype | None,
        sparse_as_dense: bool,
        refuse: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None: ...
    def synchronize(self) -> None: ...
    def begin_step(self) -> None: ...
    def warning_of_step(self) -> str | None: ...
    def set_steps_synchronize(self, synchronize: bool) -> None: ...
    def check_zero_grad(self) -> None: ...
    def set_backward_passes_per_step(self, passes: int) -> None: ...
    def has_passes(self) -> bool: ...
    def forget_passes(self) -> None: ...
    def shadow_backward(self) -> None: ...
    def last_step(self) -> int: ...
    def set_begun_callback(self, begun: Callable[[int], None] | None) -> None: ...
    def end(self, why: str) -> None: ...

def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor: ...
def pack_value(value: object, area: str, name: str, rank: int, world: int) -> torch.Tensor: ...
def unpack_value(bytes: torch.Tensor) -> Any: ...
def make_communicator(group: ProcessGroup, store: Store | None) -> Communicator: ...
def gather_texts(
    own: str | bytes, communicator: Communicator, device: torch.device
) -> list[str]: ...
def broadcast_text(own: str | bytes, communicator: Communicator, device: torch.device) -> str: ...
def compare_texts(
    own: str | bytes, communicator: Communicator, flag: bool = False
) -> tuple[bool, bool]: ...
def as_complaint(why: str | bytes) -> str: ...
def first_complaint(texts: list[str]) -> tuple[int, str] | None: ...
def first_failure(
    own: str | bytes | None, communicator: Communicator, device: torch.device
) -> tuple[int, str] | None: ...
def make_shm_backend(
    store: Store, rank: int, world: int, timeout: timedelta, host_partition: str = ""
) -> Backend: ...
def close_all_p2p() -> None: ...
def leave_all_groups(error: str) -> None: ...
def accumulate_through(leaf: torch.Tensor, through: torch.Tensor) -> None: ...

class ParameterInfo:
    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> None: ...
    @property
    def numel(self) -> int: ...

def estimate_memory(
    parameters: Sequence[ParameterInfo],
    *,
    strategy: str,
    world: int,
    ranks_per_host: int,
    accounting: str,
    optimizer: int | str,
    grad_dtype: torch.dtype | None,
    host_params: bool,
    unit_numel: int,
    activation_bytes: int,
    module_buffer_bytes: int,
    limit: tuple[int, bool] | None,
) -> dict[str, Any]: ...
def chunk_rows(rows: int, rank: int, world: int) -> tuple[int, int]: ...
def examine_host(pids: Sequence[int], patience: timedelta, history: int) -> dict[str, Any]: ...

class WorkerPool:
    def __init__(self, *, devices: _Devices, intra_op_threads: Sequence[int]) -> None: ...
    def worker_loop(self, worker: int) -> _Call: ...
    def stopper(self) -> _Call: ...
    def run(self, workers: Sequence[int], function: _Job, on_interrupt: _Call) -> None: ...

class ModuleReplicas:
    def __init__(
        self,
        *,
        devices: _Devices,
        names: Sequence[str],
        parameters: _Tensors,
        leaves: Sequence[_Tensors],
        buffers: _Tensors,
        replica_buffers: Sequence[_Tensors],
    ) -> None: ...

class ReplicasOptions:
    weights: list[float]
    auto_balance: bool
    copy_always: bool
    output_device: torch.device
    def __init__(self) -> None: ...

class ReplicaPass:
    @property
    def chunks(self) -> list[tuple[int, int]]: ...
    def scatter(self, input: torch.Tensor, dim: int) -> list[torch.Tensor]: ...
    def gather(
        self, outputs: Sequence[_Tensors], dim: int, weights: Sequence[float]
    ) -> list[torch.Tensor]: ...

class Replicas:
    def __init__(
        self, *, module: ModuleReplicas, pool: WorkerPool, options: ReplicasOptions
    ) -> None: ...
    def begin(self, rows: int) -> ReplicaPass: ...
    def forward(self, pass_: ReplicaPass, function: _Job, on_interrupt: _Call) -> None: ...
    def describe(self, replica: int) -> str: ...
    def last_step(self) -> dict[str, Any]: ...

def default_replicas(threads: int) -> int: ...
def intra_op_threads_of(threads: int, workers: int) -> list[int]: ...

class Fp16:
    def __init__(self, *, error_feedback: bool, dense_below: int, between: str) -> None: ...

class Bf16:
    def __init__(self, *, error_feedback: bool, dense_below: int, between: str) -> None: ...

class Int8:
    def __init__(
        self, *, block: int, rounding: str, error_feedback: bool, dense_below: int, between: str
    ) -> None: ...

class Int4:
    def __init__(
        self, *, block: int, error_feedback: bool, dense_below: int, between: str
    ) -> None: ...

class Sign:
    def __init__(
        self, *, block: int, error_feedback: bool, dense_below: int, between: str
    ) -> None: ...

class TopK:
    def __init__(
        self,
        *,
        density: float,
        chunk: int | None,
        bits: int,
        exact: bool,
        decay: float,
        error_feedback: bool,
        dense_below: int,
        between: str,
    ) -> None: ...

class RandomK:
    def __init__(
        self, *, density: float, seed: int, error_feedback: bool, dense_below: int, between: str
    ) -> None: ...

class PowerSGD:
    def __init__(
        self,
        *,
        rank: int,
        start_step: int,
        min_ratio: float,
        seed: int,
        error_feedback: bool,
        dense_below: int,
        between: str,
    ) -> None: ...

_Compression = Fp16 | Bf16 | Int8 | Int4 | Sign | TopK | RandomK | PowerSGD

class HookCoder:
    def __init__(self, ranks: Communicator, compression: _Compression) -> None: ...
    def average(
        self, buffer: torch.Tensor, parameters: _Tensors, names: Sequence[str], index: int
    ) -> None: ...

class KeptCodes:
    def rename(self, names: Sequence[str], prefix: str) -> None: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def tensors(self) -> list[torch.Tensor]: ...
    def residuals(self) -> dict[str, tuple[int, int, torch.Tensor]]: ...

def codes_to_save(codes: Sequence[KeptCodes]) -> list[CheckpointTensor] | None: ...
def check_codes(
    codes: Sequence[KeptCodes], source: CheckpointSource, where: tuple[int, int]
) -> None: ...
def load_codes(
    codes: Sequence[KeptCodes], source: CheckpointSource, where: tuple[int, int]
) -> None: ...
def check_same_compression(
    communicator: Communicator, compression: _Compression | None
) -> None: ...
def code_bytes(compression: _Compression, sizes: Sequence[int]) -> int: ...

class DdpOptions:
    init_sync: bool
    init_sync_buffers: bool
    bucket_cap_mb: float | None
    bucket_cap_mb_list: list[float]
    gradient_as_bucket_view: bool
    reduce_dtype: torch.dtype | None
    compression: _Compression | None
    def __init__(self) -> None: ...

class ModuleNow:
    def __init__(
        self,
        *,
        names: Sequence[str],
        parameters: _Tensors,
        sparse_gradient: Sequence[bool],
        beside: Sequence[str],
    ) -> None: ...

class Ddp:
    def __init__(
        self,
        *,
        names: Sequence[str],
        parameters: _Tensors,
        sparse_gradient: Sequence[bool],
        buffers: _Tensors,
        communicator: Communicator,
        options: DdpOptions,
    ) -> None: ...
    def before_forward(self) -> None: ...
    def after_forward(self, outputs: _Tensors, synchronize: bool, all_found: bool) -> None: ...
    def sync_buffers(self, buffers: _Tensors, root: int) -> None: ...
    def sync_module(self, buffers: _Tensors, root: int) -> None: ...
    def is_held(self) -> bool: ...
    def has_averaged(self) -> bool: ...
    def prepare_for_backward(self) -> None: ...
    def shadow_backward(self, deliver: bool) -> None: ...
    def finalize_backward(self) -> None: ...
    def should_finalize_after_backward(self) -> bool: ...
    def set_manual_finalization(self, manual: bool) -> None: ...
    def set_delivered_callback(self, callback: Callable[[list[int]], None]) -> None: ...
    def set_divisor(self, divisor: float) -> None: ...
    def register_comm_hook(self, state: object, hook: object) -> None: ...
    def kept_codes(self) -> list[KeptCodes]: ...
    def last_step(self) -> dict[str, float]: ...
    def watch_module(
        self,
        look: Callable[[bool], ModuleNow | None],
        adopted: Callable[[], None],
    ) -> None: ...
    def describe_plan(self) -> str: ...
    def plan(self) -> list[list[str]]: ...

def has_layers(
    layers: list[tuple[dict[str, object], dict[str, object] | int, dict[str, object]]],
    begin: int,
    end: int,
) -> bool: ...

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
    params: _Tensors,
    grads: _Tensors,
    exp_avgs: _Tensors,
    exp_avg_sqs: _Tensors,
    max_exp_avg_sqs: _Tensors,
    steps: _Tensors,
    options: AdamStepOptions,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None: ...
def sgd_step(
    *,
    params: _Tensors,
    grads: _Tensors,
    momentum_buffers: _Tensors,
    options: SgdStepOptions,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None: ...

class CheckpointTensor:
    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        sizes: Sequence[int],
        values: torch.Tensor | None = None,
        *,
        first: Sequence[int] = (),
    ) -> None: ...
    def copied(self) -> CheckpointTensor: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def sizes(self) -> list[int]: ...

class CheckpointRanks:
    def __init__(self, communicator: Communicator | None, device: torch.device) -> None: ...
    def some_rank_has_optimizer(self, has: bool, trains: bool) -> bool: ...

class CheckpointSource:
    def tensors(self, kind: str) -> dict[str, CheckpointTensor]: ...
    def text(self, name: str) -> str: ...
    def verify(self, kinds: Sequence[str]) -> None: ...
    def check(self, kind: str, tensors: Sequence[CheckpointTensor]) -> None: ...
    def read(self, kind: str, tensors: Sequence[CheckpointTensor]) -> None: ...

class CheckpointReader(CheckpointSource):
    def __init__(
        self, path: str, ranks: CheckpointRanks, *, reads_once: bool = ..., verify: bool = ...
    ) -> None: ...

class HeldCheckpoint(CheckpointSource):
    def __init__(
        self,
        ranks: CheckpointRanks,
        *,
        tensors: dict[str, list[CheckpointTensor]],
        texts: dict[str, str],
        of_lowest: set[str],
    ) -> None: ...

class PendingSave:
    def wait_for(self, seconds: float | None = ...) -> bool: ...
    def done(self) -> bool: ...
    @property
    def stall_ms(self) -> float: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def path(self) -> str: ...

def save_checkpoint(
    path: str,
    ranks: CheckpointRanks,
    *,
    tensors: dict[str, list[CheckpointTensor]],
    texts: dict[str, str],
    max_file_bytes: int,
    stall_ms: float,
) -> PendingSave: ...

class CheckpointSeries:
    def __init__(self, folder: str, keep: int, *, rank: int, world: int) -> None: ...
    @property
    def folder(self) -> str: ...
    def path_of(self, step: int) -> str: ...
    def steps(self) -> list[int]: ...
    def note_damaged(self, step: int) -> None: ...
    def make_room(self, step: int) -> None: ...
    def keep_last(self, step: int) -> None: ...

def communicator_of_saves(ranks: CheckpointRanks) -> Communicator | None: ...
def wait_for_earlier_saves(ranks: CheckpointRanks) -> None: ...
def save_in_background(
    path: str,
    ranks: CheckpointRanks,
    saver: Communicator | None,
    *,
    tensors: dict[str, list[CheckpointTensor]],
    texts: dict[str, str],
    max_file_bytes: int,
    written: Sequence[torch.Tensor],
    stages: tuple[bool, bool] | None,
    stall_ms: float,
    series: CheckpointSeries | None,
    step: int,
) -> PendingSave: ...
def refuse_to_save(
    path: str, ranks: CheckpointRanks, saver: Communicator | None, reason: str
) -> None: ...
def finish_saves() -> None: ...
def abort_saves(reason: str) -> None: ...
def has_snapshots() -> bool: ...
def keep_snapshots_of(tensors: Sequence[torch.Tensor]) -> None: ...
def keep_all_snapshots() -> None: ...

class BatchPart:
    @property
    def number(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rows(self) -> torch.Tensor: ...
    @property
    def weight(self) -> float: ...

class GlobalBatch:
    def __init__(
        self,
        rows: int,
        size: int,
        shuffle: bool,
        seed: int,
        balance: Sequence[float],
        rank: int,
        world: int,
    ) -> None: ...
    def whole(self, step: int) -> torch.Tensor: ...
    def part(self, step: int) -> BatchPart: ...
    def part_of(self, step: int, rank: int, world: int) -> BatchPart: ...
    def state(self) -> str: ...
    def load_state(self, text: str) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

_State = Mapping[str, torch.Tensor | str]

class ShardedParameter:
    def own_part(self, whole: _State, communicator: Communicator) -> _State: ...

def gather_states(
    own: Sequence[_State],
    parameters: Sequence[ShardedParameter],
    communicator: Communicator,
    to: int,
) -> list[_State]: ...

class Launcher:
    ALONE: ClassVar[Launcher]
    VARIABLES: ClassVar[Launcher]
    OPEN_MPI: ClassVar[Launcher]
    MPICH: ClassVar[Launcher]
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
def rank_seed(seed: int, rank: int) -> int: ...
def threads_per_rank(environment: LaunchEnvironment, cpus: int) -> int | None: ...
def usable_cpus() -> int: ...
def error_text(area: str, what: str, next_step: str, *, rank: int = -1, world: int = -1) -> str: ...
