"""Children of a rank by fork(), which are copies of it."""

import os
import sys
import traceback
from collections.abc import Callable


def in_child(program: Callable[[], bool]) -> bool:
    """What ``program`` finds in a child of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if program() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if status:
        print(f"a child of process {os.getpid()} ended with status {status}", file=sys.stderr)
    return status == 0
