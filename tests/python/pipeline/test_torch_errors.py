"""What schedules of torch's kind refuse, and what comes out of them when a stage raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from harness.faults import HOUSE_FORM, RANKLESS_FORM, raises
from harness.on_ranks import on_shm_ranks
from pipeline.ranks import rows
from pipeline.torch_programs import (
    CPU,
    OURS,
    Block,
    make_schedule,
    own_numbers,
    train_alone,
)

BAD_STEPS: dict[str, tuple[dict[str, Any], int, type[Exception], str]] = {
    "rows": ({"args": (rows(0, 3),)}, 0, ValueError, "got 3 chunks of the batch, expected 4"),
    "target rows": ({"target": rows(0, 2)}, 1, ValueError, "got 2 chunks of the target"),
    "arg_mbs": ({"args": (), "arg_mbs": [()] * 3}, 0, ValueError, "got 3 chunks of arg_mbs"),
    "kwarg_mbs": ({"kwarg_mbs": ({},) * 4, "args": ()}, 0, TypeError, "got a tuple as kwarg_mbs"),
    "no tuples": ({"args": (), "arg_mbs": [1] * 4}, 0, TypeError, "got a int as arg_mbs[0]"),
    "no dicts": ({"args": (), "kwarg_mbs": [1] * 4}, 0, TypeError, "expected a dict"),
    "both": ({"arg_mbs": [()] * 4}, 0, ValueError, "positional inputs of a whole batch beside"),
    "both keywords": (
        {"args": (), "arg_mbs": [()] * 4, "kwargs": {"a": 1}}, 0, ValueError, "got 'a' of a whole"
    ),
    "both targets": ({"target_mbs": [1] * 4}, 1, ValueError, "got target of a whole batch"),
    "losses": ({"losses": ()}, 1, TypeError, "got a tuple as losses, expected a list"),
    "no target": ({"target": None}, 1, TypeError, "got no target on the rank of the last stage"),
}  # fmt: skip


@on_shm_ranks(2)
def test_a_bad_batch_of_one_rank_is_refused_on_all(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)})
    good: dict[str, Any] = {"args": (rows(0, 8),)} if rank == 0 else {"target": rows(1, 8)}
    for name, (bad, where, kind, text) in BAD_STEPS.items():
        given = {**good, **bad} if rank == where else dict(good)
        args, kwargs = given.pop("args", ()), given.pop("kwargs", {})
        if rank == where:
            with raises(kind, text, form=RANKLESS_FORM):
                schedule.step(*args, **given, **kwargs)
        else:
            with raises(ValueError, f"got a step that rank {where} cannot use", text):
                schedule.step(*args, **given, **kwargs)
        assert name
    args = good.pop("args", ())
    schedule.step(*args, **good)
    for name, parameter in schedule._stage.submod.named_parameters():
        expected = train_alone("GPipe", 2, steps=1).gradients[f"{rank}.{name}"]
        assert torch.equal(parameter.grad, expected)


@on_shm_ranks(2)
def test_a_target_or_losses_without_loss_fn(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)}, loss_fn=None)
    args = (rows(0, 8),) if rank == 0 else ()
    with raises(ValueError, "got a target and a schedule without loss_fn", form=RANKLESS_FORM):
        schedule.step(*args, target=rows(1, 8))
    kind: Any = RuntimeError if rank == 1 else ValueError
    with pytest.raises(kind, match="got losses= in a step that computes none"):
        schedule.step(*args, losses=[])


@on_shm_ranks(2)
def test_a_step_without_gradients_on_one_rank(rank: int) -> None:
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)})
    args = (rows(0, 8),) if rank == 0 else ()
    kind: Any = RuntimeError if rank == 1 else ValueError
    with torch.set_grad_enabled(rank == 0), pytest.raises(kind, match="got a step under torch"):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)


@on_shm_ranks(2)
def test_ranks_that_differ(rank: int) -> None:
    name = "GPipe" if rank == 0 else "1F1B"
    schedule = make_schedule(OURS, name, {rank: Block(rank)})
    args = (rows(0, 8),) if rank == 0 else ()
    target = rows(1, 8) if rank == 1 else None
    with raises(ValueError, "got a step that differs between ranks: schedule"):
        schedule.step(*args, target=target)
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)}, micro_batches=4 + rank)
    with raises(ValueError, "micro-batches 4 on rank 0, 5 on rank 1"):
        schedule.step(*args, target=target)
    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)})
    with raises(ValueError, "training True on rank 0, False on rank 1"):
        schedule.step(*args) if rank == 0 else schedule.eval(target=target)
    schedule = make_schedule(OURS, "GPipe", {rank: Block(0)}, loss_fn=mse_loss if rank else None)
    with raises(ValueError, "training False on rank 0, True on rank 1"):
        schedule.step(*args, target=target)


def stage(number: int = 0, count: int = 1, **options: Any) -> Any:
    return OURS.PipelineStage(Block(number), number, count, CPU, **options)


def runtime() -> Any:
    return OURS._PipelineScheduleRuntime([stage(0, 2), stage(1, 2)], 2)


def table(text: str, folder: Path, form: str = "compute_only") -> None:
    file = folder / "table.csv"
    file.write_text(text)
    runtime()._load_csv(str(file), format=form)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "two stages": (
        lambda _: OURS.ScheduleGPipe([stage(), stage()], 2), AttributeError,
        "got 2 stages for ScheduleGPipe, which has one per rank"
    ),
    "one stage": (
        lambda _: OURS.ScheduleLoopedBFS(stage(), 2), TypeError, "got a PipelineStage as stages"
    ),
    "no stage": (lambda _: OURS.ScheduleLoopedBFS([], 2), TypeError, "expected a list of one"),
    "three stages of a V": (
        lambda _: OURS.ScheduleZBVZeroBubble([stage(i, 3) for i in range(3)], 2), ValueError,
        "got 3 stages for ScheduleZBVZeroBubble, expected 2 per rank"
    ),
    "too few": (
        lambda _: OURS.ScheduleLoopedBFS([stage(0, 2)], 2), ValueError,
        "got 1 stages on each of 1 ranks, expected 2 in all"
    ),
    "loss": (
        lambda _: OURS.ScheduleGPipe(stage(), 2, loss_fn=3), TypeError, "got a int as loss_fn"
    ),
    "micro-batches": (lambda _: OURS.ScheduleGPipe(stage(), 0), ValueError, "micro"),
    "name": (
        lambda _: OURS.get_schedule_class("zigzag"), ValueError,
        "Unknown schedule name 'zigzag', expected one of 1F1B,"
    ),
    "no grad": (
        lambda _: torch.no_grad()(OURS.ScheduleGPipe(stage(), 2, mse_loss).step)(),
        RuntimeError, "got a step under torch.no_grad()"
    ),
    "ranks": (
        lambda _: OURS.ScheduleGPipe(stage(0, 2), 2).step(), ValueError,
        "got a schedule for 2 ranks, expected one for 1"
    ),
    "no table": (lambda _: runtime().step(), RuntimeError, "got a step without a table"),
    "nothing to write": (lambda at: runtime()._dump_csv(str(at)), RuntimeError, "got no table"),
    "custom": (
        lambda _: runtime().register_custom_function("F", print), NotImplementedError,
        "got a function of your own for F"
    ),
    "typo": (lambda at: table("0F0,0X0", at), ValueError, "0X0"),
    "other numbers": (
        lambda at: table("0F0,1F0,1B0,0B0", at), ValueError, "a table of 1 micro-batches"
    ),
    "messages": (
        lambda at: table("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD", at),
        ValueError, "expected F, B, I, W"
    ),
    "format": (
        lambda at: table("0F0", at, "words"), NotImplementedError, "got format='words', expected"
    ),
    "lowering": (
        lambda _: OURS.ScheduleLoopedBFS([stage()], 2, max_outstanding_sends=-1), ValueError,
        "got max_outstanding_sends=-1"
    ),
    "lookahead": (
        lambda _: OURS.ScheduleLoopedBFS([stage()], 2, unshard_lookahead=(1, 2)), ValueError,
        "got unshard_lookahead=(1, 2)"
    ),
    "active": (
        lambda _: OURS.ScheduleLoopedBFS([stage()], 2, max_active_stages=0), ValueError,
        "got max_active_stages=0"
    ),
    "own loop": (
        lambda _: type("Own", (OURS.ScheduleGPipe,), {"_step_microbatches": print}), TypeError,
        "got Own with a _step_microbatches() of its own"
    ),
    "no step": (
        lambda _: OURS.ScheduleGPipe(stage(), 2).last_step(), ValueError, "got no step yet"
    ),
}  # fmt: skip


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_schedule(name: str, tmp_path: Path) -> None:
    act, kind, text = REFUSED[name]
    with raises(kind, text, form=HOUSE_FORM if name == "ranks" else RANKLESS_FORM):
        act(tmp_path)


@pytest.mark.usefixtures("lone_rank")
def test_compiled_modules_have_no_backward_in_halves() -> None:
    compiled = OURS.PipelineStage(torch.compile(Block(0)), 0, 1, CPU)
    OURS.ScheduleInterleaved1F1B([compiled], 2)
    with raises(RuntimeError, "got a compiled module in stage 0", form=RANKLESS_FORM):
        OURS.ScheduleInterleavedZeroBubble([compiled], 2)


@pytest.mark.usefixtures("lone_rank")
def test_a_deprecated_argument_warns() -> None:
    with pytest.warns(UserWarning, match="use_full_backward= has no effect"):
        OURS._PipelineScheduleRuntime([stage()], 2, use_full_backward=True)


@on_shm_ranks(2)
def test_layers_without_memory(rank: int) -> None:
    module = Block(rank).to("meta") if rank == 1 else Block(rank)
    schedule = make_schedule(OURS, "GPipe", {rank: module})
    args = (rows(0, 8),) if rank == 0 else ()
    with pytest.raises(ValueError, match="of stage 1 on device meta"):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)


class Fails(Block):
    """Raises when it is told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyError("a forward that fails")
        if self.where == "value":
            return print  # type: ignore[return-value]
        x = super().forward(x)
        if self.where == "backward":
            x.register_hook(fail)
        return x


