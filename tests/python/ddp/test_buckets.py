"""Which gradients share a bucket, in which order buckets leave, and what goes over the wire."""

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn

from ddp.ranks import assert_equals_torch, record_wire
from harness.meeting import say, stay_until, until
from harness.on_ranks import WORLD, on_ranks
from harness.recording import needs_recording

ROW = 256  # a layer of ROW x ROW floats takes 256 KiB


def five_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(ROW, ROW, bias=False) for _ in range(5)))


def layers_of(ddp: trireme.DistributedDataParallel) -> list[str]:
    """The plan as text: layers of a bucket side by side, buckets in launch order."""
    return ["".join(name.split(".")[0] for name in bucket) for bucket in ddp._core.plan()]


def backward(ddp: nn.Module, rank: int = 0) -> None:
    torch.manual_seed(rank)
    ddp(torch.randn(2, ROW)).sum().backward()


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, ["4321", "0"]),  # 1 MiB, then 25
        ({"bucket_cap_mb": 25}, ["43210"]),
        ({"bucket_cap_mb": 0.5}, ["43", "21", "0"]),
        ({"bucket_cap_mb": 0.0001}, ["4", "3", "2", "1", "0"]),
        ({"bucket_cap_mb_list": [0.25, 0.5]}, ["4", "32", "10"]),
        ({"bucket_cap_mb_list": [0.75, 0.2, 25], "bucket_cap_mb": 9}, ["432", "1", "0"]),
    ],
)
@on_ranks(1)
def test_caps(rank: int, options: dict[str, object], plan: list[str]) -> None:
    ddp = trireme.DistributedDataParallel(five_layers(), **options)
    assert layers_of(ddp) == plan
    backward(ddp)
    backward(ddp)  # the order seen in the first is that which was guessed
    assert layers_of(ddp) == plan
    assert ddp.last_step()["buckets"] == len(plan)


