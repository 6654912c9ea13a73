"""What codes leave out: whose it is, that nothing is lost, and that checkpoints have it."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trireme
from torch.optim import SGD
from trireme import compression as c
from trireme.compression import Compression, state_of

from compression.given import Given, averaged
from compression.reference import Sender
from harness.faults import raises
from harness.on_ranks import on_ranks
from harness.pretended_hosts import on_hosts

SIZES = {"matrix": (37, 61), "tail": (2000,), "small": (1000,), "big": (66_000,)}

METHODS: dict[str, Compression] = {
    "int8, stochastic": c.Int8(rounding="stochastic", between="ranks"),
    "sign": c.Sign(between="ranks"),
    "top 1 %": c.TopK(0.01, between="ranks"),
    "random": c.RandomK(0.05, between="ranks"),
    "low rank": c.PowerSGD(2, start_step=2, between="ranks"),
    "bf16": c.Bf16(error_feedback=True, between="ranks"),
    "no feedback": c.Int4(error_feedback=False, between="ranks"),
}


def given(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def step_of(ddp: Any, step: int, rank: int) -> list[torch.Tensor]:
    return [value.clone() for value in averaged(ddp, given(step, rank)).values()]


def wrapped(method: Compression, sizes: dict[str, tuple[int, ...]] = SIZES) -> Any:
    return trireme.DistributedDataParallel(Given(sizes), compression=method)


@pytest.mark.parametrize("name", METHODS)
@on_ranks()
def test_goes_on_bit_for_bit(rank: int, name: str, tmp_path: Path) -> None:
    first = wrapped(METHODS[name])
    for step in range(4):
        step_of(first, step, rank)
    trireme.save_checkpoint(tmp_path / "saved", first)
    second = wrapped(METHODS[name])
    trireme.load_checkpoint(tmp_path / "saved", second)
    for step in range(4, 8):
        expected, found = step_of(first, step, rank), step_of(second, step, rank)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert not [key for key in first.state_dict() if "residual" in key]


@on_ranks()
def test_is_what_numpy_says(rank: int) -> None:
    method = METHODS["sign"]
    ddp = wrapped(method)
    assert state_of(ddp) == {}
    sender = Sender(method)
    for step in range(3):
        step_of(ddp, step, rank)
        sender.send(given(step, rank)["tail"].numpy())
    found = state_of(ddp)
    assert set(found) == {"held.matrix", "held.tail", "held.big"}
    residual = found["held.tail"]
    assert (residual.sender, residual.first) == (rank, 0)
    np.testing.assert_array_equal(residual.values.numpy(), sender.residual)


@on_ranks()
def test_nothing_is_lost(rank: int) -> None:
    """What was sent and what is kept are what was given, over steps that freeze, leave out and
    plan anew, and over a checkpoint."""
    for method in (c.Int4(between="ranks"), c.TopK(0.02, between="ranks")):
        ddp = trireme.DistributedDataParallel(
            Given({"tail": (2000,), "other": (1500,)}), compression=method, bucket_cap_mb=0.001
        )
        tail, other = ddp.module.held["tail"], ddp.module.held["other"]
        sent = torch.zeros(2000, dtype=torch.float64)
        all_given = torch.zeros(2000, dtype=torch.float64)
        for step in range(60):
            other.requires_grad_(step % 7 != 3)
            torch.manual_seed(100 * step + rank)
            gradients = {"tail": torch.randn(2000), "other": torch.randn(1500)}
            uses_tail = step % 5 != rank and step % 11 != 4
            if not other.requires_grad:
                del gradients["other"]
            if not uses_tail and len(gradients) > 1:
                del gradients["tail"]
            ddp.zero_grad()
            ddp(gradients).backward()
            if "tail" in gradients:
                all_given += gradients["tail"]
            if tail.grad is not None:
                sent += tail.grad
        dist.all_reduce(all_given)
        kept = state_of(ddp)["held.tail"].values.double().clone()
        dist.all_reduce(kept)
        assert torch.allclose(2 * sent + kept, all_given, atol=1e-3)


@on_ranks()
def test_another_method_begins_with_zeros(rank: int, tmp_path: Path) -> None:
    """Said once, on rank 0; so where none was saved."""
    plain = trireme.DistributedDataParallel(Given(SIZES))
    trireme.save_checkpoint(tmp_path / "plain", plain)
    first = wrapped(METHODS["sign"])
    step_of(first, 0, rank)
    trireme.save_checkpoint(tmp_path / "sign", first)
    for saved in ("plain", "sign"):
        second = wrapped(c.Int8(between="ranks"))
        step_of(second, 0, rank)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trireme.load_checkpoint(tmp_path / saved, second)
        assert len(said) <= (1 if rank == 0 else 0)
        assert state_of(second) == {}
    trireme.load_checkpoint(tmp_path / "sign", plain)


@on_ranks()
def test_another_shape_is_refused(rank: int, tmp_path: Path) -> None:
    first = wrapped(METHODS["sign"])
    step_of(first, 0, rank)
    trireme.save_checkpoint(tmp_path / "saved", first)
    second = wrapped(METHODS["sign"], SIZES | {"tail": (1900,)})
    with raises(ValueError, "tail"):
        trireme.load_checkpoint(tmp_path / "saved", second)


def save_on(rank: int, world: int, folder: str, method: Compression) -> dict[str, torch.Tensor]:
    ddp = wrapped(method)
    for step in range(2):
        step_of(ddp, step, rank)
    trireme.save_checkpoint(folder, ddp)
    return {name: residual.values.clone() for name, residual in state_of(ddp).items()}


def load_on(rank: int, world: int, folder: str, method: Compression) -> dict[str, torch.Tensor]:
    ddp = wrapped(method)
    trireme.load_checkpoint(folder, ddp)
    return {name: residual.values.clone() for name, residual in state_of(ddp).items()}


def test_another_number_of_senders(tmp_path: Path) -> None:
    """Each gets the mean of what there was."""
    method = c.Int4(between="ranks")
    folder = str(tmp_path / "saved")
    saved = on_hosts("alone", save_on, folder, method)
    loaded = on_hosts("2x2", load_on, folder, method)
    for name in saved[0]:
        mean = torch.stack([of_rank[name] for of_rank in saved]).mean(0)
        for of_rank in loaded:
            assert torch.allclose(of_rank[name], mean, rtol=1e-6, atol=1e-7)


def test_thresholds_of_another_number_of_senders(tmp_path: Path) -> None:
    """Where nothing is kept but those, each begins with its own."""
    method = c.TopK(0.01, error_feedback=False, between="ranks")
    folder = str(tmp_path / "saved")
    on_hosts("alone", save_on, folder, method)
    on_hosts("2x2", load_on, folder, method)


def go_on(rank: int, world: int, folder: str) -> None:
    method = c.TopK(0.05, chunk=128)
    first = wrapped(method)
    for step in range(3):
        step_of(first, step, rank)
    trireme.save_checkpoint(folder, first)
    second = wrapped(method)
    trireme.load_checkpoint(folder, second)
    for step in range(3, 5):
        expected, found = step_of(first, step, rank), step_of(second, step, rank)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("layout", ["2x2", "1+3"])
def test_goes_on_between_hosts(layout: str, tmp_path: Path) -> None:
    """Each leg keeps its part."""
    on_hosts(layout, go_on, str(tmp_path / "saved"))


@on_ranks()
def test_an_optimizer_resumes_with_it(rank: int, tmp_path: Path) -> None:
    method = METHODS["top 1 %"]
    models, optimizers = [wrapped(method), wrapped(method)], []
    for model in models:
        optimizers.append(SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        step_of(models[0], step, rank)
        optimizers[0].step()
    trireme.save_checkpoint(tmp_path / "saved", models[0], optimizers[0])
    trireme.load_checkpoint(tmp_path / "saved", models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step_of(model, 3, rank)
        optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@on_ranks()
def test_another_rank_of_matrices_begins_with_its_own(rank: int, tmp_path: Path) -> None:
    first = wrapped(c.PowerSGD(2, start_step=0, between="ranks"))
    step_of(first, 0, rank)
    trireme.save_checkpoint(tmp_path / "saved", first)
    second = wrapped(c.PowerSGD(3, start_step=0, between="ranks"))
    trireme.load_checkpoint(tmp_path / "saved", second)
    assert all(value.isfinite().all() for value in step_of(second, 1, rank))


@on_ranks()
def test_two_modules_in_one_model(rank: int, tmp_path: Path) -> None:
    """Each goes on with what it kept."""
    models = []
    for _ in range(2):
        models.append(torch.nn.ModuleList(wrapped(METHODS["sign"]) for _ in range(2)))
    for step, part in enumerate(models[0]):
        step_of(part, step, rank)
    trireme.save_checkpoint(tmp_path / "saved", models[0])
    trireme.load_checkpoint(tmp_path / "saved", models[1])
    assert len(state_of(models[1])) == 6
    for one, other in zip(*models, strict=True):
        expected, found = step_of(one, 2, rank), step_of(other, 2, rank)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
