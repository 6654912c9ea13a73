"""Stages of torch's kind: traced ones, skips between single ones, late gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import rows
from pipeline.torch_programs import (
    ALL,
    CPU,
    MICRO_BATCHES,
    OURS,
    TORCHS,
    Block,
    assert_same,
    count_of,
    make_schedule,
    own_numbers,
    train,
    train_alone,
)


class Chain(nn.Module):
    """Four layers, each of which takes what the one before returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    """What the first layer returns is added in all later ones; a mask goes to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(number) for number in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.layers[0](x)
        second, third = self.layers[1](first), first * 2
        fourth = self.layers[2](second + first)
        return self.layers[3](fourth + third + first) * mask


def traced(module: nn.Module, cuts: list[int], *sample: Tensor, **keywords: Tensor) -> Any:
    spec = {f"layers.{number}": OURS.SplitPoint.BEGINNING for number in cuts}
    return OURS.pipeline(module, mb_args=sample, mb_kwargs=keywords, split_spec=spec)


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch's": lambda pipe, number: pipe.build_stage(number, CPU),
    "ours": lambda pipe, number: OURS.build_stage(
        pipe.get_stage_module(number), number, pipe.info(), CPU
    ),
}


@pytest.mark.parametrize("builder", BUILDERS)
@on_shm_and_gloo_ranks(2, timeout=120)
def test_traced_stages_train_as_in_torchs_schedules(rank: int, builder: str) -> None:
    x, y = rows(0, 8), rows(1, 8)
    for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble"):
        count = count_of(name, 2)
        expected = Chain()
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            mse_loss(expected(a), b).backward()
        for names in (OURS, TORCHS):
            cuts = [2] if count == 2 else [1, 2, 3]
            pipe = traced(Chain(), cuts, x[:2])
            stages = [BUILDERS[builder](pipe, number) for number in own_numbers(name, rank, 2)]
            given = stages[0] if count == 2 else stages
            schedule = names.get_schedule_class(name)(given, MICRO_BATCHES, mse_loss)
            numbers = [stage.stage_index for stage in stages]
            args = (x,) if 0 in numbers else ()
            output = schedule.step(*args, target=y if count - 1 in numbers else None)
            assert (output is not None) == (count - 1 in numbers)
            whole = dict(expected.named_parameters())
            compared = 0
            for stage in stages:
                for key, parameter in stage.submod.named_parameters():
                    assert torch.equal(parameter.grad * MICRO_BATCHES, whole[key].grad), (name, key)
                    compared += 1
            assert compared == 4


@on_shm_and_gloo_ranks(2, timeout=120)
def test_traced_stages_take_from_several_stages(rank: int) -> None:
    x, y, mask = rows(0, 8), rows(1, 8), rows(2, 8) > 0
    expected = Residual()
    pieces = zip(x.tensor_split(4), mask.tensor_split(4), y.tensor_split(4), strict=True)
    outputs = []
    for a, m, b in pieces:
        outputs.append(expected(a, m))
        mse_loss(outputs[-1], b).backward()
    whole = dict(expected.named_parameters())
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        pipe = traced(Residual(), [1, 2, 3], x[:2], mask=mask[:2])
        stages = [pipe.build_stage(number, CPU) for number in own_numbers(name, rank, 2)]
        schedule = OURS.get_schedule_class(name)(stages, MICRO_BATCHES, mse_loss)
        numbers = [stage.stage_index for stage in stages]
        given: dict[str, Any] = {"mask": mask} if 3 in numbers else {}
        if 0 in numbers and "mask" not in given and _takes(stages[0], "mask"):
            given["mask"] = mask
        args = (x,) if 0 in numbers else ()
        output = schedule.step(*args, target=y if 3 in numbers else None, **given)
        if output is not None:
            assert torch.equal(output, torch.cat(outputs))
        for stage in stages:
            for key, parameter in stage.submod.named_parameters():
                torch.testing.assert_close(parameter.grad * MICRO_BATCHES, whole[key].grad)


def _takes(stage: Any, name: str) -> bool:
    nodes = stage.submod.graph.nodes
    return any(node.op == "placeholder" and node.name == name for node in nodes)


@on_shm_ranks(2)
def test_kinds_of_stages_are_not_mixed(rank: int) -> None:
    pipe = traced(Chain(), [1, 2, 3], rows(0, 2))
    stages = [pipe.build_stage(rank, CPU), OURS.PipelineStage(Block(2), rank + 2, 4, CPU)]
    schedule = OURS.ScheduleInterleaved1F1B(stages, MICRO_BATCHES, mse_loss)
    with raises(ValueError, "got manual and traced stages", form=RANKLESS_FORM):
        schedule.step(target=rows(1, 8) if rank == 1 else None)


@trireme.skippable(stash=["skip"])
class Down(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        trireme.stash("skip", x)
        return x


@trireme.skippable(pop=["skip"])
class Up(Block):
    def forward(self, x: Tensor) -> Tensor:
        skip = trireme.pop("skip")
        assert skip is not None
        return super().forward(x + skip)


def u_net(number: int) -> nn.Module:
    kinds: list[Any] = [Down, Down, Up, Up]
    made = kinds[number](number)
    names = ("outer", "inner", "inner", "outer")
    made.isolate(SPACES[names[number]])
    return made


SPACES = {name: trireme.Namespace() for name in ("outer", "inner")}


# A namespace is known by how many the process has made before.
@on_shm_and_gloo_ranks(2, timeout=120, fresh=True)
def test_stages_built_singly_tell_each_other_their_skips(rank: int) -> None:
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"):
        assert_same(train(OURS, name, make=u_net), train_alone(name, 2, make=u_net))


@on_shm_ranks(2)
def test_a_skip_that_nobody_pops_is_refused_on_all_ranks(rank: int) -> None:
    modules = {rank: Down(0) if rank == 0 else Block(1)}
    schedule = make_schedule(OURS, "GPipe", modules)
    with raises(ValueError, "got 'skip', which stage 0 stashes and no stage pops",
                form=RANKLESS_FORM):  # fmt: skip
        schedule.step(*((rows(0, 8),) if rank == 0 else ()), target=rows(1, 8) if rank else None)


class Later(torch.autograd.Function):
    """Leaves the gradient of the weight to the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.module.pending.append((gradient, x))
        return gradient @ weight, None, None


