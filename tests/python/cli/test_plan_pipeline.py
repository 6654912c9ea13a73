"""``python -m trireme plan --pipeline``: what each rank takes, and its bubble."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import trireme
from torch import nn
from trireme.__main__ import main
from trireme.pipeline_estimate import peak_bytes

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]

FORMS = ("gpipe", "1f1b", "zb-h1", "looped-bfs", "interleaved-1f1b", "zb-v", "dualpipe-v")
MODELS = """
import torch
from torch import nn

def even():
    return nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))

def uneven():
    return nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 100), nn.Tanh(), nn.Tanh())

def tied():
    first, last = nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)

def make_layers():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

def sample():
    return torch.zeros(5, 100)
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> Any:
    """Calls the command in a folder that has models; returns exit code, output and errors."""
    (tmp_path / "piped_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trireme", "plan", *map(str, arguments)])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_what_each_rank_takes(plan: Any) -> None:
    common = ("--model", "piped_models:even", "--input", "5,100", "--micro-batches", 8)
    code, out, _ = plan("--pipeline", 4, *common, "--json")
    found = json.loads(out)
    assert code == 0
    schedule = trireme.pipeline_schedule("1f1b", ranks=4, micro_batches=8)
    assert found["bubble"] == schedule.bubble() == pytest.approx(3 / 11)
    layer = 4 * (100 * 100 + 100)
    for rank, entry in enumerate(found["ranks"]):
        assert entry["stages"] == [
            {"number": rank, "rank": rank, "layers": [str(2 * rank), str(2 * rank + 1)]}
        ]
        taken, live = entry["taken"], schedule.peak_activations(rank)
        assert entry["micro_batches"] == live == 4 - rank
        assert (taken["parameters"], taken["gradients"]) == (2 * layer, 2 * layer)
        assert taken["optimizer"] == 2 * 2 * layer
        # Each Linear saves its input: of the first stage nobody wants that of its first layer.
        assert taken["activations"] == live * 2 * 5 * 100 * 4
        assert taken["total"] == sum(taken[name] for name in ("model_states", "activations"))
        assert entry["bubble"] == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", FORMS)
def test_peaks_are_those_of_the_schedule(name: str) -> None:
    schedule = trireme.pipeline_schedule(name, ranks=4, micro_batches=8)
    for rank in range(4):
        ones, zeros = [1] * schedule.stages, [0] * schedule.stages
        assert peak_bytes(schedule, rank, ones, ones) == schedule.peak_activations(rank)
        again = schedule.with_recomputation("always")
        assert peak_bytes(again, rank, ones, zeros) == again.peak_activations(rank)


