"""The strategies that can be compared: one entry each in STRATEGIES.

An entry says how a process joins its group and how a plain module and an optimizer become a
parallel pair. Forward, backward, `optimizer.step()` and `zero_grad()` are the same code for all of
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from workloads import Batch

from measure.bad_input import BadInput, unknown_name
from measure.machine import cores

if TYPE_CHECKING:
    import trireme

Options = Mapping[str, Any]
Report = dict[str, float]


def no_report() -> Report:
    return {}


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer as a class and its arguments, since sharded strategies build it themselves."""

    kind: type[Optimizer] = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3, "fused": True})

    def build(self, parameters: Iterable[Tensor]) -> Optimizer:
        return self.kind(parameters, **self.arguments)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.kind.__name__}({arguments})"


def optimizer_spec(library: str) -> OptimizerSpec:
    """AdamW of `library`, "torch" (fused), "torch-foreach" or "trireme", which runs as fused."""
    if library == "torch":
        return OptimizerSpec()
    if library == "torch-foreach":
        return OptimizerSpec(arguments={"lr": 1e-3, "foreach": True})
    import trireme

    return OptimizerSpec(trireme.optim.AdamW)


@dataclass(frozen=True)
class Parallel:
    """A module ready to train; `report` is what the strategy itself says about its last step.

    `step` runs forward and backward of a whole batch where these are not to be told apart, and
    returns what tells the loss.
    """

    module: nn.Module
    optimizer: Optimizer
    report: Callable[[], Report] = no_report
    step: Callable[[Batch], Callable[[], float]] | None = None


Build = Callable[[nn.Module, OptimizerSpec, Options], Parallel]


@dataclass(frozen=True)
class Group:
    """How a rank enters and leaves its process group."""

    enter: Callable[[], object]
    leave: Callable[[], object]


@dataclass(frozen=True)
class Strategy:
    """One way to train. `build` is None while the strategy is only planned.

    `alone`: runs as one process with all cores; else one thread on each of several ranks.
    `replicates`: the one process has as many replicas as others have ranks, of one thread each.
    `is_staged`: a rank, or a thread of the one process, has some layers, and is given the whole
    batch. `build` finds among its options the workload's `loss`, and how many `micro_batches` there
    are.
    `agrees`: follows the same trajectory as one process, so that its losses may be compared.
    `only_benchmarked`: a variant for one benchmark, which compare.py does not list.
    """

    title: str
    build: Build | None = None
    group: Group | None = None
    options: Options = field(default_factory=dict)
    alone: bool = False
    replicates: bool = False
    is_staged: bool = False
    agrees: bool = True
    only_benchmarked: bool = False
    needs_trireme: bool = False

    def processes(self, ranks: int) -> tuple[int, int]:
        """How many there are where others have `ranks`, and the threads of each."""
        if not self.alone:
            return ranks, 1
        return 1, ranks if self.replicates or self.is_staged else cores()


