"""How much memory a strategy will take, told before anything is allocated: docs/memory.md."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trireme import _C
from trireme._core.errors import Area

AREA = Area("memory_estimate")
refuse = AREA.refuse
_WHOLE = "Pass a whole number."
STRATEGIES = ("single", "dp", "ddp", "zero1", "zero2", "fsdp")
OTHER_NAMES = {"zero3": "fsdp", "fully_shard": "fsdp"}


@dataclass(frozen=True)
class MemoryBytes:
    """What tensors take, in bytes. ``buffers`` are the module's, and those of the strategy."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def model_states(self) -> int:
        """Parameters, gradients and the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it: model states, activations and buffers."""
        return self.model_states + self.activations + self.buffers


@dataclass(frozen=True)
class MemoryEstimate:
    """What :func:`estimate_memory` says.

    ``rank`` is the fullest one, with its share of what a host has once. ``host`` is the fullest
    one: what its ranks take together, to be compared with the sum of their PSS.
    """

    strategy: str
    world: int
    ranks_per_host: int
    accounting: str
    numel: int
    rank: MemoryBytes
    host: MemoryBytes
    fewest_ranks: int | None = None
    """With ``memory``: the fewest ranks for which that is enough; None if no number is."""


def estimate_memory(
    model_or_numel: nn.Module | float,
    strategy: str,
    world: int,
    *,
    ranks_per_host: int | None = None,
    optimizer: str | int = "adamw",
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    activation_bytes: int = 0,
    host_params: bool = True,
    unit_numel: int = 0,
    accounting: Literal["trireme", "paper"] = "trireme",
    memory: int | None = None,
    memory_of: Literal["host", "rank"] = "host",
) -> MemoryEstimate:
    """Says what a rank and a host keep in memory under a strategy.

    Not counted: the interpreter, torch itself, and gradients on their way from a layer to where
    they are kept. Nothing is allocated or communicated; a model may be on the meta device.

    Args:
        model_or_numel: a module, of which sizes, dtypes and ``requires_grad`` are read (shared
            parameters once; its buffers are counted for each rank), or a number of parameters.
        strategy: "single", "dp", "ddp", "zero1", "zero2" or "fsdp", which is ``fully_shard`` (also
            "zero3", as the ZeRO paper calls it).
        world: ranks, under "dp" replicas.
        ranks_per_host: of the fullest host; all of them if left out.
        optimizer: "sgd", "sgd_momentum", "adam", "adamw" (states in fp32, or in a wider dtype of
            the parameter), or the bytes of state per element of a parameter.
        dtype: of parameters that are given as a number; fp32 if left out.
        grad_dtype: of gradients; that of their parameters if left out.
        activation_bytes: of each rank. This function does not guess them.
        host_params: whether ZeRO may keep parameters once per host. False under "fsdp" means ranks
            that share no memory (Gloo, GPUs): each keeps its shards, and gathers units.
        unit_numel: "fsdp" that gathers, so also with one rank per host: parameters of the largest
            unit, of which two are there at a time. 0: the whole model is one unit.
        accounting: "trireme", or "paper" for the table of the ZeRO paper (mixed precision, Adam).
        memory: bytes that there are. The result then says in ``fewest_ranks`` how many ranks it
            takes: ``world``, or more hosts of ``ranks_per_host``.
        memory_of: whether each "host" has that memory, or each "rank" (a GPU).

    Raises:
        TypeError: an argument of another type.
        ValueError: counts that contradict each other; a strategy, optimizer or accounting that is
            not known; a lazy module that has not seen an input.
    """
    _check_counts(
        world=world,
        activation_bytes=activation_bytes,
        unit_numel=unit_numel,
        ranks_per_host=0 if ranks_per_host is None else ranks_per_host,
        optimizer=0 if isinstance(optimizer, str) else optimizer,
        memory=0 if memory is None else memory,
    )
    if memory_of not in ("host", "rank"):
        refuse(
            f"got memory_of={memory_of!r}, expected 'host' or 'rank'",
            "Say 'rank' where each rank has memory of its own, as a GPU has.",
        )
    if accounting == "paper" and dtype is not None:
        refuse(
            f"got dtype={dtype} for the paper's accounting, which has its own",
            "Leave it out, or use accounting='trireme'.",
        )
    parameters, buffer_bytes = _describe(model_or_numel, dtype)
    per_host = world if ranks_per_host is None else ranks_per_host
    strategy = OTHER_NAMES.get(strategy, strategy)
    found = _C.estimate_memory(
        parameters,
        strategy=strategy,
        world=world,
        ranks_per_host=per_host,
        accounting=accounting,
        optimizer=optimizer,
        grad_dtype=grad_dtype,
        host_params=host_params,
        unit_numel=unit_numel,
        activation_bytes=activation_bytes,
        module_buffer_bytes=buffer_bytes,
        limit=None if memory is None else (memory, memory_of == "rank"),
    )
    return MemoryEstimate(
        strategy=strategy,
        world=world,
        ranks_per_host=per_host,
        accounting=accounting,
        numel=sum(parameter.numel for parameter in parameters),
        rank=MemoryBytes(**found["rank"]),
        host=MemoryBytes(**found["host"]),
        fewest_ranks=found.get("fewest_ranks"),
    )


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        expected = "str or int" if name == "optimizer" else "int"
        AREA.expect(name, count, int, expected, next_step=_WHOLE)
        if not -(2**63) <= count < 2**63:
            refuse(f"got {name}={count}, expected a number of 64 bits", "Give a smaller one.")


def _describe(
    model_or_numel: object, dtype: torch.dtype | None
) -> tuple[list[_C.ParameterInfo], int]:
    """Returns what the core has to know of the parameters, and the bytes of the module's
    buffers."""
    if not isinstance(model_or_numel, nn.Module):
        numel = _as_numel(model_or_numel)
        return [_C.ParameterInfo([numel], dtype or torch.float32, True)], 0
    if dtype is not None:
        refuse(
            f"got dtype={dtype} beside a module, expected it beside a number",
            "Leave it out, or convert the module: module.to(dtype).",
        )
    for name, tensor in [*model_or_numel.named_parameters(), *model_or_numel.named_buffers()]:
        if is_lazy(tensor):
            refuse(
                f"got a module whose '{name}' has no sizes yet, expected known sizes",
                "Feed it an input first.",
            )
    parameters = [
        _C.ParameterInfo(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for parameter in model_or_numel.parameters()
    ]
    return parameters, sum(
        buffer.numel() * buffer.element_size() for buffer in model_or_numel.buffers()
    )


def _as_numel(number: object) -> int:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        refuse(
            f"got {type(number).__name__}, expected a torch.nn.Module or a number of parameters",
            "Pass the module itself, or for example 7.5e9.",
            kind=TypeError,
        )
    # Neither nan nor infinity is between these.
    if not 0 <= number < 2**63 or int(number) != number:
        refuse(
            f"got {number} parameters, expected a whole number from 0 to 2**63 - 1",
            "Pass how many elements all parameters have.",
        )
    return int(number)
