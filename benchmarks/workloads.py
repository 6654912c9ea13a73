"""The training jobs: what is trained, on which samples, with which loss.

docs/benchmarks.md tells readers what these are. Samples are a fixed set made from a seed (or read
from a text), so that every strategy and every rank sees the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from models import Gpt, Mlp, NormFactory, PlainMlp, ResNet18, TreeNet
from torch import Tensor, nn

RANDOM_VOCABULARY = 128
BYTE_VOCABULARY = 256
SAMPLES = 1024
NORMS = ("groupnorm", "syncbn")


@dataclass(frozen=True)
class Batch:
    """`targets` is what the loss compares with; for a GPT these are the inputs themselves."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Samples:
    """A fixed set of samples: `inputs[i]` belongs to `targets[i]`, along dim 0.

    Integer inputs may be stored narrow (bytes of a mapped text); `rows` widens them to int64 token
    ids.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def rows(self, indices: Tensor) -> Batch:
        return Batch(_widened(self.inputs[indices]), _widened(self.targets[indices]))


@dataclass(frozen=True)
class SampleOrder:
    """The samples of every global batch: one permutation per epoch, drawn from one seed."""

    num_samples: int
    global_batch: int
    seed: int

    def indices(self, step: int) -> Tensor:
        per_epoch = self.num_samples // self.global_batch
        epoch, position = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.num_samples, generator=generator)
        return order[position * self.global_batch : (position + 1) * self.global_batch]


@dataclass(frozen=True)
class WorkloadOptions:
    """`corpus`: a file of bytes for the GPTs, random tokens if None. `tiny`: sizes for tests.
    `width`: of mlp's layers, in place of its own."""

    corpus: str | None = None
    norm: str = "groupnorm"
    tiny: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Workload:
    """One training job. `rows_per_rank` samples of `unit` make up a rank's batch."""

    unit: str
    rows_per_rank: int
    model: Callable[[], nn.Module]
    samples: Callable[[], Samples]
    loss: Callable[[Tensor, Batch], Tensor]


def gpt(options: WorkloadOptions) -> Workload:
    """8 blocks of width 384 with 6 heads: 14.3 M parameters; 8 sequences of 128 per rank."""
    return _gpt(options, rows=8, length=128)


def gpt_small_batch(options: WorkloadOptions) -> Workload:
    """Trains the same model with 2 sequences of 32 per rank, where communication counts."""
    return _gpt(options, rows=2, length=32)


def gpt_large(options: WorkloadOptions) -> Workload:
    """12 blocks of width 1024 with 16 heads: 152 M parameters; 8 sequences of 512 per rank."""
    return _gpt(options, rows=8, length=512, width=1024, depth=12, heads=16)


def mlp(options: WorkloadOptions) -> Workload:
    """16 residual Linear(1024, 1024) + ReLU: 16.8 M parameters, 16 rows per rank."""
    width, depth = (32, 2) if options.tiny else (1024, 16)
    width = options.width or width
    return Workload(
        unit="rows",
        rows_per_rank=16,
        model=lambda: Mlp(width, depth),
        samples=lambda: _random_rows(width),
        loss=lambda output, batch: output.square().mean(),
    )


def narrow(options: WorkloadOptions) -> Workload:
    """64 x (Linear(128, 128) + ReLU), 128 rows per rank: too little in a layer to share it."""
    width, depth = (32, 2) if options.tiny else (128, 64)
    return Workload(
        unit="rows",
        rows_per_rank=128,
        model=lambda: PlainMlp(width, depth),
        samples=lambda: _random_rows(width),
        loss=lambda output, batch: F.mse_loss(output, batch.targets),
    )


def trees(options: WorkloadOptions) -> Workload:
    """A recursive network of width 128 over trees of 16 words, 16 trees per rank: Python counts."""
    width, leaves = (8, 4) if options.tiny else (128, 16)
    return Workload(
        unit="trees",
        rows_per_rank=16,
        model=lambda: TreeNet(RANDOM_VOCABULARY, width, classes=2),
        samples=lambda: _random_trees(leaves),
        loss=lambda output, batch: F.cross_entropy(output, batch.targets),
    )


def resnet18(options: WorkloadOptions) -> Workload:
    """ResNet-18 on 32 x 32 images of ten made-up classes: 11.2 M parameters, 8 images per rank."""
    width, side = (8, 8) if options.tiny else (64, 32)
    return Workload(
        unit="images",
        rows_per_rank=8,
        model=lambda: ResNet18(10, width, _norm(options.norm)),
        samples=lambda: _random_images(classes=10, side=side),
        loss=lambda output, batch: F.cross_entropy(output, batch.targets),
    )


WORKLOADS: dict[str, Callable[[WorkloadOptions], Workload]] = {
    "mlp": mlp,
    "gpt": gpt,
    "gpt-small-batch": gpt_small_batch,
    "gpt-large": gpt_large,
    "narrow": narrow,
    "trees": trees,
    "resnet18": resnet18,
}


def _gpt(
    options: WorkloadOptions,
    rows: int,
    length: int,
    width: int = 384,
    depth: int = 8,
    heads: int = 6,
) -> Workload:
    if options.tiny:
        width, depth, heads, length = 32, 2, 2, min(length, 32)
    vocabulary = RANDOM_VOCABULARY if options.corpus is None else BYTE_VOCABULARY

    def next_token_loss(logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten())

    def samples() -> Samples:
        if options.corpus is None:
            return _random_tokens(length)
        return _text_windows(Path(options.corpus), length)

    return Workload(
        unit="sequences",
        rows_per_rank=rows,
        model=lambda: Gpt(vocabulary, width, depth, heads, length),
        samples=samples,
        loss=next_token_loss,
    )


def _norm(name: str) -> NormFactory:
    if (
        name == "syncbn"
    ):  # the strategy turns it into a synchronized one where there are several ranks
        return nn.BatchNorm2d
    return lambda channels: nn.GroupNorm(8, channels)


def _widened(rows: Tensor) -> Tensor:
    return rows if rows.is_floating_point() else rows.long()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(100)


def _random_tokens(length: int) -> Samples:
    tokens = torch.randint(0, RANDOM_VOCABULARY, (SAMPLES, length), generator=_generator())
    return Samples(tokens, tokens)


def _random_rows(width: int) -> Samples:
    rows = torch.randn(SAMPLES, width, generator=_generator())
    return Samples(rows, rows)


def _random_trees(leaves: int) -> Samples:
    """The class of a tree is whether the sum of its words is odd."""
    words = torch.randint(0, RANDOM_VOCABULARY, (SAMPLES, leaves), generator=_generator())
    merges = torch.rand(SAMPLES, leaves - 1, generator=_generator())
    places = (merges * torch.arange(leaves - 1, 0, -1)).long()
    return Samples(torch.cat([words, places], dim=1), words.sum(dim=1) % 2)


def _random_images(classes: int, side: int) -> Samples:
    """Each class is a pattern of its own under noise, so that there is something to learn."""
    generator = _generator()
    patterns = torch.randn(classes, 3, side, side, generator=generator)
    labels = torch.randint(0, classes, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, 3, side, side, generator=generator)
    return Samples(patterns[labels] + noise, labels)


def _text_windows(path: Path, length: int) -> Samples:
    """Windows of `length` bytes, side by side, mapped from the file: a host holds it once."""
    count = path.stat().st_size // length
    text = torch.from_file(str(path), shared=False, size=count * length, dtype=torch.uint8)
    windows = text.view(count, length)
    return Samples(windows, windows)
