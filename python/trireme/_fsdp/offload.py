"""What of a sharded model lies in CPU memory while another device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from trireme._C import UnitOffload, plan_offload
from trireme._core.rank_log import get_logger
from trireme._fsdp import refuse

_told: set[str] = set()


@dataclass
class Offload(OffloadPolicy):
    """``offload_policy`` of ``fully_shard``: a fraction of the model in CPU memory, by bytes.

    The fraction ``optimizer`` has this rank's part of parameters, their gradients and so the state
    of the optimizer in CPU memory, where the optimizer steps them. The device has no copy of
    ``params`` (at most ``optimizer``), and each gather brings one; it keeps one of the part of the
    others, in ``param_dtype``, made once per step. ``Offload(1, 1)`` is ``CPUOffloadPolicy()``.

    Whole parameters are chosen, from the front of each unit; give one object to all units of a
    model, and each of them rounds so that the total comes nearest.

    Args:
        pin_memory: page-locked, which copies that run beside the computation need.

    Raises:
        ValueError: not 0 <= params <= optimizer <= 1.
    """

    optimizer: float = 1.0
    params: float = 0.0
    pin_memory: bool = True
    # OffloadOwed in csrc/strategies/fsdp/offload_plan.h says what this is.
    _owed: tuple[float, float] = field(default=(0.0, 0.0), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fractions = (self.params, self.optimizer)
        are_numbers = all(
            isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
            for fraction in fractions
        )
        if not are_numbers or not 0 <= self.params <= self.optimizer <= 1:
            refuse(
                f"got Offload(optimizer={self.optimizer!r}, params={self.params!r}), expected "
                "0 <= params <= optimizer <= 1",
                "Pass fractions; what has no copy on the device is a part of what is offloaded.",
            )


def offloads_from(device: torch.device) -> bool:
    """Whether there is another memory than that of ``device`` to offload to."""
    return device.type != "cpu"


def resolve_offload(policy: OffloadPolicy, device: torch.device) -> Offload | None:
    """Returns None if everything stays where it is."""
    if not isinstance(policy, OffloadPolicy):
        got = f"got {type(policy).__name__} as offload_policy"
        refuse(got, "Pass trireme.Offload(), or a policy of torch's.", kind=TypeError)
    if isinstance(policy, CPUOffloadPolicy):
        offload = Offload(1.0, 1.0, policy.pin_memory)
    elif isinstance(policy, Offload):
        offload = policy
    else:
        return None
    if not offloads_from(device):
        _say_once(type(policy).__name__)
        return None
    return offload


def _say_once(name: str) -> None:
    if name not in _told:
        _told.add(name)
        get_logger().info(f"[fully_shard] {name}: parameters are in CPU memory already")


def choose(offload: Offload | None, params: Sequence[torch.Tensor]) -> UnitOffload | None:
    """Says which of a unit's parameters are offloaded; all ranks say the same."""
    if offload is None:
        return None
    optimizers, everything, offload._owed = plan_offload(
        [param.numel() * param.element_size() for param in params],
        optimizer=offload.optimizer,
        params=offload.params,
        owed=offload._owed,
    )
    return UnitOffload(optimizers, everything, offload.pin_memory)
