"""The main job, benchmarks/compare.py: it runs, proves its losses and names wrong input."""

import dataclasses
import json
import math
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import compare
from measure.agreement import agreements
from measure.job import Job
from measure.machine import cores
from measure.memory import host_pss_mib, tensor_mib
from measure.ranks import Launch, RankFailed, RankGroup
from measure.rounds import Trajectory
from measure.stats import PairedRatio, percentile
from measure.strategies import STRATEGIES, Strategy
from measure.worker import RankConfig, StepRecord
from workloads import WORKLOADS, SampleOrder, WorkloadOptions

RUN_FIELDS = {
    "strategy": str,
    "world": int,
    "step_ms": dict,
    "samples_per_s": float,
    "exposed_comm_ms": float,
    "peak_rss_mib_per_rank": float,
    "pss_mib_host": float,
    "final_loss": float,
}
STEPS = 3
WORLDS = {
    **{"single": 1, "dp": 1, "ddp": 2, "zero1": 2, "zero2": 2, "fsdp": 2, "ps-bsp": 2},
    **{
        "pipeline": 2,
        "pipeline-threads": 1,
        "torch-ddp": 2,
        "torch-zero1": 2,
        "torch-fsdp2": 2,
        "torch-pipeline": 2,
    },
    **{"ddp+checkpoint": 2, "fsdp+checkpoint": 2, "torch-ddp+checkpoint": 2},
}


@pytest.fixture(scope="module")
def comparison(
    tmp_path_factory: pytest.TempPathFactory, forked_measure: None
) -> tuple[int, dict[str, Any], Path]:
    """Exit code, JSON and plot folder of one tiny comparison."""
    folder = tmp_path_factory.mktemp("compare")
    options = ["--tiny", "--steps", str(STEPS), "--strategies", ",".join(WORLDS)]
    files = ["--out", str(folder), "--json", str(folder / "numbers.json")]
    code = compare.main([*options, *files])
    return code, json.loads((folder / "numbers.json").read_text()), folder


def test_losses_agree(comparison: tuple[int, dict[str, Any], Path]) -> None:
    code, numbers, _ = comparison
    assert code == 0
    assert [proof["run"] for proof in numbers["agreement"]] == list(WORLDS)[1:]
    single, *others = (run["losses"] for run in numbers["runs"])
    for losses in others:
        assert losses == pytest.approx(single, rel=1e-4)
    assert single[-1] < single[0]


def test_checkpoints_change_no_bit(comparison: tuple[int, dict[str, Any], Path]) -> None:
    _, numbers, _ = comparison
    losses = {run["strategy"]: run["losses"] for run in numbers["runs"]}
    for plain in ("ddp", "fsdp", "torch-ddp"):
        assert losses[f"{plain}+checkpoint"] == losses[plain]


def test_json_has_the_promised_fields(comparison: tuple[int, dict[str, Any], Path]) -> None:
    _, numbers, _ = comparison
    assert {"cpu", "cores", "torch", "commit", "allocator_env"} <= numbers["machine"].keys()
    assert [(run["strategy"], run["world"]) for run in numbers["runs"]] == list(WORLDS.items())
    for run in numbers["runs"]:
        for name, kind in RUN_FIELDS.items():
            assert isinstance(run[name], kind), name
        assert run["step_ms"]["p10"] <= run["step_ms"]["median"] <= run["step_ms"]["p90"]
        assert len(run["losses"]) == len(run["seconds"]) == STEPS + 5
        is_staged = STRATEGIES[run["strategy"]].is_staged  # its forwards are in the backward
        assert (run["phase_ms"]["forward"] == 0) == is_staged
        assert 0 < run["phase_ms"]["backward"] < run["step_ms"]["p90"]


def test_the_host_holds_a_store_once(comparison: tuple[int, dict[str, Any], Path]) -> None:
    _, numbers, _ = comparison
    parameters, states = (
        {run["strategy"]: run["memory_mib"][kind] for run in numbers["runs"]}
        for kind in ("parameters", "optimizer_state")
    )
    once = ("dp", "zero1", "zero2", "fsdp", "torch-fsdp2")
    assert parameters["ps-bsp"] == pytest.approx(parameters["single"], rel=1e-4)
    for sharded in (*once, "pipeline", "pipeline-threads", "torch-pipeline"):
        assert parameters[sharded] == pytest.approx(parameters["single"], rel=1e-4)
        assert states[sharded] == pytest.approx(states["single"], rel=1e-2)
    assert parameters["ddp"] == pytest.approx(2 * parameters["single"], rel=1e-4)
    assert states["ddp"] == pytest.approx(2 * states["single"], rel=1e-2)
    assert states["torch-zero1"] == pytest.approx(states["single"], rel=1e-2)


def test_plots_are_pictures(comparison: tuple[int, dict[str, Any], Path]) -> None:
    pytest.importorskip("matplotlib")
    _, _, folder = comparison
    for name in ("step_time.png", "memory.png", "loss.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name


def test_synchronized_batch_norm_sees_the_whole_batch(tmp_path: Path) -> None:
    model = ["--tiny", "--model", "resnet18", "--norm", "syncbn"]
    options = [*model, "--strategies", "single,ddp", "--steps", "1"]
    assert compare.main([*options, "--out", str(tmp_path)]) == 0


def test_a_model_without_blocks_is_one(tmp_path: Path) -> None:
    options = ["--tiny", "--model", "trees", "--strategies", "single,fsdp+checkpoint"]
    assert compare.main([*options, "--steps", "1", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--text /nowhere/text",
            "[compare] got --text '/nowhere/text' (No such file or directory)",
        ),
        ("--strategies torch-dpp", "Did you mean 'torch-ddp'?"),
        (
            "--model resnet18 --norm syncbn --strategies single,dp",
            "got --norm syncbn with dp, whose replicas normalize their own rows",
        ),
        (
            "--model trees --strategies single,torch-pipeline",
            "got torch-pipeline with --model trees, expected one that is cut into layers",
        ),
        ("--strategies single,single", "expected different names"),
        ("--model gtp", "Did you mean 'gpt'?"),
        ("--ranks 0", "got --ranks 0, expected more than 0"),
        ("--steps -1", "got --steps -1, expected more than 0"),
        ("--model mlp --text x", "got --text with --model mlp"),
        ("--model resnet18 --norm batch", "got norm 'batch', expected one of groupnorm, syncbn"),
    ],
)
def test_bad_options_are_named(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(options.split()) == 2
    assert message in capsys.readouterr().err


def test_a_planned_strategy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STRATEGIES, "pipeline", Strategy("pipeline of stages"))
    assert compare.main(["--strategies", "pipeline"]) == 2
    assert "got strategy 'pipeline', which is not built yet" in capsys.readouterr().err


