"""Ray Train over our backend, with our classes. Ray takes a minute to install and half to start:

TRIREME_TEST_RAY=1 python -m pytest tests/python/integrations/test_ray.py
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.skipif("TRIREME_TEST_RAY" not in os.environ, reason="TRIREME_TEST_RAY is not set"),
    pytest.mark.timeout(300),
]


def losses_of(model: nn.Module, rank: int, world: int, mean: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(4):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=made)[rank::world]
        loss = functional.cross_entropy(model(x), x[:, :3].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean(loss.detach())))
    return losses


def small_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def ray_of_two() -> Any:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("strategy", ["trireme_ddp", "trireme_fsdp", "ddp"])
def test_training(ray_of_two: Any, strategy: str, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from trireme.integrations.ray import TorchConfig

    def train() -> None:
        import torch.distributed as dist
        import trireme
        from trireme.integrations.ray import prepare_model

        model = prepare_model(small_net(), parallel_strategy=strategy)
        assert dist.get_backend() == "trireme"
        is_ours = isinstance(model, trireme.DistributedDataParallel | trireme.FSDPModule)
        assert is_ours == (strategy != "ddp")
        losses = losses_of(model, dist.get_rank(), 2, trireme.all_mean)
        (tmp_path / str(dist.get_rank())).write_text(json.dumps(losses))

    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    trainer.fit()
    expected = losses_of(small_net(), 0, 1, lambda loss: loss)
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == pytest.approx(expected, rel=1e-5)
