"""Three steps of each strategy on two ranks equal three steps of one process.

A script and not a test: .ci/run runs it on the oldest torch that is supported, with nothing but
torch and the standard library.
"""

import os
import socket
from collections.abc import Callable, Iterable

import torch
import trireme
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from trireme import ps

WORLD = 2
STEPS = 3
LR = 0.1


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(STEPS)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for inputs, targets in batches():
        optimizer.zero_grad()
        mse_loss(model(inputs[rank::world]), targets[rank::world]).backward()
        optimizer.step()


def by_ddp(rank: int) -> Iterable[Tensor]:
    model = trireme.DistributedDataParallel(make_model())
    train(model, torch.optim.SGD(model.parameters(), LR), rank, WORLD)
    return model.parameters()


def by_zero(rank: int) -> Iterable[Tensor]:
    model = make_model()
    optimizer = trireme.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, stage=2, lr=LR)
    train(model, optimizer, rank, WORLD)
    return model.parameters()


def by_fully_shard(rank: int) -> Iterable[Tensor]:
    model = make_model()
    for layer in (model[0], model[2], model):
        trireme.fully_shard(layer)
    train(model, torch.optim.SGD(model.parameters(), LR), rank, WORLD)
    return [parameter.full_tensor() for parameter in model.parameters()]


def by_pipeline(rank: int) -> Iterable[Tensor]:
    """Each rank has its stage; what the other has is taken from where it trained."""
    pipe = trireme.Pipeline(make_model(), 2, ranks=True, loss=mse_loss, balance=[2, 1])
    optimizer = torch.optim.SGD(pipe.parameters(), LR)
    for inputs, targets in batches():
        optimizer.zero_grad()
        pipe.step(inputs, target=targets)
        optimizer.step()
    own = dict(pipe.named_parameters())
    whole = []
    for name, like in make_model().named_parameters():
        value = own[name].detach().clone() if name in own else torch.zeros_like(like)
        torch.distributed.all_reduce(value)
        whole.append(value)
    return whole


def by_server(rank: int) -> Iterable[Tensor]:
    model = make_model()
    with ps.ParameterServer([ps.Dense("net", model, optimizer=ps.SGD(LR))]) as server:
        for inputs, targets in batches():
            server["net"].pull()
            mse_loss(model(inputs[rank::WORLD]), targets[rank::WORLD]).backward()
            server["net"].push()
            server.clock()
        server["net"].pull()  # what the last clock has made of it, once all workers have come
    return model.parameters()


STRATEGIES: dict[str, Callable[[int], Iterable[Tensor]]] = {
    "DDP": by_ddp,
    "ZeRO 2": by_zero,
    "fully_shard": by_fully_shard,
    "a pipeline": by_pipeline,
    "a parameter server": by_server,
}


def run_rank(rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
    )
    alone = make_model()
    train(alone, torch.optim.SGD(alone.parameters(), LR), 0, 1)
    expected = [parameter.detach() for parameter in alone.parameters()]
    trireme.init(device="cpu")
    for name, by_strategy in STRATEGIES.items():
        got = [value.detach() for value in by_strategy(rank)]
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
    trireme.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    torch.multiprocessing.spawn(run_rank, args=(free_port(),), nprocs=WORLD)
    names = ", ".join(STRATEGIES)
    print(f"{STEPS} steps of {names} on {WORLD} ranks equal one process, torch {torch.__version__}")
