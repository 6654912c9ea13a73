"""torch.distributed.pipelining's names on our engine, beside torch's own over the same group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
import trireme.pipelining
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import _backward as torch_backward
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.functional import mse_loss
from trireme._pipeline.torch_signature import as_in_torch

from harness.on_ranks import on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import WIDTH, rows
from pipeline.torch_programs import (
    ALL,
    CPU,
    LOOPED,
    MICRO_BATCHES,
    OURS,
    SINGLE,
    TORCHS,
    V_SHAPED,
    Block,
    assert_same,
    count_of,
    make_schedule,
    own_numbers,
    train,
    train_alone,
)
from shm.ranks import TORCH


@on_shm_and_gloo_ranks(2, timeout=120)
def test_a_program_for_torch_trains_alike(rank: int) -> None:
    for name in ALL:
        got = train(OURS, name)
        assert_same(got, train(TORCHS, name), exact=name != "LoopedBFS")  # backwards in reverse
        assert_same(got, train_alone(name, 2))


@on_shm_ranks(4, timeout=120)
def test_four_ranks_train_as_one_process(rank: int) -> None:
    for name in ALL:
        assert_same(train(OURS, name), train_alone(name, 4))


@on_shm_ranks(2, timeout=120)
def test_torchs_schedules_drive_our_stage(rank: int) -> None:
    for name in ALL:
        got = train(TORCHS, name, stage_class=OURS.PipelineStage)
        assert_same(got, train(TORCHS, name))


@on_shm_ranks(2, timeout=120)
def test_our_schedules_drive_torchs_stage(rank: int) -> None:
    for name in ALL:
        got = train(OURS, name, stage_class=TORCHS.PipelineStage)
        assert_same(got, train_alone(name, 2))


@on_shm_ranks(2)
def test_gradients_may_be_sums(rank: int) -> None:
    for name in ("GPipe", "ZBVZeroBubble"):
        got = train(OURS, name, scale_grads=False)
        assert_same(got, train(TORCHS, name, scale_grads=False))
        assert_same(got, train_alone(name, 2, scale_grads=False))


@on_shm_ranks(2)
def test_fewer_micro_batches_than_stages_and_uneven_batches(rank: int) -> None:
    for name in ALL:
        one = train(OURS, name, micro_batches=3, rows_of_batch=7)
        two = train(OURS, name, micro_batches=3, rows_of_batch=7)
        assert_same(one, two)
        for number, module in enumerate(Block(i) for i in range(count_of(name, 2))):
            for key, gradient in one.gradients.items():
                if key == f"{number}.linear.weight":
                    assert gradient.shape == module.linear.weight.shape


class Several(nn.Module):
    """Returns a tuple: two tensors that are the next one's positional arguments."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.block = Block(number)

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: Tensor | None = None) -> Any:
        if y is not None:
            x = x + y
        x = self.block(x)
        if scale is not None:
            x = x * scale
        return x if self.number == 3 else (x, x.sin())