def fail(*_: Any) -> None:
    raise ArithmeticError("a backward that fails")


@on_shm_ranks(2, timeout=120)
def test_what_a_stage_raises_comes_out_on_all_ranks(rank: int) -> None:
    told = {"loss": False}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if told["loss"]:
            raise LookupError("a loss that fails")
        return mse_loss(output, target)

    texts = {
        "forward": "a forward that fails",
        "backward": "a backward that fails",
        "loss": "a loss that fails",
    }
    for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble"):
        modules: dict[int, Fails] = {n: Fails(n) for n in own_numbers(name, rank, 2)}
        schedule: Any = make_schedule(OURS, name, dict(modules), loss_fn=loss_fn)
        last = 1 if name == "GPipe" else 3
        args = (rows(0, 8),) if 0 in modules else ()
        target = rows(1, 8) if last in modules else None
        schedule.step(*args, target=target)
        kept = {n: module.linear.weight.grad.clone() for n, module in modules.items()}
        for where, text in texts.items():
            told["loss"] = where == "loss"
            if 1 in modules:
                modules[1].where = where
            with pytest.raises(RuntimeError) as caught:
                schedule.step(*args, target=target, losses=[] if last in modules else None)
            assert text in str(caught.value) and "stage" in str(caught.value)
            is_here = last in modules if where == "loss" else 1 in modules
            if where != "backward":
                assert (caught.value.__cause__ is not None) == is_here, (name, where)
            told["loss"] = False
            for number, module in modules.items():
                module.where = ""
                assert torch.equal(module.linear.weight.grad, kept[number])
        schedule.step(*args, target=target)
        for number, module in modules.items():
            torch.testing.assert_close(module.linear.weight.grad, 2 * kept[number])


