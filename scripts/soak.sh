#!/usr/bin/env bash
# Long runs of what CI runs for seconds, on shm/ and strategies/remote/: ranks that are killed and stopped, strange bytes,
# and the sanitizers' tests over and over; called with the environment of `scripts/dev.sh run`.
#   make soak              ten minutes
#   make soak SOAK=3600    as many seconds, in equal parts
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
root="$PWD" part=$((${SOAK:-600} / 8))
build="$(realpath "$BUILD")"
tests="$build/tests/cpp" room="$build/soak" core="$root/csrc"
if [ ! -x "$tests/kill_soak_asan" ]; then
  echo "[soak] got no $tests/kill_soak_asan. Install catch2, and build with -DTRIREME_SANITIZERS=ON."
  exit 1
fi
mkdir -p "$room" && cd "$room" || exit
report=() failed=0

stage() {
  local name="$1" began=$SECONDS status=ok
  shift
  printf '\n=== %s\n' "$name"
  "$@" || { status=FAILED; failed=1; }
  report+=("$(printf '%-12s %5d s  %s' "$name" $((SECONDS - began)) "$status")")
}

# clang's fuzzer sees which lines an input reaches; without clang the driver of CI goes on for longer.
# fuzz <target> <what clang compiles it with>
fuzz() {
  local name="$1"
  shift
  mkdir -p "corpus-$name"
  if command -v clang++ >/dev/null && clang++ -std=c++20 -O1 -g1 -pthread -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all -I"$build/include" -I"$root/tests/cpp" "$root/tests/cpp/soak/$name.cpp" "$@" \
    -o "$name-guided"; then
    "./$name-guided" -rss_limit_mb=4096 -max_total_time="$part" -max_len=4096 -timeout=20 -print_final_stats=1 \
      "corpus-$name" 2>&1 | tail -n 20
    return "${PIPESTATUS[0]}"
  fi
  "$tests/$name" --seconds "$part"
}

# fuzz_with_torch <target> <its sources in the core>
fuzz_with_torch() {
  local name="$1" torch
  shift
  torch="$(python -c 'from importlib.util import find_spec; print(find_spec("torch").submodule_search_locations[0])')"
  fuzz "$name" "$core/common/error.cpp" "${@/#/$core/}" \
    -isystem "$torch/include" "$torch"/lib/lib{torch_cpu,c10}.so -Wl,-rpath,"$torch/lib" -Wl,--allow-shlib-undefined
}

# The whole suite of shm/ again and again: what depends on timing shows in one run of many.
again() {
  local until=$((SECONDS + part)) runs=0
  while [ $SECONDS -lt "$until" ]; do
    timeout 600 "$@" >last_run.txt 2>&1 || { tail -n 60 last_run.txt; return 1; }
    runs=$((runs + 1))
  done
  echo "$runs runs passed"
}

stage kills "$tests/kill_soak" --seconds "$part"
# Freed memory that the sanitizer keeps to itself would look like growth.
stage "kills, asan" env ASAN_OPTIONS=quarantine_size_mb=4 "$tests/kill_soak_asan" --seconds "$part"
stage "kills of callers" env TRIREME_REMOTE_SOAK_S="$part" \
  python -m pytest -q -p no:cacheprovider "$root/tests/python/remote/test_kill_soak.py"
stage "fuzz shm" fuzz fuzz_shm "$core"/shm/*.cpp "$core"/common/{cpus,error,forks,interruption}.cpp
stage "fuzz remote" fuzz_with_torch fuzz_remote {comm/value_codec,strategies/remote/wire_messages}.cpp
stage "fuzz codes" fuzz_with_torch fuzz_codes kernels/{block_codes,sparse_codes}.cpp \
  kernels/cpu/{block_loops,sparse_loops,parallel}.cpp
stage asan again "$tests/test_shm_asan"
stage tsan again "$tests/test_shm_tsan" --filenames-as-tags '~[#reduce_test]~*process*'

printf '\n=== summary\n'
printf '%s\n' "${report[@]}"
exit $failed
