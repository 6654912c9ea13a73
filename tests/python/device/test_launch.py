"""trireme.init() where there is a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import trireme

from harness.ranks import run_ranks

GPUS = torch.cuda.device_count()


@pytest.mark.skipif(GPUS == 0, reason="no CUDA device")
def test_a_rank_takes_the_gpu_of_its_number() -> None:
    run_ranks(_take_gpu, min(2, GPUS))


def _take_gpu(rank: int) -> None:
    with trireme.init() as context:
        assert context.device == torch.device("cuda", rank)
        assert torch.cuda.current_device() == rank
        for device in (context.device, "cpu"):  # an engine for each
            ones = torch.ones(3, device=device)
            dist.all_reduce(ones)
            assert ones.tolist() == [context.world] * 3
        mean = trireme.all_mean(torch.tensor(float(rank), device=context.device))
        assert mean.item() == (context.world - 1) / 2
        assert trireme.init(device="cuda").device == context.device
