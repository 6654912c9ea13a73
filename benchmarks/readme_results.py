"""Writes the results into README.md and docs/ from the committed JSON: no figure is typed by hand.

What is written has its form from the templates in benchmarks/pages (readme_tables.py).

python benchmarks/readme_results.py          rewrite the pages
python benchmarks/readme_results.py --check  exit 1 if one of them is not what the JSON says

Either way a target that docs/benchmarks.md does not explain is an error (readme_goals.py).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from readme_goals import goals, lacking
from readme_rows import ROWS, TEXTS, measured_on
from readme_steps import draw, picture_is_current
from readme_tables import Json, filled

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "steps.svg"
REGION = re.compile(
    r"(<!-- (results|goals): written by benchmarks/readme_results\.py from benchmarks/results/\S+ "
    r"-->\n).*?(<!-- \2 end -->\n)",
    re.S,
)
NOTHING = "No run is committed yet."
PAGES: Mapping[str, str] = {  # their templates in benchmarks/pages
    "README.md": "readme",
    **{
        f"docs/{name}.md": name
        for name in (
            *("benchmarks", "activation_memory", "parameter_server", "pipeline", "remote"),
            *("shared_memory", "ddp", "zero", "fsdp", "data_parallel", "strategies", "optimizers"),
            *("checkpoint", "multi_host", "compression", "local_sgd", "integrations"),
            *("horovod", "pipetransformer"),
        )
    },
}


def main(command_line: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args(command_line).check
    files = _files()
    wrong = list(lacking(files))
    for name in PAGES:
        page = ROOT / name
        before = page.read_text()
        after = REGION.sub(partial(_rewritten, name), before)
        if before != after and check:
            wrong.append(_stale(name))
        elif before != after:
            page.write_text(after)
    if "steps" in files and not picture_is_current(files["steps"], PICTURE):
        if check:
            wrong.append(_stale(PICTURE.name))
        else:
            draw(files["steps"], measured_on(files["steps"]), PICTURE)
    for line in wrong:
        print(f"[readme] {line}.")
    return 1 if wrong else 0


def _rewritten(name: str, region: re.Match[str]) -> str:
    return region[1] + written(name, region[2]) + region[3]


def _files() -> dict[str, Json]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def _stale(name: str) -> str:
    return (
        f"got figures in {name} that are not those of benchmarks/results. "
        "Run benchmarks/readme_results.py"
    )


def written(name: str, region: str = "results") -> str:
    """Returns what a region of a page says of the runs that are committed."""
    files = _files()
    if region == "goals":
        blocks = [*goals(files)]
    else:
        found = filled(PAGES[name], {**files, "all": files}, ROWS, TEXTS, complete=True)
        blocks = [*found]
    return "\n" + "\n\n".join(blocks or [NOTHING]) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
