"""What a process holds: resident memory, page faults, and the bytes of tensors by kind."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer


def peak_rss_mib() -> float:
    """The most that was ever resident in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def minor_faults() -> int:
    """Pages that this process has touched for the first time (or again, after giving them back)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_mib() -> dict[str, float]:
    """This process's share of the host's memory, by what backs it.

    `pss_anon` and `pss_shmem` count a page shared by n processes as 1/n. `rss_file` counts every
    mapped page of files (mostly libraries): its PSS would depend on who else runs torch on the
    host.
    """
    shares = _kib_fields("/proc/self/smaps_rollup")
    status = _kib_fields("/proc/self/status")
    return {
        "pss_anon": shares["Pss_Anon"] / 1024,
        "pss_shmem": shares["Pss_Shmem"] / 1024,
        "rss_file": status["RssFile"] / 1024,
    }


def host_pss_mib(ranks: list[dict[str, float]]) -> float:
    """What a strategy alone would hold on this host: every shared page counted once."""
    private_and_shared = sum(rank["pss_anon"] + rank["pss_shmem"] for rank in ranks)
    return private_and_shared + max(rank["rss_file"] for rank in ranks)


def tensor_mib(tensors: Iterable[Tensor]) -> float:
    """Memory of the storages under `tensors`; views of one storage (a bucket) count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values()) / 2**20


def optimizer_state_mib(optimizer: Optimizer) -> float:
    """Momenta and everything else that the optimizer keeps per parameter."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return tensor_mib(value for value in states if isinstance(value, Tensor))


def _kib_fields(path: str) -> dict[str, int]:
    fields = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            fields[name] = int(value.split()[0])
    return fields