def test_processes_and_their_threads() -> None:
    assert STRATEGIES["ddp"].processes(4) == (4, 1)
    assert STRATEGIES["dp"].processes(4) == (1, 4)
    assert STRATEGIES["single"].processes(4) == (1, cores())


def test_fewer_samples_than_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a" * 3 * 128)
    assert compare.main(["--strategies", "torch-ddp", "--ranks", "4", "--text", str(text)]) == 2
    assert "got 3 sequences for 4 ranks, expected at least one for each" in capsys.readouterr().err


def _record(loss: float) -> StepRecord:
    fields: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(StepRecord)}
    return StepRecord(**{**fields, "loss": loss})


def test_losses_that_differ_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = dict.fromkeys(("at_start", "parameters", "gradients", "optimizer_state"), 1.0)
    held |= {"peak_rss": 9.0, "pss_anon": 5.0, "pss_shmem": 0.0, "rss_file": 1.0}

    def trained(job: Job, names: list[str], *_: object) -> dict[str, Trajectory]:
        return {
            name: Trajectory([[_record(2.0 + 0.001 * number)] * 6], [held])
            for number, name in enumerate(names)
        }

    monkeypatch.setattr(compare, "train", trained)
    options = ["--strategies", "single,torch-ddp", "--out", str(tmp_path)]
    assert compare.main(options) == 1
    assert "torch-ddp    DIFFER with single" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        ([2.0, 1.0, 1.0, 1.0, 1.0, 1.5], True),
        ([2.0, 1.0, 1.0, 1.0, 1.00011, 1.0], False),
        ([2.0, math.nan, 1.0, 1.0, 1.0, 1.0], False),
    ],
    ids=["apart only later", "apart in step 5", "not a number"],
)
def test_agreement_asserts_the_first_five_steps(losses: list[float], holds: bool) -> None:
    (agreement,) = agreements({"single": [2.0, 1.0, 1.0, 1.0, 1.0, 1.0], "ddp": losses})
    assert agreement.holds is holds


def test_an_epoch_takes_no_sample_twice() -> None:
    order = SampleOrder(num_samples=10, global_batch=4, seed=3)
    first_epoch = torch.cat([order.indices(0), order.indices(1)])
    assert len(first_epoch.unique()) == 8
    assert not torch.equal(order.indices(0), order.indices(2))


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_a_finite_loss(name: str) -> None:
    workload = WORKLOADS[name](WorkloadOptions(tiny=True))
    samples = workload.samples()
    batch = samples.rows(torch.arange(workload.rows_per_rank))
    loss = workload.loss(workload.model()(batch.inputs), batch)
    assert loss.ndim == 0
    assert math.isfinite(loss.item())


def test_sizes_of_the_shared_workloads() -> None:
    millions = {
        name: sum(p.numel() for p in WORKLOADS[name](WorkloadOptions()).model().parameters()) / 1e6
        for name in ("mlp", "gpt", "gpt-small-batch")
    }
    assert millions == pytest.approx({"mlp": 16.8, "gpt": 14.3, "gpt-small-batch": 14.3}, abs=0.05)


def test_a_rank_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    config = RankConfig("torch-ddp", "mlp", 32, 1, options={"no_such_option": 1})
    launch = Launch("torch-ddp", "measure.worker", config.to_json(), 2, 1, tmp_path)
    with pytest.raises(RankFailed, match="no_such_option"), RankGroup(launch) as group:
        group.replies()


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([1.0, 0.9, 1.2], "met"), ([1.0, 1.02, 1.2], "met within noise (3 %)"), ([1.1] * 3, "missed")],
)
def test_verdict_is_on_the_median_of_the_ratios(ours: list[float], verdict: str) -> None:
    assert PairedRatio.of(ours, [1.0, 1.0, 1.0], target=1.0).verdict == verdict


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == pytest.approx(2.5)
    assert percentile([5.0], 0.9) == 5.0


def test_memory_counts_shared_things_once() -> None:
    bucket = torch.zeros(1 << 18)
    assert tensor_mib([bucket[:10], bucket[10:], bucket], sharers=2) == 1.0
    rank = {"pss_anon": 10.0, "pss_shmem": 2.0, "rss_file": 7.0}
    assert host_pss_mib([rank, rank]) == 31.0


def test_memory_of_tensors_is_what_was_written() -> None:
    page = mmap.PAGESIZE
    private, shared = (
        mmap.mmap(-1, 16 * page, kind) for kind in (mmap.MAP_PRIVATE, mmap.MAP_SHARED)
    )
    for mapping in (private, shared):
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)[100:]
        tensor[: 3 * page].fill_(1)
        written = (4 * page) / 2**20
        assert tensor_mib([tensor], sharers=4) == written / (4 if mapping is shared else 1)
