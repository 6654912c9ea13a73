"""One rank of bench_hosts.py, started by torchrun on each host (examples/two_hosts.sh).

Trains a workload under a strategy, and writes what its host sends in a step into a file of that.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from measure.rounds import WARM_UP_STEPS
from measure.strategies import STRATEGIES
from measure.worker import RankConfig, Trainer, process_group

SENT = Path("/sys/class/net/trireme0/statistics/tx_bytes")


def main() -> None:
    config, steps, folder = RankConfig.from_json(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with process_group(STRATEGIES[config.strategy]):
        torch.set_num_threads(config.threads)  # after trireme.init(), which sets them
        trainer = Trainer(config, STRATEGIES[config.strategy])
        for _ in range(WARM_UP_STEPS):
            trainer.step()
        dist.barrier()
        before = int(SENT.read_text())
        dist.barrier()
        times = [trainer.step().step_ms for _ in range(steps)]
        dist.barrier()
        sent = (int(SENT.read_text()) - before) / steps
        dist.barrier()
        if os.environ["LOCAL_RANK"] == "0":
            found = {"step_ms": statistics.median(times), "sent_mb": sent / 1e6}
            Path(folder, os.environ["GROUP_RANK"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