def test_what_is_recomputed_takes_its_input(plan: Any) -> None:
    given = ("--model", "piped_models:even", "--input", "5,100", "--micro-batches", 8, "--json")
    for schedule, stored in (("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])):
        common = ("--pipeline", 4, *given, "--schedule", schedule, "--checkpoint")
        code, out, _ = plan(*common, "always")
        assert code == 0
        found = json.loads(out)
        block = 5 * 100 * 4
        for rank, inputs in zip(found["ranks"], stored, strict=True):
            # Two layers save their inputs, of one micro-batch at a time; of others there is one.
            assert rank["micro_batches"] == 1
            assert rank["taken"]["activations"] == (inputs + 1) * block
        assert found["bubble"] < 3 / 11  # ranks recompute in it


def test_the_table(plan: Any) -> None:
    given = ("--model", "piped_models:even", "--sample", "piped_models:sample")
    code, out, _ = plan("--pipeline", 2, *given, "--schedule", "zb-v", "--optimizer", "sgd")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "80,800 parameters in 8 layers, 4 stages on 2 ranks; 4 micro-batches; sgd"
    assert lines[1] == "zb-v: bubble 0.04, if all stages take as long"
    columns = "live parameters gradients optimizer activations buffers total bubble"
    assert " ".join(lines[3].split()) == f"kB per rank {columns}"
    assert lines[4].startswith("0           layers 0..1, layers 6..7  ")
    assert lines[5].startswith("1           layers 2..3, layers 4..5  ")
    assert lines[4].split()[-7:-4] == ["161.60", "161.60", "0.00"]


def test_the_page_has_what_the_command_prints(plan: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()
    (line,) = re.findall(r"^python -m trireme plan (--pipeline .*)$", page, re.MULTILINE)
    code, out, _ = plan(*line.replace("my_models", "piped_models").split())
    assert code == 0 and f"```text\n{out}```\n" in page


def test_balance(plan: Any) -> None:
    def layers_of(*arguments: object) -> list[int]:
        code, out, error = plan("--pipeline", 2, "--input", "5,100", "--json", *arguments)
        assert code == 0, error
        ranks = json.loads(out)["ranks"]
        return [len(stage["layers"]) for rank in ranks for stage in rank["stages"]]

    uneven = ("--model", "piped_models:uneven")
    assert layers_of(*uneven) == [2, 2]
    assert layers_of(*uneven, "--balance", "1,3") == [1, 3]
    assert layers_of(*uneven, "--balance", "bytes") == [1, 3]
    assert sum(layers_of(*uneven, "--balance", "time")) == 4


def test_measured_times_make_the_bubble(plan: Any) -> None:
    given = ("--pipeline", 2, "--model", "piped_models:even", "--input", "5,100")
    code, out, _ = plan(*given, "--balance", "time")
    assert code == 0 and ", by times measured here\n" in out
    _, out, _ = plan(*given, "--balance", "time", "--json")
    found = json.loads(out)
    mean = sum(rank["bubble"] for rank in found["ranks"]) / 2
    assert found["bubble"] == pytest.approx(mean) and 0 < mean < 1


def test_each_rank_has_a_copy_of_what_is_tied(plan: Any) -> None:
    given = ("--pipeline", 2, "--model", "piped_models:tied", "--input", "5,100", "--json")
    _, out, _ = plan(*given)
    ranks = json.loads(out)["ranks"]
    assert [rank["taken"]["parameters"] for rank in ranks] == [4 * 100 * 100] * 2


EVEN = ("--model", "piped_models:even")
SAMPLE = ("--input", "5,100")
WRONG = [
    ((*EVEN, "--pipeline", 2), "expected --model with it, and either --sample or one --input"),
    ((*EVEN, *SAMPLE, *SAMPLE, "--pipeline", 2), "either --sample or one --input"),
    (("--numel", 5, *SAMPLE, "--pipeline", 2), "got --numel with --pipeline"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--world", 2), "got --world with --pipeline"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--strategy", "ddp"), "got --strategy with --pipeline"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--gpus"), "got --gpus with --pipeline"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--no-host-params"), "got --no-host-params with"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--memory", "1GiB"), "got --memory with --pipeline"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--checkpoint", "sqrt"), "got --checkpoint sqrt with"),
    ((*EVEN, *SAMPLE, "--world", 2, "--checkpoint", "always"), "got --checkpoint always without"),
    ((*EVEN, "--world", 2, "--balance", "bytes"), "got --balance without --pipeline"),
    ((*EVEN, "--world", 2, "--micro-batches", 2), "got --micro-batches without --pipeline"),
    ((*EVEN,), "got no --world, expected a number of ranks"),
    ((*EVEN, *SAMPLE, "--pipeline", 9), "got 8 layers for 9 stages"),
    ((*EVEN, *SAMPLE, "--pipeline", 0), "[pipeline] got"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--schedule", "zb-h2"), "got the schedule 'zb-h2'"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--balance", "4,5"), "adds up to 9, expected 8 layers"),
    ((*EVEN, *SAMPLE, "--pipeline", 2, "--balance", "size"), "got --balance size, expected"),
    ((*EVEN, "--input", "5,99", "--pipeline", 2), "a layer raised RuntimeError"),
    (("--model", "torch.nn:Identity", *SAMPLE, "--pipeline", 1), "got a Identity as module"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[text for _, text in WRONG])
def test_what_is_refused(plan: Any, arguments: tuple[object, ...], text: str) -> None:
    code, out, error = plan(*arguments)
    assert (code, out) == (2, "")
    assert text in error


def test_a_model_that_no_memory_would_hold(plan: Any, tmp_path: Path) -> None:
    text = (
        "\ndef large():\n    return nn.Sequential(*(nn.Linear(10**6, 10**6) for _ in range(2)))\n"
    )
    (tmp_path / "large_models.py").write_text("from torch import nn\n" + text)
    given = ("--model", "large_models:large", "--input", f"10,{10**6}", "--json")
    code, out, _ = plan("--pipeline", 2, *given)
    assert code == 0
    taken = json.loads(out)["ranks"][0]["taken"]
    assert taken["parameters"] == 4 * (10**12 + 10**6)


def test_the_models_are_what_the_test_says() -> None:
    scope: dict[str, Any] = {}
    exec(MODELS, scope)
    assert all(isinstance(scope[name](), nn.Sequential) for name in ("even", "uneven", "tied"))
