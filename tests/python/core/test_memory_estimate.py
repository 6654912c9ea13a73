"""``estimate_memory`` and ``python -m trireme plan``: what a strategy takes, told beforehand."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import nn
from trireme import estimate_memory
from trireme.__main__ import main
from trireme.memory_estimate import STRATEGIES

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

MIB = 2**20


class Net(nn.Module):
    """A tied weight, a frozen layer, running statistics, a scalar, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens)))
        logits: torch.Tensor = self.head(hidden) * self.temperature.float()
        return logits


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("fsdp", 1.9), ("zero3", 1.9)],
)
def test_the_row_of_the_zero_paper(strategy: str, gigabytes: float) -> None:
    found = estimate_memory(7.5e9, strategy, 64, accounting="paper")
    assert round(found.rank.total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda trained: torch.optim.SGD(trained, 0.1)),
        ("sgd_momentum", lambda trained: torch.optim.SGD(trained, 0.1, momentum=0.9)),
        ("adam", lambda trained: torch.optim.Adam(trained, 0.1)),
        ("adamw", lambda trained: torch.optim.AdamW(trained, 0.1)),
    ],
)
def test_one_process_keeps_what_was_estimated(
    name: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    model = Net()
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(torch.arange(64)).square().mean().backward()
    optimizer.step()
    found = estimate_memory(model, "single", 1, optimizer=name)
    assert found.rank == found.host
    assert found.rank.parameters == bytes_of(model.parameters())
    assert found.rank.gradients == bytes_of(
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    )
    states = [value for kept in optimizer.state.values() for key, value in kept.items()]
    wanted = [state for state in states if isinstance(state, torch.Tensor) and state.dim() > 0]
    scalars = 8 * {"sgd": 0, "sgd_momentum": 1}.get(name, 2)  # for the temperature
    assert found.rank.optimizer == bytes_of(wanted) + scalars
    assert found.rank.buffers == bytes_of(model.buffers())
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())


def test_on_the_meta_device_it_is_the_same() -> None:
    with torch.device("meta"):
        described = Net()
    for strategy in STRATEGIES:
        world = 1 if strategy == "single" else 4
        on_meta = estimate_memory(described, strategy, world)
        assert on_meta == estimate_memory(Net(), strategy, world)


def test_a_module_is_its_number_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    numel = 2 * 64 * 64 + 64
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        assert estimate_memory(model, strategy, 4) == estimate_memory(numel, strategy, 4)


def test_sixteen_bytes_per_parameter_and_host() -> None:
    """fp32 with AdamW; what is above that are the rings."""
    for world in (2, 4):
        host = estimate_memory(16_777_216, "zero2", world).host
        assert host.model_states == 16 * 16_777_216
        assert 8 * MIB * world <= host.buffers <= 13 * MIB * world
        assert host.total == host.model_states + host.buffers


def test_the_options_are_heard() -> None:
    plain = estimate_memory(1024, "zero2", 4)
    assert estimate_memory(1024, "zero2", 4, dtype=torch.bfloat16).rank.gradients == 512
    mixed = estimate_memory(1024, "zero2", 4, dtype=torch.bfloat16, grad_dtype=torch.float32)
    assert mixed.rank == dataclasses.replace(plain.rank, parameters=512)
    assert estimate_memory(1024, "zero2", 4, optimizer=12).rank.optimizer == 12 * 256
    assert estimate_memory(1024, "zero2", 4, activation_bytes=7).host.activations == 28
    private = estimate_memory(1024, "zero2", 4, host_params=False)
    assert private.host.parameters == 4 * plain.host.parameters
    # On several hosts zero2 has no store, and ranks of one host alone have no memory to share.
    apart = estimate_memory(1024, "zero2", 4, ranks_per_host=1)
    assert apart.rank.parameters == apart.host.parameters == 4096
    assert apart.rank.buffers < private.rank.buffers


