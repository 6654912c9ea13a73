"""What pretended hosts send."""

import numpy as np

from compression.given import SIZES, drawn
from harness.pretended_hosts import LAYOUTS


def hosts_of(layout: str) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    names = LAYOUTS[layout]
    return [
        [rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)
    ]


def of_hosts(layout: str, step: int, parameter: str) -> list[np.ndarray]:
    """What each host codes: its ranks' sum, which counts as much as they are."""
    made = []
    for ranks in hosts_of(layout):
        total = np.zeros(SIZES[parameter], np.float32)
        for rank in ranks:
            total = total + drawn(step, rank)[parameter].numpy()
        share = np.float32(len(hosts_of(layout)) / len(LAYOUTS[layout]))
        made.append((total * share).reshape(-1))
    return made
