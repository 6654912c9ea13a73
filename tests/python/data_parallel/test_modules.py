"""What a DataParallel is: its class, its replicas, its copies, its reports and its end."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from data_parallel.cases import DP, TIME_LIMIT, Called, assert_close, assert_same_backward, pair
from harness.models import batch, mlp
from harness.on_ranks import on_ranks
from harness.training import gradients

pytestmark = TIME_LIMIT


def make() -> nn.Module:
    return mlp(torch.float64)


def data(step: int = 0, rows: int = 7) -> Tensor:
    return batch(step, rows=rows, dtype=torch.float64)


# What it is


def test_it_is_torchs_class() -> None:
    ours = DP(make(), replicas=2)
    assert isinstance(ours, nn.DataParallel)
    assert isinstance(ours, nn.parallel.DataParallel)
    theirs = nn.DataParallel(make())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_modules()] == [
        name for name, _ in theirs.named_modules()
    ]
    assert ours.device_ids == [torch.device("cpu")] * 2
    assert (ours.output_device, ours.src_device_obj) == (torch.device("cpu"), torch.device("cpu"))
    assert ours.dim == 0


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_state(assign: bool) -> None:
    ours, one = pair(make)
    for step in range(2):
        assert_same_backward(ours, one, data(step))
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.5)
        state = {f"module.{name}": value.clone() for name, value in one.state_dict().items()}
        assert list(ours.state_dict()) == list(state)
        ours.load_state_dict(state, assign=assign)
        assert_close(dict(ours.state_dict()), state)
    assert_same_backward(ours, one, data(3))


class CutOne(DP):  # type: ignore[type-arg]
    """A step of its own, as classes for graphs and lists have."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        (rows,) = inputs
        return tuple((part * 2,) for part in rows.chunk(len(device_ids))), ({},) * len(device_ids)


class JoinOne(DP):  # type: ignore[type-arg]
    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(list(outputs)) * 3


@pytest.mark.parametrize("kind", [CutOne, JoinOne])
def test_subclasses_that_replace_a_step(kind: Any) -> None:
    ours, one = kind(make(), replicas=2), make()
    factor = 2 if kind is CutOne else 1
    outcome = 1 if kind is CutOne else 3
    for step in range(2):
        expected = one(data(step) * factor) * outcome
        got = ours(data(step))
        assert_close(got, expected)
        for module, output in ((ours, got), (one, expected)):
            module.zero_grad()
            output.square().mean().backward()
        assert_close(gradients(ours), gradients(one))


# What a replica is


def test_replicas_are_modules_like_it() -> None:
    """With parameters, names and a state of their own names; in the module's memory."""
    seen: list[Any] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        first = next(module.parameters())
        seen.append(
            {
                "state": {name: value.clone() for name, value in module.state_dict().items()},
                "names": [name for name, _ in module.named_parameters()],
                "layers": [type(layer) for layer in module.modules()],
                "pointers": [p.data_ptr() for p in module.parameters()],
                "leaves": [p.is_leaf and isinstance(p, nn.Parameter) for p in module.parameters()],
                "first": (first.dtype, first.device, first.requires_grad),
                "training": module.training,
                "attribute": module.attribute,
            }
        )
        return module.net(x)

    module = Called(forward, net=make(), attribute="text")
    ours = DP(module, replicas=3)
    expected = {
        "state": dict(module.state_dict()),
        "names": [name for name, _ in module.named_parameters()],
        "layers": [type(layer) for layer in module.modules()],
        "pointers": [p.data_ptr() for p in module.parameters()],
        "leaves": [True] * 5,
        "first": (torch.float64, torch.device("cpu"), True),
        "training": True,
        "attribute": "text",
    }
    ours(data()).sum().backward()
    assert len(seen) == 3
    for state in seen:
        torch.testing.assert_close(state.pop("state"), expected["state"])
        assert state == {key: value for key, value in expected.items() if key != "state"}
    report = ours.last_step()
    assert report["copied_bytes"] == 0
    assert [replica["memory_bytes"] for replica in report["replicas"]] == [0] * 3


def test_what_a_forward_sets_is_lost() -> None:
    seen: list[int] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        module.count += 1
        module.extra = x
        seen.append(module.count)
        return module.net(x)

    ours = DP(Called(forward, net=make(), count=0), replicas=2)
    for _ in range(3):
        ours(data())
    assert seen == [1] * 6
    assert ours.module.count == 0
    assert not hasattr(ours.module, "extra")
    ours.module.count = 10
    ours(data())
    assert seen[6:] == [11, 11]