def test_fully_shard_that_gathers_keeps_its_shards_two_units_and_buckets() -> None:
    numel, unit = 100 * MIB, 4 * MIB
    apart = estimate_memory(numel, "fsdp", 4, ranks_per_host=1, unit_numel=unit)
    assert (apart.rank.parameters, apart.rank.buffers) == (numel, 2 * 4 * unit + 5 * 25 * MIB)
    over_gloo = estimate_memory(numel, "fsdp", 4, host_params=False, unit_numel=unit)
    assert over_gloo.rank == apart.rank
    assert over_gloo.host.total == 4 * apart.host.total
    shared = estimate_memory(numel, "fsdp", 4)
    assert shared.host.parameters == over_gloo.host.parameters == 4 * numel


LAZY = nn.LazyLinear(3)
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: estimate_memory(1, "zero4", 2), ValueError, "got strategy 'zero4', expected one of"),
    (lambda: estimate_memory(1, "ddp", 0), ValueError, "got a world of 0"),
    (lambda: estimate_memory(1, "ddp", 2, ranks_per_host=3), ValueError, "got 3 ranks per host"),
    (lambda: estimate_memory(1, "ddp", 2, ranks_per_host=0), ValueError, "got 0 ranks per host"),
    (lambda: estimate_memory(1, "single", 2), ValueError, "expected 1 for 'single'"),
    (lambda: estimate_memory(1, "dp", 4, ranks_per_host=2), ValueError, "choose 'ddp'"),
    (lambda: estimate_memory(1, "ddp", 2, optimizer="lion"), ValueError, "got optimizer 'lion'"),
    (lambda: estimate_memory(1, "ddp", 2, optimizer=-1), ValueError, "negative number"),
    (lambda: estimate_memory(-1, "ddp", 2), ValueError, "got -1 parameters"),
    (lambda: estimate_memory(0.5, "ddp", 2), ValueError, "got 0.5 parameters"),
    (lambda: estimate_memory(float("nan"), "ddp", 2), ValueError, "got nan parameters"),
    (lambda: estimate_memory(float("inf"), "ddp", 2), ValueError, "got inf parameters"),
    (lambda: estimate_memory(2**62, "ddp", 2), ValueError, "more bytes than 64 bits count"),
    (lambda: estimate_memory(Net(), "ddp", 2, dtype=torch.half), ValueError, "beside a module"),
    (lambda: estimate_memory(LAZY, "ddp", 2), ValueError, "'weight' has no sizes yet"),
    (
        lambda: estimate_memory(1, "ddp", 2, accounting="theirs"),  # type: ignore[arg-type]
        ValueError,
        "got accounting 'theirs'",
    ),
    (
        lambda: estimate_memory(1, "ddp", 2, accounting="paper", optimizer="sgd"),
        ValueError,
        "for the paper's accounting",
    ),
    (
        lambda: estimate_memory(1, "ddp", 2, accounting="paper", dtype=torch.half),
        ValueError,
        "for the paper's accounting",
    ),
    (lambda: estimate_memory(1, "fsdp", 2, unit_numel=-1), ValueError, "negative number"),
    (
        lambda: estimate_memory(1, "fsdp", 2, accounting="paper", unit_numel=1),
        ValueError,
        "for the paper's accounting",
    ),
    (lambda: estimate_memory(1, "fsdp", 2, unit_numel=0.5), TypeError, "unit_numel is float"),  # type: ignore[arg-type]
    (lambda: estimate_memory("1", "ddp", 2), TypeError, "got str"),  # type: ignore[arg-type]
    (lambda: estimate_memory(True, "ddp", 2), TypeError, "got bool"),
    (lambda: estimate_memory(1, "ddp", 2.0), TypeError, "world is float"),  # type: ignore[arg-type]
    (lambda: estimate_memory(1, "ddp", 2, optimizer=1.5), TypeError, "optimizer is float"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_what_is_refused(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    said = str(raised.value).split("\nException raised from")[0]
    assert said.startswith("[memory_estimate] ") and text in said


def run_plan(monkeypatch: Patch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["trireme", "plan", *map(str, arguments)])
    return main()


def test_the_table(monkeypatch: Patch, capsys: Captured) -> None:
    arguments = ("--numel", "7.5e9", "--world", 64, "--ranks-per-host", 8, "--paper")
    assert run_plan(monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("7,500,000,000 parameters, 64 ranks, 8 on a host; as the ZeRO paper")
    ranks, hosts = lines[2:9], lines[10:17]
    assert ranks[0].split()[:3] == ["GB", "per", "rank"] and hosts[0].split()[2] == "host"
    totals = {line.split()[0]: line.split()[-1] for line in ranks[1:]}
    assert list(totals) == list(STRATEGIES)
    assert [totals[name] for name in STRATEGIES[2:]] == ["120.00", "31.41", "16.64", "1.88"]
    assert hosts[3].split()[-1] == "960.00"


def test_json_has_what_the_function_says(monkeypatch: Patch, capsys: Captured) -> None:
    assert (
        run_plan(monkeypatch, "--numel", 1000, "--world", 8, "--ranks-per-host", 4, "--json") == 0
    )
    printed = json.loads(capsys.readouterr().out)
    # One process on two hosts there is not.
    assert [estimate["strategy"] for estimate in printed] == [
        estimate for estimate in STRATEGIES if estimate != "dp"
    ]
    found = estimate_memory(1000, "zero2", 8, ranks_per_host=4)
    expected = dataclasses.asdict(found)
    expected["rank"] |= {"total": found.rank.total, "model_states": found.rank.model_states}
    expected["host"] |= {"total": found.host.total, "model_states": found.host.model_states}
    assert printed[3] == expected


def test_options_of_the_command(monkeypatch: Patch, capsys: Captured) -> None:
    arguments = ["--numel", 1000, "--world", 2, "--strategy", "ddp", "zero2", "--optimizer", "6"]
    arguments += ["--dtype", "bfloat16", "--grad-dtype", "float32", "--activations", "1e3"]
    assert run_plan(monkeypatch, *arguments, "--json") == 0
    ddp, zero2 = (plan["rank"] for plan in json.loads(capsys.readouterr().out))
    assert (ddp["parameters"], ddp["gradients"], ddp["optimizer"]) == (2000, 4000, 6000)
    assert (zero2["gradients"], zero2["optimizer"], zero2["activations"]) == (2000, 3000, 1000)
    assert run_plan(monkeypatch, *arguments) == 0
    assert "6 bytes of state per parameter, on CPU\n" in capsys.readouterr().out


def test_what_fits(monkeypatch: Patch, capsys: Captured) -> None:
    arguments = ["--numel", "7e9", "--world", 8, "--ranks-per-host", 4, "--memory", "64GiB"]
    assert run_plan(monkeypatch, *arguments, "--strategy", "ddp", "zero3", "fully_shard") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "with 64 GiB on each host:",
        "ddp         fits with no number of hosts of 4 ranks (with 8: 417.2 GiB)",
        "fsdp        needs 12 ranks (3 hosts of 4; with 8: 65.5 GiB)",
    ]
    arguments = ["--numel", "7e9", "--world", 8, "--gpus", "--memory", "24GiB", "--strategy"]
    assert run_plan(monkeypatch, *arguments, "fsdp", "--unit", "2e8") == 0
    text = capsys.readouterr().out
    assert "each a GPU with memory of its own; adamw, on GPUs\n" in text
    assert "per host" not in text and "fsdp        fits (14.65 GiB)\n" in text
    assert run_plan(monkeypatch, *arguments, "fsdp") == 0
    assert "fits with no number of GPUs" in (text := capsys.readouterr().out)
    assert "say with --unit" in text.splitlines()[-1]


@pytest.mark.parametrize("option", ["world", "ranks-per-host", "memory", "activations", "unit"])
def test_absurd_numbers(option: str, monkeypatch: Patch, capsys: Captured) -> None:
    arguments = {"world": 2, "numel": 5, "strategy": "fsdp", option: "1e30"}
    given = [text for name, value in arguments.items() for text in (f"--{name}", value)]
    assert run_plan(monkeypatch, *given) == 2
    assert "expected a number of 64 bits. Give a smaller one." in capsys.readouterr().err


MODELS = """
import torch
from torch import nn

class Models:
    @staticmethod
    def large():
        model = nn.Linear(10**6, 10**6)
        assert model.weight.is_meta
        return model

def fails():
    raise RuntimeError("no data here")

number = lambda: 5

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1000, 1000)

    def forward(self, x):
        return x + self.linear(x).tanh()

class Chain(nn.Module):
    def __init__(self, rows=10**6):
        super().__init__()
        self.inner = nn.Module()
        self.inner.blocks = nn.ModuleList(Block() for _ in range(9))
        self.table = nn.Embedding(rows, 1000)

    def forward(self, x, scale=1.0):
        x = self.table(x) * scale
        for block in self.inner.blocks:
            x = block(x)
        return x

class Peeks(Chain):
    def __init__(self):
        super().__init__(rows=4)

    def forward(self, x):
        return super().forward(x) if int(x.sum()) == 0 else None

def sample():
    return dict(x=torch.zeros(5, 2, dtype=torch.long), scale=2.0)
"""


def test_a_model_that_no_memory_would_hold(tmp_path: Path) -> None:
    """The user calls it in the folder of the model."""
    (tmp_path / "their_models.py").write_text(MODELS)
    command = [sys.executable, "-m", "trireme", "plan", "--world", "4", "--json"]
    command += ["--model", "their_models:Models.large"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    assert {plan["numel"] for plan in json.loads(done.stdout)} == {10**12 + 10**6}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "their_models"), "[plan] got --model their_models, expected MODULE:FACTORY"),
        (("--model", "their_models:fails"), "raised RuntimeError: no data here, expected"),
        (("--model", "their_models:missing"), "raised AttributeError"),
        (("--model", "no_such_models:make"), "raised ModuleNotFoundError"),
        (("--model", "their_models:number"), "their_models:number made int, expected"),
        (("--model", "torch.nn:Linear"), "raised TypeError"),
        (("--numel", "5", "--dtype", "nn"), "[plan] got dtype 'nn', expected one of torch"),
        (("--numel", "5", "--ranks-per-host", "0"), "[memory_estimate] got 0 ranks per host"),
        (("--numel", "5", "--optimizer", "lion"), "[memory_estimate] got optimizer 'lion'"),
    ],
)
def test_what_the_command_refuses(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    (tmp_path / "their_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run_plan(monkeypatch, "--world", 2, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err and captured.err.startswith("[") and captured.err.count("\n") == 1
    sys.modules.pop("their_models", None)


WHOLE = 5 * 2 * 1000 * 4  # bytes between two blocks; a block saves its input and tanh's result
NEVER = (9 * 2 + 1) * WHOLE  # counts what the model returns, too


@pytest.fixture
def their_models(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    (tmp_path / "their_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("their_models", None)


@pytest.mark.usefixtures("their_models")
@pytest.mark.parametrize(
    ("options", "counted", "recomputed"),
    [
        (("never", "--input", "5,2:int64"), NEVER, 0),
        (("never", "--sample", "their_models:sample"), NEVER, 0),
        # Three segments of three: two inputs remain beside the last one.
        (("sqrt", "--input", "5,2:int64"), (2 + 3 * 2 + 1) * WHOLE, 6),
        (("auto", "--input", "5,2:int64", "--budget", NEVER - 3 * WHOLE), NEVER - 3 * WHOLE, 3),
    ],
)
def test_activations_are_counted(
    options: tuple[object, ...],
    counted: int,
    recomputed: int,
    monkeypatch: Patch,
    capsys: Captured,
) -> None:
    """The table would take 4 GB."""
    arguments = ("--model", "their_models:Chain", "--world", 2, "--strategy", "ddp")
    assert run_plan(monkeypatch, *arguments, "--json", "--checkpoint", *options) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["rank"]["activations"] == counted
    assert found["counted_activations"]["recomputed"] == recomputed
    assert run_plan(monkeypatch, *arguments, "--checkpoint", *options) == 0
    line = capsys.readouterr().out.splitlines()[1]
    text = f"{counted / 2**20:,.1f} MiB of activations: {recomputed} of 9 layers of 'inner.blocks'"
    assert line.startswith(text)


@pytest.mark.usefixtures("their_models")
def test_a_forward_that_needs_values_runs_with_real_ones(
    monkeypatch: Patch, capsys: Captured
) -> None:
    arguments = ("--model", "their_models:Peeks", "--world", 2, "--input", "5,2:int64", "--json")
    assert run_plan(monkeypatch, *arguments, "--checkpoint", "never") == 0
    assert json.loads(capsys.readouterr().out)[0]["rank"]["activations"] == NEVER


INPUT = ("--model", "their_models:Chain", "--input", "5,2:int64")


@pytest.mark.usefixtures("their_models")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((*INPUT, "--checkpoint", "sqrt", "--activations", 5), "got --activations and --checkpoi"),
        (INPUT, "got --input, --sample or --budget without --checkpoint"),
        (("--numel", 5, "--checkpoint", "sqrt"), "got --checkpoint, expected --model with it"),
        ((*INPUT, "--checkpoint", "auto"), "[checkpoint] got checkpoint='auto' without a budget"),
        ((*INPUT, "--checkpoint", "sqrt", "--budget", 9), "got checkpoint='sqrt' with a budget"),
        (
            (*INPUT, "--checkpoint", "auto", "--budget", 9),
            f"[checkpoint] got a budget of 9 bytes, expected at least {(1 + 8 + 2) * WHOLE}",
        ),
        ((*INPUT[:3], "5,x", "--checkpoint", "never"), "got --input 5,x, expected SHAPE[:DTYPE]"),
        ((*INPUT[:3], "5:word", "--checkpoint", "never"), "got --input 5:word, expected SHAPE"),
        ((*INPUT[:3], "5", "--checkpoint", "never"), "the forward raised "),
        (
            (*INPUT[:2], "--sample", "their_models:nothing", "--checkpoint", "never"),
            "--sample their_models:nothing raised AttributeError",
        ),
        (
            ("--model", "torch.nn:Identity", "--input", "5", "--checkpoint", "sqrt"),
            "[checkpoint] got a model without repeated layers",
        ),
    ],
)
def test_what_is_refused_of_checkpoints(
    arguments: tuple[object, ...], text: str, monkeypatch: Patch, capsys: Captured
) -> None:
    assert run_plan(monkeypatch, "--world", 2, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err and captured.err.startswith("[")


def test_the_command_knows_units_and_ranks_without_common_memory(
    monkeypatch: Patch, capsys: Captured
) -> None:
    arguments = ["--numel", "1e8", "--world", 4, "--no-host-params", "--unit", "1e6", "--json"]
    assert run_plan(monkeypatch, *arguments, "--strategy", "zero2", "zero3") == 0
    zero2, fsdp = (plan["rank"] for plan in json.loads(capsys.readouterr().out))
    assert (zero2["parameters"], fsdp["parameters"]) == (4 * 10**8, 10**8)
    assert fsdp["buffers"] == 2 * 4 * 10**6 + 5 * 25 * MIB


@pytest.mark.parametrize("wrong", ["5.5", "inf", "many"])
def test_no_number(wrong: str, monkeypatch: Patch, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_plan(monkeypatch, "--numel", wrong, "--world", 2)
    assert f"argument --numel: invalid number value: '{wrong}'" in capsys.readouterr().err


def test_the_public_names() -> None:
    for name in ("estimate_memory", "MemoryEstimate", "MemoryBytes"):
        assert name in trireme.__all__