@on_shm_ranks(2)
def test_values_that_cannot_go_to_another_stage(rank: int) -> None:
    module = Fails(rank)
    module.where = "value" if rank == 0 else ""
    schedule = make_schedule(OURS, "GPipe", {rank: module})
    args = (rows(0, 8),) if rank == 0 else ()
    with pytest.raises(RuntimeError, match="stage 0 returned a builtin_function_or_method"):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)


@on_shm_ranks(2)
def test_a_loss_that_is_no_tensor(rank: int) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> float:
        return mse_loss(output, target).item()

    schedule = make_schedule(OURS, "GPipe", {rank: Block(rank)}, loss_fn=loss_fn)
    args = (rows(0, 8),) if rank == 0 else ()
    with pytest.raises(RuntimeError, match="loss_fn returned a float, expected a tensor"):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)


@on_shm_ranks(2)
def test_a_context_that_swallows_an_exception(rank: int) -> None:
    class Swallows:
        def __init__(self, _: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> bool:
            return True

    module = Fails(rank)
    module.where = "forward" if rank == 0 else ""
    schedule = make_schedule(OURS, "GPipe", {rank: module})
    schedule._stage.register_forward_context(Swallows)
    args = (rows(0, 8),) if rank == 0 else ()
    with pytest.raises(RuntimeError, match="stage 0 that swallowed an exception"):
        schedule.step(*args, target=rows(1, 8) if rank == 1 else None)


@pytest.mark.usefixtures("lone_rank")
def test_an_argument_that_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from trireme._pipeline import torch_stage

    class Old(nn.Module):
        def __init__(self, submodule: Any, stage_index: int, num_stages: int, device: Any,
                     input_args: Any = None) -> None: ...  # fmt: skip

    monkeypatch.setattr(torch_stage, "_TorchStage", Old)
    with raises(NotImplementedError, "got dw_builder=, which torch", form=RANKLESS_FORM):
        stage(dw_builder=print)


def test_forward_contexts_where_torch_has_none() -> None:
    from trireme._pipeline import torch_stage

    class Old:
        stage_index = 3

        def forward_one_chunk(self, fwd_chunk_id: int, args: Any) -> Any:
            seen.append(("runs", fwd_chunk_id))
            return args

    class Stage(torch_stage._Contexts, Old):
        pass

    class Context:
        def __init__(self, info: Any) -> None:
            seen.append((info.stage_index, info.microbatch_index))

        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    seen: list[Any] = []
    made = Stage()
    handle = made.register_forward_context(Context)
    with raises(RuntimeError, "a second forward context", form=RANKLESS_FORM):
        made.register_forward_context(Context)
    assert made.forward_one_chunk(5, args=7) == 7
    handle.remove()
    made.forward_one_chunk(6, 7)
    assert seen == [(3, 5), ("runs", 5), ("runs", 6)]
