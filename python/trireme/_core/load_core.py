"""Loads the compiled module, or says in one sentence why it cannot.

A module built for another torch minor version fails in the dynamic linker with a mangled symbol
name, so what the build was made for is compared before it is loaded.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

_BUILD = "Build Trireme with this interpreter: pip install --no-build-isolation ."


def load_core() -> ModuleType:
    """Import and return ``trireme._C``.

    Raises:
        ImportError: the module was never built, torch is missing or of another minor version than
            it was built for, the interpreter is another one, or a shared library is missing.
    """
    if importlib.util.find_spec("trireme._build_info") is None:
        raise ImportError(f"[import] got Python sources only, expected a build. {_BUILD}")
    built = importlib.import_module("trireme._build_info")

    torch_minor = _minor(built.TORCH_VERSION)
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"[import] got no torch in this environment, expected torch {torch_minor}. "
            f"Install it: pip install 'torch=={torch_minor}.*'"
        )
    import torch

    if _minor(torch.__version__) != torch_minor:
        raise ImportError(
            f"[import] got torch {torch.__version__}, expected torch {torch_minor}, for which this "
            f"Trireme was built. {_BUILD}"
        )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != built.PYTHON_VERSION:
        raise ImportError(
            f"[import] got Python {python}, expected Python {built.PYTHON_VERSION}, for which this "
            f"Trireme was built. {_BUILD}"
        )
    try:
        return importlib.import_module("trireme._C")
    except ImportError as error:
        raise ImportError(
            f"[import] got a compiled module that does not load ({error}), expected one that was "
            f"built here. {_BUILD}"
        ) from None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
