"""Packaging: everything is built by the one CMake project; this file only calls it.

One wheel serves one Python and one torch minor version, because torch's C++ classes change between
minors.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


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


class CMakeBuild(build_ext):
    """Builds with CMake and installs what it made into the Python package.

    run() is replaced, not build_extension(): for an editable installation setuptools copies back
    only the files that it knows as extensions, and the library beside the module would be lost.
    """

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        package = (ROOT / "python" if in_place else Path(self.build_lib).resolve()) / "trireme"
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}-torch{torch_minor()}"
        build = ROOT / "build" / tag

        env = {**os.environ, "PATH": tool_path()}
        env.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        cmake = shutil.which("cmake", path=env["PATH"])
        if cmake is None:
            sys.exit("[setup] no cmake found, expected >= 3.22. Run: pip install cmake ninja")
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=env["PATH"]) else []

        def run(*arguments: object) -> None:
            subprocess.run([cmake, *map(str, arguments)], check=True, env=env)

        # A wheel travels to other machines, so it must not search this one's paths.
        settings = [
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DTRIREME_RELOCATABLE={'OFF' if in_place else 'ON'}",
        ]
        run("-S", ROOT, "-B", build, *generator, *settings)
        run("--build", build, "--target", "trireme", "_C")

        for stale in [*package.glob("_C*.so"), package / "lib", package / "include"]:
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
        run("--install", build, "--component", "core", "--prefix", package)
        run("--install", build, "--component", "python", "--prefix", package)

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_outputs(self) -> list[str]:
        return []


setup(
    ext_modules=[Extension("trireme._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[f"torch=={torch_minor()}.*"],
)