@on_shm_ranks(2)
def test_a_tuple_is_several_arguments_and_keywords_go_to_all_stages(rank: int) -> None:
    def train_with(names: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        modules = {number: Several(number) for number in own_numbers("Interleaved1F1B", rank, 2)}
        schedule = make_schedule(names, "Interleaved1F1B", modules)
        losses: list[Tensor] = []
        args = (rows(0, 8),) if rank == 0 else ()
        target = rows(1, 8) if rank == 1 else None
        schedule.step(*args, target=target, losses=losses, scale=rows(2, 8)[:, :1])
        found = {
            f"{number}.{name}": parameter.grad
            for number, module in modules.items()
            for name, parameter in module.named_parameters()
        }
        return [loss.detach() for loss in losses], found

    got, expected = train_with(OURS), train_with(TORCHS)
    assert all(torch.equal(a, b) for a, b in zip(got[0], expected[0], strict=True))
    assert got[1].keys() == expected[1].keys()
    for name, gradient in got[1].items():
        assert torch.equal(gradient, expected[1][name]), name


class Dicts(nn.Module):
    """Takes and returns a dict, with tensors of several types, and what is no tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.block = Block(number)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            given = {"x": given, "count": 0, "mask": given > 0}
        assert isinstance(given, dict) and given["count"] == self.number
        x = self.block(given["x"]) * given["mask"]
        if self.number == 3:
            return x
        return {"x": x, "count": self.number + 1, "mask": x > 0}


@on_shm_ranks(2)
def test_a_dict_is_one_argument(rank: int) -> None:
    for name in (*LOOPED, *V_SHAPED):
        assert_same(train(OURS, name, make=Dicts), train_alone(name, 2, make=Dicts))


@on_shm_ranks(2)
def test_micro_batches_may_be_cut_before(rank: int) -> None:
    for names in (OURS, TORCHS) if TORCH >= (2, 15) else (OURS,):
        modules = {number: Block(number) for number in own_numbers("GPipe", rank, 2)}
        schedule = make_schedule(names, "GPipe", modules)
        losses: list[Tensor] = []
        arg_mbs = [(part,) for part in rows(0, 8).tensor_split(4)] if rank == 0 else None
        target_mbs = list(rows(1, 8).tensor_split(4)) if rank == 1 else None
        kwarg_mbs: list[dict[str, Any]] = [{} for _ in range(4)]
        output = schedule.step(
            arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs, losses=losses
        )
        expected = train_alone("GPipe", 2, steps=1)
        if rank == 1:
            assert torch.equal(output.detach(), expected.outputs[0])
            for got, other in zip(losses, expected.losses, strict=True):
                assert torch.equal(got, other)
        for name, parameter in modules[rank].named_parameters():
            assert torch.equal(parameter.grad, expected.gradients[f"{rank}.{name}"])


@on_shm_ranks(2)
def test_micro_batches_of_different_shapes(rank: int) -> None:
    modules = {rank: Block(rank)}
    schedule = make_schedule(OURS, "1F1B", modules, micro_batches=3)
    sizes = (1, 4, 2)
    arg_mbs = [(rows(0, size),) for size in sizes] if rank == 0 else None
    target_mbs = [rows(1, size) for size in sizes] if rank == 1 else None
    output = schedule.step(arg_mbs=arg_mbs, target_mbs=target_mbs)
    if rank == 1:
        assert output.shape == (7, WIDTH)


def weighed_loss(output: Tensor, target: Tensor, *, weight: float = 1.0) -> Tensor:
    return mse_loss(output, target) * weight


@on_shm_ranks(2)
def test_outputs_are_returned_when_asked_for_and_losses_get_keywords(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)}, loss_fn=weighed_loss)
    args = (rows(0, 8),) if rank == 0 else ()
    target = rows(1, 8) if rank == 1 else None
    kept: list[list[Tensor]] = []
    for weight in (1.0, 2.0):
        losses = [torch.tensor(7.0)]
        output = schedule.step(
            *args,
            target=target,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"weight": weight},
        )
        assert output is None
        kept.append(losses)
    if rank == 0:
        assert [loss.item() for loss in kept[0]] == [7.0]  # left alone, as in torch
    else:
        assert len(kept[0]) == MICRO_BATCHES and not kept[0][0].requires_grad
        assert all(torch.equal(2 * a, b) for a, b in zip(*kept, strict=True))


@on_shm_ranks(2)
def test_eval_computes_no_gradients_and_alternates_with_steps(rank: int) -> None:
    for name in ALL:
        numbers = own_numbers(name, rank, 2)
        modules = {number: Block(number) for number in numbers}
        schedule = make_schedule(OURS, name, modules)
        is_last = count_of(name, 2) - 1 in modules
        args = (rows(0, 8),) if 0 in modules else ()
        target = rows(1, 8) if is_last else None
        expected = train_alone(name, 2, steps=1)
        for _ in range(2):
            losses: list[Tensor] = []
            output = schedule.eval(*args, target=target, losses=losses)
            assert all(
                parameter.grad is None for m in modules.values() for parameter in m.parameters()
            )
            alone = schedule.eval(*args)
            if is_last:
                assert torch.equal(output, expected.outputs[0])
                assert torch.equal(alone, output) and not alone.requires_grad
                assert all(torch.equal(*two) for two in zip(losses, expected.losses, strict=True))
            schedule.step(*args, target=target)
            for number, module in modules.items():
                for key, parameter in module.named_parameters():
                    assert torch.equal(parameter.grad, expected.gradients[f"{number}.{key}"])
                module.zero_grad()


@on_shm_ranks(2)
def test_a_schedule_without_loss_runs_forwards(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)}, loss_fn=None)
    output = schedule.step(*((rows(0, 8),) if rank == 0 else ()))
    if rank == 1:
        assert torch.equal(output, train_alone("GPipe", 2, steps=1).outputs[0])
    assert all(parameter.grad is None for parameter in schedule._stage.submod.parameters())


class ByColumn(nn.Module):
    """Works on columns, so that batches are cut along dim 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.block = Block(number)

    def forward(self, x: Tensor, factor: float = 1.0) -> dict[str, Any]:
        return {"y": self.block(x.T).T * factor}


@on_shm_ranks(1)
def test_chunk_and_merge_specs(rank: int) -> None:
    spec = OURS.TensorChunkSpec
    schedule = OURS.ScheduleGPipe(
        OURS.PipelineStage(ByColumn(0), 0, 1, CPU),
        MICRO_BATCHES,
        args_chunk_spec=(spec(1),),
        output_merge_spec={"y": spec(1)},
    )
    x = rows(0, 8).T
    output = schedule.step(x)
    assert torch.equal(output["y"], torch.cat([Block(0)(part.T).T for part in x.split(2, 1)], 1))


@on_shm_ranks(2)
def test_a_forward_context_is_entered_for_each_micro_batch(rank: int) -> None:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        if not info.is_metadata_inference:
            seen.append((info.stage_index, info.microbatch_index))
        yield

    for names in (OURS, TORCHS):
        schedule = make_schedule(names, "1F1B", {rank: Block(rank)}, stage_class=OURS.PipelineStage)
        handle = schedule._stage.register_forward_context(context)
        with pytest.raises(RuntimeError):
            schedule._stage.register_forward_context(context)
        args = (rows(0, 8),) if rank == 0 else ()
        target = rows(1, 8) if rank == 1 else None
        schedule.step(*args, target=target)
        assert seen == [(rank, number) for number in range(MICRO_BATCHES)]
        handle.remove()
        seen.clear()
        schedule.step(*args, target=target)
        assert not seen


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@on_shm_ranks(2)
def test_tables_are_read_and_written(rank: int, form: Any, tmp_path: Path) -> None:
    """One of ours in torch's runtime, one of torch's in ours: alike."""
    name = "InterleavedZeroBubble"
    files = {}
    for label, names in (("ours", OURS), ("torchs", TORCHS)):
        modules = {number: Block(number) for number in own_numbers(name, rank, 2)}
        files[label] = str(tmp_path / f"{label}-{rank}.csv")
        make_schedule(names, name, modules)._dump_csv(files[label], format=form)
    expected = train_alone(name, 2)
    for names in (OURS, TORCHS):
        for file in files.values():

            def runtime(
                stages: list[Any], *given: Any, names: Any = names, file: str = file
            ) -> Any:
                made = names._PipelineScheduleRuntime(stages, *given)
                made._load_csv(file, format=form)
                return made

            loading = type("Loading", (), {**vars(names), "get_schedule_class": lambda _: runtime})
            loading.PipelineStage = names.PipelineStage
            assert_same(train(loading, name), expected)


@on_shm_ranks(2)
def test_a_table_may_be_made_in_a_subclass(rank: int) -> None:
    class Own(OURS._PipelineScheduleRuntime):
        def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: Any) -> None:
            super().__init__(stages, n_microbatches, loss_fn)
            table = trireme.pipeline_schedule(
                "looped-bfs", ranks=2, micro_batches=n_microbatches, stages_per_rank=2
            )
            action = torch_schedules._Action.from_str
            self.pipeline_order = {
                rank: [None, *(action(str(text)) for text in row)]
                for rank, row in enumerate(table.rows)
            }
            self._prepare_schedule_with_comms(self.pipeline_order)

    loading = type("Loading", (), {"PipelineStage": OURS.PipelineStage})
    loading.get_schedule_class = staticmethod(lambda _: Own)
    assert_same(train(loading, "LoopedBFS"), train_alone("LoopedBFS", 2))


