"""Several process groups, several DDP modules in one program, and modules inside modules."""

import threading

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import assert_same_on_all_ranks, gradients

Gradients = dict[str, torch.Tensor | None]


def one_process(steps: list[int], ranks: list[int], world: int) -> Gradients:
    """The mean over ``ranks`` of their gradients, summed over ``steps``."""
    model = mlp()
    for step in steps:
        for rank in ranks:
            (model(batch(step)[rank::world]).square().mean() / len(ranks)).backward()
    return gradients(model)


@on_ranks(4)
def test_groups_of_two(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = trireme.DistributedDataParallel(mlp(), process_group=halves[rank // 2])
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step)[rank::4]).square().mean().backward()
        first = 2 * (rank // 2)
        torch.testing.assert_close(gradients(ddp), one_process([step], [first, first + 1], 4))


@on_ranks(4)
def test_a_device_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    ddp = trireme.DistributedDataParallel(mlp(), device_mesh=mesh["outer"])
    assert ddp.device_mesh is not None
    ddp(batch(0)[rank::4]).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), one_process([0], [rank % 2, rank % 2 + 2], 4))


@on_ranks()
def test_modules_over_different_groups_in_one_loss(rank: int) -> None:
    """One average is over all ranks, the other over this one."""
    alone = [dist.new_group([other]) for other in range(WORLD)][rank]
    shared = trireme.DistributedDataParallel(mlp())
    own = trireme.DistributedDataParallel(mlp(), process_group=alone)
    for step in range(3):
        for model in (shared, own):
            model.zero_grad()
        x = batch(step)[rank::WORLD]
        (shared(x).square().mean() + own(x).square().mean()).backward()
        torch.testing.assert_close(gradients(shared), one_process([step], [0, 1], WORLD))
        torch.testing.assert_close(gradients(own), one_process([step], [rank], WORLD))


@on_ranks()
def test_two_modules_in_one_graph(rank: int) -> None:
    """An encoder and a decoder, each wrapped; the backward of one runs into the other."""
    torch.manual_seed(2)
    encoder, decoder = nn.Linear(6, 5), nn.Linear(5, 3)
    ddp = [trireme.DistributedDataParallel(part) for part in (encoder, decoder)]
    for step in range(3):
        for part in ddp:
            part.zero_grad()
        ddp[1](ddp[0](batch(step)[rank::WORLD]).tanh()).square().mean().backward()
        expected = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 3)])
        expected.load_state_dict(nn.ModuleList([encoder, decoder]).state_dict())
        expected[1](expected[0](batch(step)).tanh()).square().mean().backward()
        got = gradients(nn.ModuleList([encoder, decoder]))
        torch.testing.assert_close(got, gradients(expected))


@on_ranks()
def test_two_modules_trained_in_turn(rank: int) -> None:
    """A GAN: the generator's step runs through the frozen discriminator and back."""
    torch.manual_seed(2)
    generator, discriminator = nn.Linear(6, 4), nn.Linear(4, 1)
    wrapped = [trireme.DistributedDataParallel(net) for net in (generator, discriminator)]
    plain = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 1)])
    plain.load_state_dict(nn.ModuleList([generator, discriminator]).state_dict())

    def turn(models: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
        make, judge = models
        judge.zero_grad()
        judge(make(x).detach()).square().mean().backward()
        seen = [p.grad.clone() for p in judge.parameters()]
        make.zero_grad()
        judge.requires_grad_(False)
        judge(make(x)).sigmoid().mean().backward()
        judge.requires_grad_(True)
        return [*seen, *(p.grad.clone() for p in make.parameters())]

    for step in range(4):
        got = turn(wrapped, batch(step)[rank::WORLD])
        torch.testing.assert_close(got, turn(list(plain), batch(step)))


class Outer(nn.Module):
    def __init__(self, wrap: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        inner = nn.Linear(6, 6)
        self.inner = trireme.DistributedDataParallel(inner) if wrap else inner
        self.own = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.inner(x).tanh())


@on_ranks()
def test_a_wrapped_module_inside_a_wrapped_module(rank: int) -> None:
    """The outer one averages all parameters, once; test_nesting.py has more."""
    ddp = trireme.DistributedDataParallel(Outer(wrap=True))
    planned = {name for bucket in ddp._core.plan() for name in bucket}
    assert planned == {name for name, _ in ddp.module.named_parameters()}
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(step)[rank::WORLD]).square().mean().backward()
        alone = Outer(wrap=False)
        alone(batch(step)).square().mean().backward()
        got = [parameter.grad for parameter in ddp.parameters()]
        torch.testing.assert_close(got, [parameter.grad for parameter in alone.parameters()])
        assert ddp.module.inner.last_step()["step"] == 0


@on_ranks()
def test_a_module_that_is_gone_leaves_nothing(rank: int) -> None:
    """Its hooks go with it: the module can be wrapped again, and trains alone in between."""
    module = mlp()
    for step in range(3):
        ddp = trireme.DistributedDataParallel(module)
        ddp.zero_grad()
        ddp(batch(step)[rank::WORLD]).square().mean().backward()
        torch.testing.assert_close(gradients(module), one_process([step], [0, 1], WORLD))
        del ddp
        module.zero_grad()
        module(batch(step)[rank::WORLD]).square().mean().backward()
        torch.testing.assert_close(gradients(module), one_process([step], [rank], WORLD))


@on_ranks()
def test_a_module_that_dies_between_forward_and_backward(rank: int) -> None:
    """Its graph is still good; nobody averages any more."""
    module = mlp()
    loss = trireme.DistributedDataParallel(module)(batch(0)[rank::WORLD]).square().mean()
    loss.backward()
    torch.testing.assert_close(gradients(module), one_process([0], [rank], WORLD))


@on_ranks()
def test_modules_on_two_threads(rank: int) -> None:
    """Each with a group of its own, as c10d asks."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    models = [trireme.DistributedDataParallel(mlp(), process_group=group) for group in groups]
    expected = [one_process([step], [0, 1], WORLD) for step in range(11)]
    wrong: list[str] = []

    def train(number: int) -> None:
        for step in range(10):
            models[number].zero_grad()
            models[number](batch(step + number)[rank::WORLD]).square().mean().backward()
            for name, grad in gradients(models[number]).items():
                if not torch.allclose(grad, expected[step + number][name], atol=1e-6):
                    wrong.append(f"thread {number}, step {step}, {name}")

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@on_ranks(3)
def test_another_process_group(rank: int) -> None:
    """What torch calls _update_process_group: training goes on over the ranks that are left."""
    pair = dist.new_group([0, 1])
    ddp = trireme.DistributedDataParallel(mlp())
    ddp(batch(0)[rank::3]).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), one_process([0], [0, 1, 2], 3))
    if rank == 2:
        return
    ddp._update_process_group(pair)
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(step)[rank::2]).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), one_process([step], [0, 1], 2))


@pytest.mark.parametrize("count", [5])
@on_ranks()
def test_modules_that_share_a_parameter(rank: int, count: int) -> None:
    """Two wrappers around modules with one common layer: each averages it in its own backward."""
    shared = nn.Linear(6, 6)
    models = [
        trireme.DistributedDataParallel(nn.Sequential(shared, nn.Linear(6, 2))) for _ in range(2)
    ]
    for step in range(count):
        for model in models:
            model.zero_grad()
            model(batch(step)[rank::WORLD]).square().mean().backward()
            assert_same_on_all_ranks([parameter.grad for parameter in model.parameters()])
