"""What GradScalers of several ranks tell each other."""

from __future__ import annotations

from trireme._C import Communicator, gather_texts


def on_any_rank(found_inf: bool, ranks: Communicator) -> bool:
    """Says whether any of them has found an inf. Collective: one gather of a number."""
    return any(gather_texts("inf" if found_inf else "", ranks, ranks.device))