@on_shm_ranks(2)
def test_classes_signatures_and_tables_are_torchs(rank: int) -> None:
    for name in ALL:
        ours, torchs = OURS.get_schedule_class(name), TORCHS.get_schedule_class(name)
        assert issubclass(ours, torchs) and ours is not torchs
        assert OURS.get_schedule_class(name.lower()) is ours
        modules = {number: Block(number) for number in own_numbers(name, rank, 2)}
        one = make_schedule(OURS, name, modules)
        other = make_schedule(TORCHS, name, modules)
        assert isinstance(one, torchs)
        # torch's 1F1B shows other micro-batches on the last rank than it runs.
        if name not in ("LoopedBFS", "1F1B"):
            assert _computes(one.pipeline_order) == _computes(other.pipeline_order), name
        if TORCH >= (2, 15):
            assert _signature(ours.__init__) == _signature(torchs.__init__), name
            assert _signature(ours.step) == _signature(torchs.step), name
            assert _signature(ours.eval) == _signature(torchs.eval), name
    if TORCH >= (2, 15):
        assert _signature(OURS.PipelineStage.__init__) == _signature(TORCHS.PipelineStage.__init__)
    for name in ("stage_backward", "stage_backward_input", "stage_backward_weight"):
        assert getattr(OURS, name) is getattr(torch_backward, name)
    for name in ("pipeline", "Pipe", "SplitPoint", "pipe_split"):
        assert getattr(OURS, name) is getattr(torch_pipelining, name)
    assert OURS.PipelineScheduleSingle is torch_schedules.PipelineScheduleSingle
    assert OURS.get_schedule_class("PipelineScheduleMulti") is OURS.PipelineScheduleMulti
    for name in torch_pipelining.__all__:
        assert hasattr(OURS, name), name


