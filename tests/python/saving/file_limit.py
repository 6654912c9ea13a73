"""A limit of how long the files of this process become: a disk that is full, or a death."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def failing_behind(most: int) -> Iterator[None]:
    """Writing further than ``most`` bytes into a file fails: Python ignores the signal of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def die_behind(most: int) -> None:
    """The kernel ends this process when it writes further than ``most`` bytes into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # no dump, neither a file nor by a program
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
