"""One rank: builds a workload under a strategy and trains when it is told to.

Commands (one JSON object per line on standard input):
  {"do": "steps", "count": k}   k training steps; replies with their times, losses and page faults
  {"do": "measure"}             one untimed step; replies with what is held after its backward
  {"do": "rest"}                replies with what is held between steps, freed memory given back
  {"do": "stop"}                leaves the process group and ends
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor
from workloads import WORKLOADS, Batch, SampleOrder, WorkloadOptions

from measure import memory
from measure.stages import micro_batches
from measure.strategies import STRATEGIES, Report, Strategy, optimizer_spec


@dataclass(frozen=True)
class RankConfig:
    """What a rank trains.

    `options`: arguments of the strategy in place of its own. `optimizer`: whose AdamW. `probe`:
    times the last gradient of each step with a hook per parameter, which costs about a microsecond
    each, so pure timing goes without. `ticks`: rank 0 reports every step as it ends.
    """

    strategy: str
    workload: str
    global_batch: int
    threads: int
    options: dict[str, Any] | None = None
    optimizer: str = "torch"
    workload_options: WorkloadOptions = field(default_factory=WorkloadOptions)
    seed: int = 0
    probe: bool = False
    ticks: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankConfig:
        fields = json.loads(text)
        fields["workload_options"] = WorkloadOptions(**fields["workload_options"])
        return cls(**fields)


@dataclass(frozen=True)
class StepRecord:
    """Where the time of one step went. `exposed_ms` is a part of `backward_ms`.

    `exposed_ms`: from the last gradient that autograd produced to the end of backward, the same on
    all sides. `reported_exposed_ms`: what the strategy says of itself. Of a pipeline `backward_ms`
    has its forwards, too.
    """

    step_ms: float
    forward_ms: float
    backward_ms: float
    exposed_ms: float
    reported_exposed_ms: float
    optimizer_ms: float
    faults: int
    loss: float


class Trainer:
    """The training loop of a rank, one step at a time."""

    def __init__(self, config: RankConfig, strategy: Strategy) -> None:
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        workload = WORKLOADS[config.workload](config.workload_options)
        self.samples = workload.samples()
        for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim"):
            importlib.import_module(name)  # else an optimizer or a strategy imports it in its place
        memory.keep_heap_warm()
        memory.give_back_unused()
        self.at_start_mib = memory.without_files_mib(memory.resident_mib())
        torch.manual_seed(config.seed)
        module = workload.model()
        if config.workload_options.norm == "syncbn" and self.world > 1:
            module = _synchronized_norms(module)
        build = strategy.build
        assert build is not None  # compare.py refuses planned strategies
        options = strategy.options if config.options is None else config.options
        self.is_staged = strategy.is_staged
        if strategy.is_staged:
            parts = config.threads if strategy.alone else self.world
            chunks = micro_batches(config.global_batch, parts)
            options = {**options, "micro_batches": chunks, "loss": workload.loss}
        self.parallel = build(module, optimizer_spec(config.optimizer), options)
        self.loss = workload.loss
        self.order = SampleOrder(len(self.samples), config.global_batch, config.seed)
        self.steps_done = 0
        self.last_gradient_s = 0.0
        if config.probe:
            self._note_gradients_of(module)

    def step(self) -> StepRecord:
        """One step, timed from the forward to the cleared gradients."""
        batch = self._next_batch()
        faults = memory.minor_faults()
        start = time.perf_counter()
        if self.parallel.step is None:
            loss = self.loss(self.parallel.module(batch.inputs), batch)
            forward = time.perf_counter()
            loss.backward()
            tell_loss = loss.item
        else:
            forward, tell_loss = start, self.parallel.step(batch)
        backward = time.perf_counter()
        self.parallel.optimizer.step()
        self.parallel.optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        faults = memory.minor_faults() - faults
        report = self.parallel.report() if self.config.probe else {}
        return StepRecord(
            step_ms=(end - start) * 1e3,
            forward_ms=(forward - start) * 1e3,
            backward_ms=(backward - forward) * 1e3,
            exposed_ms=self._exposed_ms(backward),
            reported_exposed_ms=report.get("exposed_comm_ms", 0.0),
            optimizer_ms=(end - backward) * 1e3,
            faults=faults,
            loss=tell_loss(),
        )

    def measure(self) -> Report:
        """One more step; memory is read while parameters, gradients and optimizer state exist."""
        batch = self._next_batch()
        if self.parallel.step is None:
            self.loss(self.parallel.module(batch.inputs), batch).backward()
        else:
            self.parallel.step(batch)
        held = self._held()
        self.parallel.optimizer.step()
        self.parallel.optimizer.zero_grad(set_to_none=True)
        return {**held, "peak_rss": memory.peak_rss_mib()}

    def rest(self) -> Report:
        """What stays between steps, when all activations have gone."""
        memory.give_back_unused()
        return self._held()

    def _held(self) -> Report:
        parameters = list(self.parallel.module.parameters())
        kinds = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer_state": memory.optimizer_state(self.parallel.optimizer),
        }
        return {
            **memory.resident_mib(),
            **{kind: memory.tensor_mib(held, self.world) for kind, held in kinds.items()},
            "at_start": self.at_start_mib,
        }

    def _next_batch(self) -> Batch:
        indices = self.order.indices(self.steps_done)
        self.steps_done += 1
        own = indices if self.is_staged else indices.chunk(self.world)[self.rank]
        return self.samples.rows(own)

    def _note_gradients_of(self, module: torch.nn.Module) -> None:
        """When backward has made a gradient, the clock is read.

        Of sharded parameters a gradient only comes when it has been reduced, so theirs is that of
        the unsharded ones, which each module has in its forward.
        """
        parameters = list(module.parameters())
        if not any(map(memory.is_sharded, parameters)):
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)
            return
        known: dict[int, Tensor] = {}

        def follow(part: torch.nn.Module, _: object) -> None:
            for parameter in part.parameters(recurse=False):
                if id(parameter) not in known and parameter.requires_grad:
                    known[id(parameter)] = parameter
                    parameter.register_hook(self._note_gradient)

        for part in module.modules():
            part.register_forward_pre_hook(follow)

    def _note_gradient(self, _: Tensor) -> None:
        self.last_gradient_s = time.perf_counter()

    def _exposed_ms(self, backward_end: float) -> float:
        if not self.config.probe or self.world == 1:
            return 0.0
        return (backward_end - self.last_gradient_s) * 1e3


def _synchronized_norms(module: torch.nn.Module) -> torch.nn.Module:
    """Ours on all sides: torch's SyncBatchNorm refuses CPU tensors."""
    import trireme

    converted: torch.nn.Module = trireme.convert_sync_batchnorm(module)
    return converted


