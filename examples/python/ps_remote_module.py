"""Trains one net that lives at rank 0; the trainers of all other ranks call it and step it.

    torchrun --nproc-per-node 3 examples/python/ps_remote_module.py 60

This is the program of torch's tutorial on a parameter server over RPC. The net is computed where it
lives, behind a forward that trainers call. Gradients of its parameters stay there, apart for each
trainer, and `net.step()` applies those of its caller alone: trainers do not wait for each other,
and never mix what they push. There are no contexts, and the backward is that of any loss.
"""

import sys

import torch
import trireme
from torch import Tensor, nn
from trireme import ps, remote

CLASSES, PIXELS, BATCH = 10, 64, 32

nets: dict[str, nn.Module] = {}  # only process "ps0" holds one


@remote.function
def shared_net(name: str) -> nn.Module:
    """What it returns again is shared: all callers get the same parameters."""
    return nets[name]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(PIXELS, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, CLASSES),
    )


def draw_images(count: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each class is a pattern under noise."""
    patterns = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(CLASSES, (count,), generator=drawn)
    return patterns[labels] + 2.0 * torch.randn(count, PIXELS, generator=drawn), labels


def train(trainer: str, steps: int, drawn: torch.Generator) -> None:
    net = remote.Module("ps0", shared_net, "classifier", optimizer=ps.SGD(0.1))
    for step in range(steps):
        images, labels = draw_images(BATCH, drawn)
        loss = nn.functional.cross_entropy(net(images), labels)
        net.zero_grad()  # this trainer's gradients
        loss.backward()
        net.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"{trainer}  step {step:3d}  loss {loss.item():.4f}", flush=True)
    net.eval()
    images, labels = draw_images(500, torch.Generator().manual_seed(8))
    with torch.no_grad():
        guesses = net(images).argmax(1)
    right = (guesses == labels).float().mean().item()
    print(f"{trainer}  {right:.1%} right", flush=True)


def main(steps: str = "60") -> None:
    ctx = trireme.init(device="cpu")
    if ctx.world < 2:
        raise SystemExit("got 1 rank, expected 2 or more. Use torchrun --nproc-per-node 3.")
    if ctx.rank == 0:
        nets["classifier"] = make_net()
    remote.start("ps0" if ctx.rank == 0 else f"trainer{ctx.rank}")
    if ctx.rank > 0:
        train(remote.names()[ctx.rank], int(steps), trireme.rank_generator(0))
    remote.stop()  # "ps0" serves until all trainers are here
    trireme.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
