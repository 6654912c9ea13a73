"""What an installation says of itself."""

import re
import subprocess
import sys
from pathlib import Path

import torch
import trireme

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_the_version_says_torch_and_cuda() -> None:
    plain = re.search(r'^version = "(.*)"', PROJECT.read_text(), re.MULTILINE)
    assert plain is not None
    minor = ".".join(torch.__version__.split(".")[:2])
    flavour = trireme.__version__.removeprefix(f"{plain[1]}+torch{minor}.")
    assert re.fullmatch(r"cpu|cu\d+", flavour), trireme.__version__
    # CUDA kernels are there exactly where the version promises them.
    lib = Path(trireme._C.__file__).parent / "lib"
    assert bool(list(lib.glob("libtrireme_cuda-*.so"))) == (flavour != "cpu")


def test_the_command_says_the_same_version() -> None:
    command = [sys.executable, "-m", "trireme", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"trireme {trireme.__version__} for torch ")
