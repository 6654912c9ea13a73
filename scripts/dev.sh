#!/usr/bin/env bash
# Everything that `make` does, each part done once; the time of each part is printed.
#   scripts/dev.sh setup               compiler, Python, the environment with torch and the tools
#   scripts/dev.sh build [TARGET...]   setup, then libtrireme, the Python module, the C++ tests and examples, or
#                                      these targets of CMake only; build/current leads to them
#   scripts/dev.sh run COMMAND         build, then COMMAND with the environment's tools and this build
#   scripts/dev.sh core COMMAND        as run, but only libtrireme and the Python module are built
#   scripts/dev.sh test                says how long it will take, then run, with scripts/test.sh as COMMAND
#   scripts/dev.sh demo [OPTION...]    core, with benchmarks/demo.py and its options as COMMAND
#   scripts/dev.sh docs                core, then scripts/docs.sh, which writes the site
#   scripts/dev.sh tool COMMAND        setup, then COMMAND; builds nothing
# Settings: VENV=<environment to use or make>  TORCH=<version>  PYTHON=<interpreter for a new environment>
#           CMAKE_FLAGS="-D..."  BUILD=<build folder>  TOOLS=<requirements file>  TRIREME_CUDA=<AUTO, ON or OFF>
# The first build of a folder decides how it compiles: `core` and `demo` the files of a folder together, which takes
# half the time, `build` and `run` file by file, so that an edit costs one file. CMAKE_FLAGS=-DTRIREME_UNITY=ON (or OFF)
# changes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all_tools=scripts/tools.txt
tools="${TOOLS:-$all_tools}"
unity=OFF
wants_test_tools=yes
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

# took <area> <what> <value of SECONDS at its beginning>: says so, if it took some.
took() { if [ $((SECONDS - $3)) -gt 1 ]; then printf '[%s] %s: %d s\n' "$1" "$2" $((SECONDS - $3)); fi; }

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

  # Wanted by who builds again and again, not needed. A failed attempt is not repeated.
  [ "$wants_test_tools" = yes ] || return 0
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

  local torch_line="torch==${found:-${torch:-$(default_torch)}}"
  ! has_packages "$torch_line" "$tools" || return 0
  ! has_packages "$torch_line" "$all_tools" || return 0
  say "installing $torch_line and what $tools lists into $VENV"
  # Only those lines of pip are shown that tell how far it is: large downloads, and the last one.
  # pip would compile the Python sources on one core, half a minute.
  "$python" -m pip install --no-compile --progress-bar off --disable-pip-version-check "$torch_line" -r "$tools" |
    sed -un -e 's/^ *Downloading \(.*[0-9]\{3\}[.0-9]* MB)\).*/[setup]   downloading \1/p' \
      -e 's/^Installing collected packages.*/[setup]   installing/p'
  "$python" -m compileall -q -j 0 "$VENV/lib" >/dev/null 2>&1 || true  # some packages carry examples of broken code
  touch "$(packages_stamp "$torch_line" "$tools")"
}

# The file that is there when these packages have been installed into the environment.
packages_stamp() {
  local key
  key="$({ realpath "$VENV"; echo "$1 $2"; cat scripts/*.txt; } | cksum | cut -d' ' -f1)"
  echo "$state/packages-$key"
}
has_packages() { [ -e "$(packages_stamp "$@")" ]; }

setup() {
  local began=$SECONDS
  state="build/.setup"
  mkdir -p "$state"
  if [ -x "$VENV/bin/python" ]; then python="$VENV/bin/python"; fi
  setup_host
  setup_venv
  PATH="$(cd "$VENV/bin" && pwd):$PATH"
  export PATH
  took setup "the environment" "$began"
}

# --- the build ------------------------------------------------------------------------------------

default_build() {
  local tag
  tag="$(python -c 'import sys; print(f"cp{sys.version_info.major}{sys.version_info.minor}")')"
  echo "build/$tag-torch$(torch_of python | cut -d. -f1,2)"  # the name that setup.py uses, so both share it
}

