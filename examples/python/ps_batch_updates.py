"""Trains with batched updates: all trainers push, one step is made, all get the model.

    torchrun --nproc-per-node 3 examples/python/ps_batch_updates.py 60

This is the program of torch's tutorial on batch RPC, whose trainers call `update_and_fetch_model`
of a server by `@rpc.functions.async_execution`. Here no process serves, and the parameters of each
trainer's model lie in the table itself, so that to get the model is to wait for the step.
"""

import sys

import torch
import trireme
from torch import Tensor, nn
from trireme import ps

CLASSES, PIXELS = 10, 16
IMAGES, BATCH = 192, 48  # a batch is that of all trainers together


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 3 * 3, CLASSES),
    )


def make_images() -> tuple[Tensor, Tensor]:
    """Each class has a pattern of its own, under noise."""
    drawn = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 1, PIXELS, PIXELS, generator=drawn)
    labels = torch.randint(CLASSES, (IMAGES,), generator=drawn)
    return patterns[labels] + torch.randn(IMAGES, 1, PIXELS, PIXELS, generator=drawn), labels


def main(last: str = "60") -> None:
    steps = int(last)
    ctx = trireme.init(device="cpu")
    images, labels = make_images()
    torch.manual_seed(0)
    model = make_model()
    table = ps.Dense("model", model, optimizer=ps.SGD(0.02, momentum=0.9))
    with ps.ParameterServer([table], mode="bsp") as server:
        for step in range(steps):
            rows = (torch.arange(BATCH) + step * BATCH) % IMAGES
            own = rows[ctx.rank :: ctx.world]
            server["model"].pull()  # torch: self.m = the model that the last call has returned
            loss = nn.functional.cross_entropy(model(images[own]), labels[own])
            loss.backward()
            server["model"].push()  # torch: rpc_sync(update_and_fetch_model, gradients)
            server.clock()
            if step % 10 == 0 or step == steps - 1:
                mean = trireme.all_mean(loss.detach()).item()
                if ctx.rank == 0:
                    print(f"step {step:3d}  loss {mean:.6f}")
        server["model"].pull()
        pushes = server.stats()["pushes"]
        print(f"trainer {ctx.rank} of {ctx.world}: {pushes} pushes, sum {sum_of(model):.6f}")
    trireme.shutdown()


def sum_of(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(parameter.double().sum().item() for parameter in model.parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
