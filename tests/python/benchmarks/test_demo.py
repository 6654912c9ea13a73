"""The first look, benchmarks/demo.py: it trains, draws, and says truly what was fastest."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import demo
from measure.progress import Countdown
from measure.summary import Summary
from measure.verdict import sentence, training_mib

BUILD_TIMES = Path(__file__).resolve().parents[3] / "scripts" / "build_times.py"


def _run(strategy: str, ms: float, mib: float) -> Summary:
    world, threads = (1, 2) if strategy in ("single", "dp") else (2, 1)
    return Summary(
        strategy=strategy,
        world=world,
        threads=threads,
        step_ms={"median": ms, "p10": 0.9 * ms, "p90": 1.2 * ms},
        samples_per_s=1.0,
        phase_ms={},
        exposed_comm_ms=0.0,
        reported_exposed_comm_ms=0.0,
        faults_per_step=0.0,
        memory_mib={"at_start": 500.0, "parameters": mib / 4, "rest": 3 * mib / 4},
        peak_rss_mib_per_rank=0.0,
        pss_mib_host=500.0 + mib,
        losses=[1.0],
        seconds=[1.0],
    )


def _runs(**ms: float) -> list[Summary]:
    return [
        _run(name.replace("_", "-"), time, 100.0 + number)
        for number, (name, time) in enumerate(ms.items())
    ]


def test_the_demo_trains_draws_and_concludes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    names = ("single", "zero2", "torch-ddp")
    monkeypatch.setattr(demo, "STRATEGY_NAMES", names)
    monkeypatch.setattr(demo, "MODELS", ("mlp",))
    assert demo.main(["--tiny", "--steps", "3", "--out", str(tmp_path)]) == 0
    numbers = json.loads((tmp_path / "demo.json").read_text())
    runs = numbers["models"]["mlp"]["runs"]
    assert [run["strategy"] for run in runs] == list(names)
    for run in runs:
        # A model this small may fit into what the process gave back since its start was measured:
        # then the kinds add up to a little more than all that is held.
        kinds, held = sum(run["memory_mib"].values()), run["pss_mib_host"]
        exact = run["memory_mib"]["rest"] > 0
        assert kinds == pytest.approx(held, rel=1e-4 if exact else 1e-2)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("On mlp ")
    assert "of the time of" in printed[-1]
    assert any("losses of all agree" in line for line in printed)


def test_one_process_is_named_where_it_is_fastest() -> None:
    runs = _runs(single=39, ddp=68, fsdp=50, torch_ddp=100, torch_fsdp2=250)
    assert sentence("mlp", runs) == (
        "On mlp one process with 2 threads is fastest, 39 ms a step with 100 MiB; of the parallel "
        "runs the fastest is Trireme's fully_shard: 50 ms a step with 102 MiB, 0.50 of the time of "
        "torch's DDP (100 ms, 103 MiB) and 0.20 of the time of torch's FSDP2 (250 ms, 104 MiB)."
    )


def test_what_is_level_is_not_called_slower() -> None:
    runs = _runs(single=91, ddp=90, zero2=91, torch_ddp=120)
    text = sentence("gpt", runs)
    assert "Trireme's DDP (level with Trireme's ZeRO 2): 90 ms" in text
    assert text.endswith("one process with 2 threads is as fast, 91 ms a step with 100 MiB.")


def test_torch_is_named_where_it_is_fastest() -> None:
    runs = _runs(single=200, ddp=110, zero2=100, torch_ddp=80)
    text = sentence("gpt", runs)
    assert text.startswith("On gpt the fastest is torch's DDP: 80 ms a step with 103 MiB, 0.80 of")
    assert "of the time of Trireme's ZeRO 2 (100 ms, 102 MiB); one process" in text
    assert "is slower, 200 ms" in text


def test_memory_is_what_training_adds() -> None:
    assert training_mib(_run("ddp", 1, 160)) == pytest.approx(160)


def test_the_time_left_is_told_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    class Quick(Countdown):
        LINE_S = 0.001

    countdown = Quick(125.0)
    countdown.begin("mlp", "starting")
    countdown.round("fsdp", 8, 0.5, 51.26)
    lines = ""
    while "ms/step" not in lines:  # the other thread prints
        lines += capsys.readouterr().err
    countdown.end()
    last = next(line for line in lines.splitlines() if "ms/step" in line)
    assert "mlp: fsdp" in last
    assert "51.3 ms/step" in last
    assert "left" in last


@pytest.mark.parametrize("option", ["--steps 0", "--budget -1"])
def test_bad_options_are_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(option.split()) == 2
    assert f"[demo] got {option}" in capsys.readouterr().err


def _build_times() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_times", BUILD_TIMES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_core_seconds_of_a_build_by_part() -> None:
    now = 1_000 * 10**9
    lines = [
        (0, 4000, now, "csrc/CMakeFiles/trireme.dir/comm/a.cpp.o"),
        (0, 9000, now - 10**10, "csrc/CMakeFiles/trireme.dir/comm/earlier.cpp.o"),
        (4000, 6500, now, "csrc/bindings/CMakeFiles/_C.dir/zero.cpp.o"),
        (6500, 7000, now, "python/trireme/_C.cpython-311.so"),
        (0, 5000, now, "csrc/CMakeFiles/trireme_cuda.dir/kernels/cuda/flatten.cu.o"),
        (0, 3000, now, "tests/cpp/CMakeFiles/test_grad.dir/grad/a.cpp.o"),
        (0, 1500, now, "csrc/CMakeFiles/trireme.dir/comm/a.cpp.o"),  # the last one counts
        (0, 7000, now, "build.ninja", "cmake"),
        (0, 7000, now, "tests/cpp/CTestTestfile.cmake", "cmake"),  # of the same step
        (100, 7000, now, "CMakeFiles/trireme_programs.dir/cmake_pch.hxx.gch"),
    ]
    log = "# ninja log v7\n"
    for start, end, written, output, *step in lines:
        log += f"{start}\t{end}\t{written}\t{output}\t{step[0] if step else output}\n"
    assert _build_times().times(log, since_s=1_000) == {
        "libtrireme": 1.5,
        "Python module": 3.0,
        "CUDA kernels": 5.0,
        "C++ tests": 3.0,
        "header of tests, examples and benchmarks": 6.9,
        "other": 7.0,
    }
