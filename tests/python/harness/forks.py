"""Children of a rank by fork(), which are copies of it."""

import os
from collections.abc import Callable


def in_child(program: Callable[[], bool]) -> bool:
    """What ``program`` finds in a child of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if program() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
