"""benchmarks/bench_compression.py: made-up times make the tables; a part is measured for real."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_compression
import readme_goals
import readme_results
from measure.bad_input import BadInput
from measure.fresh_run import RunTimes, starting_ranks
from measure.hosts_run import HostsRun
from measure.quality_run import DATA
from measure.sides import TORCH_DDP, Side, compressed, hooked
from workloads import WorkloadOptions

PAGE = "docs/compression.md"
PASS_US = 8 * bench_compression.NUMEL / 16e3  # 16 GB/s
CODES = {
    bench_compression.PASS: [PASS_US] * 3,
    "int8": [PASS_US * 2, PASS_US * 2, PASS_US * 4],
    "int4": [PASS_US * 2] * 3,
    "sign": [PASS_US * 4] * 3,
    "fp16": [PASS_US * 14 / 8] * 3,
    "top 1 %": [PASS_US * 2] * 3,
}
STEP_MS = {
    "PowerSGD": 400.0,
    "Fp16": 200.0,
    "Bf16": 310.0,
    "Int8": 200.0,
    "fp16": 300.0,
    "bf16": 300.0,
    "8": 1200.0,
}


WAYS = ("none", *bench_compression.LOSS_TARGETS)
QUALITY = {
    data: {way: [1.5, 2.5] if way == "Sign" else [1.0, 2.0] for way in WAYS} for data in DATA
}


def _run(side: Side, workload: str, steps: int) -> RunTimes:
    """Plain sides take 150 ms, and torch's first option set is its fastest."""
    name = next((n for n in STEP_MS if f", {n}" in side.label), None)
    ms = STEP_MS[name] if name else 150.0
    slower = 10.0 if "view" in side.label and name in ("fp16", "bf16") else 0.0
    return RunTimes(**{field.name: ms + slower for field in dataclasses.fields(RunTimes)})


def _run_on_cable(side: Side, cable: str, steps: int) -> HostsRun:
    """torch's DDP takes 10 times as long as ours with a code."""
    return HostsRun(100.0 if "method" in side.options else 1000.0, [1.0, 1.0])


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every part has made-up results; returns where they go."""
    monkeypatch.setattr(bench_compression, "run_program", lambda *_: json.dumps(CODES))
    monkeypatch.setattr(bench_compression, "run_fresh", _run)
    monkeypatch.setattr(bench_compression, "run_on_cable", _run_on_cable)
    monkeypatch.setattr(bench_compression, "train_to_quality", lambda *_: QUALITY)
    monkeypatch.setattr(readme_results, "RESULTS", tmp_path)
    return tmp_path / "compression.json"


def test_verdicts(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_compression.main(["--json", str(made_up)]) == 0
    found = json.loads(made_up.read_text())
    verdicts = {name: side.get("ratio", {}) for name, side in found["codes"]["sides"].items()}
    assert {name: ratio.get("verdict") for name, ratio in verdicts.items()} == {
        **{"in-place pass": None, "int8": "met", "int4": None, "sign": "missed", "fp16": None},
        "top 1 %": "met",
    }
    contests = found["steps"]["contests"]
    assert [(c["ours"], c["theirs"], c["ratio"]["verdict"]) for c in contests] == [
        ("ddp, Gloo, Fp16", "torch-ddp, fp16 hook", "met"),
        ("ddp, Gloo, Bf16", "torch-ddp, bf16 hook", "missed"),
        ("ddp, Gloo, Int8", "torch-ddp + view, 8 bit hook", "met"),
        ("ddp, Gloo, PowerSGD", "torch-ddp + view, PowerSGD 4 hook", "missed"),
    ]
    verdicts = {side: ratio["verdict"] for side, ratio in found["100mbit"]["contests"].items()}
    assert verdicts == {
        **{f"ddp, {name}": "met" for name in ("Int8", "Int4")},
        **{f"ddp, {name}": "missed" for name in ("Sign", "PowerSGD", "TopK")},
    }
    assert found["1gbit"]["contests"] == {}
    assert {way: it["verdict"] for way, it in found["quality"]["contests"]["text"].items()} == {
        **dict.fromkeys(bench_compression.LOSS_TARGETS, "met"),
        "Sign": "missed",
    }
    assert re.search(r"int8 +1.00 +13.02 +81% +50%: met", capsys.readouterr().out)


def test_pages_show_the_figures(made_up: Path) -> None:
    assert "No run is committed yet" in readme_results.written(PAGE)
    assert bench_compression.main(["--only", "codes", "--json", str(made_up)]) == 0
    assert readme_results.written(PAGE).count("\n| --- |") == 1
    assert bench_compression.main(["--json", str(made_up)]) == 0
    page = readme_results.written(PAGE)
    for line in (
        "| in-place pass | 0.50 | 8.00 |  |",
        "| int8 | 1.00 | 13.02 | 81% (54% to 81%) |",
        "| ddp, Sign | 100 | 1.00 | 10.0x |",
        "| text | Sign | 2.0000 | +33.3% |",
        "| fp16 | 0.88 | 14.00 | 100% (100% to 100%) |",
        "| ddp, Gloo, Fp16 | torch-ddp, fp16 hook | 200 | 300 | 0.667 (0.667 to 0.667) |",
        "Without compression a step takes 150 ms (ddp, Gloo), 150 ms (torch-ddp + view).",
    ):
        assert line in page


def test_each_target_has_a_row(made_up: Path) -> None:
    """What is missed wants a reason, which one host and the slow cable do not have."""
    assert bench_compression.main(["--json", str(made_up)]) == 0
    files: dict[str, Any] = {"compression": json.loads(made_up.read_text())}
    assert [line for line in readme_goals.lacking(files) if "expected 1" in line] == []
    assert len(list(readme_goals.lacking(files))) == 2


@pytest.mark.usefixtures("forked_measure")
@pytest.mark.parametrize(
    "side",
    [
        compressed("Bf16"),
        compressed("Int8"),
        compressed("PowerSGD", **bench_compression.POWER_SGD),
        *hooked(TORCH_DDP[:1], "bf16 hook"),
        *hooked(TORCH_DDP[:1], "8 bit hook", **bench_compression.ONE_BUCKET),
    ],
    ids=lambda side: side.label,
)
def test_sides_train(side: Side) -> None:
    with starting_ranks(side, "mlp", 2, WorkloadOptions(tiny=True)) as group:
        group.replies()
        records = [reply["records"] for reply in group.ask({"do": "steps", "count": 3})]
    losses = [step["loss"] for step in records[0]]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_the_program_measures_codes() -> None:
    run = partial(bench_compression.run_program, 2, 1, 4096)
    try:
        found = json.loads(run())
    except BadInput:
        pytest.skip("the C++ benchmarks are not built beside this package")
    assert found.keys() == {bench_compression.PASS, *bench_compression.CODE_BYTES}
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