def _computes(order: dict[int, list[Any]]) -> dict[int, list[str]]:
    def is_compute(action: Any) -> bool:
        return action is not None and action.is_compute_op

    return {
        rank: [str(action) for action in row if is_compute(action)] for rank, row in order.items()
    }


def _signature(function: Any) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


class FakeStage:
    """All that constructors may read of a stage."""

    group = None

    def __init__(self, rank: int, number: int, count: int, world: int) -> None:
        self.group_rank, self.group_size = rank, world
        self.num_stages, self.stage_index = count, number
        self.stage_index_to_group_rank = {stage: stage % world for stage in range(count)}
        self.submod = None


def test_constructors_need_no_group() -> None:
    for name in ALL:
        fakes = [FakeStage(1, number, count_of(name, 4), 4) for number in own_numbers(name, 1, 4)]
        given: Any = fakes[0] if name in SINGLE else fakes
        made = OURS.get_schedule_class(name)(given, 8)
        assert sorted(made.pipeline_order) == [0, 1, 2, 3]
        if name in V_SHAPED:
            assert fakes[0].stage_index_to_group_rank[7] == 0
        with pytest.raises(TypeError, match="got a FakeStage as stage"):
            made.step()


def test_constructors_take_arguments_in_torchs_order() -> None:
    fakes: Any = [FakeStage(0, number, 2, 1) for number in range(2)]
    merge: Any = {"x": 0}
    looped = OURS.ScheduleLoopedBFS(fakes, 2, mse_loss, merge, False, False)
    others = OURS.ScheduleInterleaved1F1B(fakes, 2, mse_loss, None, None, merge, False, False)
    for made in (looped, others):
        assert (made._loss_fn, made._output_merge_spec) == (mse_loss, merge)
        assert (made.scale_grads, made._backward_requires_autograd) == (False, False)
    with pytest.raises(TypeError, match="n_microbatches"):
        OURS.ScheduleLoopedBFS(fakes)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="eager"):
        OURS.ScheduleLoopedBFS(fakes, 2, eager=True)  # type: ignore[call-arg]