def test_attributes_of_parameters() -> None:
    seen: list[Any] = []
    module = make()
    module[0].weight.tag = "first"
    ours = DP(Called(lambda m, x: (seen.append(m.net[0].weight.tag), x)[1], net=module), replicas=2)
    ours(data())
    assert seen == ["first", "first"]


# Copies


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, saved, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies(make_copy: Any, used: bool) -> None:
    ours, one = pair(make, 3, loss=nn.MSELoss(), balance=[1, 2, 1])
    if used:
        assert_same_backward(ours, one, data())
    other = make_copy(ours)
    assert type(other) is DP
    assert other.module is not ours.module
    assert_same_backward(other, one, data(1))
    target = torch.zeros(8, 3, dtype=torch.float64)
    with torch.no_grad():
        assert_close(other(data(2, 8), target=target), one(data(2, 8)).square().mean())
    assert_same_backward(ours, one, data(1))
    assert [r["rows"] for r in other.last_step()["replicas"]] == [2, 4, 2]


# In and beside other classes


@pytest.mark.parametrize("kind", [trireme.DistributedDataParallel, TorchDDP])
def test_in_ddp(kind: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours, one = pair(make)
    ddp = kind(ours)
    for step in range(3):
        ddp.zero_grad()
        one.zero_grad()
        ddp(data(step)).square().mean().backward()
        one(data(step)).square().mean().backward()
        assert_close(gradients(ours), gradients(one))


@on_ranks(2)
def test_on_each_of_two_ranks(rank: int) -> None:
    ours, one = pair(make)
    ddp = trireme.DistributedDataParallel(ours)
    for step in range(3):
        ddp.zero_grad()
        one.zero_grad()
        ddp(data(step, 8)[rank::2]).square().mean().backward()
        one(data(step, 8)).square().mean().backward()
        assert_close(gradients(ours), gradients(one))


def test_two_of_one_module() -> None:
    module, one = make(), make()
    first, second = DP(module, replicas=2), DP(module, replicas=3)
    for step in range(2):
        assert_same_backward(first, one, data(step))
        assert_same_backward(second, one, data(step))
    assert_same_backward(module, one, data(3))


# Reports and ends


def test_last_step() -> None:
    ours, _ = pair(make)
    assert ours.last_step() == {}
    for _ in range(3):
        ours(data()).sum().backward()
    report = ours.last_step()
    assert set(report) == {"step", "forward_ms", "backward_ms", "copied_bytes", "replicas"}
    assert report["step"] == 3
    assert [r["rows"] for r in report["replicas"]] == [4, 3]
    for replica in report["replicas"]:
        assert replica["device"] == "cpu"
        assert 0 < replica["forward_ms"] <= report["forward_ms"]
        assert 0 < replica["backward_ms"] <= report["backward_ms"]
        assert 0 <= replica["waiting_share"] < 1
    with torch.no_grad():
        ours(data(rows=1))
    report = ours.last_step()
    assert report["step"] == 3
    assert [r["rows"] for r in report["replicas"]] == [1, 0]
    assert report["replicas"][0]["backward_ms"] == 0


def replica_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("trireme-replica")}


def test_its_end_is_that_of_its_threads_and_replicas() -> None:
    before = replica_threads()
    seen: list[Any] = []
    ours = DP(
        Called(lambda m, x: (seen.append(weakref.ref(m)), m.net(x))[1], net=make()), replicas=3
    )
    ours(data()).sum().backward()
    assert len(replica_threads() - before) == 3
    parameters = [weakref.ref(p) for p in ours.parameters()]
    del ours
    gc.collect()
    for thread in replica_threads() - before:
        thread.join(10)
    assert not replica_threads() - before
    assert [ref() for ref in seen] == [None] * 3
    assert [parameter() for parameter in parameters] == [None] * 5


def test_a_graph_outlives_it() -> None:
    ours, one = pair(make)
    module = ours.module
    loss = ours(data()).square().mean()
    del ours
    gc.collect()
    loss.backward()
    one(data()).square().mean().backward()
    assert_close(gradients(module), gradients(one))


def test_a_graph_outlives_a_change_of_the_module() -> None:
    """The replicas are made anew for that change."""
    ours, one = pair(make)
    losses = []
    for module in (ours, one):
        losses.append(module(data()).square().mean())
        (module.module if module is ours else module)[1] = nn.ReLU()
        module(data(1)).square().mean().backward()
    for loss in losses:
        loss.backward()
    assert_close(gradients(ours), gradients(one))
