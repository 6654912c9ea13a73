"""Copies, pickles and checkpoints of wrapped modules, also after training began."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import backward, run_steps, sgd
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import gradients, values


def pickled(ddp: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(ddp))


def saved(ddp: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("trained", [0, 1, 3])
@pytest.mark.parametrize("make_copy", [pickled, saved, copy.deepcopy])
@on_ranks()
def test_a_copy_goes_on_reducing(rank: int, make_copy: Any, trained: int) -> None:
    """torch's class, wrapped with static_graph=True, silently stops."""
    ddp = trireme.DistributedDataParallel(mlp(), static_graph=True, bucket_cap_mb=0.0003)
    run_steps(ddp, sgd(ddp), backward, rank, trained)
    other = make_copy(ddp)
    assert isinstance(other, trireme.DistributedDataParallel)
    assert other.module is not ddp.module
    for copied, original in zip(other.parameters(), ddp.parameters(), strict=True):
        assert copied.data_ptr() != original.data_ptr()
    expected = run_steps(ddp, sgd(ddp), backward, rank, 3)
    torch.testing.assert_close(run_steps(other, sgd(other), backward, rank, 3), expected)
    alone = mlp()
    alone.load_state_dict(other.module.state_dict())
    other.zero_grad()
    backward(other, 9, rank)
    alone(batch(9)).square().mean().backward()
    torch.testing.assert_close(gradients(other), gradients(alone))


@pytest.mark.parametrize("trained", [0, 3])
@on_ranks(timeout=40, backend="trireme")
def test_one_rank_alone_may_copy(rank: int, trained: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    run_steps(ddp, sgd(ddp), backward, rank, trained)
    if rank == 0:
        for make_copy in (pickled, saved, copy.deepcopy):
            copied = make_copy(ddp)
            torch.testing.assert_close(values(copied), values(ddp))
    run_steps(ddp, sgd(ddp), backward, rank, 3)


def double_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The sum over the ranks, undivided."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


@pytest.mark.parametrize("make_copy", [pickled, copy.deepcopy])
@on_ranks()
def test_a_copy_keeps_its_settings(rank: int, make_copy: Any) -> None:
    ddp = trireme.DistributedDataParallel(
        mlp(), gradient_as_bucket_view=True, bucket_cap_mb_list=[0.0003, 1]
    )
    ddp.register_comm_hook(None, double_hook)
    backward(ddp, 0, rank)
    other = make_copy(ddp)
    assert other._core.plan() == ddp._core.plan()
    assert other.gradient_as_bucket_view
    other.zero_grad()
    backward(other, 0, rank)
    alone = mlp()
    (WORLD * alone(batch(0)).square().mean()).backward()
    torch.testing.assert_close(gradients(other), gradients(alone))


@on_ranks()
def test_a_copy_of_a_module_over_another_group(rank: int) -> None:
    """deepcopy stays with its group; a pickle can only mean the default group, and says so."""
    group = dist.new_group([0, 1])
    ddp = trireme.DistributedDataParallel(mlp(), process_group=group)
    other = copy.deepcopy(ddp)
    assert other.process_group is group
    backward(other, 0, rank)
    alone = mlp()
    alone(batch(0)).square().mean().backward()
    torch.testing.assert_close(gradients(other), gradients(alone))
    with pytest.raises(RuntimeError, match="default process group"):
        pickle.dumps(ddp)


@on_ranks()
def test_deepcopy_as_an_average_of_weights(rank: int) -> None:
    """torch.optim.swa_utils deep-copies the wrapped module and only ever evaluates the copy."""
    ddp = trireme.DistributedDataParallel(mlp())
    optimizer = sgd(ddp)
    average = torch.optim.swa_utils.AveragedModel(ddp)
    for step in range(3):
        optimizer.zero_grad()
        backward(ddp, step, rank)
        optimizer.step()
        average.update_parameters(ddp)
        with torch.no_grad():
            average(batch(step))
    assert not torch.equal(average.module.module[0].weight, ddp.module[0].weight)


@on_ranks()
def test_state_dicts_are_those_of_torch(rank: int) -> None:
    ddp, theirs = trireme.DistributedDataParallel(mlp()), TorchDDP(mlp())
    run_steps(ddp, sgd(ddp), backward, rank, 2)
    assert list(ddp.state_dict()) == list(theirs.state_dict())
    assert all(name.startswith("module.") for name in ddp.state_dict())
    theirs.load_state_dict(ddp.state_dict())
    torch.testing.assert_close(values(theirs), values(ddp))
    run_steps(theirs, sgd(theirs), backward, rank, 2)
    ddp.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(values(ddp), values(theirs))
    # Loading wrote in place: the next steps still reduce.
    got = run_steps(ddp, sgd(ddp), backward, rank, 2)
    torch.testing.assert_close(got, run_steps(theirs, sgd(theirs), backward, rank, 2))


@on_ranks()
def test_optimizer_state_moves_between_the_classes(rank: int) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    ddp, theirs = trireme.DistributedDataParallel(mlp()), TorchDDP(mlp())
    of_ours, of_theirs = adam(ddp), adam(theirs)
    run_steps(ddp, of_ours, backward, rank, 3)
    theirs.load_state_dict(ddp.state_dict())
    of_theirs.load_state_dict(copy.deepcopy(of_ours.state_dict()))
    got = run_steps(ddp, of_ours, backward, rank, 3)
    torch.testing.assert_close(got, run_steps(theirs, of_theirs, backward, rank, 3))


@on_ranks()
def test_distributed_checkpoint_names_strip_the_wrapper(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    run_steps(ddp, optimizer, backward, rank, 2)
    assert list(get_model_state_dict(ddp)) == list(ddp.module.state_dict())
    _, of_optimizer = get_state_dict(ddp, optimizer)
    assert set(of_optimizer["state"]) == {name for name, _ in ddp.module.named_parameters()}
    fresh = trireme.DistributedDataParallel(mlp())
    set_model_state_dict(fresh, get_model_state_dict(ddp))
    torch.testing.assert_close(values(fresh), values(ddp))


@on_ranks()
def test_a_module_may_be_wrapped_again(rank: int) -> None:
    """Two wrappers of one module at once: each averages after its own forward."""
    module = mlp()
    first = trireme.DistributedDataParallel(module)
    second = trireme.DistributedDataParallel(module)
    for step in range(3):
        for ddp in (first, second):
            module.zero_grad()
            backward(ddp, step, rank)
            alone = mlp()
            alone(batch(step)).square().mean().backward()
            torch.testing.assert_close(gradients(module), gradients(alone))