configure() {
  local flags=(-DTRIREME_RELOCATABLE=OFF "-DPython3_EXECUTABLE=$(command -v python)")
  if [ ! -e "$BUILD/CMakeCache.txt" ]; then
    flags+=("-DTRIREME_UNITY=$unity")
  elif [ "$unity" = OFF ] && [[ "${CMAKE_FLAGS:-}" != *TRIREME_UNITY* ]] &&
    grep -q '^TRIREME_UNITY:BOOL=ON' "$BUILD/CMakeCache.txt"; then
    say "$BUILD compiles the files of a folder together, as its first build did (CMAKE_FLAGS=-DTRIREME_UNITY=OFF: one by one)"
  fi
  if [ -n "${TRIREME_CUDA:-}" ]; then flags+=("-DTRIREME_CUDA=$TRIREME_CUDA"); fi
  # shellcheck disable=SC2086  # CMAKE_FLAGS is a list of words
  cmake -S . -B "$BUILD" -G Ninja --log-level=WARNING "${flags[@]}" ${CMAKE_FLAGS:-} >"$state/configure.log" 2>&1 ||
    { cat "$state/configure.log" >&2; die "CMake could not configure $BUILD"; }
}

# build [TARGET...]: all targets if none is given.
build() {
  setup
  BUILD="${BUILD:-$(default_build)}"
  local began=$SECONDS since targets=()
  since="$(date +%s)"
  configure
  took build "CMake" "$began"
  began=$SECONDS
  if [ $# -gt 0 ]; then targets=(--target "$@"); fi
  cmake --build "$BUILD" -j "$(nproc)" "${targets[@]}"
  took build "${*:-everything}" "$began"
  python scripts/build_times.py "$BUILD" "$since"
  ln -sfn "$(realpath "$BUILD")" build/current
  export BUILD
  PYTHONPATH="$(pwd)/$BUILD/python${PYTHONPATH:+:$PYTHONPATH}"
  export PYTHONPATH
}

# Libtrireme, the Python module and what they open at run time, in the least time.
build_core() {
  tools="${TOOLS:-scripts/demo_tools.txt}"
  unity=ON
  wants_test_tools=no
  build trireme _C
}

# What makes the reference of the C++ headers.
need_doxygen() {
  command -v doxygen >/dev/null && return
  may_install || die "missing: doxygen. Run: sudo apt-get install -y doxygen"
  apt_install doxygen || die "apt-get failed, see $state/apt.log"
}

# --- the tests ------------------------------------------------------------------------------------

whole_build_s=1100  # of one core, without ccache
tests_s=1060        # on two cores, and with FAST; then what they took the last time counts
fast_tests_s=120

announce_tests() {
  printf '[test] On this machine, if nothing else runs:\n'
  announce_environment test
  if [ ! -e build/current/tests/cpp/CTestTestfile.cmake ]; then
    printf '[test]   %d minutes   libtrireme, the Python module, C++ tests and examples, on %d cores\n' \
      $((whole_build_s / $(nproc) / 60 + 1)) "$(nproc)"
  fi
  local seconds default=$tests_s is_fast=0
  if [ -n "${FAST:-}" ]; then default=$fast_tests_s is_fast=1; fi
  seconds="$(awk -F': ' -v is_fast=$is_fast '/, fast: / == is_fast { all += $2 } END { print all + 0 }' \
    build/current/test_times.txt 2>/dev/null || echo 0)"
  printf '[test]   %d minutes   C++ tests, Python tests; each stage says how far it is\n' \
    $(((seconds > 0 ? seconds : default) / 60 + 1))
}

# --- the demo -------------------------------------------------------------------------------------

announce_environment() { # <area>
  if [ ! -x "$VENV/bin/python" ]; then
    printf '[%s]   2 minutes   %s with torch, a download of 2 to 3 GB\n' "$1" "$VENV"
  fi
}

core_build_s=520  # of one core, without CUDA kernels and without ccache

announce_demo() {
  printf '[demo] Two models, each trained in seven ways, Trireme beside torch. On this machine, if nothing else runs:\n'
  announce_environment demo
  if ! compgen -G 'build/current/python/trireme/_C*.so' >/dev/null; then
    printf '[demo]   %d minutes   libtrireme and the Python module, without tests, on %d cores\n' \
      $((core_build_s / $(nproc) / 60 + 1)) "$(nproc)"
  fi
  printf '[demo]   3 minutes   the training; then a picture, and two sentences on what was fastest\n'
}

case "${1:-}" in
  setup) setup ;;
  build) shift; build "$@" ;;
  run) shift; build; exec "$@" ;;
  core) shift; build_core; exec "$@" ;;
  test) announce_tests; build; exec scripts/test.sh ;;
  demo)
    shift
    announce_demo
    build_core
    began=$SECONDS
    python benchmarks/demo.py "$@"
    took demo "training" "$began"
    took demo "all" 0
    ;;
  docs) shift; build_core; need_doxygen; exec scripts/docs.sh ;;
  tool) shift; setup; exec "$@" ;;
  *) sed -n '2,16p' "${BASH_SOURCE[0]}" | cut -c3-; exit 2 ;;
esac
