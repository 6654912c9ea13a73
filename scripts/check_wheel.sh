#!/usr/bin/env bash
# Makes the wheel, installs it into an empty folder, and builds and runs a foreign CMake project with it. Called with the
# environment of `scripts/dev.sh run`; what that built is reused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
place="$(pwd)/build/wheel"
rm -rf "$place" build/lib.* build/bdist.* # setuptools would pack what an earlier wheel left there
python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$place" .
python -m pip install --quiet --no-deps --target "$place/site" "$place"/*.whl
export PYTHONPATH="$place/site"
cd "$place" # away from the sources

python -m trireme --version
python -c 'import trireme; from trireme import _C; print(_C.__file__)' | grep -q "^$place/site/"
# Opened at run time only, so nothing above asks for it.
torch="$(python -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("torch").origin))')"
if [ -e "$torch/lib/libtorch_cuda.so" ] && compgen -G "$torch/../nvidia/*/include" >/dev/null; then
  python -c 'import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])' site/trireme/lib/libtrireme_nccl-*-torch*.so
fi
cmake -S ../../tests/cpp/consumer -B consumer -G Ninja --log-level=WARNING \
  -DTrireme_DIR="$(python -m trireme --cmake-dir)" -DTrireme_PYTHON="$(command -v python)" >/dev/null
cmake --build consumer
./consumer/consumer
OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 2 --no-python ./consumer/consumer
