#!/usr/bin/env bash
# All tests, C++ then Python; called with the environment of `scripts/dev.sh run`.
#   make test          everything
#   make test FAST=1   what one runs after each edit: five minutes at most
#   make test INTEGRATIONS=OFF   everything but the programs of other libraries, which are downloaded
# A test that fails runs again alone, twice. If it passes both times the run goes on, and the summary ends with its name
# as FLAKY: a defect of the test or of the product like any other, to be found before other work goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# Two tests at a time, each with several ranks: most of a test is a wait or runs on one core.
jobs=2
# More failures than these are no accident, and nobody waits for each of them twice more.
most_accidents=8
integrations=".venv-integrations-$(basename "$BUILD")"
report=() flaky=() failed=0

# stage NAME FUNCTION ARGUMENT...: says what begins, and what it took.
stage() {
  local name="$1" began=$SECONDS status=ok
  shift
  printf '\n=== %s (after %d s)\n' "$name" "$SECONDS"
  "$@" || { status=FAILED; failed=1; }
  report+=("$(printf '%-28s %4d s  %s' "$name" $((SECONDS - began)) "$status")")
}

# again COMMAND... -- TEST...: COMMAND with each of the tests by itself, twice.
again() {
  local command=() name round
  while [ "$1" != -- ]; do command+=("$1"); shift; done
  shift
  [ $# -gt 0 ] && [ $# -le "$most_accidents" ] || return 1
  for name in "$@"; do
    for round in 1 2; do
      echo "[test] alone, $round of 2: $name"
      "${command[@]}" "$name" || return 1
    done
  done
  flaky+=("$@")
}

one_cpp_test() { ctest --test-dir "$BUILD" --output-on-failure --no-tests=error -R "^$1\$"; }

cpp_tests() {
  local names list="$BUILD/Testing/Temporary/LastTestsFailed.log"
  rm -f "$list"
  ctest --test-dir "$BUILD" --output-on-failure --no-tests=error -j "$jobs" "$@" && return
  [ -f "$list" ] || return 1
  mapfile -t names < <(sed 's/^[0-9]*://' "$list")
  again one_cpp_test -- "${names[@]}"
}

python_tests() {
  local names cache list
  cache="$(realpath "$BUILD")/.pytest_cache"
  list="$cache/v/cache/lastfailed"
  rm -rf "$cache"
  python -m pytest -q -n "$jobs" --dist worksteal --durations=15 -o cache_dir="$cache" "$@" && return
  [ -f "$list" ] || return 1
  mapfile -t names < <(python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$list")
  again python -m pytest -q -p no:cacheprovider -- "${names[@]}"
}

# Tests of DDP run over Gloo; those that see most of the reducer run over shared memory, too.
over_shared_memory() { TRIREME_TEST_BACKEND=trireme python_tests "$@"; }

# An environment of its own that sees the packages of this one. What scripts/integration_tools.txt lists goes there, so
# that no test depends on it unawares.
install_integrations() {
  local packages versions key site
  packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  versions="$(python -c 'from importlib.metadata import version
for name in ("torch", "numpy"): print(f"{name}=={version(name)}")')"
  key="$packages $versions $(cksum <scripts/integration_tools.txt)"
  if [ "$(cat "$integrations/installed" 2>/dev/null)" = "$key" ]; then return; fi
  python -m venv --clear --without-pip "$integrations" || return 1
  site="$("$integrations/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  echo "$packages" >"$site/packages_of_the_build.pth"
  "$integrations/bin/python" -m pip install --quiet --no-compile --progress-bar off --disable-pip-version-check \
    --constraint <(echo "$versions") -r scripts/integration_tools.txt && echo "$key" >"$integrations/installed"
}

integration_tests() {
  if ! install_integrations; then
    echo "[test] could not install what scripts/integration_tools.txt lists. make test INTEGRATIONS=OFF leaves it out."
    return 1
  fi
  # Tests skip what cannot be imported; here all of it is there, or that is the failure.
  "$integrations/bin/python" -c 'import accelerate, lightning.pytorch, torchmetrics, transformers' || return 1
  PATH="$PWD/$integrations/bin:$PATH" python_tests tests/python/integrations
}

if ! grep -qs add_test "$BUILD/tests/cpp/CTestTestfile.cmake"; then
  echo "[test] C++ tests skipped: Catch2 is not installed (apt-get install catch2)"
elif [ -n "${FAST:-}" ]; then
  stage "C++ tests, fast" cpp_tests -E '^(soak/|shm/[at]san|strategies/threads_tsan)'
else
  stage "C++ tests" cpp_tests
fi
if [ -n "${FAST:-}" ]; then
  stage "Python tests, fast" python_tests tests/test_{structure,python_drawing,pages}.py \
    tests/python/{core/test_stub,launch/test_launch,ddp/test_equality}.py
else
  stage "Python tests" python_tests tests/test_{structure,python_drawing,pages}.py tests/python \
    --ignore=tests/python/integrations
  stage "Python tests, shared memory" over_shared_memory \
    tests/python/ddp/test_{accumulation,arming,buckets}.py \
    tests/python/ddp/test_{comm_hooks,equality,freezing,grad_memory,join,precision,unused}.py
  if [ "${INTEGRATIONS:-ON}" = ON ]; then
    stage "programs of other libraries" integration_tests
  else
    echo "[test] programs of other libraries skipped: INTEGRATIONS=$INTEGRATIONS"
  fi
fi

printf '\n=== tests: summary\n'
printf '%s\n' "${report[@]}"
printf '%s\n' "${flaky[@]+"${flaky[@]}"}" >"$BUILD/flaky.txt"
if [ ${#flaky[@]} -gt 0 ]; then echo "FLAKY: ${flaky[*]}"; fi
exit $failed
