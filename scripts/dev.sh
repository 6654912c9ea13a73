#!/usr/bin/env bash
# Everything that `make` does, each part done once:
#   scripts/dev.sh setup         compiler, Python, the environment with torch and the tools
#   scripts/dev.sh build         setup, then libtrireme, the Python module, the C++ tests and examples;
#                                build/current leads to them
#   scripts/dev.sh run COMMAND   build, then COMMAND with the environment's tools and this build
# Settings: VENV=<environment to use or make>  TORCH=<version>  PYTHON=<interpreter for a new environment>
#           CMAKE_FLAGS="-D..."  BUILD=<build folder>  TOOLS=<requirements file>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools="${TOOLS:-scripts/tools.txt}"
torch="${TORCH:-}"
python="${PYTHON:-python3}"

# The newest torch that there is for this Python.
default_torch() {
  local newest=2.15.0
  if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 11))' 2>/dev/null; then newest=2.14.1; fi
  echo "$newest"
}

if [ -z "${VENV:-}" ]; then
  VENV=".venv"
  if [ -n "$torch" ] && [ "$torch" != "$(default_torch)" ]; then VENV=".venv-torch$torch"; fi
fi

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

# --- what the machine must have -------------------------------------------------------------------

compiler_is_fine() {
  local compiler="${CXX:-g++}"
  command -v "$compiler" >/dev/null || return 1
  case "$("$compiler" --version | head -n 1)" in
    *clang*) return 0 ;;
    *) [ "$("$compiler" -dumpversion | cut -d. -f1)" -ge 10 ] ;;
  esac
}

python_is_fine() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

python_has_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

# Appends to `packages` (for apt) and `lacking` (for people) what is missing.
look_at_host() {
  packages=() lacking=()
  if ! compiler_is_fine; then
    packages+=(g++) lacking+=("g++ >= 10")
  fi
  if [ ! -x "$VENV/bin/python" ] && ! python_is_fine "$python"; then
    packages+=(python3 python3-venv) lacking+=("python3 >= 3.10 with venv")
  fi
  if ! python_has_headers "$python"; then
    packages+=(python3-dev) lacking+=("the headers of $python")
  fi
}

may_install() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

apt_install() {
  say "apt-get install $*"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "$@"; } >"$state/apt.log" 2>&1
}

has_catch2() { compgen -G '/usr/include/catch2*' >/dev/null || compgen -G '/usr/local/include/catch2*' >/dev/null; }

setup_host() {
  look_at_host
  if [ ${#packages[@]} -gt 0 ]; then
    may_install || die "missing: $(join_comma "${lacking[@]}"). Run: sudo apt-get install -y ${packages[*]}"
    apt_install "${packages[@]}" || die "apt-get failed, see $state/apt.log"
    look_at_host
    [ ${#lacking[@]} -eq 0 ] || die "still missing after apt-get: $(join_comma "${lacking[@]}")"
  fi

  # Wanted, not needed. A failed attempt is not repeated.
  local wanted=()
  has_catch2 || wanted+=(catch2)
  command -v ccache >/dev/null || wanted+=(ccache)
  if [ ${#wanted[@]} -gt 0 ] && may_install && [ ! -e "$state/tried-apt" ]; then
    touch "$state/tried-apt"
    apt_install "${wanted[@]}" || say "could not install ${wanted[*]}, going on without"
  fi
}

join_comma() { local IFS=,; printf '%s' "${*//,/;}" | sed 's/,/, /g'; }

# --- the environment ------------------------------------------------------------------------------

torch_of() {
  "$1" -c 'import importlib.metadata as m
try: print(m.version("torch").split("+")[0])
except m.PackageNotFoundError: pass'
}

setup_venv() {
  if [ ! -x "$VENV/bin/python" ]; then
    say "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
  fi
  python="$VENV/bin/python"

  local found
  found="$(torch_of "$python")"
  if [ -n "$found" ] && [ -n "$torch" ] && [ "$found" != "$torch" ]; then
    die "got torch $found in $VENV, expected TORCH=$torch. Name another VENV, or leave TORCH out."
  fi

  local torch_line="torch==${found:-${torch:-$(default_torch)}}" key stamp
  key="$({ realpath "$VENV"; echo "$torch_line $tools"; cat scripts/*.txt; } | cksum | cut -d' ' -f1)"
  stamp="$state/packages-$key"
  [ ! -e "$stamp" ] || return 0
  say "installing $torch_line and what $tools lists into $VENV"
  "$python" -m pip install --quiet --disable-pip-version-check "$torch_line" -r "$tools"
  touch "$stamp"
}

setup() {
  state="build/.setup"
  mkdir -p "$state"
  if [ -x "$VENV/bin/python" ]; then python="$VENV/bin/python"; fi
  setup_host
  setup_venv
  PATH="$(cd "$VENV/bin" && pwd):$PATH"
  export PATH
}

# --- the build ------------------------------------------------------------------------------------

build() {
  setup
  local tag
  tag="$(python -c 'import sys; print(f"cp{sys.version_info.major}{sys.version_info.minor}")')"
  tag="$tag-torch$(torch_of python | cut -d. -f1,2)"  # the name that setup.py uses, so both share it
  BUILD="${BUILD:-build/$tag}"
  # shellcheck disable=SC2086  # CMAKE_FLAGS is a list of words
  cmake -S . -B "$BUILD" -G Ninja --log-level=WARNING -DTRIREME_RELOCATABLE=OFF \
    -DPython3_EXECUTABLE="$(command -v python)" ${CMAKE_FLAGS:-} >"$state/configure.log" 2>&1 ||
    { cat "$state/configure.log" >&2; die "CMake could not configure $BUILD"; }
  cmake --build "$BUILD" -j "$(nproc)"
  ln -sfn "$(realpath "$BUILD")" build/current
  export BUILD
  PYTHONPATH="$(pwd)/$BUILD/python${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
}

case "${1:-}" in
  setup) setup ;;
  build) build ;;
  run) shift; build; exec "$@" ;;
  tool) shift; setup; exec "$@" ;;
  *) sed -n '2,8p' "${BASH_SOURCE[0]}" | cut -c3-; exit 2 ;;
esac