def build_plain(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    return Parallel(module, optimizer.build(module.parameters()))


def build_dp(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    """With a replica for each of the threads that this process was given."""
    import trireme

    parallel = trireme.DataParallel(module, **{"replicas": torch.get_num_threads(), **options})
    return Parallel(parallel, optimizer.build(parallel.parameters()))


def build_ddp(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    import trireme

    parallel = trireme.DistributedDataParallel(module, **options)
    return Parallel(parallel, optimizer.build(parallel.parameters()), parallel.last_step)


def build_torch_ddp(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    parallel = nn.parallel.DistributedDataParallel(module, **options)
    report = partial(_torch_report, parallel)
    return Parallel(parallel, optimizer.build(parallel.parameters()), report)


POWER_SGD_HOOK = "PowerSGD 4 hook"
HOOKS = {
    "fp16 hook": ("default_hooks", "fp16_compress_hook"),
    "bf16 hook": ("default_hooks", "bf16_compress_hook"),
    "8 bit hook": ("quantization_hooks", "quantization_pertensor_hook"),
    POWER_SGD_HOOK: ("powerSGD_hook", "powerSGD_hook"),
}


def build_compressed_ddp(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    """`options` are those of the method."""
    from trireme import compression

    arguments = {name: value for name, value in options.items() if name != "method"}
    method = getattr(compression, options["method"])(**arguments)
    return build_ddp(module, optimizer, {"compression": method})


def build_hooked_torch_ddp(
    module: nn.Module, optimizer: OptimizerSpec, options: Options
) -> Parallel:
    plain = {name: value for name, value in options.items() if name != "hook"}
    parallel = build_torch_ddp(module, optimizer, plain)
    file, name = HOOKS[options["hook"]]
    hooks = importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{file}")
    assert isinstance(parallel.module, nn.parallel.DistributedDataParallel)
    state = None
    if options["hook"] == POWER_SGD_HOOK:  # which runs plain until warm-up is over
        state = hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    parallel.module.register_comm_hook(state, getattr(hooks, name))
    return parallel


def _torch_report(parallel: nn.parallel.DistributedDataParallel) -> Report:
    """The reducer's own clock, a step late: last gradient to end of communication."""
    parallel._set_ddp_runtime_logging_sample_rate(1)  # else only every 100th step is timed
    log = parallel._get_ddp_logging_data()
    hidden = log.get("backward_compute_comm_overlap_time", 0)
    return {"exposed_comm_ms": (log.get("backward_comm_time", 0) - hidden) / 1e6}


def build_zero1(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    import trireme

    parallel = trireme.DistributedDataParallel(module)
    return Parallel(parallel, _sharded(parallel, optimizer, 1, options), parallel.last_step)


def build_zero2(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    sharded = _sharded(module, optimizer, 2, options)
    return Parallel(module, sharded, sharded.last_step)


def _sharded(
    module: nn.Module, optimizer: OptimizerSpec, stage: int, options: Options
) -> trireme.ZeroRedundancyOptimizer:
    import trireme

    parameters, arguments = module.parameters(), {**options, **optimizer.arguments}
    return trireme.ZeroRedundancyOptimizer(parameters, optimizer.kind, stage=stage, **arguments)


class TableSteps(Optimizer):
    """Steps a module by the table of a parameter server that keeps it, and the states too."""

    def __init__(self, module: nn.Module, server: trireme.ps.ParameterServer, table: str) -> None:
        super().__init__(module.parameters(), {})
        self._server, self._table = server, server[table]
        self._table.pull()

    def step(self, closure: Any = None) -> None:
        """Waits for the gradients of all ranks; then forwards may read."""
        self._table.push()
        self._server.clock()
        self._table.pull()


def build_ps(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    from trireme import ps

    adam = ps.AdamW(optimizer.arguments.get("lr", 1e-3))
    server = ps.ParameterServer([ps.Dense("model", module, optimizer=adam)], **options)
    return Parallel(module, TableSteps(module, server, "model"))


def build_torch_zero1(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    arguments = {**options, **optimizer.arguments}
    sharded = ZeroRedundancyOptimizer(parallel.parameters(), optimizer.kind, **arguments)
    return Parallel(parallel, sharded, partial(_torch_report, parallel))


def build_fsdp(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    import trireme

    root = shard_units(module, partial(trireme.fully_shard, **options))
    return Parallel(module, optimizer.build(module.parameters()), root.last_step)


def build_torch_fsdp2(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    parameter = next(module.parameters())
    mesh = init_device_mesh(parameter.device.type, (dist.get_world_size(),))
    shard_units(module, partial(fully_shard, mesh=mesh, **options))
    return Parallel(module, optimizer.build(module.parameters()))


def shard_units(module: nn.Module, fully_shard: Callable[[nn.Module], Any]) -> Any:
    """Makes each of the module's `blocks`, if it has any, a unit, and the module around them, which
    is returned."""
    for block in getattr(module, "blocks", ()):
        fully_shard(block)
    return fully_shard(module)


def build_pipeline(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    import trireme

    from measure.stages import cut, loss_of

    layers, chunks = cut(module), options["micro_batches"]
    pipe = trireme.Pipeline(
        nn.Sequential(*layers.layers),
        chunks,
        ranks=True,
        schedule=options["schedule"],
        balance=layers.balance(dist.get_world_size()),
        loss=loss_of(options["loss"]),
    )
    return _stepped(pipe, optimizer)


def build_pipeline_threads(
    module: nn.Module, optimizer: OptimizerSpec, options: Options
) -> Parallel:
    """With a row for each of the threads that this process was given."""
    import trireme

    from measure.stages import cut, loss_of

    layers, rows = cut(module), torch.get_num_threads()
    pipe = trireme.Pipeline(
        nn.Sequential(*layers.layers),
        options["micro_batches"],
        devices=["cpu"] * rows,
        schedule=options["schedule"],
        balance=layers.balance(rows),
        loss=loss_of(options["loss"]),
    )
    return _stepped(pipe, optimizer)


def _stepped(pipe: trireme.Pipeline, optimizer: OptimizerSpec) -> Parallel:
    def step(batch: Batch) -> Callable[[], float]:
        return pipe.step(batch.inputs, target=batch.targets).item

    return Parallel(pipe, optimizer.build(pipe.parameters()), step=step)


def build_torch_pipeline(module: nn.Module, optimizer: OptimizerSpec, options: Options) -> Parallel:
    from measure.stages import cut, loss_of, tell_everybody, torch_stages, torch_step

    stages = torch_stages(cut(module), range(dist.get_world_size()), None)
    held = nn.ModuleList(stage.submod for stage in stages)
    loss = loss_of(options["loss"])
    run = torch_step(stages, options["schedule"], options["micro_batches"], loss)

    def step(batch: Batch) -> Callable[[], float]:
        return partial(tell_everybody, run(batch.inputs, batch.targets))

    return Parallel(held, optimizer.build(held.parameters()), step=step)


def checkpointing(library: str, build: Build) -> Build:
    """`build` of modules whose `blocks` each run again in backward, by a library's `checkpoint`.

    It takes the place of their forward, so that what strategies hang on modules stays outside. A
    module without blocks is one.
    """

    def build_checkpointed(
        module: nn.Module, optimizer: OptimizerSpec, options: Options
    ) -> Parallel:
        checkpoint = importlib.import_module(library).checkpoint
        for block in getattr(module, "blocks", (module,)):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return build(module, optimizer, options)

    return build_checkpointed


def _enter_trireme() -> None:
    import trireme

    trireme.init(device="cpu")


def _leave_trireme() -> None:
    import trireme

    trireme.shutdown()


def _leave_gloo() -> None:
    dist.barrier()  # a rank that leaves first takes the store, or its connections, from the others
    dist.destroy_process_group()


TRIREME = Group(_enter_trireme, _leave_trireme)
GLOO = Group(lambda: dist.init_process_group("gloo"), _leave_gloo)

OTHER_NAMES = {"zero3": "fsdp", "fully_shard": "fsdp"}
STRATEGIES: dict[str, Strategy] = {
    "single": Strategy("one process, all cores", build_plain, alone=True),
    "dp": Strategy(
        "trireme DataParallel", build_dp, alone=True, replicates=True, needs_trireme=True
    ),
    "ddp": Strategy("trireme DistributedDataParallel", build_ddp, TRIREME, needs_trireme=True),
    "zero1": Strategy("trireme ZeRO stage 1, in DDP", build_zero1, TRIREME, needs_trireme=True),
    "zero2": Strategy("trireme ZeRO stage 2", build_zero2, TRIREME, needs_trireme=True),
    "fsdp": Strategy("trireme fully_shard", build_fsdp, TRIREME, needs_trireme=True),
    "ps-bsp": Strategy(
        "trireme ParameterServer, bsp", build_ps, TRIREME, {"mode": "bsp"}, needs_trireme=True
    ),
    "pipeline": Strategy(
        "trireme Pipeline, 1f1b",
        build_pipeline,
        TRIREME,
        {"schedule": "1f1b"},
        is_staged=True,
        needs_trireme=True,
    ),
    "pipeline-threads": Strategy(
        "trireme Pipeline in one process, 1f1b",
        build_pipeline_threads,
        options={"schedule": "1f1b"},
        alone=True,
        is_staged=True,
        needs_trireme=True,
    ),
    "torch-ddp": Strategy(
        "torch DistributedDataParallel",
        build_torch_ddp,
        GLOO,
        {"gradient_as_bucket_view": True},
    ),
    "torch-zero1": Strategy("torch ZeroRedundancyOptimizer, in DDP", build_torch_zero1, GLOO),
    "torch-fsdp2": Strategy("torch fully_shard", build_torch_fsdp2, GLOO),
    "torch-pipeline": Strategy(
        "torch pipelining, Schedule1F1B",
        build_torch_pipeline,
        GLOO,
        {"schedule": "1f1b"},
        is_staged=True,
    ),
    "ddp+checkpoint": Strategy(
        "trireme DistributedDataParallel, blocks checkpointed",
        checkpointing("trireme", build_ddp),
        TRIREME,
        needs_trireme=True,
    ),
    "fsdp+checkpoint": Strategy(
        "trireme fully_shard, blocks checkpointed",
        checkpointing("trireme", build_fsdp),
        TRIREME,
        needs_trireme=True,
    ),
    "torch-ddp+checkpoint": Strategy(
        "torch DistributedDataParallel, blocks checkpointed",
        checkpointing("torch.utils.checkpoint", build_torch_ddp),
        GLOO,
        {"gradient_as_bucket_view": True},
    ),
    "fsdp-gloo": Strategy(
        "trireme fully_shard over Gloo",
        build_fsdp,
        GLOO,
        only_benchmarked=True,
        needs_trireme=True,
    ),
    "ddp-gloo": Strategy(
        "trireme DistributedDataParallel over Gloo",
        build_ddp,
        GLOO,
        only_benchmarked=True,
        needs_trireme=True,
    ),
    "ddp-gloo-compressed": Strategy(
        "trireme DistributedDataParallel over Gloo, compressed",
        build_compressed_ddp,
        GLOO,
        {"method": "Int8"},
        agrees=False,
        only_benchmarked=True,
        needs_trireme=True,
    ),
    "ddp-compressed": Strategy(
        "trireme DistributedDataParallel, compressed between hosts",
        build_compressed_ddp,
        TRIREME,
        {"method": "Int8"},
        agrees=False,
        only_benchmarked=True,
        needs_trireme=True,
    ),
    "torch-ddp-hooked": Strategy(
        "torch DistributedDataParallel with a communication hook",
        build_hooked_torch_ddp,
        GLOO,
        {"hook": "fp16 hook"},
        agrees=False,
        only_benchmarked=True,
    ),
    "zero2-gloo": Strategy(
        "trireme ZeRO stage 2 over Gloo",
        build_zero2,
        GLOO,
        only_benchmarked=True,
        needs_trireme=True,
    ),
    "no-sync": Strategy("ranks that never talk", build_plain, GLOO, agrees=False),
}


def comparable() -> list[str]:
    """The names that compare.py takes, built or planned."""
    return [
        name
        for name, strategy in STRATEGIES.items()
        if strategy.agrees and not strategy.only_benchmarked
    ]


def ready() -> list[str]:
    """The comparable strategies that are built."""
    return [name for name in comparable() if STRATEGIES[name].build is not None]


def built(area: str, name: str) -> Strategy:
    """The strategy of that name. Raises BadInput if it is unknown or only planned."""
    if name not in comparable():
        raise unknown_name(area, "strategy", name, comparable())
    strategy = STRATEGIES[name]
    if strategy.build is None:
        raise BadInput(
            area,
            f"got strategy {name!r}, which is not built yet, expected one of {', '.join(ready())}",
            "Leave it out.",
        )
    return strategy


def require_trireme(area: str, next_step: str) -> None:
    """BadInput if trireme cannot be imported: one line in place of a traceback per rank."""
    try:
        importlib.import_module("trireme")
    except ImportError as error:
        raise BadInput(
            area,
            f"got no usable package trireme ({error}), expected it to be installed",
            f"Install it (pip install --no-build-isolation .), {next_step}",
        ) from error
