"""Extension modules for tests alone, which are built with the C++ tests."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from trireme import _C

_FOLDER = Path(_C.__file__).parents[2] / "tests" / "cpp"


def why_not(name: str) -> str | None:
    """Says why there is no such module; None if there is."""
    return None if _files_of(name) else f"no C++ tests were built in {_FOLDER}"


@functools.cache
def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, _files_of(name)[0])
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where there is no such module."""
    reason = why_not(name)
    return pytest.mark.skipif(reason is not None, reason=str(reason))


def _files_of(name: str) -> list[Path]:
    return sorted(_FOLDER.glob(f"{name}.*.so"))