class LateBlock(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.linear.bias = None
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return Later.apply(x, self.linear.weight, self).tanh()

    def build(self) -> Callable[[], None]:
        self.calls.append("build")
        pending, self.pending = self.pending, []

        def run() -> None:
            self.calls.append("run")
            for gradient, x in pending:
                found = gradient.T @ x
                grad = self.linear.weight.grad
                self.linear.weight.grad = found if grad is None else grad + found

        return run


@on_shm_ranks(2)
def test_layers_that_compute_gradients_of_weights_later(rank: int) -> None:
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        found = []
        for names in (OURS, TORCHS):
            modules = {number: LateBlock(number) for number in own_numbers(name, rank, 2)}
            count = count_of(name, 2)
            stages = [
                names.PipelineStage(module, number, count, CPU, dw_builder=module.build)
                for number, module in modules.items()
            ]
            given = stages[0] if count == 2 else stages
            schedule = names.get_schedule_class(name)(given, MICRO_BATCHES, mse_loss)
            for _ in range(2):
                for module in modules.values():
                    module.zero_grad()
                    module.calls.clear()
                args = (rows(0, 8),) if 0 in modules else ()
                schedule.step(*args, target=rows(1, 8) if count - 1 in modules else None)
            found.append(
                {
                    number: (module.linear.weight.grad, module.calls)
                    for number, module in modules.items()
                }
            )
        assert found[0].keys() == found[1].keys()
        for number, (gradient, calls) in found[0].items():
            other, other_calls = found[1][number]
            assert torch.equal(gradient, other), (name, number)
            assert sorted(calls) == sorted(other_calls) and len(calls) == 2 * MICRO_BATCHES


@on_shm_ranks(2)
def test_parameters_may_be_replaced_and_frozen_between_steps(rank: int) -> None:
    module = Block(rank)
    schedule = make_schedule(OURS, "1F1B", {rank: module})

    def step() -> None:
        module.zero_grad()
        args = (rows(0, 8),) if rank == 0 else ()
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)

    step()
    before = module.linear.weight.grad
    module.linear.weight = nn.Parameter(module.linear.weight.detach().clone())
    step()
    assert module.linear.weight.grad is not None
    assert torch.equal(module.linear.weight.grad, before)
    module.linear.requires_grad_(rank == 1)
    step()
    assert (module.linear.weight.grad is None) == (rank == 0)


@on_shm_ranks(2)
def test_names_are_printed_and_groups_told(rank: int) -> None:
    assert OURS.PipelineStage.__module__ == "trireme.pipelining"
    assert {OURS.get_schedule_class(name).__module__ for name in ALL} == {"trireme.pipelining"}
    group = dist.new_group([rank], use_local_synchronization=True)
    stages = [
        OURS.PipelineStage(Block(rank), rank, 4, CPU),
        OURS.PipelineStage(Block(rank), rank + 2, 4, CPU, group=group),
    ]
    schedule = OURS.ScheduleInterleaved1F1B(stages, MICRO_BATCHES, mse_loss)
    with raises(ValueError, "got stages of several groups", form=RANKLESS_FORM):
        schedule.step(target=rows(1, 8) if rank == 1 else None)
