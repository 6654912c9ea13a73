"""What a collective of the backend ``trireme`` sends from host to host, counted at the interface.

The hosts are two network namespaces joined by a virtual cable; their ranks are told that they do
not share memory with each other.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

MIB = 1 << 20
WORLD = 4
INTERFACE = "trireme0"  # in both namespaces
PORT = 29500  # nothing else listens there
NUMEL = 2 * MIB  # of fp32: 8 MiB
PAYLOAD = 4 * NUMEL


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """The names of the namespaces; host h is 10.77.0.(h + 1)."""
    hosts = [f"trireme{os.getpid()}{side}" for side in "ab"]
    ends = [f"tri{os.getpid() % 100000}{side}" for side in "ab"]
    made: list[str] = []
    try:
        for host in hosts:
            ip("netns", "add", host)
            made.append(host)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (host, end) in enumerate(zip(hosts, ends, strict=True), start=1):
            ip("link", "set", end, "netns", host, "name", INTERFACE)
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", INTERFACE)
            ip("-n", host, "link", "set", INTERFACE, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in made:
            ip("netns", "delete", host)  # and the cable with it


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (package iproute2)")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    try:
        stack = two_hosts()
        names = stack.__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not possible here: {error.stderr.strip()}")
    yield names
    stack.__exit__(None, None, None)


def move_to(host: str) -> None:
    """This thread and those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host).open() as namespace:
        if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def sent_bytes() -> int:
    """By the interface of this namespace so far, headers and all."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise AssertionError("no such interface")


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
    host = layout[rank]
    move_to(hosts["ab".index(host)])
    store = dist.TCPStore("10.77.0.1", PORT, is_master=rank == 0, timeout=timedelta(seconds=30))
    options: Any = SimpleNamespace(host_partition=host) if backend == "trireme" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=30),
        pg_options=options,
    )
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
    env = {"GLOO_SOCKET_IFNAME": INTERFACE}
    sent = run_ranks(count, WORLD, hosts, layout, backend, timeout=90, env=env)
    first = [sent[layout.index(host)] for host in "ab"]
    return {one: [host[at] for host in first] for at, one in enumerate(COLLECTIVES)}


def about(bytes_: float) -> tuple[float, float]:
    """With the headers of TCP, and what a few barriers and acknowledgements take."""
    return bytes_, 1.1 * bytes_ + 128 * 1024


@pytest.mark.parametrize("layout", ["aabb", "abbb", "abab"])
def test_every_byte_crosses_once(hosts: list[str], layout: str) -> None:
    sent = by_host(hosts, layout, "trireme")
    here = [layout.count(host) / WORLD for host in "ab"]  # which part of the ranks
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
    """The same ranks and counters, so that the numbers above mean something."""
    sent = by_host(hosts, "aabb", "gloo")
    assert min(sent[all_reduce]) > 1.4 * PAYLOAD, sent[all_reduce]
    apart = by_host(hosts, "abab", "gloo")
    assert min(apart[all_reduce]) > 2.8 * PAYLOAD, apart[all_reduce]
