"""``python -m trireme``: which installation this is, where a C++ build finds it; doctor, plan."""

import argparse
import importlib
import sys
from pathlib import Path

from trireme.cli.doctor import add_doctor, examine
from trireme.cli.plan import add_plan, plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trireme", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    add_doctor(commands)
    add_plan(commands)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the folder for CMake: cmake -DTrireme_DIR=$(python -m trireme --cmake-dir)",
    )
    asked.add_argument("--version", action="store_true", help="print what this build was made for")
    arguments = parser.parse_args()

    if arguments.command == "doctor":
        return examine(arguments)
    if arguments.command == "plan":
        return plan(arguments)
    if not arguments.version and not arguments.cmake_dir:
        parser.error("one of doctor, plan, --cmake-dir, --version is required")
    if arguments.version:
        built = importlib.import_module("trireme._build_info")
        made_for = f"torch {built.TORCH_VERSION}, Python {built.PYTHON_VERSION}"
        print(f"trireme {built.VERSION} for {made_for}")
        return 0

    config = Path(__file__).parent / "lib" / "cmake" / "Trireme"
    if not config.is_dir():
        print(
            f"[cmake_dir] got a Trireme that runs from a build tree, expected {config}. "
            "Install it: pip install, or cmake --install <build> --prefix <where>.",
            file=sys.stderr,
        )
        return 1
    print(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
