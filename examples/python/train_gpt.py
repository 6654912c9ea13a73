"""Trains a small GPT on text. Copy it and put your model and your data in.

python examples/python/train_gpt.py                                   # alone
torchrun --nproc-per-node 2 examples/python/train_gpt.py              # two ranks
torchrun --nproc-per-node 2 examples/python/train_gpt.py --strategy zero2
torchrun --nproc-per-node 2 examples/python/train_gpt.py --epochs 4 --resume
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import trireme
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": trireme.DistributedDataParallel,
    "zero1": trireme.DistributedDataParallel,
    "zero2": lambda module: module,  # the optimizer averages
    "torch-ddp": nn.parallel.DistributedDataParallel,
    "none": lambda module: module,
}
ZERO_STAGES = {"zero1": 1, "zero2": 2}


class TextWindows(Dataset[Tensor]):
    """Windows of `length` + 1 bytes: all but the last are read, all but the first predicted."""

    def __init__(self, file: Path | None, length: int, limit: int = 1 << 17) -> None:
        files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(source.read_bytes() for source in files)[:limit]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class Gpt(nn.Module):
    """Bytes `[rows, length]` in, logits of each next byte `[rows, length, 256]` out."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return cast(Tensor, self.head(x))


class Training:
    """Model, optimizer and progress of a run, on this rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        torch.manual_seed(args.seed)
        self.module = Gpt(args.width, args.depth, args.length).to(device)
        self.model = WRAPPERS[args.strategy](self.module)
        self.optimizer = self.make_optimizer()
        # bf16 has the range of fp32; the gradients of fp16 are scaled, or they underflow.
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(enabled=args.amp and self.dtype == torch.float16)
        self.epoch = 0
        self.history: list[float] = []

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters, options = self.model.parameters(), {"lr": self.args.lr, "fused": True}
        stage = ZERO_STAGES.get(self.args.strategy)
        if stage is None:
            return torch.optim.AdamW(parameters, **options)
        return trireme.ZeroRedundancyOptimizer(
            parameters, torch.optim.AdamW, stage=stage, **options
        )

    def loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.args.amp):
            logits = self.model(windows[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def train_epoch(self, batches: DataLoader[Tensor]) -> float:
        """One pass over this rank's part of the data; returns its mean loss."""
        total = 0.0
        for number, windows in enumerate(batches, start=1):
            last = number % self.args.accumulate == 0 or number == len(batches)
            # Gradients add up on their rank; only the last backward before a step reduces them.
            with nullcontext() if last else self.no_sync():
                loss = self.loss(windows)
                self.scaler.scale(loss / self.args.accumulate).backward()
            total += loss.item()
            if last:
                self.scaler.unscale_(self.optimizer)
                trireme.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
        return total / len(batches)

    def no_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        if isinstance(self.optimizer, trireme.ZeroRedundancyOptimizer):
            return self.optimizer.no_sync()
        return nullcontext()

    @torch.no_grad()
    def test(self, batches: DataLoader[Tensor]) -> float:
        """This rank's mean loss, without learning from it."""
        return sum(self.loss(windows).item() for windows in batches) / len(batches)

    def save(self, path: Path) -> None:
        """All ranks call it, and each writes what it has. A crash leaves the old one whole."""
        progress = {
            "epoch": self.epoch,
            "history": self.history,
            "scaler": self.scaler.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        trireme.save_checkpoint(path, self.model, self.optimizer, extra=progress)

    def load(self, path: Path) -> None:
        """Reads what any strategy has saved, on any number of ranks."""
        progress = trireme.load_checkpoint(path, self.model, self.optimizer)
        self.scaler.load_state_dict(progress["scaler"])
        self.epoch, self.history = progress["epoch"], progress["history"]


def open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SystemExit("--tensorboard needs: pip install 'trireme[tensorboard]'") from error
    return SummaryWriter(folder)


def train(args: argparse.Namespace, ctx: trireme.Context) -> None:
    data = TextWindows(args.text, args.length)
    train_part = Subset(data, range(len(data) // 10, len(data)))
    test_part = Subset(data, range(len(data) // 10))
    order = DistributedSampler[Tensor](train_part, ctx.world, ctx.rank, seed=args.seed)
    in_order = DistributedSampler[Tensor](test_part, ctx.world, ctx.rank, shuffle=False)
    train_batches = DataLoader(train_part, args.batch_size, sampler=order)
    test_batches = DataLoader(test_part, args.batch_size, sampler=in_order)
    run = Training(args, ctx.device)
    if args.resume and args.checkpoint.exists():
        run.load(args.checkpoint)
    log = trireme.get_logger()  # speaks on rank 0
    board = open_board(args.tensorboard) if args.tensorboard and ctx.rank == 0 else None
    while run.epoch < args.epochs:
        order.set_epoch(run.epoch)  # else every epoch has the order of the first
        # Each rank has seen its part of the data: the mean over ranks is the loss.
        train_loss = trireme.all_mean(run.train_epoch(train_batches))
        test_loss = trireme.all_mean(run.test(test_batches))
        run.epoch += 1
        run.history.append(test_loss)
        log.info("epoch %d  train loss %.4f  test loss %.4f", run.epoch, train_loss, test_loss)
        run.save(args.checkpoint)
        if board is not None:
            board.add_scalars("loss", {"train": train_loss, "test": test_loss}, run.epoch)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT on text.")
    add = parser.add_argument
    add("--strategy", choices=WRAPPERS, default="ddp", help="none: one rank")
    add("--text", type=Path, help="a file to learn (default: Python's standard library)")
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=16, help="windows per rank and backward")
    add("--accumulate", type=int, default=2, help="backwards per optimizer step")
    add("--amp", action="store_true", help="fp16 on CUDA, bf16 on CPU")
    add("--lr", type=float, default=3e-3)
    add("--width", type=int, default=64)
    add("--depth", type=int, default=2)
    add("--length", type=int, default=64, help="bytes that the model sees at once")
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, default=Path("build/train_gpt"))
    add("--resume", action="store_true", help="continue from the checkpoint if there is one")
    add("--tensorboard", type=Path, help="folder for TensorBoard")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_args()
    with trireme.init() as context:
        train(arguments, context)
