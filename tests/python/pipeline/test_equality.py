"""Pipelines over ranks equal one process that accumulates, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

from harness.on_ranks import on_gloo_ranks, on_shm_and_gloo_ranks, on_shm_ranks
from pipeline.ranks import FORMS, WIDTH, Both, accumulate, rows, tanh_layers


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_shm_and_gloo_ranks("world", timeout=100)
def test_every_form_equals_one_process(rank: int, world: int) -> None:
    """Five steps of AdamW; ten rows in four micro-batches, which do not divide."""
    for form in FORMS:
        both = Both(tanh_layers, chunks=4, schedule=form)
        for step in range(5):
            both.train(step)
        stages = both.pipe.schedule.stages
        assert stages == (world if form in ("gpipe", "1f1b") else 2 * world)
        assert [stage.number for stage in both.pipe.stages] == list(range(stages))
        report = both.pipe.last_step()
        assert report["step"] == 5 and 0 <= report["bubble"] <= 1
        assert [stage["stage"] for stage in report["stages"]] == [
            stage.number for stage in both.pipe.stages if stage.rank == rank
        ]


@on_shm_and_gloo_ranks(2)
def test_any_balance(rank: int) -> None:
    for balance in ([1, 7], [7, 1], [5, 3]):
        both = Both(tanh_layers, balance=balance, schedule="1f1b")
        assert [len(stage.layers) for stage in both.pipe.stages] == balance
        both.train(0)
    interleaved = Both(tanh_layers, balance=[1, 3, 3, 1], schedule="interleaved-1f1b")
    interleaved.train(0)
    for balance in ("time", "bytes"):
        both = Both(tanh_layers, balance=balance, sample=rows(1, 3))
        assert sum(len(stage.layers) for stage in both.pipe.stages) == 8
        both.train(0)


@on_shm_ranks(2)
def test_a_table_and_a_value_as_schedule(rank: int) -> None:
    made = trireme.pipeline_schedule("1f1b", ranks=2, micro_batches=4)
    for schedule in (made, made.to_csv(), made.to_csv("compute_comms")):
        both = Both(tanh_layers, chunks=4, schedule=schedule)
        assert both.pipe.schedule.to_csv() == made.to_csv()
        both.train(0)


@on_shm_ranks(2)
def test_profiles_show_actions(rank: int) -> None:
    """By the words of the table, those of threads in one process too."""
    of_ranks = trireme.Pipeline(tanh_layers(), 4, ranks=True, schedule="zb-h1", loss=mse_loss)
    of_threads = trireme.Pipeline(tanh_layers(), 4, devices=["cpu"] * 2, loss=mse_loss)
    for pipe, rows_seen in ((of_ranks, [rank]), (of_threads, [0, 1])):
        with torch.profiler.profile() as profile:
            pipe.step(rows(0), target=rows(1))
        seen = {event.name for event in profile.events() if "trireme::pipeline::" in event.name}
        table = [
            action for row in rows_seen for action in pipe.schedule.rows[row] if action is not None
        ]
        assert seen == {f"trireme::pipeline::{action}" for action in table}


@on_shm_ranks(2)
def test_names_are_those_of_the_module(rank: int) -> None:
    pipe = trireme.Pipeline(tanh_layers(), balance=[3, 5], ranks=True, loss=mse_loss)
    whole = tanh_layers().state_dict()
    own = ["0.weight", "0.bias", "2.weight", "2.bias"] if rank == 0 else None
    names = own or ["4.weight", "4.bias", "6.weight", "6.bias"]
    assert list(pipe.state_dict()) == names == [name for name, _ in pipe.named_parameters()]
    pipe.load_state_dict({name: whole[name] * 2 for name in names})
    assert all(torch.equal(tensor, whole[name] * 2) for name, tensor in pipe.state_dict().items())


@on_shm_ranks(2)
def test_modes_dtypes_and_new_parameters(rank: int) -> None:
    """What is done to the pipeline is done to its layers, also after the first step."""
    both = Both(tanh_layers)
    both.train(0)
    assert not any(module.training for module in both.pipe.eval().modules())
    both.pipe.train()
    for module in (both.one, both.pipe):
        module.double()
    x, y = rows(1).double(), rows(2).double()
    state = {name: tensor * 0.5 for name, tensor in both.one.state_dict().items()}
    both.one.load_state_dict(state, assign=True)
    own = {name: state[name].clone() for name in both.pipe.state_dict()}
    both.pipe.load_state_dict(own, assign=True)
    expected = accumulate(both.one, x, y, chunks=4, loss=mse_loss)
    got = both.pipe.step(x, target=y)
    assert got.dtype == torch.float64 and torch.equal(got, expected)
    both.assert_equal()


@on_shm_and_gloo_ranks(3)
def test_gradients_add_up_over_steps_without_zero_grad(rank: int) -> None:
    """What was there is not divided again, and keeps its identity."""
    pipe = trireme.Pipeline(tanh_layers(), 4, ranks=True, loss=mse_loss)
    with pipe.no_sync():
        pipe.step(rows(0), target=rows(1))
    before = {
        name: (parameter.grad, parameter.grad.clone())
        for name, parameter in pipe.named_parameters()
    }
    pipe.step(rows(2), target=rows(3))
    other = tanh_layers()
    accumulate(other, rows(2), rows(3), chunks=4, loss=mse_loss)
    second = dict(other.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is before[name][0]
        assert torch.equal(parameter.grad, before[name][1] + second[name].grad), name


@on_shm_ranks(2)
def test_sums_instead_of_means(rank: int) -> None:
    pipe = trireme.Pipeline(tanh_layers(), 4, ranks=True, loss=mse_loss, scale_grads=False)
    one = tanh_layers()
    mean = accumulate(one, rows(0), rows(1), chunks=4, loss=mse_loss)
    assert torch.equal(pipe.step(rows(0), target=rows(1)), mean * 4)
    whole = dict(one.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, whole[name].grad * 4)


def partly_frozen() -> nn.Sequential:
    module = tanh_layers()
    for parameter in (*module[0].parameters(), *module[2].parameters(), module[4].bias):
        parameter.requires_grad_(False)
    return module


@pytest.mark.parametrize("world", [2, 4])
@on_shm_and_gloo_ranks("world")
def test_frozen_layers(rank: int, world: int) -> None:
    """No gradient goes to a stage that needs none, and freezing changes between steps."""
    for form in FORMS:
        both = Both(partly_frozen, schedule=form)
        both.train(0)
        for module in (both.one, both.pipe):
            for parameter in module.parameters():
                parameter.requires_grad_(True)
        both.train(1)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).relu_()


@on_shm_and_gloo_ranks(2)
def test_a_first_layer_may_work_in_place_and_return_views(rank: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        first, last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        return nn.Sequential(first, nn.Unflatten(1, (2, WIDTH)), InPlace(), nn.Flatten(), last)

    for form in ("gpipe", "1f1b"):
        both = Both(make, schedule=form, balance=[2, 3])
        for step in range(3):
            both.train(step)


@on_shm_and_gloo_ranks(2)
def test_evaluation_between_steps(rank: int) -> None:
    for form in FORMS:
        both = Both(tanh_layers, schedule=form)
        for step in range(2):
            both.train(step)
            x, y = rows(50), rows(51)
            with torch.no_grad():
                outputs = torch.cat([both.one(part) for part in x.tensor_split(4)])
            got = both.pipe.eval_step(x)
            holds_last = both.pipe.stages[-1].rank == rank
            assert (got is not None) == holds_last
            assert got is None or (torch.equal(got, outputs) and not got.requires_grad)
            losses = [mse_loss(*both_parts) for both_parts in zip(
                outputs.tensor_split(4), y.tensor_split(4), strict=True)]  # fmt: skip
            expected = sum(losses[1:], losses[0]) / 4
            assert torch.equal(both.pipe.eval_step(x, target=y), expected)


@on_shm_ranks(2)
def test_layers_of_other_ranks_may_be_on_meta(rank: int) -> None:
    module = tanh_layers()
    for number in range(4, 8) if rank == 0 else range(4):
        module[number].to("meta")
    pipe = trireme.Pipeline(module, 4, ranks=True, loss=mse_loss)
    expected = accumulate(tanh_layers(), rows(0), rows(1), chunks=4, loss=mse_loss)
    assert torch.equal(pipe.step(rows(0), target=rows(1)), expected)


@on_shm_ranks(2)
def test_meshes(rank: int) -> None:
    for shape, names in (((2,), ("ranks",)), ((1, 2), ("dp", "pp"))):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        pipe = trireme.Pipeline(tanh_layers(), 4, mesh=mesh, loss=mse_loss)
        expected = accumulate(tanh_layers(), rows(0), rows(1), chunks=4, loss=mse_loss)
        assert torch.equal(pipe.step(rows(0), target=rows(1)), expected)


@pytest.mark.parametrize(("form", "of_torch"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
@on_gloo_ranks(2)
def test_torch_has_the_same_losses_and_gradients(rank: int, form: str, of_torch: str) -> None:
    pipe = trireme.Pipeline(tanh_layers(), 4, ranks=True, schedule=form, loss=mse_loss)
    half = tanh_layers()[4 * rank : 4 * rank + 4]
    stage: Any = pipelining.PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule_class = getattr(pipelining, f"Schedule{of_torch}")
    schedule = schedule_class(stage, 4, loss_fn=mse_loss)
    x, y = rows(0, 12), rows(1, 12)
    losses: list[torch.Tensor] = []
    schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank else {}))
    got = pipe.step(x, target=y)
    if rank == 1:
        assert torch.equal(got, torch.stack([loss.detach() for loss in losses]).mean())
    for ours, torchs in zip(pipe.parameters(), half.parameters(), strict=True):
        assert torch.equal(ours.grad, torchs.grad)
