"""What ranks tell each other once, as plain values: nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from trireme._core.errors import refuse


def gather_values(value: Any, device: torch.device, group: dist.ProcessGroup) -> list[Any]:
    """What JSON can say, of every rank, by rank. ``device`` is where the group moves tensors.

    Collective: two small collectives.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = torch.empty(group.size(), dtype=torch.long, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([text.numel()], device=device), group=group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    gathered = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, padded, group=group)
    rows = gathered.cpu().view(group.size(), longest)
    return [
        json.loads(row[: int(length)].numpy().tobytes())
        for row, length in zip(rows, lengths, strict=True)
    ]


def raise_together(
    error: Exception | None, what: str, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raises on all ranks if one passes an error: that rank its own, the others one naming it.

    ``what`` it could not use. Collective.
    """
    told = None if error is None else f"{type(error).__name__}: {error}"
    texts = gather_values(told, device, group)
    if error is not None:
        try:
            raise error
        finally:
            del error  # which holds this frame, and with it what its frames hold
    for rank, text in enumerate(texts):
        if text is not None:
            refuse(
                "zero",
                f"got {what} that rank {rank} cannot use: {text}",
                "Pass what every rank can use for its part of the parameters.",
                group,
            )


def agree_on_names(
    names: dict[torch.Tensor, str], were_given: bool, device: torch.device, group: dist.ProcessGroup
) -> dict[torch.Tensor, str]:
    """``names``, or rank 0's where both ranks have found them by themselves: modules that one rank
    alone has made, such as a wrapper for logging, make names that differ. Names that a caller gave
    are compared later, and those of models that differ, too. Collective.
    """
    told = gather_values(None if were_given else list(names.values()), device, group)[0]
    if were_given or told is None or len(told) != len(names):
        return names
    return dict(zip(names, told, strict=True))
