#!/usr/bin/env bash
# All tests, C++ then Python; called with the environment of `scripts/dev.sh run`.
#   make test          everything
#   make test FAST=1   what one runs after each edit: five minutes at most
#   make test INTEGRATIONS=OFF   everything but the programs of other libraries, which are downloaded
# It says at once how long it will take, and at each stage how far it is. What each stage took the last time is in
# $BUILD/test_times.txt.
# A test that fails runs again alone, twice. If it passes both times the run goes on, and the summary ends with its name
# as FLAKY: a defect of the test or of the product like any other, to be found before other work goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# Tests at a time on two cores, each with several ranks: most of a test is a wait or runs on one core. More of Python's
# take longer, since each worker of pytest keeps ranks of its own.
jobs=2
cpp_jobs=3
# More failures than these are no accident, and nobody waits for each of them twice more.
most_accidents=8
integrations=".venv-integrations-$(basename "$BUILD")"
times="$BUILD/test_times.txt"
log="$BUILD/pytest.log"
failures="$BUILD/failures.txt"
names=() commands=() expected=() report=() flaky=() failed=0

# plan NAME SECONDS FUNCTION ARGUMENT...: a stage, and what it takes on two cores if it was never run here.
plan() {
  local last
  last="$(sed -n "s/^$1: //p" "$times" 2>/dev/null)"
  names+=("$1") expected+=("${last:-$2}")
  shift 2
  commands+=("$*")
}

minutes_of() { echo $((($1 + 59) / 60)); }

# Runs what was planned; says before each stage what has passed and what is expected of all.
run_plan() {
  local all=0 i began status
  for i in "${!names[@]}"; do all=$((all + expected[i])); done
  printf '[test] %d stages, some %d minutes\n' ${#names[@]} "$(minutes_of $all)"
  for i in "${!names[@]}"; do
    printf '\n=== %s (%d of %d, after %d of some %d s)\n' "${names[i]}" $((i + 1)) ${#names[@]} $SECONDS "$all"
    began=$SECONDS status=ok
    # shellcheck disable=SC2086  # a function and its arguments, none of which has spaces
    ${commands[i]} || { status=FAILED; failed=1; }
    report+=("$(printf '%-28s %4d s  %s' "${names[i]}" $((SECONDS - began)) "$status")")
    all=$((all - expected[i] + SECONDS - began))
    if [ "$status" = ok ]; then note_time "${names[i]}" $((SECONDS - began)); fi
  done
}

note_time() { # <name> <seconds>
  { grep -v "^$1: " "$times" 2>/dev/null; echo "$1: $2"; } >"$times.new"
  mv "$times.new" "$times"
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
  ctest --test-dir "$BUILD" --output-on-failure --no-tests=error -j "$cpp_jobs" "$@" && return
  [ -f "$list" ] || return 1
  mapfile -t names < <(sed 's/^[0-9]*://' "$list")
  again one_cpp_test -- "${names[@]}"
}

python_tests() {
  local names cache list
  cache="$(realpath "$BUILD")/.pytest_cache"
  list="$cache/v/cache/lastfailed"
  rm -rf "$cache"
  run_pytest -n "$jobs" --dist worksteal --durations=15 -o cache_dir="$cache" "$@" && return
  [ -f "$list" ] || return 1
  mapfile -t names < <(python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$list")
  again run_pytest -p no:cacheprovider -- "${names[@]}"
}

# Notes a line for each failure, with its reason; pytest cuts it to the width of the screen.
run_pytest() {
  local status
  COLUMNS=400 python -m pytest -q "$@" | tee "$log"
  status="${PIPESTATUS[0]}"
  grep -E '^(FAILED|ERROR) ' "$log" >>"$failures"
  return "$status"
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

structure="tests/test_structure.py tests/test_python_drawing.py tests/test_pages.py"
if ! grep -qs add_test "$BUILD/tests/cpp/CTestTestfile.cmake"; then
  echo "[test] C++ tests skipped: Catch2 is not installed (apt-get install catch2)"
elif [ -n "${FAST:-}" ]; then
  plan "C++ tests, fast" 60 cpp_tests -E '^(soak/|shm/[at]san|strategies/threads_tsan)'
else
  plan "C++ tests" 120 cpp_tests
fi
if [ -n "${FAST:-}" ]; then
  plan "Python tests, fast" 60 python_tests $structure \
    tests/python/{core/test_stub,launch/test_launch,ddp/test_equality}.py
else
  plan "Python tests" 820 python_tests $structure tests/python --ignore=tests/python/integrations
  plan "Python tests, shared memory" 25 over_shared_memory \
    tests/python/ddp/test_{accumulation,arming,buckets}.py \
    tests/python/ddp/test_{comm_hooks,equality,freezing,grad_memory,join,precision,unused}.py
  if [ "${INTEGRATIONS:-ON}" = ON ]; then
    plan "programs of other libraries" 65 integration_tests
  else
    echo "[test] programs of other libraries skipped: INTEGRATIONS=$INTEGRATIONS"
  fi
fi
true >"$failures"
run_plan

printf '\n=== tests: summary\n'
printf '%s\n' "${report[@]}"
cat "$failures"
printf '%s\n' "${flaky[@]+"${flaky[@]}"}" >"$BUILD/flaky.txt"
if [ ${#flaky[@]} -gt 0 ]; then echo "FLAKY: ${flaky[*]}"; fi
exit $failed
