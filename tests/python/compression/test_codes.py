"""Gradients under compression, against numpy: what arrives, what is kept, what is sent."""

import math

import numpy as np
import pytest
import torch
import trireme
from trireme import compression as c
from trireme.compression import Compression

from compression.given import SIZES, Given, averaged, drawn
from compression.reference import Sender, mean_of
from harness.on_ranks import on_ranks
from harness.training import assert_same_on_all_ranks

STEPS = 4

BLOCKS: dict[str, Compression] = {
    "int8": c.Int8(between="ranks"),
    "int8 in odd blocks": c.Int8(block=77, between="ranks"),
    "int8, no feedback": c.Int8(error_feedback=False, between="ranks"),
    "int4": c.Int4(between="ranks"),
    "int4 in odd blocks": c.Int4(block=33, between="ranks"),
    "int4 in one block": c.Int4(block=1 << 40, between="ranks"),
    "sign": c.Sign(between="ranks"),
    "sign in odd blocks": c.Sign(block=13, between="ranks"),
    "top 1 %": c.TopK(0.01, between="ranks"),
    "top 30 % with decay": c.TopK(0.3, decay=0.9, between="ranks"),
    "top of chunks": c.TopK(0.02, chunk=256, between="ranks"),
    "one of each chunk": c.TopK(1e-9, chunk=64, between="ranks"),
    "top, no feedback": c.TopK(0.1, error_feedback=False, between="ranks"),
    "all coded": c.Int8(dense_below=0, between="ranks"),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", BLOCKS)
@on_ranks("world")
def test_equals_numpy(rank: int, name: str, world: int) -> None:
    """Bit for bit, in every step, whatever bucket a parameter is in."""
    method = BLOCKS[name]
    for cap_mb in (25, 0.001):
        model = Given(SIZES)
        ddp = trireme.DistributedDataParallel(model, compression=method, bucket_cap_mb=cap_mb)
        senders = [{name: Sender(method) for name in SIZES} for _ in range(world)]
        for step in range(STEPS):
            got = averaged(ddp, drawn(step, rank))
            given = [drawn(step, sender) for sender in range(world)]
            for parameter in SIZES:
                expected = mean_of(
                    [
                        senders[sender][parameter].send(given[sender][parameter].view(-1).numpy())
                        for sender in range(world)
                    ]
                )
                np.testing.assert_array_equal(got[parameter].view(-1).numpy(), expected)
        sent = sum(method.bytes(size) for size in SIZES.values()) * (world - 1)
        assert ddp.last_step()["sent_bytes"] == pytest.approx(sent, rel=0.02)
        assert ddp.last_step()["encode_ms"] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feedback", [False, True])
@on_ranks()
def test_casts(rank: int, dtype: torch.dtype, feedback: bool) -> None:
    """One rounding on each rank and one of the sum; with feedback nothing is lost over steps."""
    kind = c.Fp16 if dtype == torch.float16 else c.Bf16
    method = kind(error_feedback=feedback, between="ranks")
    ddp = trireme.DistributedDataParallel(Given(SIZES), compression=method)
    given = {name: value * 0.37 for name, value in drawn(0, rank).items()}
    of_all = [{name: value * 0.37 for name, value in drawn(0, r).items()} for r in range(2)]
    exact = {name: (of_all[0][name] + of_all[1][name]) / 2 for name in SIZES}
    # What rounding may cost: of each rank's part, and of their sum.
    limits = {
        name: 2 * torch.finfo(dtype).eps * (of_all[0][name].abs() + of_all[1][name].abs()) + 1e-6
        for name in SIZES
    }
    steps = 64
    totals = {name: torch.zeros(SIZES[name]) for name in SIZES}
    for _ in range(steps):
        for name, value in averaged(ddp, given).items():
            totals[name] += value
            assert ((value - exact[name]).abs() <= limits[name]).all()
    if feedback:
        for name, total in totals.items():
            assert ((total / steps - exact[name]).abs() <= limits[name] / 4).all()
    assert torch.allclose(averaged(ddp, given)["small"], exact["small"], rtol=1e-6, atol=1e-7)
    cast = sum(kind().bytes(size) for size in SIZES.values())
    assert ddp.last_step()["sent_bytes"] == pytest.approx(cast, rel=0.01)


@on_ranks()
def test_stochastic_rounding_is_right_on_average(rank: int) -> None:
    method = c.Int8(rounding="stochastic", error_feedback=False, between="ranks")
    ddp = trireme.DistributedDataParallel(Given({"tail": (2000,)}), compression=method)
    given = {"tail": torch.full((2000,), 0.3)}
    given["tail"][::256] = 127.0
    first = averaged(ddp, given)["tail"].clone()
    rest = first.view(-1)[1:256]
    assert set(rest.unique().tolist()) <= {0.0, 0.5, 1.0}
    total = sum(averaged(ddp, given)["tail"].clone() for _ in range(50))
    assert not torch.equal(first, averaged(ddp, given)["tail"]), "draws do not change with the step"
    assert abs(float((total / 50).view(-1)[1:256].mean()) - 0.3) < 0.03


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@on_ranks()
def test_other_dtypes(rank: int, dtype: torch.dtype) -> None:
    """What is coded is fp32, of the real numbers of a complex one."""
    ddp = trireme.DistributedDataParallel(
        Given({"tail": (2000,)}, dtype), compression=c.Int8(between="ranks")
    )
    torch.manual_seed(rank)
    given = {"tail": torch.randn(2000).to(dtype)}
    module = ddp.module
    ddp(given).real.backward() if dtype.is_complex else ddp(given).backward()
    found = module.held["tail"].grad
    torch.manual_seed(0)
    first = torch.randn(2000).to(dtype)
    torch.manual_seed(1)
    exact = (first + torch.randn(2000).to(dtype)).conj() / 2
    assert found.dtype == dtype
    assert (found - exact).abs().max() < 4 / 127


@on_ranks()
def test_what_is_not_finite(rank: int) -> None:
    """NaN and Inf arrive on all ranks, in the block that had them; the step after is finite, and
    what was kept of other steps is still there."""
    method = c.Int8(between="ranks")
    for broken in (float("nan"), float("inf")):
        ddp = trireme.DistributedDataParallel(Given({"tail": (2000,)}), compression=method)
        senders = [Sender(method), Sender(method)]
        for step in range(3):
            given = [drawn(step, sender)["tail"] for sender in range(2)]
            if step == 1:
                given[1][300] = broken
            found = averaged(ddp, {"tail": given[rank]})["tail"]
            residual = senders[1].residual
            expected = mean_of([senders[s].send(given[s].numpy()) for s in range(2)])
            if step == 1:
                assert not found[256:512].isfinite().any()
                senders[1].residual[256:512] = residual[256:512]
                expected[256:512] = np.nan
            np.testing.assert_array_equal(found.numpy(), expected)


@on_ranks()
def test_left_out_parameters(rank: int) -> None:
    """A rank that leaves a parameter out sends what it has kept of it; if no rank used it, nothing
    is lost, and .grad stays."""
    method = c.Int4(between="ranks")
    ddp = trireme.DistributedDataParallel(
        Given({"matrix": (37, 61), "tail": (2000,)}), compression=method
    )
    users = [(0, 1), (0,), (), (0, 1), (1,)]
    senders = [Sender(method), Sender(method)]
    for step, using in enumerate(users):
        ddp.zero_grad()
        given = drawn(step, rank)
        used = {"matrix": given["matrix"]} | ({"tail": given["tail"]} if rank in using else {})
        ddp(used).backward()
        found = ddp.module.held["tail"].grad
        if not using:
            assert found is None
            continue
        zeros = np.zeros(2000, np.float32)
        expected = mean_of(
            [
                senders[s].send(drawn(step, s)["tail"].numpy() if s in using else zeros)
                for s in range(2)
            ]
        )
        np.testing.assert_array_equal(found.numpy(), expected)


@on_ranks()
def test_accumulation_compresses_once(rank: int) -> None:
    method = c.Sign(between="ranks")
    ddp = trireme.DistributedDataParallel(Given({"tail": (2000,)}), compression=method)
    with ddp.no_sync():
        ddp({"tail": drawn(0, rank)["tail"]}).backward()
    assert ddp.last_step()["step"] == 0
    ddp({"tail": drawn(1, rank)["tail"]}).backward()
    whole = [drawn(0, s)["tail"] + drawn(1, s)["tail"] for s in range(2)]
    expected = mean_of([Sender(method).send(values.numpy()) for values in whole])
    np.testing.assert_array_equal(ddp.module.held["tail"].grad.numpy(), expected)


@on_ranks()
def test_a_threshold_sends_about_as_many(rank: int) -> None:
    """Never more, on average not much fewer; and what is sent is whole."""
    numel, density = 100_000, 0.01
    method = c.TopK(density, between="ranks")
    ddp = trireme.DistributedDataParallel(Given({"big": (numel,)}), compression=method)
    most = math.ceil(density * numel)
    counts = []
    total = torch.zeros(numel)
    given = torch.zeros(numel)
    for step in range(16):
        torch.manual_seed(100 * step)  # the same on both ranks
        gradient = torch.randn(numel) * (1 + step % 3)
        found = averaged(ddp, {"big": gradient})["big"]
        counts.append(int((found != 0).sum()))
        total += found
        given += gradient
    assert max(counts) <= most
    assert sum(counts[5:]) / len(counts[5:]) >= 0.8 * most
    sent = total != 0
    assert torch.allclose((given - total)[sent & (found != 0)], torch.zeros(1), atol=1e-4)
    assert ddp.last_step()["sent_bytes"] == pytest.approx(method.bytes(numel), rel=0.02)


@on_ranks()
def test_drawn_positions(rank: int) -> None:
    """Alike on all ranks, others in each step, one in each part; right on average without
    feedback, and nothing is lost with it."""
    numel, density = 2000, 0.1
    given = drawn(0, rank)["tail"]
    mean = (drawn(0, 0)["tail"] + drawn(0, 1)["tail"]) / 2
    for feedback in (True, False):
        method = c.RandomK(density, error_feedback=feedback, between="ranks")
        ddp = trireme.DistributedDataParallel(Given({"tail": (numel,)}), compression=method)
        seen, total, steps = [], torch.zeros(numel), 200
        for _ in range(steps):
            found = averaged(ddp, {"tail": given})["tail"].clone()
            seen.append(found != 0)
            total += found
            count = int((found.view(-1, 10)[80:] != 0).sum(1).max())
            assert count <= 1
        assert ddp.last_step()["sent_bytes"] == method.bytes(numel) == 4 * 200
        assert not torch.equal(seen[0], seen[1])
        assert_same_on_all_ranks([total])
        off = (total / steps - mean)[600:].abs().mean() / mean[600:].abs().mean()
        assert off < (0.1 if feedback else 0.4)


@on_ranks()
def test_low_rank_is_exact_for_low_ranks(rank: int) -> None:
    """After two steps; before start_step, and for vectors, gradients go as fp32."""
    torch.manual_seed(3)
    left, right = torch.randn(64, 3), torch.randn(48, 3)
    mine = left @ torch.diag(torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)) @ right.t()
    mean = left @ torch.diag(torch.tensor([1.0, 2.0, 3.0]) * 1.5) @ right.t()
    method = c.PowerSGD(4, start_step=2, between="ranks")
    sizes = {"matrix": (64, 48), "vector": (2000,)}
    ddp = trireme.DistributedDataParallel(Given(sizes), compression=method)
    vector = torch.full((2000,), float(rank))
    for step in range(6):
        found = averaged(ddp, {"matrix": mine, "vector": vector})
        assert torch.equal(found["vector"], torch.full((2000,), 0.5))
        if step < 2:
            assert torch.allclose(found["matrix"], mean, rtol=1e-6, atol=1e-6)
            assert ddp.last_step()["sent_bytes"] == 4 * (64 * 48 + 2000)
        elif step > 3:
            assert torch.allclose(found["matrix"], mean, rtol=1e-3, atol=1e-3)
            assert ddp.last_step()["sent_bytes"] == method.bytes((64, 48)) + 4 * 2000
        assert_same_on_all_ranks([found["matrix"]])


