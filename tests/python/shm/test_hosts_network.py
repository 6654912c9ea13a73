"""What collectives of the backend ``trireme`` send from host to host, counted at the interface."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from harness.network_hosts import ENVIRONMENT, about, join, of_hosts, sent_bytes, two_hosts_or_skip
from harness.ranks import run_ranks

MIB = 1 << 20
WORLD = 4
NUMEL = 2 * MIB  # elements of fp32: 8 MiB
PAYLOAD = 4 * NUMEL


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with two_hosts_or_skip() as names:
        yield names


def all_reduce(rank: int) -> None:
    tensor = torch.full((NUMEL,), float(rank))
    dist.all_reduce(tensor)
    assert torch.all(tensor == sum(range(WORLD)))


def reduce_scatter(rank: int) -> None:
    output = torch.empty(NUMEL // WORLD)
    dist.reduce_scatter_tensor(output, torch.full((NUMEL,), float(rank)))
    assert torch.all(output == sum(range(WORLD)))


def all_gather(rank: int) -> None:
    output = torch.empty(NUMEL)
    dist.all_gather_into_tensor(output, torch.full((NUMEL // WORLD,), float(rank)))
    assert torch.equal(output[:: NUMEL // WORLD], torch.arange(float(WORLD)))


def broadcast(rank: int) -> None:
    tensor = torch.full((NUMEL,), float(rank))
    dist.broadcast(tensor, 1)
    assert torch.all(tensor == 1)


COLLECTIVES = (all_reduce, reduce_scatter, all_gather, broadcast)


def count(rank: int, hosts: list[str], layout: str, backend: str) -> list[int]:
    """What this rank's host sends in each of the collectives."""
    join(rank, hosts, layout, backend)
    sent = []
    for collective in COLLECTIVES:
        collective(rank)  # connections are slow to start
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        collective(rank)
        dist.barrier()
        sent.append(sent_bytes() - before)
        dist.barrier()
    dist.destroy_process_group()
    return sent


def by_host(hosts: list[str], layout: str, backend: str) -> dict[Callable[[int], None], list[int]]:
    sent = run_ranks(count, WORLD, hosts, layout, backend, timeout=90, env=ENVIRONMENT)
    first = of_hosts(layout, sent)
    return {collective: [host[at] for host in first] for at, collective in enumerate(COLLECTIVES)}


@pytest.mark.parametrize("layout", ["aabb", "abbb", "abab"])
def test_every_byte_crosses_once(hosts: list[str], layout: str) -> None:
    sent = by_host(hosts, layout, "trireme")
    here = [layout.count(host) / WORLD for host in "ab"]  # the part of the ranks
    root = "ab".index(layout[1])
    expected = {
        all_reduce: [PAYLOAD, PAYLOAD],
        reduce_scatter: [PAYLOAD * here[1], PAYLOAD * here[0]],
        all_gather: [PAYLOAD * here[0], PAYLOAD * here[1]],
        broadcast: [PAYLOAD if host == root else 0 for host in (0, 1)],
    }
    for collective, bytes_of_hosts in expected.items():
        for host, bytes_ in enumerate(bytes_of_hosts):
            low, high = about(bytes_)
            case = (collective.__name__, host, sent[collective])
            assert low <= sent[collective][host] <= high, case


def test_gloo_alone_sends_more(hosts: list[str]) -> None:
    """Ranks and counters are the same, so that the numbers above mean something."""
    sent = by_host(hosts, "aabb", "gloo")
    assert min(sent[all_reduce]) > 1.4 * PAYLOAD, sent[all_reduce]
    apart = by_host(hosts, "abab", "gloo")
    assert min(apart[all_reduce]) > 2.8 * PAYLOAD, apart[all_reduce]
