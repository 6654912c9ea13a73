"""Exceptions of a callee: how they are described there, and raised here."""

from __future__ import annotations

import builtins
import traceback
from typing import NoReturn

import torch.distributed as dist

from trireme import _C
from trireme._core.errors import note

# An exception of these would mean something else where it is raised again.
_CHANGED = (StopIteration, StopAsyncIteration)


def describe(error: BaseException) -> tuple[str, str, str, str]:
    """Returns type, module, text and traceback, each of which UTF-8 has."""
    kind = type(error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    described = (kind.__qualname__, kind.__module__, _text_of(error), trace)
    name, module, text, trace = (_sendable(text) for text in described)
    return name, module, text, trace


def _text_of(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and type(error.args[0]) is str:
        return error.args[0]  # str() would have it in quotation marks
    try:
        return str(error)
    except Exception:
        return "<its text cannot be made>"


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def raise_failure(kind: str, module: str, text: str, trace: str, where: str) -> NoReturn:
    """Raises what a call ended with at its callee; ``where`` is "function add at p1 (rank 1)"."""
    error = _made(kind, module, text)
    note(error, f"[remote] raised by {where}" + (f"\n{trace}" if trace else ""))
    raise error


def _made(kind: str, module: str, text: str) -> Exception:
    """Makes an exception of the same type where that is built in, else a RuntimeError."""
    found = None
    if module == "builtins":
        found = getattr(builtins, kind, None)
    elif module == "torch.distributed" and kind == "DistBackendError":
        found = dist.DistBackendError
    if isinstance(found, type) and issubclass(found, Exception) and found not in _CHANGED:
        try:
            return found(text)
        except TypeError:  # it takes more than a text
            pass
    name = kind if module == "builtins" else f"{module}.{kind}"
    return RuntimeError(f"{name}: {text}")


_C.remote_use_describer(describe)
_C.remote_use_raiser(raise_failure)
