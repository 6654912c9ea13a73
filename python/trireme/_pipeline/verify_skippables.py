"""Whether stashes and pops of a Sequential's layers match, in torchgpipe's words."""

from __future__ import annotations

from torch import nn

from trireme._pipeline.skips import declared_names


def verify_skippables(module: nn.Sequential) -> None:
    """Refuses layers whose stashes and pops do not match.

    Raises:
        TypeError: a text with a line for each name that does not match.
    """
    stashed: set[str] = set()
    popped: set[str] = set()
    wrong: list[str] = []
    for layer, child in module.named_children():
        stashes, pops = declared_names(child)
        for key, name in stashes.items():
            if key in pops:
                continue
            if key in stashed:
                wrong.append(f"'{layer}' redeclared '{name}' as stashable")
        for key, name in pops.items():
            if key in stashes:
                wrong.append(f"'{layer}' declared '{name}' both as stashable and as poppable")
            elif key in popped:
                wrong.append(f"'{layer}' redeclared '{name}' as poppable")
            elif key not in stashed:
                wrong.append(f"'{layer}' declared '{name}' as poppable but it was not stashed")
        both = stashes.keys() & pops.keys()
        stashed |= stashes.keys() - both
        popped |= pops.keys() - both
    names = {
        key: name
        for _, child in module.named_children()
        for key, name in declared_names(child)[0].items()
    }
    for key in sorted(stashed - popped):
        wrong.append(f"no module declared '{names[key]}' as poppable but stashed")
    if wrong:
        listed = "\n".join(f"* {text}" for text in wrong)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listed}")
