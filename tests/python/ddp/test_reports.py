"""What a module tells about its steps: last_step(), profiler ranges, torch's logging data."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddp.ranks import backward
from harness.meeting import say, stay_until, until
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks

KEYS = {
    *("step", "forward_ms", "backward_ms", "waiting_ms", "exposed_comm_ms", "hidden_comm_ms"),
    *("reduced_bytes", "buckets", "streamed", "sent_bytes", "encode_ms"),
}


@on_ranks()
def test_last_step(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    gradient_bytes = 4 * sum(parameter.numel() for parameter in ddp.parameters())
    for step in range(1, 4):
        begin = time.perf_counter()
        backward(ddp, step, rank)
        elapsed_ms = (time.perf_counter() - begin) * 1e3
        report = ddp.last_step()
        assert set(report) == KEYS
        assert report["step"] == step
        assert report["reduced_bytes"] == gradient_bytes
        assert report["buckets"] == 1
        assert report["exposed_comm_ms"] == report["waiting_ms"]
        assert 0 <= report["waiting_ms"] <= report["backward_ms"]
        assert 0 <= report["hidden_comm_ms"] <= report["backward_ms"]
        assert report["forward_ms"] > 0
        assert report["forward_ms"] + report["backward_ms"] <= elapsed_ms


def late_ms() -> float:
    """Computes, and returns how long."""
    began = time.perf_counter()
    torch.randn(500, 500).matrix_exp()
    return 1e3 * (time.perf_counter() - began)


def of_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


@on_ranks()
def test_waiting_is_seen(rank: int) -> None:
    """Rank 1 computes when rank 0 has its last gradient; rank 0 waits for it and says so."""
    ddp = trireme.DistributedDataParallel(mlp())
    backward(ddp, 0, rank)
    last_gradient: list[float] = []
    ddp.module[0].weight.register_hook(lambda _: last_gradient.append(time.perf_counter()))
    if rank == 0:
        ddp.module[0].weight.register_hook(lambda _: say(f"0 is through {number}"))
    number = 0

    def is_seen() -> bool:
        """Unless rank 0 was kept from its wait for half of the time that rank 1 took."""
        nonlocal number
        number += 1
        loss = ddp(batch(0)[rank::WORLD]).square().mean()
        late = 0.0
        if rank == 1:
            stay_until(f"0 is through {number}")
            late = late_ms()
        loss.backward()
        report = ddp.last_step()
        most = 1e3 * (time.perf_counter() - last_gradient[-1])
        assert report["exposed_comm_ms"] == report["waiting_ms"] <= most
        waited, hidden = of_all((report["waiting_ms"], report["hidden_comm_ms"]))[0]
        return waited > of_all(late)[1] / 2 and hidden < waited / 2

    until(is_seen)


class Slow(nn.Module):
    """Its first layer's backward waits, so that the last layer's bucket travels meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 64)
        self.compute: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden.register_hook(lambda grad: self.compute())
        return self.last(hidden)


@on_ranks()
def test_hidden_communication_is_seen(rank: int) -> None:
    """Rank 1 is late, and rank 0 computes until its bucket has left, which hides the lateness."""
    ddp = trireme.DistributedDataParallel(Slow(), bucket_cap_mb=0.0001)
    for step in range(2):
        backward(ddp, step, rank)
    number = 0

    def compute() -> None:
        say(f"{rank} computes {number}")
        if rank == 0:
            stay_until(f"1 computes {number}")

    def is_seen() -> bool:
        """Unless the rest was waited for half as long."""
        nonlocal number
        number += 1
        loss = ddp(batch(2)[rank::WORLD]).square().mean()
        late = 0.0
        if rank == 1:
            stay_until(f"0 computes {number}")
            late = late_ms()
        loss.backward()
        report = ddp.last_step()
        hidden = report["hidden_comm_ms"]
        assert hidden <= report["backward_ms"]
        return of_all(hidden)[0] > of_all(late)[1] / 2

    ddp.module.compute = compute
    until(is_seen)


@on_ranks()
def test_forward_time_of_an_accumulation_is_summed(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    inside: list[float] = []
    ddp.module.register_forward_pre_hook(lambda *_: inside.append(-time.perf_counter()))
    ddp.module.register_forward_hook(lambda *_: inside.append(time.perf_counter()))
    began = time.perf_counter()
    with ddp.no_sync():
        backward(ddp, 0, rank)
        backward(ddp, 1, rank)
    backward(ddp, 2, rank)
    summed_ms = 1e3 * sum(inside)
    assert summed_ms <= ddp.last_step()["forward_ms"] < 1e3 * (time.perf_counter() - began)
    assert ddp.last_step()["step"] == 1
    inside.clear()
    began = time.perf_counter()
    backward(ddp, 3, rank)
    assert 1e3 * sum(inside) <= ddp.last_step()["forward_ms"]
    assert ddp.last_step()["forward_ms"] < 1e3 * (time.perf_counter() - began)


@on_ranks()
def test_profiler_ranges_carry_the_names_of_stages(rank: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    ddp = trireme.DistributedDataParallel(model)
    backward(ddp, 0, rank)
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        backward(ddp, 1, rank)
    names = {event.key for event in traced.key_averages()}
    ours = {name for name in names if name.startswith("trireme::")}
    assert ours >= {
        "trireme::ddp.forward",
        "trireme::ddp.sync_buffers",
        "trireme::launch_queue.launch",
        "trireme::grad_reducer.finish_backward",
    }
    stages = {name.removeprefix("trireme::").split(".")[0] for name in ours}
    assert stages <= {"ddp", "grad_hook", "bucket", "stream_wire", "launch_queue", "grad_reducer"}


@on_ranks()
def test_logging_data(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=2)
    backward(ddp, 0, rank)
    data = ddp._get_ddp_logging_data()
    assert data["world_size"] == 2 and data["rank"] == rank
    assert data["module_name"] == "Sequential"
    assert data["backend_name"] == dist.get_backend()
    assert data["bucket_cap_bytes"] == 2 * 2**20
    assert data["comm_hook"] == ""
    assert set(data) > KEYS
    ddp._set_ddp_runtime_logging_sample_rate(1)
    with pytest.raises(ValueError, match="sample rate of 0"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
