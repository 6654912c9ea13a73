"""The versions of other frameworks with which Trireme is tested."""

from __future__ import annotations

import warnings
from importlib import import_module

from trireme import _C
from trireme._C import error_text

# scripts/integration_tools.txt installs them.
TESTED = {
    "lightning": "2.6",
    "pytorch_lightning": "2.6",
    "lightning_fabric": "2.6",
    "accelerate": "1.15",
    "transformers": "5.23",
    "ray": "2.60",
}

_said: set[str] = set()


def say_if_untested(package: str) -> None:
    """Warns once, on rank 0, if another minor version of ``package`` is installed."""
    installed, tested = version_of(package), TESTED[package]
    if package in _said or installed.split(".")[:2] == tested.split("."):
        return
    _said.add(package)
    if _C.read_launch_environment(None, None).rank == 0:
        got = f"got {package} {installed}, expected {tested}, with which Trireme is tested"
        next_step = f"If it fails, install {package}~={tested}.0."
        warnings.warn(error_text("integrations", got, next_step), stacklevel=2)


def version_of(package: str) -> str:
    """Returns what the package says of itself; ``lightning_fabric`` comes with others, too."""
    return str(import_module(package).__version__)
