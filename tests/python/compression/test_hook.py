"""Compression as a communication hook equals compression of DDP itself."""

import pytest
import torch
import trireme
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from trireme import compression as c
from trireme.compression import Compression

from compression.given import Given, averaged, drawn
from harness.on_ranks import on_gloo_ranks

SIZES = {"matrix": (37, 61), "tail": (2000,), "small": (1000,)}
METHODS: dict[str, Compression] = {
    "int8": c.Int8(between="ranks"),
    "top 5 %": c.TopK(0.05, between="ranks"),
    "low rank": c.PowerSGD(2, start_step=1, between="ranks"),
    "fp16": c.Fp16(between="ranks"),
}


@pytest.mark.parametrize("wrapper", [TorchDDP, trireme.DistributedDataParallel])
@pytest.mark.parametrize("name", METHODS)
@on_gloo_ranks()
def test_equals_the_argument(rank: int, name: str, wrapper: type) -> None:
    method = METHODS[name]
    ours = trireme.DistributedDataParallel(Given(SIZES), compression=method)
    hooked = wrapper(Given(SIZES))
    hooked.register_comm_hook(c.HookState(method, hooked, process_group=None), c.hook)
    for step in range(4):
        given = {key: value for key, value in drawn(step, rank).items() if key in SIZES}
        expected, found = averaged(ours, given), averaged(hooked, given)
        for key in SIZES:
            assert torch.equal(found[key], expected[key])
