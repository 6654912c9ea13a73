#!/usr/bin/env bash
# Makes the sdist, of it the wheel, installs that into an empty folder, and builds and runs a foreign CMake project with it.
#   scripts/check_wheel.sh          the wheel is built in the unpacked sdist, from nothing
#   scripts/check_wheel.sh tree     it is made of what this checkout has built, for when another check took the sdist
# Called with the environment of `scripts/dev.sh tool`, or of `run`. CMAKE_ARGS and TRIREME_CUDA go to CMake, as with pip.
# The wheel and the folder `site` with what is in it stay in build/wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place="$(pwd)/build/wheel"
rm -rf "$place"
mkdir -p "$place"
began=$SECONDS

make_sdist() {
  python -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' "$place" >"$place/sdist.log" 2>&1 ||
    { cat "$place/sdist.log" >&2; exit 1; }
  tar -xzf "$place"/trireme-*.tar.gz -C "$place"
  # What the repository has, the sdist has: a file that MANIFEST.in forgets is missed here, not by who unpacks it.
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    lacking="$(cd "$place"/trireme-*/ && git -C "$OLDPWD" ls-files | while read -r file; do
      [ -e "$file" ] || [ ! -e "$OLDPWD/$file" ] || echo "$file"; done)"
    [ -z "$lacking" ] || { echo "[wheel] the sdist lacks: $lacking. Name it in MANIFEST.in." >&2; exit 1; }
  fi
}

make_wheel() { # <folder of the sources>
  (cd "$1" && rm -rf build/lib.* build/bdist.* && # setuptools would pack what an earlier wheel left there
    python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$place" .)
}

if [ "${1:-}" = tree ]; then
  make_wheel .
else
  make_sdist
  echo "[wheel] building it in the unpacked sdist, 5 minutes on 2 cores"
  make_wheel "$place"/trireme-*/
fi
printf '[wheel] %s: %d s\n' "$(basename "$place"/*.whl)" $((SECONDS - began))
python -m pip install --quiet --no-deps --target "$place/site" "$place"/*.whl
export PYTHONPATH="$place/site"
cd "$place" # away from the sources

python -m trireme --version
python - "$place" <<'END'
import sys
from importlib.metadata import version
import torch, trireme
from trireme import _C
assert _C.__file__.startswith(sys.argv[1] + "/site/"), _C.__file__
minor = ".".join(torch.__version__.split(".")[:2])
assert trireme.__version__ == version("trireme"), (trireme.__version__, version("trireme"))
assert f"+torch{minor}." in trireme.__version__, trireme.__version__
END
# A machine without CUDA loads this: what needs it is in libraries that are opened at run time only, so nothing above asks
# for them.
if readelf -d site/trireme/lib/libtrireme-*.so site/trireme/_C*.so | grep -E 'NEEDED.*(cuda|cudart|nccl)'; then
  echo "[wheel] got libraries that need CUDA, expected none but those that are opened at run time" >&2
  exit 1
fi
for part in cuda nccl; do
  for library in site/trireme/lib/libtrireme_"$part"-*-torch*.so; do
    [ -e "$library" ] || continue
    python -c 'import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])' "$library"
    echo "[wheel] opens $(basename "$library")"
  done
done
cmake -S ../../tests/cpp/consumer -B consumer -G Ninja --log-level=WARNING \
  -DTrireme_DIR="$(python -m trireme --cmake-dir)" -DTrireme_PYTHON="$(command -v python)" >/dev/null
cmake --build consumer
./consumer/consumer
OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 --no-python ./consumer/consumer
