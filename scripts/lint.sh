#!/usr/bin/env bash
# Format and type checks; called with the environment's tools. `scripts/lint.sh fix` formats instead.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
mapfile -t cpp < <(find csrc tests examples \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) -type f | sort)
if [ "${1:-}" = fix ]; then
  clang-format -i "${cpp[@]}"
  ruff check --fix --quiet .
  ruff format --quiet .
  exit
fi
failed=0
check() { printf '[lint] %s\n' "$1"; shift; "$@" || failed=1; }
check clang-format clang-format --dry-run -Werror "${cpp[@]}"
check ruff ruff check --quiet --output-format=concise .
check "ruff format" ruff format --check --quiet .
check mypy mypy python examples
check "tables of the pages" python benchmarks/readme_results.py --check
check "what goes with what" python scripts/together.py --check
exit $failed
