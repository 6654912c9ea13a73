"""Parameters of what is defined, in words that two processes can compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trireme.remote.areas import AREA

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Default:
    """Shows a default by a text that is the same in every process."""

    def __init__(self, value: object) -> None:
        self.text = _shown(value)

    def __repr__(self) -> str:
        return self.text


def _shown(value: Any) -> str:
    kind = type(value)
    if kind in (set, frozenset):  # its order is another one in each process
        return "{" + ", ".join(sorted(map(_shown, value))) + "}"
    if kind in (list, tuple):  # they may hold a set
        return f"{kind.__name__}(" + ", ".join(map(_shown, value)) + ")"
    if kind is dict:
        return "{" + ", ".join(f"{_shown(k)}: {_shown(v)}" for k, v in value.items()) + "}"
    text = repr(value)
    return f"<{type(value).__qualname__}>" if " at 0x" in text else text


def parameters_of(function: Callable[..., Any], *, skip: int = 0) -> tuple[str, int]:
    """Returns the parameters behind the first ``skip`` as a text, and how many; -1 if that varies.

    Raises:
        ValueError: one is called "timeout", which is a keyword of every call.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function of C may not say
        return "(...)", -1
    parameters = list(signature.parameters.values())
    if not (parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL):
        parameters = parameters[skip:]
    if any(parameter.name == "timeout" for parameter in parameters):
        got = f"got a parameter called timeout of {function.__qualname__}"
        AREA.refuse(got, "Give it another name: timeout= is a keyword of every call.")
    plain = [_plain(parameter) for parameter in parameters]
    varies = any(parameter.kind in _MANY for parameter in parameters)
    return str(inspect.Signature(plain)), -1 if varies else len(plain)


def _plain(one: inspect.Parameter) -> inspect.Parameter:
    default = one.default
    if default is not inspect.Parameter.empty:
        default = _Default(default)
    return one.replace(annotation=inspect.Parameter.empty, default=default)
