"""What a step of fully_shard sends from host to host, counted at the interface; and torch's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from harness.network_hosts import (
    ENVIRONMENT,
    about,
    join,
    of_hosts,
    sent_bytes,
    skip_without_namespaces,
    two_hosts_or_skip,
)
from harness.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parents[3]
STEPS = 2  # that are counted


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts_or_skip() as names:
        yield names


def make(shard: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            shard(layer, **options)
    shard(model, **options)
    return model


PARAMETER_BYTES = 4 * (512 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512)


def count_step(model: Any) -> float:
    """What this rank's host sends in one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 512)).square().mean().backward()
            optimizer.step()
        dist.barrier()

    train(3)
    before = sent_bytes()
    dist.barrier()
    train(STEPS)
    sent = sent_bytes() - before
    dist.barrier()
    return sent / STEPS


def count_parameters(model: Any) -> float:
    """What it sends until written parameters are there."""
    model.unshard()
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    for _ in range(STEPS):
        with trireme.writing(model):
            pass
        model.unshard()
    dist.barrier()
    sent = sent_bytes() - before
    dist.barrier()
    return sent / STEPS


def ours(rank: int, hosts: list[str], layout: str) -> dict[str, float]:
    join(rank, hosts, layout, "trireme")
    model = make(trireme.fully_shard)
    sent = {"step": count_step(model), "parameters": count_parameters(model)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    halved = make(trireme.fully_shard, mp_policy=policy)
    count_step(halved)
    sent["bf16"] = count_parameters(halved)
    dist.destroy_process_group()
    return sent


def torchs(rank: int, hosts: list[str], layout: str) -> dict[str, float]:
    join(rank, hosts, layout, "gloo")
    sent = {"step": count_step(make(torch_fully_shard))}
    sent["kept"] = count_step(make(torch_fully_shard, reshard_after_forward=False))
    dist.destroy_process_group()
    return sent


def by_host(program: Any, hosts: list[str], layout: str) -> list[dict[str, float]]:
    sent = run_ranks(program, len(layout), hosts, layout, timeout=60, env=ENVIRONMENT)
    return of_hosts(layout, sent)


@pytest.mark.parametrize("layout", ["aabb", "abbb"])
def test_bytes_of_a_step(hosts: list[str], layout: str) -> None:
    """Each host receives each foreign shard, and what others computed of its gradients, once."""
    sent = by_host(ours, hosts, layout)
    for host, of_host in enumerate(sent):
        here = layout.count("ab"[host]) / len(layout)  # the part of the ranks, and of the shards
        expected = {
            "step": PARAMETER_BYTES * here + PARAMETER_BYTES * (1 - here),
            "parameters": PARAMETER_BYTES * here,
            "bf16": PARAMETER_BYTES * here / 2,
        }
        for what, bytes_ in expected.items():
            low, high = about(bytes_)
            assert low <= of_host[what] <= high, (what, host, bytes_, sent)
    theirs = by_host(torchs, hosts, layout)
    total, kept = (sum(host[what] for host in theirs) for what in ("step", "kept"))
    assert sum(host["step"] for host in sent) <= 0.36 * total, (sent, theirs)
    assert sum(host["step"] for host in sent) <= 0.5 * kept, (sent, theirs)


def test_the_example(tmp_path: Path) -> None:
    """Two hosts with process and network namespaces of their own, under torchrun."""
    skip_without_namespaces()
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    script = REPOSITORY / "examples" / "two_hosts.sh"
    program = REPOSITORY / "examples" / "python" / "train_fsdp.py"
    finished = subprocess.run(
        ["bash", str(script), str(program), str(text), "21"],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHON": sys.executable},
        check=False,
    )
    if "namespaces are not possible here" in finished.stderr:
        pytest.skip(finished.stderr)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "ranks are on 2 hosts" in finished.stderr, finished.stderr
    losses = [float(text) for text in re.findall(r"step +\d+ +loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0], finished.stdout
    assert len(re.findall(r"host \d sent [\d.]+ MiB", finished.stdout)) == 2
