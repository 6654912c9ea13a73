"""Models as layers, dealt out to the ranks of a pipeline: ours, and torch's on the same cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from models import Gpt, Mlp, PlainMlp
from torch import Tensor, nn
from workloads import Batch

if TYPE_CHECKING:  # other strategies need it not
    from torch.distributed import pipelining

TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
}
MODELS = ("mlp", "narrow", "gpt", "gpt-small-batch")  # those that cut() takes
MICRO_BATCHES_PER_RANK = 4

TellLoss = Callable[[], float]
Loss = Callable[[Tensor, Tensor], Tensor]


class _Added(nn.Module):
    """Is a layer with a shortcut, as Mlp has them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class _Embedding(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return embedded


@dataclass(frozen=True)
class Layers:
    """Computes what a model does, one after the other. `ends` layers at each end stay beside a
    block."""

    layers: Sequence[nn.Module]
    ends: int = 0

    def balance(self, stages: int) -> list[int]:
        """How many layers each stage has: as many blocks in each as can be."""
        each, more = divmod(len(self.layers) - 2 * self.ends, stages)
        counts = [each + (number < more) for number in range(stages)]
        counts[0] += self.ends
        counts[-1] += self.ends
        return counts


def cut(model: nn.Module) -> Layers:
    """The layers of a model of `MODELS`, which keep its parameters."""
    if isinstance(model, Gpt):
        head = nn.Sequential(model.norm, model.head)
        return Layers([_Embedding(model), *model.blocks, head], ends=1)
    if isinstance(model, Mlp):
        return Layers([_Added(block) for block in model.blocks])
    if isinstance(model, PlainMlp):
        return Layers(list(model.blocks))
    raise TypeError(f"{type(model).__name__} has not been cut into layers")


def micro_batches(batch: int, ranks: int) -> int:
    """The largest number of equal ones out of `batch` rows, up to four per rank."""
    most = min(batch, MICRO_BATCHES_PER_RANK * ranks)
    return next(count for count in range(most, 0, -1) if batch % count == 0)


def loss_of(loss: Callable[[Tensor, Batch], Tensor]) -> Loss:
    """A workload's loss as pipelines call it, on what comes out and what it is compared with."""
    return lambda output, target: loss(output, Batch(target, target))


def torch_stages(
    layers: Layers, stage_rank: Sequence[int], group: dist.ProcessGroup | None
) -> list[pipelining.PipelineStage]:
    """This rank's, where `stage_rank` says which rank has which."""
    from torch.distributed import pipelining

    stages, begin = [], 0
    for number, count in enumerate(layers.balance(len(stage_rank))):
        part = nn.Sequential(*layers.layers[begin : begin + count])
        begin += count
        if stage_rank[number] == dist.get_rank():
            cpu = torch.device("cpu")
            stages.append(pipelining.PipelineStage(part, number, len(stage_rank), cpu, group=group))
    return stages


def torch_step(
    stages: Sequence[pipelining.PipelineStage], schedule: str, chunks: int, loss: Loss
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Runs a batch; the loss comes back on the rank of the last stage."""
    from torch.distributed import pipelining

    kind = getattr(pipelining, TORCHS[schedule])
    is_multi = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    run = kind(stages if is_multi else stages[0], chunks, loss_fn=loss)  # type: ignore
    has_inputs = any(stage.is_first for stage in stages)
    has_loss = any(stage.is_last for stage in stages)

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        given = (inputs,) if has_inputs else ()
        if not has_loss:
            run.step(*given)
            return None
        losses: list[Tensor] = []
        run.step(*given, target=targets, losses=losses)
        return torch.stack(losses).detach().mean()

    return step


def tell_everybody(loss: Tensor | None) -> float:
    """What one rank knows."""
    known = torch.zeros(()) if loss is None else loss.clone()
    dist.all_reduce(known)
    return known.item()
