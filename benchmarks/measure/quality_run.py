"""What models lose after as many steps under each method of compression, and in rounds.

`train_to_quality` starts this file by torchrun, on two ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from measure.corpus import read_corpus
from measure.ranks import LAST_WORDS_LINES, RankFailed
from measure.stats import PairedRatio
from measure.table import table

BENCHMARKS = Path(__file__).resolve().parents[1]
EXAMPLES = BENCHMARKS.parent / "examples" / "python"
RANKS = 2
ROWS = 64  # of all ranks, in a step
PERIOD = 20  # steps of a round
TESTED = 4096
CONTEXT, CHARACTERS = 16, 128

Rows = tuple[torch.Tensor, torch.Tensor]
Task = tuple[Callable[[int, torch.Generator], Rows], Callable[[], nn.Module]]


def train_to_quality(kind: str, seeds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Returns losses by data and way to train (`kind`: "compression" or "rounds"), one for each
    seed. Raises RankFailed."""
    paths = [str(BENCHMARKS), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="bench") as scratch:
        losses = Path(scratch, "losses.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        finished = subprocess.run(
            [*launch, __file__, kind, str(seeds), str(steps), str(losses)],
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
            env=environment,
        )
        if finished.returncode != 0:
            words = "\n".join(finished.stderr.splitlines()[-LAST_WORDS_LINES:])
            raise RankFailed(f"[bench_{kind}] a rank failed. It printed last:\n{words}")
        return json.loads(losses.read_text())


def compare_losses(
    losses: Mapping[str, Mapping[str, Sequence[float]]], steps: int, targets: Mapping[str, float]
) -> dict[str, Any]:
    """Prints losses beside those of plain DDP, and returns them with the verdicts on `targets`,
    which are ratios by way to train."""
    rows = []
    contests: dict[str, dict[str, Any]] = {}
    for data, of_ways in losses.items():
        plain = of_ways["none"]
        contests[data] = {
            way: PairedRatio.of(of_ways[way], plain, target).to_json()
            for way, target in targets.items()
        }
        for way, found in of_ways.items():
            ratio = statistics.mean(found) / statistics.mean(plain) - 1
            said = contests[data].get(way, {}).get("verdict", "")
            rows.append([data, way, f"{statistics.mean(found):.4f}", f"{ratio:+.2%}", said])
    print(table(["", "", "loss", "beside none", "target"], rows))
    print(flush=True)
    return {"steps": steps, "losses": losses, "contests": contests}


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


@dataclass(frozen=True)
class Way:
    """How a model is trained: what is called, and what steps run inside of."""

    net: nn.Module
    optimizer: Optimizer
    inside: AbstractContextManager[Any]


Make = Callable[[nn.Module], Way]


def _adam(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=2e-3)


def _by_ddp(method: Any, model: nn.Module) -> Way:
    import trireme

    ddp = trireme.DistributedDataParallel(model, compression=method)
    return Way(ddp, _adam(ddp), nullcontext())


def _compressed() -> dict[str, Make]:
    from trireme import compression as c

    made = {
        "Int8": c.Int8,
        "Int4": c.Int4,
        "Sign": c.Sign,
        "TopK 1 %": lambda **options: c.TopK(0.01, **options),
        "PowerSGD 4": lambda **options: c.PowerSGD(4, start_step=10, **options),
    }
    ways: dict[str, Make] = {"none": partial(_by_ddp, None)}
    for name, method in made.items():
        ways[name] = partial(_by_ddp, method(between="ranks"))
        without = method(between="ranks", error_feedback=False)
        ways[f"{name}, no feedback"] = partial(_by_ddp, without)
    return ways


def _local_sgd(model: nn.Module) -> Way:
    import trireme

    optimizer = _adam(model)
    across = dist.group.WORLD
    return Way(
        model, optimizer, trireme.LocalSGD(model, optimizer, sync_every=PERIOD, across=across)
    )


def _diloco(model: nn.Module, outer: Any = None, **options: Any) -> Way:
    import trireme

    optimizer = _adam(model)
    given = {"sync_every": PERIOD, "across": dist.group.WORLD, **options}
    return Way(model, optimizer, trireme.DiLoCo(model, optimizer, outer, **given))


def _sparse(model: nn.Module) -> Way:
    from trireme.compression import TopK

    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    return _diloco(model, outer, compression=TopK(1 / 64, chunk=4096, decay=0.95))


def _in_rounds() -> dict[str, Make]:
    return {
        "none": partial(_by_ddp, None),
        "LocalSGD": _local_sgd,
        "DiLoCo at once": _diloco,
        "DiLoCo in fragments": partial(_diloco, fragments=4, fragment_sync_delay=2),
        "SparseLoCo": _sparse,
    }


WAYS: dict[str, Callable[[], dict[str, Make]]] = {"compression": _compressed, "rounds": _in_rounds}


def _loss_of(task: Task, make: Make, seed: int, steps: int, rank: int) -> float:
    """Trains; returns the loss on rows of their own."""
    draw, make_net = task
    torch.manual_seed(seed)
    way = make(make_net())
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(way.optimizer, steps)
    drawn = torch.Generator().manual_seed(seed)
    tests = draw(TESTED, drawn)
    with way.inside:
        for _ in range(steps):
            inputs, targets = (rows[rank::RANKS] for rows in draw(ROWS, drawn))
            way.optimizer.zero_grad()
            nn.functional.cross_entropy(way.net(inputs), targets).backward()
            way.optimizer.step()
            decay.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(way.net(tests[0]), tests[1]))


def main() -> None:
    import trireme

    kind, seeds, steps, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ctx = trireme.init()
    losses: dict[str, dict[str, list[float]]] = {}
    for data, make in DATA.items():
        task = make()
        losses[data] = {
            name: [_loss_of(task, make_way, seed, steps, ctx.rank) for seed in range(seeds)]
            for name, make_way in WAYS[kind]().items()
        }
    if ctx.rank == 0:
        Path(path).write_text(json.dumps(losses))
    trireme.shutdown()


if __name__ == "__main__":
    main()
