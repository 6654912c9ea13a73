#!/usr/bin/env bash
# All tests, C++ then Python; called with the environment of `scripts/dev.sh run`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
failed=0
# Two tests at a time, each with several ranks: most of a test is a wait or runs on one core.
jobs=2
if [ -f "$BUILD/tests/cpp/CTestTestfile.cmake" ] && grep -q add_test "$BUILD/tests/cpp/CTestTestfile.cmake"; then
  ctest --test-dir "$BUILD" --output-on-failure --no-tests=error -j "$jobs" || failed=1
else
  echo "[test] C++ tests skipped: Catch2 is not installed (apt-get install catch2)"
fi
python -m pytest -q -n "$jobs" --dist worksteal || failed=1
# The tests of DDP run over Gloo; those that see most of the reducer run over shared memory, too.
TRIREME_TEST_BACKEND=trireme python -m pytest -q -n "$jobs" --dist worksteal \
  tests/python/test_ddp_{accumulation,arming,buckets}.py \
  tests/python/test_ddp_{comm_hooks,equality,freezing,grad_memory,join,precision,unused}.py || failed=1
exit $failed
