#!/usr/bin/env bash
# All tests, C++ then Python; called with the environment of `scripts/dev.sh run`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
failed=0
if [ -f "$BUILD/tests/cpp/CTestTestfile.cmake" ] && grep -q add_test "$BUILD/tests/cpp/CTestTestfile.cmake"; then
  ctest --test-dir "$BUILD" --output-on-failure --no-tests=error || failed=1
else
  echo "[test] C++ tests skipped: Catch2 is not installed (apt-get install catch2)"
fi
python -m pytest -q || failed=1
# The tests of DDP run over Gloo; those that see most of the reducer run over shared memory, too.
TRIREME_TEST_BACKEND=trireme python -m pytest -q tests/python/test_ddp_{accumulation,arming,buckets}.py \
  tests/python/test_ddp_{comm_hooks,equality,freezing,grad_memory,join,precision,unused}.py || failed=1
exit $failed
