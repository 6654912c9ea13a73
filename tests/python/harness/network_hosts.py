"""Two hosts on one machine: network namespaces joined by a virtual cable, whose traffic is counted
at the interface.

Ranks of different hosts are told that they do not share memory (``host_partition``).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

INTERFACE = "trireme0"  # in both namespaces
PORT = 29500  # nothing else listens there
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}


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
            ip("netns", "delete", host)  # the cable goes with it


@contextmanager
def two_hosts_or_skip() -> Iterator[list[str]]:
    """Does what `two_hosts` does, for a fixture."""
    skip_without_namespaces()
    stack = two_hosts()
    try:
        names = stack.__enter__()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not possible here: {error.stderr.strip()}")
    yield names
    stack.__exit__(None, None, None)


def skip_without_namespaces() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (package iproute2)")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")


def join(rank: int, hosts: list[str], layout: str, backend: str) -> None:
    """Rank ``rank`` of ``layout`` ("aabb") moves to its host and joins a group of all of them."""
    host = layout[rank]
    _move_to(hosts["ab".index(host)])
    store = dist.TCPStore("10.77.0.1", PORT, is_master=rank == 0, timeout=timedelta(seconds=30))
    options: Any = SimpleNamespace(host_partition=host) if backend == "trireme" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=len(layout),
        timeout=timedelta(seconds=30),
        pg_options=options,
    )


def _move_to(host: str) -> None:
    """This thread and those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", host).open() as namespace:
        if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def sent_bytes() -> int:
    """Counts what the interface of this namespace has sent so far, headers and all."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise AssertionError("no such interface")


def of_hosts(layout: str, by_rank: list[Any]) -> list[Any]:
    """What the first rank of each host says."""
    return [by_rank[layout.index(host)] for host in "ab"]


def about(bytes_: float) -> tuple[float, float]:
    """With the headers of TCP, and what a few barriers and acknowledgements take."""
    return bytes_, 1.1 * bytes_ + 128 * 1024
