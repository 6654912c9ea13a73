"""A Sequential whose layers are dealt out to ranks, and trained by a schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trireme import _C
from trireme._C import Communicator, PipelineEngine, PipelineThreads
from trireme._core.compression import Compression, checked, core_of, note_codes
from trireme._core.group_communicator import communicator_of
from trireme._core.nested import tensors_in
from trireme._core.owners import note_stages
from trireme._pipeline import AREA, refuse
from trireme._pipeline.agreement import agree
from trireme._pipeline.cut import Cut, schedule_of, stages_of
from trireme._pipeline.deferred_batch_norm import defer, whole_batch
from trireme._pipeline.expected_calls import ExpectedCalls
from trireme._pipeline.groups import groups_of
from trireme._pipeline.micro_batches import BatchCut, merge
from trireme._pipeline.passes import cut_for_pass, is_tensors, run_pass
from trireme._pipeline.scaler import ScalesLosses, refuse_what_leaves
from trireme._pipeline.schedule import Checkpoint, PipelineSchedule, Times
from trireme._pipeline.skips import skips_between
from trireme._pipeline.stage_requests import held_by_calls, requests_of
from trireme._pipeline.stages import (
    LOSS,
    Balance,
    MicroBatches,
    Stage,
    StageCalls,
    are_same,
    modules_of,
    note_where,
    refuse_misplaced,
    tied_between,
    with_causes,
)
from trireme._pipeline.step_batch import StepBatch, dealt_out
from trireme._pipeline.threads import (
    checked_devices,
    choose_devices,
    device_of,
    pool_of,
    refuse_wrapped,
    schedule_ranks,
)
from trireme._pipeline.values import one_or_text, put_together


class Pipeline(ScalesLosses, nn.Module):
    """Trains a module whose layers are dealt out to ranks.

    Every rank makes it from the same module, and keeps the layers of its stages; those of other
    ranks may be on device "meta". It has the parameters of this rank's layers, under the names that
    they have in the module: an optimizer on each rank is made from them, and updates them::

        pipe = trireme.Pipeline(module, chunks=8, ranks=True, schedule="1f1b", loss=cross_entropy)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            loss = pipe.step(x, target=y)
            optimizer.step()

    Losses and gradients are, bit for bit, those of one process that runs the same micro-batches one
    after the other, adds up their gradients, and divides them by their number at the end. Random
    layers draw other numbers, and gradients of parameters that layers of several ranks share are
    added up in the order of stages: each of these ranks has a copy, and all copies stay equal.

    Args:
        module: A ``torch.nn.Sequential``. A Sequential in it is one layer. A tuple that a layer
            returns is one argument of the next. With ``split`` any module that ``torch.export``
            can trace.
        chunks: How many micro-batches a step has.
        split: Names of modules in it: each begins a stage, so that there is one stage more. The
            module is traced as it is, in its mode, with ``sample``. Sizes that are written in its
            code stay those of the sample.
        balance: How many layers each stage has; "time" or "bytes" to have rank 0 measure them with
            ``sample``; None for as many in each, where that is possible.
        devices: In one process: that of each rank of the schedule, which is a thread of its own,
            such as ``["cpu"] * 2`` or ``["cuda:0", "cuda:1"]``. Layers are moved there, and so is
            what they are given. None for as many threads as the balance has stages, or else as
            torch has threads, each where its layers are.
        ranks: True for a pipeline over all ranks. False for one in this process, which needs no
            process group: its steps raise what a layer raised, with a note that says where.
        mesh: The ranks of the pipeline, in place of ``ranks``: a DeviceMesh of one dimension, or
            with one named "pp". Along the other one are replicas of the pipeline, each with batches
            of its own, which average their gradients.
        compression: What gradients become on slow links between replicas, of
            ``trireme.compression``; themselves if None. The same on all ranks.
        schedule: A name or a table for :func:`pipeline_schedule`, or a schedule.
        loss: Called with what the last layer returns for a micro-batch, and its target; returns a
            0-dim tensor. A module is part of the last stage. None where the last layer returns it.
        checkpoint: Which micro-batches a stage computes once more before their backward, so that it
            keeps only its input meanwhile: "never", "except_last", "always", or "auto": those
            whose backward does not come right behind their forward.
        deferred_batch_norm: Whether running statistics of BatchNorm are those of whole batches:
            layers are converted as by :func:`convert_deferred_batch_norm`.
        dim: Along which dimension a batch is cut.
        costs: Times of layers' forward and backward for the schedule "zb-auto".
        scale_grads: Whether the loss and gradients of a step are means over micro-batches, else
            sums.
        sample: For ``split``, ``balance="time"`` and ``"bytes"``: what the module gets for a
            micro-batch. With ``split`` a tuple is several arguments, and a dict keywords.

    Raises:
        ValueError, TypeError: what cannot be a pipeline, on all ranks; ranks that differ.
        NotImplementedError: what is refused so far.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: int = 1,
        *,
        split: Sequence[str] | None = None,
        balance: Balance = None,
        devices: Sequence[torch.device | str | int] | None = None,
        ranks: bool = False,
        mesh: DeviceMesh | None = None,
        schedule: str | PipelineSchedule = "gpipe",
        loss: Callable[..., Any] | None = None,
        checkpoint: Checkpoint = "never",
        deferred_batch_norm: bool = False,
        dim: int = 0,
        costs: Mapping[str, Times] | None = None,
        scale_grads: bool = True,
        sample: Any = None,
        compression: Compression | None = None,
    ) -> None:
        super().__init__()
        self._is_threaded = not ranks and mesh is None
        if devices is not None and not self._is_threaded:
            refuse("got devices= of a pipeline on ranks", "Move each rank's layers before.")
        AREA.expect("chunks", chunks, int, "a whole number", next_step="Pass a number.")
        AREA.expect("dim", dim, int, "a whole number", next_step="Pass a number.")
        if loss is not None and not callable(loss):
            got = f"got {type(loss).__name__} as loss, expected what can be called, or None"
            refuse(got, "Pass a function, such as torch.nn.functional.mse_loss.", kind=TypeError)
        self._group = self._all = self._replicas = None
        if self._is_threaded:
            self._communicator = _C.lone_communicator()
        else:
            self._group, copies, self._all = groups_of(mesh)
            self._communicator = communicator_of(self._group)
            self._replicas = communicator_of(copies) if copies is not None else None
        self._compression = self._checked(compression)
        self._devices_of_threads = [] if devices is None else checked_devices(devices)
        self._synchronizes = True
        self._chunks, self._dim = chunks, dim
        self._turn = _C.CallTurn(None if self._is_threaded else self._communicator)
        said = {
            "micro-batches": chunks,
            "split": split if isinstance(split, str | None) else list(split),
            "balance": balance if isinstance(balance, str | None) else list(balance),
            "dim": dim,
            "loss": loss is not None,
            "scale_grads": scale_grads,
            "deferred_batch_norm": deferred_batch_norm,
            "compression": str(self._compression),
        }
        cut = Cut(module, split, balance, sample, deferred_batch_norm)
        layers = self._agree_on_layers(cut, schedule, costs, checkpoint, said)
        counts = cut.deal_out(self._schedule.stages, self._communicator)
        self._stages = stages_of(list(layers), counts, self._schedule.stage_rank)
        modules = {**layers, LOSS: loss} if isinstance(loss, nn.Module) else layers
        own = self._agree_on_stages(modules)
        self._keep_loss(loss, is_held=own[-1] is self._stages[-1])
        kept = [name for stage in own for name in stage.layers]
        self._norms = defer(layers, kept, chunks if deferred_batch_norm else None)
        modules = {**modules, **layers}  # deferred norms in place of those that they were
        cut.show({name: layers[name] for name in kept}, self)
        self._names_in_whole = cut.names_in_whole(modules)
        self._expected = ExpectedCalls(list(layers.values()), loss, self._group)
        self._make_calls(own, modules, loss)
        self._seen, self._seen_buffers = list(self.parameters()), list(self.buffers())
        self._shows_layers = split is None
        self._scale_grads, self._checkpoint = scale_grads, checkpoint
        if not self._is_threaded:
            note_stages(self._seen, self)
        if self._is_threaded:
            self._pool = pool_of(self._devices_of_threads)
            self._core: PipelineEngine | PipelineThreads = self._make_threads()
        else:
            self._core = self._make_engine(tied_between(modules, self._stages))
            if self._compression is not None:
                note_codes(self, self._core)

    def _make_calls(
        self,
        own: Sequence[Stage],
        modules: Mapping[str, nn.Module],
        loss: Callable[..., Any] | None,
    ) -> None:
        if self._is_threaded:
            self._devices_of_threads = choose_devices(
                self._devices_of_threads, self._stages, modules
            )
        self._calls = []
        for stage in own:
            held = [modules[name] for name in stage.layers]
            device = device_of(stage, self._devices_of_threads)
            of_stage = loss if stage is self._stages[-1] else None
            self._calls.append(StageCalls(stage, held, of_stage, device))

    def _keep_loss(self, loss: Callable[..., Any] | None, *, is_held: bool) -> None:
        """Has a loss with parameters among its modules on the rank of the last stage alone."""
        if is_held:
            self._loss = loss
        else:
            self.__dict__[LOSS] = loss

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: all but the threads and what runs on them."""
        if not self._is_threaded:
            got = "got a copy or a pickle of a pipeline over ranks, whose stages belong to a group"
            refuse(
                got, "Copy the module before, or save a checkpoint.", self._group, kind=TypeError
            )
        if self._loss_scale is not None:
            got = "got a copy or a pickle of a pipeline that has a GradScaler"
            refuse(got, "Copy it before scale_losses().", kind=TypeError)
        left_out = ("_communicator", "_core", "_expected", "_pool", "_turn")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        layers = [layer for call in self._calls for layer in call.layers]
        self._expected = ExpectedCalls(layers, self._loss, None)
        self._communicator = _C.lone_communicator()
        self._turn = _C.CallTurn()
        self._pool = pool_of(self._devices_of_threads)
        self._core = self._make_threads()

    def _make_threads(self) -> PipelineThreads:
        refuse_wrapped(held for call in self._calls for held in call.held().values())
        stages = requests_of(self._calls, self._schedule.stages - 1)
        table = self._schedule._core
        skips = self._skips_of_stages()
        return PipelineThreads(table, stages, self._pool, self._scale_grads, skips, note_where)

    def _make_engine(self, tied: list[list[tuple[int, str]]]) -> PipelineEngine:
        return PipelineEngine(
            self._schedule._core,
            requests_of(self._calls, self._schedule.stages - 1),
            self._communicator,
            self._scale_grads,
            self._skips_of_stages(),
            tied,
            self._replicas,
            compression=core_of(self._compression),
        )

    def _checked(self, compression: object) -> Compression | None:
        method = checked(compression, functools.partial(refuse, group=self._group))
        if method is not None and self._replicas is None:
            got = "got compression of a pipeline without replicas, which averages nothing"
            refuse(got, "Leave it out.", self._group)
        return method

    def _agree_on_layers(
        self,
        cut: Cut,
        schedule: str | PipelineSchedule,
        costs: Mapping[str, Times] | None,
        checkpoint: Checkpoint,
        said: dict[str, Any],
    ) -> dict[str, nn.Module]:
        error, layers = None, {}
        try:
            layers = cut.layers()
            balance = cut.balance_of(layers)
            rows = self._communicator.world
            if self._is_threaded:
                rows = schedule_ranks(self._devices_of_threads, balance, schedule, len(layers))
            plain = schedule_of(schedule, self._chunks, rows, balance, costs, len(layers))
            self._schedule = plain.with_recomputation(checkpoint)
            said["layers"] = list(layers)
            said["schedule"] = self._schedule.to_csv()
            self._skips = skips_between(layers)
            said["skips"] = [list(skip) for skip in self._skips]
        except Exception as raised:
            error = raised
        agree(self._communicator, said, error, "a pipeline")
        return layers

    def _agree_on_stages(self, modules: Mapping[str, nn.Module]) -> list[Stage]:
        error = None
        rank = self._communicator.rank
        own = [stage for stage in self._stages if self._is_threaded or stage.rank == rank]
        try:
            for stage in own:
                held = modules_of(stage, self._stages, modules)
                refuse_misplaced(held, stage.number, stage.rank, self._group)
        except Exception as raised:
            error = raised
        dealt = [len(stage.layers) for stage in self._stages]
        agree(self._communicator, {"layers per stage": dealt}, error, "layers")
        return own

    def _skips_of_stages(self) -> list[tuple[str, int, int]]:
        """The skips of layers, as those of stages."""
        stage_of = [stage.number for stage in self._stages for _ in stage.layers]
        return [(name, stage_of[begin], stage_of[end]) for name, begin, end in self._skips]

    @property
    def schedule(self) -> PipelineSchedule:
        """Which rank does what, and in which order."""
        return self._schedule

    @property
    def stages(self) -> list[Stage]:
        """The stages of all ranks: number, rank, names of layers."""
        return list(self._stages)

    def step(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Runs forwards and backwards of a batch; adds to ``.grad`` of this rank's parameters.

        Each rank gives the whole batch. It is cut as ``torch.tensor_split`` does: tensors in
        tuples, lists, mappings and dataclasses too, while numbers and other objects go to every
        micro-batch as they are.

        Args:
            inputs: What the first layer is called with.
            target: What the loss is called with, beside the output.
            kwargs: Each goes to all layers whose forward names it. So do inputs, by the names that
                the first layer has for them, and the target, as ``target``: to layers of any stage
                that name one of these behind their own input.

        Returns:
            The loss, 0-dim, without a graph, the same on all ranks: the mean over micro-batches, or
            their sum with ``scale_grads=False``.

        Raises:
            ValueError, TypeError: a batch that cannot be used, or that differs between ranks.
            RuntimeError: what a layer or the loss raised, on all ranks; on the rank that raised it
                with that as its ``__cause__``. Gradients are as before, and the next step works.
            torch.distributed.DistBackendError: a rank has died or does not come.
        """
        with self._turn.of(self._core):
            batch = self._begin("step", inputs, target, kwargs)
            mode = (self._synchronizes, self._divides_losses, self._scale)
            return self._run(lambda: self._core.step(batch, *mode))

    def eval_step(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Any:
        """Runs the forwards of a batch, without gradients.

        Returns:
            With a target the loss, as :meth:`step` does. Else what the last layer returns, put
            together for the whole batch, on the rank of the last stage, and None on others.

        Raises:
            ValueError: outputs of micro-batches that cannot be put together, on the last stage's
                rank.
        """
        has_loss = target is not None
        with self._turn.of(self._core):
            batch = self._begin("eval_step", inputs, target, kwargs)
            loss, outputs = self._run(lambda: self._core.eval_step(batch, has_loss))
        if has_loss:
            return loss
        values = [put_together(one_or_text(*output)) for output in outputs]
        return merge(values, self._dim) if values else None

    def norm_over_stages(self) -> Communicator:
        """Says for :func:`clip_grad_norm_` whose gradients count together."""
        return self._communicator

    def later_copies(self) -> list[Tensor]:
        """This rank's copies of parameters that layers of an earlier stage have, too: their
        gradients count on that one's rank."""
        return self._core.later_copies()

    def names_in_whole(self) -> dict[str, str]:
        """What the module calls parameters and buffers that an earlier layer has, too: as there."""
        return dict(self._names_in_whole)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that have stages, in all copies; None for a pipeline in one process."""
        return self._all

    def last_step(self) -> dict[str, Any]:
        """Tells what this rank did in the last step: times, waiting, messages, by stage.

        Keys: ``step``, ``step_ms``, ``bubble`` (the share of the step in which this rank computed
        nothing), ``computed_bubble`` (what the schedule says of the times measured), ``stages``,
        one dict for each stage of this rank, and under ``compression`` ``sent_bytes`` (as codes, to
        other replicas; an all-reduce counts once) and ``encode_ms``.
        """
        return self._core.last_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in it only accumulate gradients on this rank: neither replicas of the pipeline nor
        strategies around its layers average them. The first step after it averages what has come
        together. All copies enter it alike."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module in one process: the forwards of each rank of the schedule, and in a
        backward its backwards, on its thread. The loss is computed outside.

        Args:
            args: What the first layer is called with; several as one tuple.
            kwargs: Each goes to all layers whose forward names it.

        Returns:
            What the last layer returns, put together for the whole batch. It is cut into fewer
            micro-batches than ``chunks`` where it has fewer rows.

        Raises:
            TypeError: a pipeline over ranks, of which one rank alone cannot run the model; a batch
                without a tensor.
        """
        if isinstance(self._core, PipelineEngine):
            got = "got a call of the pipeline, expected one of its functions"
            refuse(got, "Call step(), or eval_step() for outputs.", self._group, kind=TypeError)
        given = args[0] if len(args) == 1 else args
        if not is_tensors(given):
            got = f"got {type(given).__name__} as input, expected a tensor, or some in a tuple"
            refuse(got, "Pass the batch.", kind=TypeError)
        with self._turn.of(self._core):
            values = self._run(lambda: self._run_pass(given, kwargs))
        return merge(values, self._dim)

    def _run_pass(self, given: Any, kwargs: dict[str, Any]) -> list[Any]:
        self._look_at_parameters()
        self._expected.check("forward", (given,), None, kwargs)
        cut = cut_for_pass(given, kwargs, self._chunks, self._dim)
        trains = self.training and torch.is_grad_enabled()
        assert isinstance(self._core, PipelineThreads)
        threads = self._core.for_pass(len(cut.inputs), self._checkpoint if trains else "never")
        names = self._expected.input_names[:1]
        return run_pass(threads, self._calls, names, cut, self._turn)

    def _begin(
        self, name: str, inputs: tuple[Any, ...], target: Any, kwargs: dict[str, Any]
    ) -> list[list[Tensor]]:
        """Hands the stages of this rank what they need; returns the first stage's inputs."""
        self._core.recover()
        error, rows, given, divides_losses = None, 0, MicroBatches(), False
        try:
            self._look_at_parameters()
            divides_losses = self._core.divides_losses()  # parameters may be others now
            self._expected.check(name, inputs, target, kwargs)
            parts = {f"input {number}": value for number, value in enumerate(inputs)}
            cut = BatchCut({**parts, **kwargs, "the target": target}, self._chunks, self._dim)
            rows = cut.rows
            names = self._expected.input_names[: len(inputs)]
            given = dealt_out(self._calls, StepBatch(cut, inputs, names, target, kwargs))
            # Behind inputs with a graph nobody divides gradients after the step.
            whole = tensors_in((inputs, target, kwargs))
            divides_losses |= any(one.requires_grad and not one.is_leaf for one in whole)
            if name == "step" and self._loss_scale is not None:
                refuse_what_leaves(self._calls, self._group)
        except Exception as raised:
            error = raised
        said = {"call": name, "rows": rows, "target": target is not None, "names": list(kwargs)}
        self._scale = 1.0
        if name == "step" and self._loss_scale is not None:
            self._scale = said["scale of the loss"] = self._loss_scale.value()
        self._divides_losses = agree(
            self._communicator, said, error, "a batch", flag=divides_losses
        )
        for call in self._calls:
            call.begin(given)
        return [tensors_in(value) for value in given.inputs]

    def _run(self, run: Callable[[], Any]) -> Any:
        try:
            with with_causes(self._calls), whole_batch(self._norms):
                return run()
        finally:
            for call in self._calls:
                call.end()

    def _look_at_parameters(self) -> None:
        """Notices those that were put in place of others, and those that are elsewhere; so of
        layers and buffers."""
        if self._shows_layers:
            self._expect_own_layers()
        if self._replicas is not None:
            self._look_at_buffers()
        now = list(self.parameters())
        if not are_same(now, self._seen):
            self._seen = now
            core = self._core
            if not isinstance(core, PipelineEngine):
                self._core = self._make_threads()
                return
            note_stages(now, self)
            for call, held in zip(self._calls, held_by_calls(self._calls), strict=True):
                core.set_parameters(call.stage.number, held.parameters, held.strategies)
        for call in self._calls:
            call.expect_unmoved(self._group)

    def _look_at_buffers(self) -> None:
        """Notices those that were put in place of others; a forward may do so in each step."""
        now = list(self.buffers())
        if not are_same(now, self._seen_buffers):
            assert isinstance(self._core, PipelineEngine)
            self._core.set_buffers(
                [buffer for held in held_by_calls(self._calls) for buffer in held.buffers[1]]
            )
            self._seen_buffers = now

    def _expect_own_layers(self) -> None:
        """Refuses a layer in place of another one, which the stage would go on to call."""
        for call in self._calls:
            for name, layer in zip(call.stage.layers, call.layers, strict=True):
                there = self._modules.get(name)
                if there is not layer:
                    got = f"got {type(there).__name__} in place of layer '{name}'"
                    expected = f"expected the {type(layer).__name__} that the pipeline was made of"
                    next_step = "Replace layers before, or make the pipeline anew."
                    refuse(f"{got}, {expected}", next_step, self._group)
