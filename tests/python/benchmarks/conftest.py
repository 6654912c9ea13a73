"""What benchmarks set for the processes that they start ends with each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A benchmark is a program: its main() may silence the ranks that inherit its environment."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
