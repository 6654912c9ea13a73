# `make demo` and `make test` do all the set-up by themselves and do nothing twice.
#   TORCH=2.11.0       another torch, in an environment of its own
#   VENV=<folder>      an existing environment with torch, so that nothing is downloaded twice
export TORCH VENV PYTHON CMAKE_FLAGS BUILD SOAK

.PHONY: help demo compare test soak lint format wheel clean

help:
	@echo "make demo      train one model under several strategies and compare them (3.5 minutes)"
	@echo "make compare   the same under all strategies"
	@echo "make test      build, C++ tests, Python tests"
	@echo "make soak      kill ranks, fuzz and run the sanitizers' tests for ten minutes; SOAK=<seconds>"
	@echo "make lint      clang-format, ruff, mypy      make format: apply the first two"
	@echo "make wheel     build the wheel and try it from a foreign CMake project"
	@echo "make clean     remove what was built; environments stay"

demo:
	@scripts/dev.sh run python benchmarks/compare.py

compare:
	@scripts/dev.sh run python benchmarks/compare.py --strategies all

test:
	@scripts/dev.sh run scripts/test.sh

soak:
	@scripts/dev.sh run scripts/soak.sh

lint:
	@scripts/dev.sh tool scripts/lint.sh

format:
	@scripts/dev.sh tool scripts/lint.sh fix

wheel:
	@scripts/dev.sh run scripts/check_wheel.sh

clean:
	rm -rf build dist python/*.egg-info python/trireme/lib python/trireme/include \
	  python/trireme/_C*.so python/trireme/_build_info.py
