"""Trains with workers of unequal speed under all modes of a parameter server, and counts.

    torchrun --nproc-per-node 4 examples/python/ps_stragglers.py
    torchrun --nproc-per-node 4 examples/python/ps_stragglers.py --modes bsp,async --seconds 5

Workers learn drawn digits. A step sleeps for 20 ms, a slow one for 80 ms: either all steps of the
last worker are slow ("always"), or each step of each worker with a probability of 1/4
("sometimes"). For each mode it prints how many updates per second reached the model, and after how
many seconds worker 0 saw an accuracy of 95 % on digits that nobody trains on.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from trireme import ps

MODES: dict[str, dict[str, Any]] = {
    "bsp": {"mode": "bsp"},
    "bsp-backup-1": {"mode": "bsp", "backup": 1},
    "ssp-1": {"mode": "ssp", "staleness": 1},
    "ssp-3": {"mode": "ssp", "staleness": 3},
    "ssp-10": {"mode": "ssp", "staleness": 10},
    "async": {"mode": "async"},
}
PATTERNS = ("always", "sometimes")
GOOD = 0.95
BATCH, TRAINED, TESTED, LOOK_EVERY = 16, 4000, 500, 3
SIDE, NOISE = 9, 0.5
DIGITS = (
    "01110100011000110001100011000101110", "00100011000010000100001000010001110",
    "01110100010000100010001000100011111", "11111000100010000010000011000101110",
    "00010001100101010010111110001000010", "11111100001111000001000011000101110",
    "00110010001000011110100011000101110", "11111000010001000100010000100001000",
    "01110100011000101110100011000101110", "01110100011000101111000010001001100",
)  # fmt: skip


@dataclass(frozen=True)
class Pace:
    """How long steps sleep, and for how long all of it goes on."""

    seconds: float = 12.0
    step_ms: float = 20.0
    slow_ms: float = 80.0

    def sleeps(self, pattern: str, worker: int, workers: int, seed: int) -> Callable[[], None]:
        drawn = random.Random(f"{seed} {worker}")

        def sleep() -> None:
            is_slow = worker == workers - 1 if pattern == "always" else drawn.random() < 0.25
            time.sleep((self.slow_ms if is_slow else self.step_ms) / 1e3)

        return sleep


def draw_digits(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits of 5 x 7 pixels further left or right in a square of SIDE x SIDE, under noise."""
    shapes = torch.tensor([[2.0 * int(pixel) for pixel in digit] for digit in DIGITS])
    images = [
        nn.functional.pad(shapes.view(-1, 7, 5), (left, SIDE - 5 - left, 1, SIDE - 8))
        for left in range(SIDE - 4)
    ]
    labels = torch.randint(len(DIGITS), (count,), generator=drawn)
    chosen = torch.randint(len(images), (count,), generator=drawn)
    noise = NOISE * torch.randn(count, SIDE, SIDE, generator=drawn)
    return (torch.stack(images)[chosen, labels] + noise).flatten(1), labels


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, len(DIGITS)))


def train(mode: str, pattern: str, seed: int, pace: Pace) -> dict[str, float | None]:
    """Trains for `pace.seconds`; returns what all workers did together. Collective."""
    torch.manual_seed(seed)
    net, loss_of = make_net(), nn.CrossEntropyLoss()
    # Each push is a step of its own under ssp and async, as many as there are workers in a clock.
    worker, workers = dist.get_rank(), dist.get_world_size()
    lr = 0.3 if mode.startswith("bsp") else 0.3 / workers
    tables = [ps.Dense("net", net, optimizer=ps.SGD(lr))]
    drawn = torch.Generator().manual_seed(seed)
    tests, digits = draw_digits(TESTED, drawn), draw_digits(TRAINED, drawn)
    with ps.ParameterServer(tables, **MODES[mode]) as server:
        drawn = trireme.rank_generator(seed)
        table = server["net"]
        sleep = pace.sleeps(pattern, worker, workers, seed)
        dist.barrier()
        losses: list[float] = []
        began, reached = time.monotonic(), float("inf")
        while time.monotonic() < began + pace.seconds:
            table.pull()
            looks = worker == 0 and len(losses) % LOOK_EVERY == 0
            if looks and reached == float("inf") and accuracy(net, *tests) >= GOOD:
                reached = time.monotonic() - began
            rows = torch.randint(TRAINED, (BATCH,), generator=drawn)
            sleep()
            loss = loss_of(net(digits[0][rows]), digits[1][rows])
            loss.backward()
            losses.append(loss.item())
            table.push()
            server.clock()
        stats = server.stats()
        server.leave()
        updates = torch.tensor([stats["pushes"] - stats["dropped"]])
        dist.all_reduce(updates)
    return {
        "updates_per_s": updates.item() / pace.seconds,
        "seconds_to_good": None if reached == float("inf") else reached,
        "first_loss": losses[0],
        "last_loss": sum(losses[-5:]) / len(losses[-5:]),
    }


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def main(command_line: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(command_line)
    pace = Pace(arguments.seconds, arguments.step_ms, arguments.slow_ms)
    modes = arguments.modes.split(",")
    ctx = trireme.init(device="cpu")  # tables lie in the memory of the host
    for pattern, mode in itertools.product(arguments.patterns.split(","), modes):
        found = train(mode, pattern, arguments.seed, pace)
        if ctx.rank == 0:
            good = found["seconds_to_good"]
            print(
                f"{pattern:9}  {mode:12}  {found['updates_per_s']:6.1f} updates/s  "
                f"loss {found['first_loss']:.3f} to {found['last_loss']:.3f}  "
                + ("95 % not reached" if good is None else f"95 % after {good:.1f} s"),
                flush=True,
            )
    trireme.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", default=",".join(MODES), help=f"out of {', '.join(MODES)}")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--seconds", type=float, default=Pace.seconds, help="of one mode")
    parser.add_argument("--step-ms", type=float, default=Pace.step_ms)
    parser.add_argument("--slow-ms", type=float, default=Pace.slow_ms)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
