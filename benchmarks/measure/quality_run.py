"""What models lose after as many steps under each method of compression.

`train_to_quality` starts this file by torchrun, on two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from measure.corpus import read_corpus
from measure.ranks import LAST_WORDS_LINES, RankFailed

BENCHMARKS = Path(__file__).resolve().parents[1]
EXAMPLES = BENCHMARKS.parent / "examples" / "python"
RANKS = 2
ROWS = 64  # of all ranks, in a step
TESTED = 4096
CONTEXT, CHARACTERS = 16, 128

Rows = tuple[torch.Tensor, torch.Tensor]
Task = tuple[Callable[[int, torch.Generator], Rows], Callable[[], nn.Module]]


def train_to_quality(seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Returns losses by data and method, one for each seed. Raises RankFailed."""
    paths = [str(BENCHMARKS), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        losses = Path(scratch, "losses.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        finished = subprocess.run(
            [*launch, __file__, str(seeds), str(steps), str(losses)],
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
            env=environment,
        )
        if finished.returncode != 0:
            words = "\n".join(finished.stderr.splitlines()[-LAST_WORDS_LINES:])
            raise RankFailed(f"[bench_compression] a rank failed. It printed last:\n{words}")
        return json.loads(losses.read_text())


def _digits() -> Task:
    from ps_stragglers import draw_digits, make_net

    return draw_digits, make_net


def _text() -> Task:
    text = torch.frombuffer(bytearray(read_corpus(None).text), dtype=torch.uint8)
    windows = text.long().clamp_max(CHARACTERS - 1).unfold(0, CONTEXT + 1, 1)

    def draw(count: int, drawn: torch.Generator) -> Rows:
        rows = windows[torch.randint(windows.size(0), (count,), generator=drawn)]
        return rows[:, :CONTEXT], rows[:, CONTEXT]

    def make_net() -> nn.Module:
        hidden = (nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, CHARACTERS))
        return nn.Sequential(nn.Embedding(CHARACTERS, 32), nn.Flatten(), *hidden)

    return draw, make_net


DATA: dict[str, Callable[[], Task]] = {"digits": _digits, "text": _text}


def _methods() -> dict[str, Any]:
    from trireme import compression as c

    made = {
        "Int8": c.Int8,
        "Int4": c.Int4,
        "Sign": c.Sign,
        "TopK 1 %": lambda **options: c.TopK(0.01, **options),
        "PowerSGD 4": lambda **options: c.PowerSGD(4, start_step=10, **options),
    }
    methods: dict[str, Any] = {"none": None}
    for name, method in made.items():
        methods[name] = method(between="ranks")
        methods[f"{name}, no feedback"] = method(between="ranks", error_feedback=False)
    return methods


def _loss_of(task: Task, method: Any, seed: int, steps: int, rank: int) -> float:
    """Trains; returns the loss on rows of their own."""
    import trireme

    draw, make_net = task
    torch.manual_seed(seed)
    ddp = trireme.DistributedDataParallel(make_net(), compression=method)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    drawn = torch.Generator().manual_seed(seed)
    tests = draw(TESTED, drawn)
    for _ in range(steps):
        inputs, targets = (rows[rank::RANKS] for rows in draw(ROWS, drawn))
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        decay.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(ddp(tests[0]), tests[1]))


def main() -> None:
    import trireme

    seeds, steps, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ctx = trireme.init()
    losses: dict[str, dict[str, list[float]]] = {}
    for data, make in DATA.items():
        task = make()
        losses[data] = {
            name: [_loss_of(task, method, seed, steps, ctx.rank) for seed in range(seeds)]
            for name, method in _methods().items()
        }
    if ctx.rank == 0:
        Path(path).write_text(json.dumps(losses))
    trireme.shutdown()


if __name__ == "__main__":
    main()
