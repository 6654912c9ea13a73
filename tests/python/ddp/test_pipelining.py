"""torch's pipeline schedules over stages that are wrapped in DDP."""

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from harness.models import batch
from harness.on_ranks import on_ranks
from harness.training import assert_same_on_all_ranks

STAGES = 2
MICRO_BATCHES = 4
ROWS = 16


def parts() -> list[nn.Module]:
    torch.manual_seed(8)
    return [nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)), nn.Linear(5, 3)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def one_process(step: int) -> list[list[torch.Tensor]]:
    model = nn.Sequential(*parts())
    loss_of(model(batch(step, ROWS)), batch(step + 50, ROWS, 3)).backward()
    return [[parameter.grad for parameter in part.parameters()] for part in model]


@pytest.mark.parametrize("schedule_type", [Schedule1F1B, ScheduleGPipe])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(4)
def test_two_pipelines_of_two_stages(
    rank: int, schedule_type: type[Schedule1F1B], set_to_none: bool
) -> None:
    """Ranks 0 and 1 are one pipeline, 2 and 3 another; 0 and 2 share a stage, so do 1 and 3.

    Every forward of a schedule is under no_sync(); before its last backward the schedule asks the
    reducer to prepare, and that one averages what all micro batches have brought.
    """
    index, pipeline = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = trireme.DistributedDataParallel(parts()[index], process_group=replicas[index])
    stage = PipelineStage(ddp, index, STAGES, torch.device("cpu"), group=pipelines[pipeline])
    schedule = schedule_type(stage, MICRO_BATCHES, loss_fn=loss_of)
    for step in range(3):
        ddp.zero_grad(set_to_none=set_to_none)
        if index == 0:
            schedule.step(batch(step, ROWS)[pipeline::2])
        else:
            schedule.step(target=batch(step + 50, ROWS, 3)[pipeline::2])
        got = [parameter.grad for parameter in ddp.parameters()]
        torch.testing.assert_close(got, one_process(step)[index])
        assert ddp.last_step()["step"] == step + 1  # averaged once per schedule, not per backward


@on_ranks()
def test_backward_of_one_stage(rank: int) -> None:
    """The stage's own methods, in the order of 1F1B, without a schedule around them."""
    ddp = trireme.DistributedDataParallel(nn.Linear(6, 3))
    stage = PipelineStage(
        ddp, 0, 1, torch.device("cpu"), group=[dist.new_group([member]) for member in (0, 1)][rank]
    )
    chunks = [batch(number)[rank::2] for number in range(3)]
    losses = [stage.forward_maybe_with_nosync(chunk).square().mean() for chunk in chunks]
    for number, loss in enumerate(losses):
        stage.backward_maybe_with_nosync(
            "full",
            {"stage_output": loss, "output_grads": None, "input_values": [chunks[number]]},
            last_backward=number == len(losses) - 1,
        )
    assert_same_on_all_ranks([parameter.grad for parameter in ddp.parameters()])
    alone = nn.Linear(6, 3)
    alone.load_state_dict(ddp.module.state_dict())
    for number in range(3):
        alone(batch(number)).square().mean().backward()
    torch.testing.assert_close(ddp.module.weight.grad, alone.weight.grad)