def take_over_stdout() -> TextIO:
    """The reply channel; whatever else is printed goes to standard error from here on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


@contextmanager
def process_group(strategy: Strategy) -> Iterator[None]:
    """The strategy's process group around the training; a failure does not wait for the others."""
    if strategy.group is not None:
        strategy.group.enter()
    yield
    if strategy.group is not None:
        strategy.group.leave()


def serve(trainer: Trainer, replies: TextIO) -> None:
    """Obeys commands until told to stop, or until whoever gave them is gone."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    module = trainer.parallel.module
    reply({"ready": True, "parameters": sum(p.numel() for p in module.parameters())})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "steps":
            records = []
            for _ in range(command["count"]):
                records.append(trainer.step())
                if trainer.config.ticks and trainer.rank == 0:
                    reply({"tick": trainer.steps_done, "loss": records[-1].loss})
            reply({"records": [asdict(record) for record in records]})
        elif command["do"] == "measure":
            reply({"memory": trainer.measure()})
        elif command["do"] == "rest":
            reply({"memory": trainer.rest()})
        else:
            return


def main() -> None:
    replies = take_over_stdout()
    config = RankConfig.from_json(sys.argv[1])
    strategy = STRATEGIES[config.strategy]
    with process_group(strategy):
        torch.set_num_threads(config.threads)
        serve(Trainer(config, strategy), replies)


if __name__ == "__main__":
    main()
