"""Freezing in the core; csrc/bindings/pipetransformer.cpp. A part of ``_C``."""

from collections.abc import Callable, Sequence

from torch import Tensor

from trireme._C import Communicator, ElasticPlan, GradNormPart

def freeze_schedule(layers: int, alpha: float, epochs: int) -> list[int]: ...
def frozen_by_gradient(point: FreezePoint, alpha: float) -> int: ...

class FreezePoint:
    def __init__(
        self, *, layers: int, frozen: int, interval: int, norms: Sequence[float]
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def frozen(self) -> int: ...
    @property
    def interval(self) -> int: ...
    @property
    def norms(self) -> list[float]: ...

class FreezeCourse:
    def __init__(
        self,
        *,
        layers: Sequence[str],
        alpha: float,
        rule: str,
        choose: Callable[[FreezePoint], int] | None,
        measure_every: int,
        hold: int,
        eval_frozen: bool,
        ranks: Communicator | None,
    ) -> None: ...
    def begin_step(self) -> bool: ...
    def measure(self, parts: Sequence[Sequence[GradNormPart]]) -> None: ...
    def advance(self, keeps_last: bool) -> int: ...
    def unfreeze(self, stay: int) -> None: ...
    def load(self, layers: Sequence[str], frozen: int, history: Sequence[int]) -> None: ...
    @property
    def frozen(self) -> int: ...
    @property
    def history(self) -> list[int]: ...

# Which ranks a layer moves between, and what this one has of it. `tensors` are its parameters and
# buffers, each tensor once, on every rank under the same names, without memory where it is not
# held. `state` is the optimizer's, by names such as "weight.exp_avg", and `values` what is no
# tensor in it, as a text (JSON): of a rank that holds the layer before.
class LayerMove:
    def __init__(
        self,
        *,
        name: str,
        before: Sequence[int],
        after: Sequence[int],
        tensors: Sequence[tuple[str, Tensor]],
        state: Sequence[tuple[str, Tensor]] = (),
        values: str = "",
    ) -> None: ...

# What a rank gets that is in `after` and not in `before`: the tensors are written in place, in
# memory of their own again; the state is new tensors.
class MovedState:
    @property
    def state(self) -> list[tuple[str, Tensor]]: ...
    @property
    def values(self) -> str: ...

# Collective over `ranks`, whose numbers `before` and `after` have. One entry per move; None for a
# layer that this rank held before, or does not hold after. Frees nothing: see free_memory().
# ValueError on all ranks: nothing was changed. DistBackendError: layers may be half moved.
def move_layers(
    moves: Sequence[LayerMove], *, plan: str, ranks: Communicator | None
) -> list[MovedState | None]: ...

# Gives a tensor's memory back: it stays the same object, of the same sizes, and whoever reads it
# gets an error of that text. move_layers() gives it memory again.
def free_memory(tensors: Sequence[Tensor], text: str) -> None: ...
def has_memory(tensor: Tensor) -> bool: ...

class ElasticEpoch:
    @property
    def epoch(self) -> int: ...
    @property
    def frozen(self) -> int: ...
    @property
    def ranks_per_pipeline(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def hits(self) -> int: ...

# How the plans of a run follow each other, on all ranks alike.
class ElasticCourse:
    # Collective. ValueError on all ranks for options that differ, or that no plan fits.
    def __init__(
        self,
        *,
        layers: Sequence[str],
        global_batch: int,
        chunks: int,
        pipe: bool,
        replicas: bool,
        cached: bool,
        costs: Sequence[float] | None,
        ranks: Communicator | None,
    ) -> None: ...
    # Takes the means of what ranks have measured; collective. Before the first next_plan().
    def take_costs(self, forward: Sequence[float], backward: Sequence[float]) -> None: ...
    @property
    def needs_costs(self) -> bool: ...
    # The plan behind `frozen` layers, from the present one; no collective.
    def next_plan(self, frozen: int) -> ElasticPlan: ...
    # ValueError for a plan of other ranks or layers, or that does not divide the batch.
    def check_plan(self, plan: ElasticPlan) -> None: ...
    # Makes it the present one; `frozen` layers were frozen when it was made.
    def adopt(self, plan: ElasticPlan, frozen: int) -> None: ...
    @property
    def plan(self) -> ElasticPlan: ...
    @property
    def where(self) -> str: ...  # "rank 3 of 4 under the plan 2 x 2 of 8 4 layers"
    # Of the present plan: [begin, end) of the global batch that this rank's replica takes, and in
    # how many micro-batches.
    @property
    def rows(self) -> tuple[int, int]: ...
    @property
    def micro_batches(self) -> int: ...
    # [begin, end) of the layers that this rank holds.
    @property
    def own_layers(self) -> tuple[int, int]: ...
    # Collective: ValueError on all ranks where one has a batch of another number of rows, or ids
    # that are no int64 [rows]. At the beginning of each step, so that no rank goes into one
    # alone.
    def check_batch(self, rows: int, ids: Tensor | None) -> None: ...
    # The mean of the replicas' losses, 0-dim, on all ranks; collective.
    def mean_loss(self, loss: Tensor) -> Tensor: ...
    # Ends an epoch of the present plan: the slowest rank's seconds, the hits of all. Collective.
    def end_epoch(self, frozen: int, seconds: float, hits: int) -> ElasticEpoch: ...
    @property
    def history(self) -> list[ElasticEpoch]: ...
