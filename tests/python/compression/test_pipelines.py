"""Compression between replicas of a pipeline, against numpy."""

import numpy as np
import pytest
import torch
import trireme
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trireme.compression import Compression, state_of

from compression.reference import Sender, mean_of
from compression.strategies import METHODS, shared_folder
from harness.faults import RANKLESS_FORM, raises
from harness.on_ranks import on_shm_and_gloo_ranks


class Pulled(nn.Module):
    """Adds to its input what has ``pull`` as the gradient of its weight."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.pull = torch.zeros(numel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight * self.pull).sum()


def first_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


NUMELS = (2000, 500, 1500, 3000)


def pulls(step: int, copy: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + copy)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def piped(method: Compression, mesh: DeviceMesh) -> trireme.Pipeline:
    layers = nn.Sequential(*(Pulled(numel) for numel in NUMELS))
    return trireme.Pipeline(layers, 2, mesh=mesh, loss=first_of, compression=method)


def step_of(pipe: trireme.Pipeline, step: int, copy: int) -> None:
    for name, layer in pipe.named_modules():
        if isinstance(layer, Pulled):
            layer.pull = pulls(step, copy)[int(name)]
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(torch.zeros(2, 1), target=torch.zeros(2, 1))


def copies(rank: int, mesh: DeviceMesh) -> None:
    copy = mesh.get_local_rank("dp")
    with shared_folder(rank) as folder:
        for method in METHODS.values():
            pipe = piped(method, mesh)
            senders = [[Sender(method) for _ in NUMELS] for _ in range(2)]
            for step in range(3):
                step_of(pipe, step, copy)
                parameters = dict(pipe.named_parameters())
                for number in range(len(NUMELS)):
                    sent = [
                        senders[one][number].send(pulls(step, one)[number].numpy())
                        for one in range(2)
                    ]
                    if f"{number}.weight" in parameters:
                        found = parameters[f"{number}.weight"].grad
                        np.testing.assert_array_equal(found.numpy(), mean_of(sent))
            own = [name for name, _ in pipe.named_parameters()]
            sent_bytes = sum(method.bytes(NUMELS[int(name.split(".")[0])]) for name in own)
            assert pipe.last_step()["sent_bytes"] == pytest.approx(sent_bytes, rel=0.02)
            assert set(state_of(pipe)) == set(own) - {"1.weight"}
            trireme.save_checkpoint(folder / "saved", pipe)
            other = piped(method, mesh)
            trireme.load_checkpoint(folder / "saved", other)
            for one in (pipe, other):
                step_of(one, 3, copy)
            for mine, theirs in zip(pipe.parameters(), other.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


@on_shm_and_gloo_ranks(4)
def test_replicas_of_a_pipeline(rank: int) -> None:
    """They code the gradients of a step, whatever its micro-batches."""
    copies(rank, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))


def test_without_replicas() -> None:
    with raises(ValueError, "compression", "replicas", form=RANKLESS_FORM):
        trireme.Pipeline(nn.Sequential(nn.Linear(4, 4)), compression=METHODS["sign"])
