# `make demo` and `make test` do all the set-up by themselves and do nothing twice.
#   TORCH=2.11.0       another torch, in an environment of its own
#   VENV=<folder>      an existing environment with torch, so that nothing is downloaded twice
#   TRIREME_CUDA=ON    CUDA kernels, also where no GPU is
export TORCH VENV PYTHON CMAKE_FLAGS BUILD SOAK FAST INTEGRATIONS TRIREME_CUDA

.PHONY: help demo compare docs test soak lint format wheel clean

help:
	@echo "make demo      DP, DDP, ZeRO and fully_shard beside torch's: a picture, and what was fastest"
	@echo "               (10 minutes on 2 cores from nothing, 3 when it is built)"
	@echo "make compare   the long one: a GPT under all strategies (3.5 minutes when it is built)"
	@echo "make docs      the site: pages and the API of both languages, in build/docs/site (10 seconds when it is built)"
	@echo "make test      build, C++ tests, Python tests; FAST=1: those to run after each edit;"
	@echo "               INTEGRATIONS=OFF: without Lightning, Accelerate and Transformers, which it downloads"
	@echo "make soak      kill ranks, fuzz and run the sanitizers' tests for ten minutes; SOAK=<seconds>"
	@echo "make lint      clang-format, ruff, mypy      make format: apply the first two"
	@echo "make wheel     make the sdist, of it the wheel, and try that from a foreign CMake project;"
	@echo "               WHEEL=tree: make the wheel of what is built"
	@echo "make clean     remove what was built; environments stay"

demo:
	@scripts/dev.sh demo

compare:
	@scripts/dev.sh core python benchmarks/compare.py --strategies all

docs:
	@scripts/dev.sh docs

test:
	@scripts/dev.sh test

soak:
	@scripts/dev.sh run scripts/soak.sh

lint:
	@scripts/dev.sh tool scripts/lint.sh

format:
	@scripts/dev.sh tool scripts/lint.sh fix

wheel:
	@scripts/dev.sh tool scripts/check_wheel.sh $(WHEEL)

clean:
	rm -rf build dist python/*.egg-info python/trireme/lib python/trireme/include \
	  python/trireme/_C*.so python/trireme/_build_info.py
