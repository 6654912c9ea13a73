"""How a benchmark script ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from measure.bad_input import BadInput
from measure.ranks import RankFailed


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns; 2 for BadInput and 3 for RankFailed, whose text is printed; 130, as
    shells have it, for Ctrl-C."""
    try:
        return run()
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