class BackToFront(nn.Module):
    """Runs its layers in another order than it registers them."""

    order = (2, 0, 4, 1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.layers = five_layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


@on_ranks()
def test_order_is_learned_from_the_first_backward(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(BackToFront(), bucket_cap_mb=0.1)

    def layers() -> str:
        return "".join(bucket[0].split(".")[1] for bucket in ddp._core.plan())

    assert layers() == "43210"
    backward(ddp, rank)
    backward(ddp, rank)
    assert layers() == "31402"


@needs_recording
@on_ranks()
def test_rank_0_decides_the_order(rank: int) -> None:
    """Ranks that see gradients arrive in another order launch buckets in one order all the same."""
    model = BackToFront()
    model.order = (2, 0, 4, 1, 3) if rank == 0 else (0, 1, 2, 3, 4)
    ddp = trireme.DistributedDataParallel(model, bucket_cap_mb=0.1)
    wire = record_wire(ddp)
    for _ in range(3):
        wire.clear()
        backward(ddp, rank)
    labels = [record.label for record in wire.records]
    assert [label.split("layers.")[1][0] for label in labels] == ["3", "1", "4", "0", "2"]
    mine = torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()])
    both = [torch.empty_like(mine) for _ in range(WORLD)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(both[0], both[1])


@needs_recording
@on_ranks()
def test_a_step_sends_every_gradient_once(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(five_layers(), bucket_cap_mb=0.5)
    wire = record_wire(ddp)
    backward(ddp, rank)
    backward(ddp, rank)
    wire.clear()
    backward(ddp, rank)
    layer = ROW * ROW * 4
    used_map = (5 + 1) * 4
    assert [(record.verb, record.bytes) for record in wire.records] == [
        ("all_reduce", 2 * layer),
        ("all_reduce", 2 * layer),
        ("all_reduce", layer + used_map),
    ]
    assert [record.label for record in wire.records] == [
        "bucket 0: 4.weight .. 3.weight",
        "bucket 1: 2.weight .. 1.weight",
        "bucket 2: 0.weight",
    ]
    assert ddp.last_step()["reduced_bytes"] == 5 * layer


@needs_recording
@on_ranks()
def test_buckets_leave_while_backward_computes(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(five_layers(), bucket_cap_mb=0.1)
    wire = record_wire(ddp)
    sent: list[int] = []

    def watch(layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: sent.append(len(wire.records)))

    for layer in ddp.module:
        layer.register_forward_hook(watch)
    for step in range(3):
        wire.clear()
        sent.clear()
        backward(ddp, rank)
        # The first backward watches the order. After it, layer 4 is on its way when the output of
        # layer 3 gets its gradient, and so on.
        assert sent == ([0] * 5 if step == 0 else [0, 1, 2, 3, 4])


@on_ranks()
def test_gradients_are_final_before_backward_ends(rank: int) -> None:
    """A bucket that is done is delivered when the next one leaves, not at the end."""
    ddp = trireme.DistributedDataParallel(five_layers(), bucket_cap_mb=0.1)
    last = ddp.module[4].weight
    early: list[torch.Tensor | None] = []

    def look(grad: torch.Tensor) -> None:
        early.append(None if last.grad is None else last.grad.clone())

    def meet(grad: torch.Tensor) -> None:
        say(f"{rank} has sent it in step {step}")
        stay_until(f"{1 - rank} has sent it in step {step}")

    def has_come_early() -> bool:
        """On both ranks. Nothing tells when the bucket of layer 4 is back, so not in every step."""
        nonlocal step
        step += 1
        early.clear()
        ddp.zero_grad()
        backward(ddp, rank)
        if step > 2 and early[0] is not None:
            assert torch.equal(early[0], last.grad)
        missing = torch.tensor(float(early[0] is None))
        dist.all_reduce(missing)
        return step > 2 and missing.item() == 0

    step = 0
    ddp.module[0].weight.register_hook(look)
    ddp.module[2].weight.register_hook(meet)
    until(has_come_early)


class Headed(nn.Module):
    """A body and two heads of which the second, first in backward order, is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = five_layers()
        self.head = nn.Linear(ROW, 4)
        self.unused_head = nn.Linear(ROW, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@needs_recording
@on_ranks()
def test_an_unused_head_does_not_hold_back_the_rest(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(Headed(), bucket_cap_mb=0.1)
    wire = record_wire(ddp)
    sent: list[int] = []
    for _ in range(3):
        wire.clear()
        sent.clear()
        x = torch.randn(2, ROW, requires_grad=True)
        x.register_hook(lambda grad: sent.append(len(wire.records)))
        ddp(x).sum().backward()
    # head + layer 4, 3, 2 and 1; layer 0 is accumulated after its input has a gradient.
    assert sent == [4]
    assert [record.label.partition(": ")[2] for record in wire.records[-2:]] == [
        "body.0.weight",
        "unused_head.bias .. unused_head.weight",
    ]


@on_ranks(1)
def test_the_plan_is_described(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(five_layers(), bucket_cap_mb=0.5)
    plan = ddp._get_ddp_logging_data()["plan"]
    assert plan.splitlines() == [
        "bucket 0: 524288 bytes Float cpu, 2 gradients: 4.weight .. 3.weight",
        "bucket 1: 524288 bytes Float cpu, 2 gradients: 2.weight .. 1.weight",
        "bucket 2: 262144 bytes Float cpu, 1 gradient: 0.weight",
    ]


@pytest.mark.parametrize("cap", [0.0001, 0.3, 25])
@on_ranks()
def test_every_cap_gives_the_same_gradients(rank: int, cap: float) -> None:
    assert_equals_torch(five_layers, lambda m, _, r: backward(m, r), rank, bucket_cap_mb=cap)


@on_ranks()
def test_dtypes_have_buckets_of_their_own(rank: int) -> None:
    model = nn.ModuleList(
        nn.Linear(4, 4, bias=False, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    )
    ddp = trireme.DistributedDataParallel(model)
    # In the order in which they are full: that of layer 0 waits for the last gradient.
    assert ddp._core.plan() == [["3.weight", "1.weight"], ["2.weight", "0.weight"]]
