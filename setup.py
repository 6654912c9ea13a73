"""Packaging: everything is built by the one CMake project; this file only calls it.

One wheel serves one Python and one torch minor version, because torch's C++ classes change between
minors; with CUDA kernels, one CUDA. Its version says so: 0.1.0+torch2.15.cu132, or .cpu without the
kernels. The sdist serves all and is 0.1.0.

The environment may say TRIREME_CUDA=ON (or OFF), and CMAKE_ARGS.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
FOR_ALL = "sdist" in sys.argv  # pip and build call commands by their names, too


def torch_minor() -> str:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(
            "[setup] no torch found, expected torch >= 2.11 in the environment that builds. "
            "Install it there first, then run: pip install --no-build-isolation ."
        )
    return ".".join(version.split(".")[:2])


def tool_path() -> str:
    """PATH with this interpreter's scripts first: a venv's pip may run while no venv is active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def cmake(*arguments: object) -> None:
    env = {**os.environ, "PATH": tool_path()}
    env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    program = shutil.which("cmake", path=env["PATH"])
    if program is None:
        sys.exit("[setup] no cmake found, expected >= 3.22. Run: pip install cmake ninja")
    subprocess.run([program, *map(str, arguments)], check=True, env=env)


def build_folder() -> Path:
    """The folder that scripts/dev.sh builds in, so that what is there is used."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return ROOT / "build" / f"{python}-torch{torch_minor()}"


def configure(*settings: str) -> None:
    """Decides what is built.

    The first time, the files of a folder are compiled together, which halves the time. A build
    folder that was configured otherwise stays as it is.
    """
    folder = build_folder()
    first = not (folder / "CMakeCache.txt").exists()
    ninja = shutil.which("ninja", path=tool_path())
    cuda = os.environ.get("TRIREME_CUDA")
    cmake(
        *("-S", ROOT, "-B", folder),
        *(["-G", "Ninja"] if first and ninja else []),
        *(["-DTRIREME_UNITY=ON"] if first else []),
        *([f"-DTRIREME_CUDA={cuda}"] if cuda else []),
        f"-DPython3_EXECUTABLE={sys.executable}",
        *settings,
        *shlex.split(os.environ.get("CMAKE_ARGS", "")),
    )


def local_version() -> str:
    """What the version has from its `+` on, as CMake decided it."""
    build_info = build_folder() / "python" / "trireme" / "_build_info.py"
    found = re.search(r'^VERSION = "[^+"]*([^"]*)"', build_info.read_text(), re.MULTILINE)
    assert found is not None  # cmake/build_info.py.in
    return found[1]


class TaggedVersion(egg_info):
    """Adds the local version to what pyproject.toml says, for all but the sdist."""

    def finalize_options(self) -> None:
        if not FOR_ALL:
            configure()
            self.tag_build = local_version()
        super().finalize_options()


class CMakeBuild(build_ext):
    """Builds with CMake and installs what it made into the Python package.

    run() is replaced, not build_extension(): for an editable installation setuptools copies back
    only the files that it knows as extensions, and the library beside the module would be lost.
    """

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = (ROOT / "python" if in_place else Path(self.build_lib).resolve()) / "trireme"
        # A wheel travels to other machines, so it must not search this one's paths.
        configure(f"-DTRIREME_RELOCATABLE={'OFF' if in_place else 'ON'}")
        build = build_folder()
        cmake("--build", build, "--target", "trireme", "_C")

        for stale in [*package.glob("_C*.so"), package / "lib", package / "include"]:
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        cmake("--install", build, "--component", "core", "--prefix", package)
        cmake("--install", build, "--component", "python", "--prefix", package)

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_outputs(self) -> list[str]:
        return []


setup(
    ext_modules=[Extension("trireme._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "egg_info": TaggedVersion},
    install_requires=["torch>=2.11,<2.16" if FOR_ALL else f"torch=={torch_minor()}.*"],
)
