"""Whole programs in fresh processes, as users write and start them."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from harness.forked_programs import run_command

PROGRAMS = Path(__file__).parent / "programs"


def loss_of_one_process() -> str:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    for _ in range(2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long))
        loss.backward()
        optimizer.step()
    return f"{loss.item():.3f}"


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    printed = run_command([sys.executable, str(PROGRAMS / "accelerate_ddp.py")], 2)
    assert printed.split() == ["trireme", "trireme.ddp", loss_of_one_process()]


def test_fabric_starts_its_ranks() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    printed = run_command([sys.executable, str(PROGRAMS / "fabric_ddp.py")], 1)
    assert printed.split() == ["trireme", loss_of_one_process(), "1"]
