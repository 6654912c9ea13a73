"""Logging that speaks once per run, not once per rank."""

import logging

import torch.distributed as dist

from trireme import _C


def get_logger(name: str = "trireme") -> logging.Logger:
    """A logger whose lines begin with ``[rank/world]`` and whose news come from rank 0 alone.

    Rank 0 prints INFO and above to stderr, the other ranks WARNING and above, so that trouble on
    any rank is seen. ``name`` other than ``trireme`` gives a child of it. Works before ``init()``
    (the rank then comes from the environment) and after ``shutdown()``. Levels and further
    handlers are set as on any logger.
    """
    root = logging.getLogger("trireme")
    if not any(isinstance(handler, _RankHandler) for handler in root.handlers):
        root.addHandler(_RankHandler())
        root.setLevel(logging.INFO)
        root.propagate = False  # a configured root logger would print every line again
    return root if name == "trireme" else root.getChild(name.removeprefix("trireme."))


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Asks for the rank at each line: a logger often is made before ``init()``."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(place)s] %(message)s"))

    def handle(self, record: logging.LogRecord) -> bool:
        rank, world = _rank_and_world()
        if rank != 0 and record.levelno < logging.WARNING:
            return False
        record.place = f"{rank}/{world}"
        return bool(super().handle(record))


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        environment = _C.read_launch_environment()
    except ValueError:  # init() will say it; a line of the log must not
        return 0, 1
    return environment.rank, environment.world
