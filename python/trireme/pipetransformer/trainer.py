"""A run that freezes layers, and gives ranks that are set free to replicas of what is left."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from trireme import _C
from trireme._C import Communicator, ElasticEpoch, ElasticPlan
from trireme._core.agreement import raised_on_all
from trireme._core.group_communicator import communicator_of
from trireme._core.loss_scale import LossScale, check_scaler
from trireme._core.nested import map_tensors, tensors_in
from trireme.activation_cache import ActivationCache
from trireme.pipeline import measure_layers, pipeline_schedule
from trireme.pipetransformer.areas import ELASTIC
from trireme.pipetransformer.elastic_layers import (
    ElasticLayers,
    Entry,
    check_layers,
    layers_by_name,
)
from trireme.pipetransformer.freeze import Freeze
from trireme.pipetransformer.layer_placement import LayerPlacement
from trireme.pipetransformer.replica import Part, Replica, StagedReplica, Staging, WholeReplica


class PipeTransformer(ElasticLayers):
    """Trains a list of layers in a pipeline that gets shorter as layers freeze, while more and more
    replicas of it train.

    ::

        run = trireme.PipeTransformer(
            layers, loss=loss_of, optimizer=optimizer, global_batch=256, chunks=8
        )
        for epoch in range(epochs):
            for part in batches.steps(epoch * steps, (epoch + 1) * steps):
                rows = batches.whole(part.number)
                loss = run.step(data[rows], rows, targets[rows])
            run.end_epoch()

    Each rank begins with all layers, and with rank 0's values. A plan of K ranks per pipeline and R
    replicas leaves it those of its stage; K = 1 is ``DistributedDataParallel`` behind the frozen
    layers. Rows of a micro-batch are the same under all plans, so that losses are those of one
    process but for the order of sums.

    It has the parameters of all layers, under the names of a Sequential of them, on every rank:
    those of layers that other ranks hold have no memory. ``state_dict()`` has those that this rank
    holds. ``save_checkpoint(path, run, optimizer)`` saves all of it, with what is frozen, for any
    other plan or number of ranks, and for a plain Sequential.

    Args:
        layers: A Sequential, or a list from the input on. A list among them is one layer, such as
            the embedding and the first block. Each has parameters, and shares none with another.
        loss: Called with what the last layer returns and the target; returns the mean over rows.
        optimizer: One over the parameters of all layers, made on every rank.
        global_batch: Rows of a step, all ranks together.
        chunks: How many micro-batches these are in pipelines, all replicas together.
        schedule: The name of a schedule with one stage per rank.
        freeze: Whether layers are frozen; a dict has options of :class:`Freeze`.
        pipe: Whether a pipeline gets shorter. Else it has all ranks, whatever is frozen.
        replicas: Whether ranks that are set free train replicas.
        cache: Keeps outputs of frozen layers; ``step`` then needs ids.
        costs: Seconds of each layer, trained, in any unit. None: the first step measures them, and
            until then each rank has all layers.

    Raises:
        ValueError, TypeError: on all ranks: what cannot be a run, such as layers that share
            parameters, an optimizer of other ones, ranks that differ.
    """

    def __init__(
        self,
        layers: nn.Module | Iterable[Entry],
        *,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        global_batch: int,
        chunks: int,
        schedule: str = "1f1b",
        freeze: bool | Mapping[str, Any] = True,
        pipe: bool = True,
        replicas: bool = True,
        cache: ActivationCache | None = None,
        costs: Sequence[float] | None = None,
    ) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        super().__init__({}, group)
        self._is_placed = False
        self._replica: Replica | None = None
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        self._communicators: list[Communicator] = []
        self._seconds, self._hits = 0.0, 0
        self._scaler: GradScaler | None = None
        self._scale: LossScale | None = None
        with self._on_all_ranks():
            named = layers_by_name(layers, group)
            self._check(loss, freeze, cache, schedule)
            for name, number in (("global_batch", global_batch), ("chunks", chunks)):
                if not isinstance(number, int) or isinstance(number, bool):
                    got = f"{name} is {type(number).__name__}, expected a whole number"
                    self._refuse(got, "Pass a number.", TypeError)
            check_layers(named, optimizer, group)
        self._modules.update(named)
        self._layers = named
        self._optimizer = optimizer
        self._schedule = schedule
        self._cache = cache
        self.__dict__["_loss"] = loss  # not one of the layers, where it is a module
        communicator = None if group is None else self._ranks
        self._course = _C.ElasticCourse(
            layers=list(named),
            global_batch=global_batch,
            chunks=chunks,
            pipe=bool(pipe),
            replicas=bool(replicas),
            cached=cache is not None,
            costs=None if costs is None else [float(cost) for cost in costs],
            ranks=communicator,
        )
        self._chunks = chunks
        self._micro_rows = max(1, global_batch // chunks)
        self._placement = LayerPlacement(named, optimizer, communicator)
        self._freezes = freeze is not False
        options = dict(freeze) if isinstance(freeze, Mapping) else {}
        # Not of the run itself, which would keep itself alive.
        self.__dict__["_all_layers"] = ElasticLayers(named, group)
        self._freeze = Freeze(
            self.__dict__["_all_layers"], list(named), optimizer=optimizer, **options
        )
        if not self._course.needs_costs:
            self._place(self._course.next_plan(0))

    def _check(self, loss: object, freeze: object, cache: object, schedule: object) -> None:
        if not callable(loss):
            got = f"got {type(loss).__name__} as loss, expected what can be called"
            self._refuse(got, "Pass a function, such as cross_entropy.", TypeError)
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            got = "got a loss with parameters, which no rank would hold"
            self._refuse(got, "Put them into the last layer.")
        if not isinstance(freeze, bool | Mapping):
            got = f"got {type(freeze).__name__} as freeze, expected a bool or options of Freeze"
            self._refuse(got, "Pass a dict.", TypeError)
        if cache is not None and not isinstance(cache, ActivationCache):
            got = f"got {type(cache).__name__} as cache, expected an ActivationCache"
            self._refuse(got, "Make one for the samples of the data set.", TypeError)
        if not isinstance(schedule, str):
            got = f"got {type(schedule).__name__} as schedule, expected a name"
            self._refuse(got, "Each plan needs a schedule of its own ranks.", TypeError)

    # steps

    def step(self, x: Any, ids: Tensor | None = None, target: Any = None) -> Tensor:
        """Trains on a global batch, which every rank gives as a whole; steps the optimizer.

        Args:
            x: What the first layer takes.
            ids: The number of each row's sample in the cache, int64; None without a cache.
            target: What the loss takes beside the output.

        Returns:
            The mean loss over the rows, 0-dim, without a graph, the same on all ranks.

        Raises:
            ValueError, TypeError: on all ranks: a batch of another number of rows, ids that are
                missing or outside.
            RuntimeError: what a layer or the loss raised on another rank, or, in a pipeline, here.
                Parameters are as before, and the next step works.
            torch.distributed.DistBackendError: a rank has died or does not come.
        """
        begin = time.perf_counter()
        self._check_batch(x, ids)
        if not self._is_placed:
            self._measure(x)
            begin = time.perf_counter()
        replica = self._replica_now()
        self._optimizer.zero_grad(set_to_none=True)
        loss = replica.backward(self._part_of(x, ids, target))
        if self._freezes:
            self._freeze.step()
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        mean = self._course.mean_loss(loss)
        self._seconds += time.perf_counter() - begin
        return mean

    def scale_losses(self, scaler: GradScaler) -> None:
        """From now on :meth:`step` trains with the scale of ``scaler``, under every plan: it
        multiplies losses, calls ``scaler.step(optimizer)`` and ``scaler.update()``, and returns the
        loss without the scale.

        Each rank passes one of its own, with the same settings. An inf on one rank makes all ranks
        skip the step and lower the scale. Collective, and one more gather of a number per step. A
        scaler that is not enabled changes nothing.

        Raises:
            TypeError: on all ranks: it is no ``torch.amp.GradScaler``.
            ValueError: on all ranks: there is one already; it is that of a pipeline; settings that
                differ between ranks.
        """
        with self._on_all_ranks():
            check_scaler(scaler, ELASTIC, self._group, has_one=self._scaler is not None)
        settings = {"enabled": scaler.is_enabled(), **scaler.state_dict()}
        texts = _C.gather_texts(repr(settings), self._ranks, self._ranks.device)
        for rank, text in enumerate(texts):
            if text != texts[0]:
                got = f"got GradScalers that differ: {texts[0]} on rank 0, {text} on rank {rank}"
                self._refuse(got, "Make them alike on all ranks.")
        if not scaler.is_enabled():
            return
        own = set(map(id, self.parameters()))
        self._scaler = scaler
        self._scale = LossScale(scaler, self._ranks, lambda param: id(param) in own, ELASTIC)
        self._replica = None

    def eval_step(self, x: Any, target: Any = None) -> Tensor:
        """Returns the mean loss of a global batch, as :meth:`step` does, and trains nothing. The
        cache is left alone: modes are those that layers have."""
        self._check_batch(x, None, needs_ids=False)
        if not self._is_placed:
            self._measure(x)
        return self._course.mean_loss(self._replica_now().evaluate(self._part_of(x, None, target)))

    def _check_batch(self, x: Any, ids: Tensor | None, *, needs_ids: bool = True) -> None:
        """Ranks compare what they were given, so that none goes into a step alone."""
        rows = next((one.size(0) for one in tensors_in(x) if one.dim() > 0), 0)
        if not needs_ids:
            ids = torch.arange(rows)
        is_wrong = ids is not None and not isinstance(ids, Tensor)
        try:
            self._course.check_batch(rows, torch.empty(0) if is_wrong else ids)
        except ValueError:
            if is_wrong:
                got = f"got {type(ids).__name__} as ids, expected a tensor with an id for each row"
                self._refuse(got, "Have the data set return the number of each sample.", TypeError)
            raise

    def _part_of(self, x: Any, ids: Tensor | None, target: Any) -> Part:
        begin, end = self._course.rows

        def cut(tensor: Tensor) -> Tensor:
            return tensor[begin:end] if tensor.dim() > 0 else tensor

        own = None if ids is None else ids[begin:end]
        return Part(map_tensors(x, cut), own, map_tensors(target, cut))

    def _measure(self, x: Any) -> None:
        """Measures layers on one micro-batch, and makes the first plan."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor[: self._micro_rows] if tensor.dim() > 0 else tensor

        with self._on_all_ranks():
            sample = map_tensors(x, cut)
            measured = measure_layers(nn.Sequential(OrderedDict(self._layers)), sample)
        self._course.take_costs(
            [layer.forward_seconds for layer in measured],
            [layer.backward_seconds for layer in measured],
        )
        self._place(self._course.next_plan(self._freeze.frozen))

    def _replica_now(self) -> Replica:
        replica = self._replica
        if replica is None or not replica.is_for(self._freeze.frozen):
            replica = self._replica = None  # what it holds goes before what comes is made
            replica = self._replica = self._build(self._course.plan)
        return replica

    def _build(self, plan: ElasticPlan) -> Replica:
        loss, frozen = self.__dict__["_loss"], self._freeze.frozen
        if plan.ranks_per_pipeline == 1:
            return WholeReplica(
                self._layers,
                frozen=frozen,
                loss=loss,
                cache=self._cache,
                group=self._group if plan.replicas > 1 else None,
                together=self._on_all_ranks,
                scale=self._scale,
            )
        micro_batches = self._course.micro_batches
        staging = Staging(plan, self._mesh_of(plan), micro_batches, self._schedule)
        return StagedReplica(
            self._layers,
            staging,
            frozen=frozen,
            loss=loss,
            cache=self._cache,
            scale=self._scale,
        )

    # plans

    def end_epoch(self) -> ElasticEpoch:
        """Ends an epoch: freezes layers, makes the plan for what is left, and changes to it.

        Returns what the epoch was, the last entry of :attr:`history`. Collective.

        Raises:
            ValueError: on all ranks, which go on as before: they have come here by different ways;
                no memory for the new plan.
        """
        self._expect_placed("the end of an epoch")
        hits = 0 if self._cache is None else self._cache.stats().hits
        frozen = self._freeze.frozen
        if self._freezes:
            self._freeze.advance()
        ended = self._course.end_epoch(frozen, self._seconds, hits - self._hits)
        self._seconds, self._hits = 0.0, hits
        self.transform(self._course.next_plan(self._freeze.frozen))
        return ended

    def transform(self, plan: ElasticPlan) -> None:
        """Changes to a plan: moves layers to the ranks that hold them next, with the state of the
        optimizer, bit for bit, and frees what a rank does not hold any more. Collective.

        Raises:
            ValueError, TypeError: on all ranks, which go on under the plan that is: plans that
                differ, one that does not fit ranks, layers or batch, no memory for it.
            torch.distributed.DistBackendError: a rank has died or does not come.
        """
        self._expect_placed("a plan")
        self._place(plan)

    def _place(self, plan: ElasticPlan) -> None:
        with self._on_all_ranks():
            if not isinstance(plan, ElasticPlan):
                got = f"got {type(plan).__name__} as plan, expected an ElasticPlan"
                self._refuse(got, "Pass what trireme.elastic_plan() returned.", TypeError)
            self._course.check_plan(plan)
            self._check_schedule(plan)
            holders = _C.layer_holders(plan)
            moves = self._placement.moves_to(holders)
        text = f"{plan.ranks_per_pipeline} x {plan.replicas}"
        self._placement.move(moves, holders, text)
        if not self._is_placed or plan != self._course.plan:
            self._replica = None
        self._course.adopt(plan, self._freeze.frozen)
        self._is_placed = True
        self._replica_now()

    def _check_schedule(self, plan: ElasticPlan) -> None:
        ranks = plan.ranks_per_pipeline
        if ranks > 1:
            micro_batches = self._chunks // plan.replicas
            pipeline_schedule(
                self._schedule, ranks=ranks, micro_batches=micro_batches, stages_per_rank=1
            )

    def _mesh_of(self, plan: ElasticPlan) -> DeviceMesh:
        """The groups of that shape, which are made once, and what connects their ranks."""
        shape = (plan.replicas, plan.ranks_per_pipeline)
        if shape not in self._meshes:
            kind = next((p.device.type for p in self.parameters()), "cpu")
            if plan.replicas == 1:
                mesh = init_device_mesh(kind, shape[1:], mesh_dim_names=("pp",))
            else:
                mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "pp"))
            self._communicators += [communicator_of(group) for group in mesh.get_all_groups()]
            self._meshes[shape] = mesh
        return self._meshes[shape]

    @property
    def plan(self) -> ElasticPlan | None:
        """Ranks of a pipeline, replicas, and how many layers each of the ranks has; None before a
        first step that measures costs."""
        return self._course.plan if self._is_placed else None

    @property
    def freeze(self) -> Freeze:
        """What freezes the layers."""
        return self._freeze

    @property
    def history(self) -> list[ElasticEpoch]:
        """Of each epoch: ``epoch``, ``frozen``, ``ranks_per_pipeline``, ``replicas``, ``seconds``
        of the slowest rank's steps, and ``hits`` of the cache on all ranks."""
        return self._course.history

    def norm_over_stages(self) -> Communicator:
        """Says for :func:`clip_grad_norm_` whose gradients count together."""
        return self._ranks if self._replica is None else self._replica.norm_over_stages()

    # what a rank has

    def train(self, mode: bool = True) -> PipeTransformer:
        """Sets the mode of layers; frozen ones stay in evaluation mode in steps."""
        if "_all_layers" in self.__dict__:
            self.__dict__["_all_layers"].training = mode
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> NoReturn:
        got = "got a run to move or cast, some of whose layers are on other ranks alone"
        self._refuse(got, "Move or cast the layers before the run is made.")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters and buffers that this rank holds."""
        state = super().state_dict(*args, **kwargs)
        for name in [name for name, value in state.items() if not _C.has_memory(value)]:
            del state[name]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads what this rank holds, out of a state of all layers or of its own."""
        if assign:
            self._refuse(
                "got assign=True, which puts other tensors into the layers than the optimizer has",
                "Leave it out.",
            )
        elsewhere = {
            name
            for name, value in super().state_dict(keep_vars=True).items()
            if not _C.has_memory(value)
        }
        own = {name: value for name, value in state_dict.items() if name not in elsewhere}
        found = super().load_state_dict(own, strict=False)
        missing = [name for name in found.missing_keys if name not in elsewhere]
        if strict and (missing or found.unexpected_keys):
            got = f"got a state without {missing}, and with {found.unexpected_keys} besides"
            self._refuse(got, "Load the state of the same layers.", RuntimeError)
        return type(found)(missing, found.unexpected_keys)

    def _freeze_state(self) -> dict[str, Any]:
        return self._freeze.state_dict()

    def _load_freeze_state(self, state: dict[str, Any]) -> None:
        self._freeze.load_state_dict(state)

    def __getstate__(self) -> NoReturn:
        got = "got a copy or a pickle of a PipeTransformer, whose layers are on several ranks"
        self._refuse(got, "Save a checkpoint.", TypeError)

    # together

    def _expect_placed(self, what: str) -> None:
        if not self._is_placed:
            got = f"got {what} before the first step, which measures what layers cost"
            self._refuse(got, "Call step() before, or pass costs=.")

    def _on_all_ranks(self) -> AbstractContextManager[None]:
        def refuse(rank: int, text: str) -> None:
            got = f"got an exception on rank {rank}{self._under_plan()}: {text}"
            self._refuse(got, "Look there; the next call works.", _kind_of(text))

        return raised_on_all(self._ranks, self._ranks.device, refuse)

    def _under_plan(self) -> str:
        plan = self.plan
        if plan is None:
            return ""
        return f" under the plan {plan.ranks_per_pipeline} x {plan.replicas}"

    def _refuse(self, got: str, next_step: str, kind: type[Exception] = ValueError) -> NoReturn:
        ELASTIC.refuse(got, next_step, self._group, kind=kind)


def _kind_of(text: str) -> type[Exception]:
    """What others raise for a rank's exception: of its class, where a caller's mistake is."""
    kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
    return kinds.get(text.partition(":")[0], RuntimeError)
