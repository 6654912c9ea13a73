"""Programs of benchmarks/cpp that run as ranks, built beside the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch.distributed as dist

from measure.bad_input import BadInput


def run_cpp_ranks(area: str, name: str, arguments: list[str], world: int) -> str:
    """What rank 0 of `benchmarks/cpp/<name>.cpp` prints. Raises BadInput where it is not built."""
    import trireme

    program = Path(trireme.__file__).absolute().parents[2] / "benchmarks" / "cpp" / name
    if not program.exists():
        raise BadInput(area, f"got no program {program}", f"Build the target {name}.")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [str(program), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
                **{"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
                **{"RANK": str(rank), "WORLD_SIZE": str(world)},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)},
            },
        )
        for rank in range(world)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    for rank in ranks:
        if rank.returncode != 0:
            raise subprocess.CalledProcessError(rank.returncode, rank.args)
    return printed[0]
