"""What is in trireme._C for activation memory. A part of _C.pyi, not a module."""

from collections.abc import Callable, Sequence
from typing import Any

from trireme._C import Communicator

class StopRecomputation(Exception): ...  # noqa: N818

class TensorPacker: ...

class PartitionMemory:
    @property
    def inputs(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def slices(self) -> int: ...
    @property
    def host(self) -> int: ...

class PartitionPacker(TensorPacker):
    @property
    def memory(self) -> PartitionMemory: ...

def checkpoint(
    forward: Callable[..., Any],
    again: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    with_random: bool,
    early_stop: bool,
    compares_metadata: bool,
    inputs: TensorPacker | None,
    explain: Callable[[str], Any] | None,
) -> Any: ...
def run_with_packer(
    packer: TensorPacker,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any: ...
def make_offload_packer(folder: str) -> TensorPacker: ...
def offloaded_bytes() -> tuple[int, int]: ...
def make_partition_packer(communicator: Communicator) -> PartitionPacker: ...
def checkpoint_plan(
    bytes: Sequence[int], times: Sequence[float], kept: Sequence[int], budget_bytes: int
) -> tuple[list[bool], int, float]: ...
def plan_of(
    bytes: Sequence[int], times: Sequence[float], kept: Sequence[int], recompute: Sequence[bool]
) -> tuple[list[bool], int, float]: ...
def segment_bounds(layers: int, segments: int) -> list[int]: ...
def square_root_segments(layers: int) -> int: ...
