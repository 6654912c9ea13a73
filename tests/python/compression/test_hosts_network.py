"""What ranks of two network namespaces exchange over Gloo has the bits of one host's exchange."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from trireme import compression as c

from harness.meeting import group_of_ranks
from harness.network_hosts import ENVIRONMENT, join, two_hosts_or_skip
from harness.ranks import run_ranks

LAYOUT = "aab"
WIDTH = 417  # rows that three ranks do not share evenly; codes and shards of more than 64 KiB


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def step(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):  # what one step exchanges begins while another step's memory is reused
        model.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()


def exchanged(rank: int) -> list[Tensor]:
    """Gradients that were gathered as codes, and shards of gradients that were scattered."""
    coded = trireme.DistributedDataParallel(make(), compression=c.Int8(between="ranks"))
    sharded = trireme.fully_shard(make())
    for model in (coded, sharded):
        step(model, rank)
    found = [it.grad for it in coded.parameters()]
    found += [it.grad.to_local() for it in sharded.parameters()]
    return [it.clone() for it in found]


def together(rank: int) -> list[Tensor]:
    with group_of_ranks("gloo"):
        return exchanged(rank)


def apart(rank: int, hosts: list[str]) -> list[Tensor]:
    join(rank, hosts, LAYOUT, "gloo")
    found = exchanged(rank)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts_or_skip() as names:
        yield names


def test_links_change_no_bit(hosts: list[str]) -> None:
    on_one_host = run_ranks(together, len(LAYOUT))
    over_a_link = run_ranks(apart, len(LAYOUT), hosts, timeout=60, env=ENVIRONMENT)
    for one, other in zip(on_one_host, over_a_link, strict=True):
        assert len(one) == len(other) == 8
        assert all(map(torch.equal, one, other))
