"""A model whose gradients are given, so that every number of a code is known."""

import torch
from torch import nn

SIZES = {"matrix": (37, 61), "one block more": (1025,), "tail": (2000,), "small": (1000,)}


class Given(nn.Module):
    """A model whose gradients are what it is called with."""

    def __init__(
        self, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.held = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(size, dtype=dtype)) for name, size in sizes.items()}
        )

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        found = [(self.held[name] * value).sum() for name, value in gradients.items()]
        return torch.stack(found).sum()


def drawn(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Gradients with a block of zeros, one of denormals, and sizes of many orders."""
    made = {}
    for place, (name, size) in enumerate(SIZES.items()):
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank + place)
        values = torch.randn(size, generator=generator)
        flat = values.view(-1)
        flat[:256] = 0
        flat[256:512] *= 1e-42
        flat[512:600] *= 1e3
        made[name] = values.to(dtype)
    return made


def averaged(ddp: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ddp.zero_grad()
    ddp(gradients).backward()
    return {name: ddp.module.held[name].grad for name in gradients}
