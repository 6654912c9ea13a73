"""Accelerate over our backend, and with our Accelerator.

Accelerate has a closed list of backends for the CPU and refuses others. It takes a process group
that exists, though, and a model that is marked as prepared; programs without our class begin so.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from integrations.sides import (
    OUR_BACKEND,
    OURS,
    THEIRS,
    Side,
    assert_close,
    assert_equal_to_theirs,
    net,
    rows,
    run_on,
    state_of,
)

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from trireme.integrations.accelerate import Accelerator as OurAccelerator


def accelerator_of(side: Side, **options: Any) -> Accelerator:
    if side == OURS:
        accelerator = OurAccelerator(**options)
        assert accelerator.device.type == "cpu" and accelerator.state.backend == "trireme"
    else:
        dist.init_process_group(side.backend)  # before Accelerator(), which then makes none
        accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == 2 and dist.get_backend() == side.backend
    return accelerator


def train(rank: int, side: Side, folder: str, options: dict[str, Any], ddp: dict[str, Any]) -> Any:
    kwargs = DistributedDataParallelKwargs(**ddp)
    accelerator = accelerator_of(
        side, gradient_accumulation_steps=2, kwargs_handlers=[kwargs], **options
    )
    torch.manual_seed(7)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(rows(38), batch_size=4, shuffle=True),
        DataLoader(rows(11), batch_size=4),
    )
    assert type(model) is side.ddp
    losses, norms = [], []
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(f"{folder}/ck")
            saved = state_of(model)
    ended = state_of(model)
    model.eval()
    seen = []
    for x, y in held_out:
        with torch.no_grad():
            seen.append(accelerator.gather_for_metrics((model(x).argmax(1), y)))
    accelerator.load_state(f"{folder}/ck")
    if rank == 0:  # its buffers were saved
        assert_close(state_of(model), saved, "loaded", 0)
    accelerator.save_model(model, f"{folder}/model")
    mean = accelerator.reduce(torch.tensor(losses[-1]), "mean")
    return {
        "losses": losses,
        "norms": norms,
        "state": ended,
        "predicted": torch.cat([predicted for predicted, _ in seen]),
        "labels": torch.cat([label for _, label in seen]),
        "mean": mean,
        "total": accelerator.reduce({"count": torch.tensor(rank + 2)}, "sum"),
        "padded": accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1))),
        "names": sorted(accelerator.unwrap_model(model).state_dict()),
    }


HOOK = {"comm_hook": DDPCommunicationHookType.BF16}
CASES = {
    "plain": ({}, {}),
    "bf16": ({"mixed_precision": "bf16"}, {"gradient_as_bucket_view": True}),
    "hook": ({}, HOOK),
    "arguments": ({}, {"find_unused_parameters": True, "bucket_cap_mb": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_training(tmp_path: Path, case: str) -> None:
    assert_equal_to_theirs(train, tmp_path, *CASES[case])


def train_marked(rank: int, side: Side, folder: str) -> Any:
    """As ``train``, but our class is wrapped around the model before it is prepared."""
    dist.init_process_group(side.backend)
    accelerator = Accelerator(cpu=True)
    model = side.ddp(net())
    model._is_accelerate_prepared = True
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.02),
        DataLoader(rows(24), batch_size=4),
    )
    assert type(model) is side.ddp
    losses = []
    for number, (x, y) in enumerate(loader):
        with accelerator.no_sync(model) if number == 0 else accelerator.autocast():
            loss = functional.cross_entropy(model(x), y)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(f"{folder}/ck")
    assert rank != 0 or (Path(folder) / "ck" / "model.safetensors").exists()
    return {"losses": losses, "state": state_of(model)}


def test_wrapped_before(tmp_path: Path) -> None:
    assert_equal_to_theirs(train_marked, tmp_path)


def train_local(rank: int, side: Side, folder: str) -> Any:
    accelerator = accelerator_of(side)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for number in range(4):
            x, y = rows(16 + number).tensors
            accelerator.backward(functional.cross_entropy(model(x[rank::2]), y[rank::2]))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return state_of(model)


def test_local_sgd(tmp_path: Path) -> None:
    assert_equal_to_theirs(train_local, tmp_path)


SHARDED = ("fully_shard", "stage 1", "stage 2")


def sharded_parts(side: Side, kind: str, **options: Any) -> tuple[Any, ...]:
    """An Accelerator, and what it has prepared; torch's side trains under plain DDP."""
    shards = {"fully_shard": True} if side == OURS and kind == "fully_shard" else {}
    accelerator = accelerator_of(side, gradient_accumulation_steps=2, **shards, **options)
    torch.manual_seed(7)
    model = net()
    if side == OURS and kind != "fully_shard":
        stage = int(kind[-1])
        optimizer = trireme.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=stage, lr=0.02
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(rows(32), batch_size=4, shuffle=True)
    # An optimizer may stand before its model.
    return accelerator, *accelerator.prepare(optimizer, model, loader)


