"""Messages that pages show are those that a user sees."""

import os
import re
import signal

import pytest
import torch
import trireme
from torch import nn

from docs.blocks import ROOT
from harness.ranks import run_ranks


def lose_a_rank(rank: int) -> str:
    trireme.init()
    model = trireme.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    for step in range(8):
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.ones(3, 4)).sum()
        try:
            loss.backward()
        except Exception as error:
            return f"torch.distributed.{type(error).__name__}: {error}"
    raise AssertionError("nobody missed rank 1")


def without_chance(text: str) -> str:
    """Numbers, and what a rank did last, which depends on the number of CPUs, are left out."""
    return re.sub(r"last operation: .*? \(rank|\d+", "...", " ".join(text.split()))


def test_readme_shows_what_a_killed_rank_leaves() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"<!-- shown: killed rank -->\n```text\n(.*?)```", readme, re.S)
    assert shown
    told, _ = run_ranks(lose_a_rank, 2, dying={1})
    if "by SIGKILL" not in told:
        pytest.skip("this kernel does not tell how other processes ended (PIDFD_GET_INFO)")
    assert without_chance(told) == without_chance(shown[1]), told