@on_ranks()
def test_low_rank_loses_nothing(rank: int) -> None:
    """What is left out of random gradients comes later: means add up to the gradients' mean."""
    method = c.PowerSGD(2, start_step=0, between="ranks")
    ddp = trireme.DistributedDataParallel(Given({"matrix": (64, 48)}), compression=method)
    torch.manual_seed(rank)
    mine = torch.randn(64, 48)
    torch.manual_seed(0)
    mean = torch.randn(64, 48)
    torch.manual_seed(1)
    mean = (mean + torch.randn(64, 48)) / 2
    total, offs = torch.zeros(64, 48), []
    for step in range(200):
        total += averaged(ddp, {"matrix": mine})["matrix"]
        offs.append(float((total / (step + 1) - mean).norm() / mean.norm()))
    assert offs[-1] < 0.25 and offs[-1] < 0.3 * offs[0]


@pytest.mark.parametrize(
    "method",
    [
        c.TopK(0.1, between="ranks"),
        c.RandomK(0.1, between="ranks"),
        c.PowerSGD(2, start_step=0, between="ranks"),
    ],
    ids=lambda method: type(method).__name__,
)
@on_ranks()
def test_what_is_not_finite_elsewhere(rank: int, method: Compression) -> None:
    """In one parameter on one rank: that parameter is not finite on all, the next step is."""
    sizes = {"matrix": (37, 61), "other": (41, 53)}
    ddp = trireme.DistributedDataParallel(Given(sizes), compression=method)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        given = {name: torch.randn(size) for name, size in sizes.items()}
        if step == 1 and rank == 1:
            given["matrix"][3, 4] = float("inf")
        found = averaged(ddp, given)
        assert found["other"].isfinite().all()
        assert bool(found["matrix"].isfinite().all()) == (step != 1)