def test_what_a_newer_torch_has_is_taken_by_name() -> None:
    def older(self: Any, stages: Any, n_microbatches: int = 1) -> None:
        pass

    class Schedule:
        @as_in_torch(older)
        def __init__(self, stages: Any, n_microbatches: int = 2, lookahead: int = 3) -> None:
            self.given = stages, n_microbatches, lookahead

    assert _signature(Schedule.__init__) == _signature(older)
    assert Schedule(5).given == (5, 1, 3)
    assert Schedule(5, 6, lookahead=7).given == (5, 6, 7)  # type: ignore[call-arg]


@on_shm_ranks(2)
def test_stages_may_sit_on_other_ranks(rank: int) -> None:
    number = 1 - rank
    stage = OURS.PipelineStage(Block(number), number, 2, CPU)
    stage.stage_index_to_group_rank = {0: 1, 1: 0}
    schedule = OURS.Schedule1F1B(stage, MICRO_BATCHES, mse_loss)
    args = (rows(0, 8),) if number == 0 else ()
    output = schedule.step(*args, target=rows(1, 8) if number == 1 else None)
    expected = train_alone("1F1B", 2, steps=1)
    if number == 1:
        assert torch.equal(output, expected.outputs[0])
    for name, parameter in stage.submod.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[f"{number}.{name}"])


@on_shm_ranks(4)
def test_a_pipeline_of_some_ranks(rank: int) -> None:
    """Two pipelines of two ranks each, beside one another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank % 2
    stage = OURS.PipelineStage(Block(number), number, 2, CPU, group=groups[rank // 2])
    schedule = OURS.ScheduleGPipe(stage, MICRO_BATCHES, mse_loss)
    schedule.step(*((rows(0, 8),) if number == 0 else ()), target=rows(1, 8) if number else None)
    expected = train_alone("GPipe", 2, steps=1)
    for name, parameter in stage.submod.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[f"{number}.{name}"])


@on_shm_ranks(2)
def test_two_schedules_share_a_group(rank: int) -> None:
    schedules = [
        make_schedule(OURS, name, {rank: Block(rank)}, micro_batches=count)
        for name, count in (("GPipe", 4), ("1F1B", 2))
    ]
    for _ in range(2):
        for schedule in schedules:
            args = (rows(0, 8),) if rank == 0 else ()
            schedule.step(*args, target=rows(1, 8) if rank == 1 else None)
    assert schedules[1].last_step()["step"] == 2


@on_shm_ranks(2)
def test_inputs_may_need_gradients(rank: int) -> None:
    for name in ("GPipe", "InterleavedZeroBubble", "ZBVZeroBubble"):
        found = []
        for names in (OURS, TORCHS):
            modules = {number: Block(number) for number in own_numbers(name, rank, 2)}
            schedule = make_schedule(names, name, modules)
            x = rows(0, 8).requires_grad_()
            args = (x,) if 0 in modules else ()
            is_last = count_of(name, 2) - 1 in modules
            schedule.step(*args, target=rows(1, 8) if is_last else None)
            found.append(x.grad)
        assert (found[0] is None) == (rank != 0)
        assert found[0] is None or torch.equal(found[0], found[1])


@on_shm_ranks(2)
def test_gradients_that_were_there_are_added_to(rank: int) -> None:
    modules = {rank: Block(rank)}
    schedule = make_schedule(OURS, "1F1B", modules)
    args = (rows(0, 8),) if rank == 0 else ()
    for _ in range(2):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None, finalize_gradients=False)
    for name, parameter in modules[rank].named_parameters():
        alone = train_alone("1F1B", 2, steps=1).gradients[f"{rank}.{name}"]
        assert torch.equal(parameter.grad, alone + alone)


@on_shm_ranks(2)
def test_a_module_may_be_put_in_place_of_another(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(7)})
    args = (rows(0, 8),) if rank == 0 else ()
    target = rows(1, 8) if rank == 1 else None
    schedule.step(*args, target=target)
    schedule._stage.submod = Block(rank)
    schedule.step(*args, target=target)
    expected = train_alone("GPipe", 2, steps=1)
    for name, parameter in schedule._stage.submod.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[f"{rank}.{name}"])