def train_sharded(
    rank: int, side: Side, folder: str, kind: str, options: dict[str, Any] | None = None
) -> Any:
    accelerator, optimizer, model, loader = sharded_parts(side, kind, **(options or {}))
    losses, norms = [], []

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    epoch()
    accelerator.save_state(f"{folder}/ck")
    accelerator.save_model(model, f"{folder}/model")
    if rank == 0:
        assert (Path(folder) / "model" / "model.safetensors").exists()
    epoch()
    accelerator.load_state(f"{folder}/ck")
    epoch()
    assert accelerator.unwrap_model(model) is getattr(model, "module", model)
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded(tmp_path: Path, kind: str) -> None:
    assert_equal_to_theirs(train_sharded, tmp_path, kind, sides={"ours": OURS})


def test_sharded_in_mixed_precision(tmp_path: Path) -> None:
    case = ("fully_shard", {"mixed_precision": "bf16"})
    assert_equal_to_theirs(train_sharded, tmp_path, *case, sides={"ours": OURS})


def refusals(rank: int, side: Side, folder: str) -> list[str]:
    accelerator = accelerator_of(side, fully_shard=True)
    model = net()
    stepped = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.ones(4, 6)).sum().backward()
    stepped.step()
    said = []
    for program in (
        lambda: accelerator.prepare(model, stepped),
        lambda: OurAccelerator(fully_shard=True, fsdp_plugin=object()),
    ):
        with pytest.raises(ValueError) as error:
            program()
        said.append(str(error.value))
    return said


def test_refusals(tmp_path: Path) -> None:
    for stepped, plugin in run_on(OURS, refusals, tmp_path):
        assert "got a AdamW that has stepped" in stepped
        assert "got fully_shard=True and fsdp_plugin" in plugin


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(rows(11).tensors[0])


def dispatch(rank: int, side: Side, folder: str) -> Any:
    """Rank 0 reads for all, and what else goes over as objects."""
    accelerator = accelerator_of(side)
    with accelerator.split_between_processes(list(range(7))) as mine:
        objects = gather_object([(rank, number) for number in mine])
    return {
        "batches": list(accelerator.prepare(DataLoader(Stream(), batch_size=2))),
        "objects": objects,
        "broadcast": broadcast_object_list([{"from": rank}], from_process=1),
        "tensors": broadcast({"a": torch.arange(3) + rank, "b": [torch.ones(2) * rank]}),
    }


def test_dispatched_batches(tmp_path: Path) -> None:
    assert_equal_to_theirs(dispatch, tmp_path, sides={"backend": OUR_BACKEND})


def under_slurm(rank: int, side: Side, folder: str) -> tuple[int, int, str, float]:
    """srun sets none of the variables that Accelerate reads."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(
        SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0",
        SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="localhost",
        SLURM_CPUS_PER_TASK="1", SLURM_JOB_ID="1", TRIREME_INIT_METHOD=f"file://{folder}/meet",
    )  # fmt: skip
    accelerator = OurAccelerator()
    assert "MASTER_ADDR" not in os.environ and "OMP_NUM_THREADS" not in os.environ
    total = accelerator.reduce(torch.tensor(rank + 1.0), "sum").item()
    return (accelerator.process_index, accelerator.num_processes, dist.get_backend(), total)


def test_under_slurm(tmp_path: Path) -> None:
    found = run_on(OURS, under_slurm, tmp_path / "ours")
    assert found == [(rank, 2, "trireme", 3.0) for rank in range(2)]


def refused(rank: int, side: Side, folder: str) -> str:
    try:
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=side.backend)])
    except ValueError as error:
        return str(error)
    return ""


def test_backend_is_refused(tmp_path: Path) -> None:
    """Our page says so. Once it is not, it should say how much simpler a program may be."""
    said = run_on(OUR_BACKEND, refused, tmp_path / "ours")
    assert all("trireme is not available" in text for text in said)
    assert run_on(THEIRS, refused, tmp_path / "theirs") == ["", ""]
