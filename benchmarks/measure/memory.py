"""What a process holds: resident memory, page faults, and the memory of tensors by kind."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, UntypedStorage
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = resource.getpagesize()
WARM_BYTES = 31 << 20  # glibc adapts itself to blocks of up to 32 MiB


def peak_rss_mib() -> float:
    """The most that was ever resident in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def minor_faults() -> int:
    """Pages that this process has touched for the first time (or again, after giving them back)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def written_mib(process: int) -> float:
    """What another process has written: its share of the host's memory, without mapped files."""
    shares = _kib_fields(f"/proc/{process}/smaps_rollup")
    return (shares["Pss_Anon"] + shares["Pss_Shmem"]) / 1024


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


def without_files_mib(rank: dict[str, float]) -> float:
    """Returns, of what `resident_mib` says, what the process and its peers have written."""
    return rank["pss_anon"] + rank["pss_shmem"]


def host_pss_mib(ranks: list[dict[str, float]]) -> float:
    """What a strategy alone would hold on this host: every shared page counted once."""
    return sum(map(without_files_mib, ranks)) + max(rank["rss_file"] for rank in ranks)


def give_back_unused() -> None:
    """Garbage is collected, and what malloc has kept of freed memory goes back to the system."""
    gc.collect()
    _LIBC.malloc_trim(0)


def keep_heap_warm() -> None:
    """glibc's malloc keeps up to 64 MiB of what is freed, for every side alike.

    Trireme's reducer does this by itself (csrc/memory/warm_heap.h), and a step of torch's DDP gains
    a tenth by it; so no side is shown without.
    """
    _LIBC.malloc.restype = ctypes.c_void_p
    _LIBC.free(ctypes.c_void_p(_LIBC.malloc(ctypes.c_size_t(WARM_BYTES))))


def tensor_mib(tensors: Iterable[Tensor], sharers: int = 1) -> float:
    """Memory of the storages under `tensors`: pages that nobody has written to take none.

    Views of one storage (a bucket) count once. What other processes map, too, counts as 1/sharers,
    so that the sum over the ranks of a host has it once, as with PSS. Of a DTensor it is this
    rank's shard, which nobody shares.
    """
    shared = _shared_mappings()
    total = {}
    for tensor in tensors:
        storage = local_of(tensor).untyped_storage()
        begin = storage.data_ptr()
        is_shared = not is_sharded(tensor) and any(begin in mapping for mapping in shared)
        total[begin] = _resident_bytes(storage) / (sharers if is_shared else 1)
    return sum(total.values()) / 2**20


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. To ask for the class would import it, on ranks that need it not."""
    return hasattr(tensor, "to_local")


def local_of(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def optimizer_state(optimizer: Optimizer) -> list[Tensor]:
    """Momenta and everything else that this rank's optimizer keeps per parameter."""
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    values = (value for state in local.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def _resident_bytes(storage: UntypedStorage) -> int:
    begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if begin == end:
        return 0
    first = begin // _PAGE * _PAGE
    pages = (ctypes.c_ubyte * -(-(end - first) // _PAGE))()
    if _LIBC.mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    missing = sum(
        min(end, first + (i + 1) * _PAGE) - max(begin, first + i * _PAGE)
        for i, page in enumerate(pages)
        if not page & 1
    )
    return end - begin - missing


def _shared_mappings() -> list[range]:
    """Addresses that a write by another process may change."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions = line.split()[:2]
        if permissions.endswith("s"):
            begin, end = addresses.split("-")
            found.append(range(int(begin, 16), int(end, 16)))
    return found


def _kib_fields(path: str) -> dict[str, int]:
    fields = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            fields[name] = int(value.split()[0])
    return fields
