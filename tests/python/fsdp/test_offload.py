"""Offload: what of a sharded model lies in CPU memory. There is no other device here, so ranks are
told that their device is one; what is copied and when is then what it would be elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import trireme
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import SGD, AdamW
from trireme import Offload
from trireme._fsdp import offload as fsdp_offload

from fsdp.ranks import assert_locals, evaluate, pair, sharded, step_both, torch_pair, train_both
from harness.faults import RANKLESS_FORM, raises
from harness.models import mlp
from harness.on_ranks import on_gloo_ranks, on_shm_ranks

# --- Which parameters ----------------------------------------------------------------------------


def chosen(policy: Offload, *units: Sequence[int]) -> str:
    """Draws units of so many bytes: o for the optimizer's part, A for all, - for none."""
    text = []
    for sizes in units:
        row = fsdp_offload.choose(policy, [torch.empty(n, dtype=torch.int8) for n in sizes])
        assert row is not None and row.pins_memory == policy.pin_memory
        letters = ["-"] * len(sizes)
        for letter, indices in (("o", row.optimizers), ("A", row.everything)):
            for index in indices:
                letters[index] = letter
        text.append("".join(letters))
    return " ".join(text)


def test_which_parameters_are_chosen() -> None:
    layer = (100, 10)
    assert chosen(Offload(), layer, layer) == "oo oo"
    assert chosen(Offload(1, 1, pin_memory=False), layer, layer) == "AA AA"
    assert chosen(Offload(0, 0), layer, layer) == "-- --"
    assert chosen(Offload(1.0, 0.5), (10, 10, 10, 10)) == "AAoo"
    assert chosen(Offload(0.75, 0.25), (10, 10, 10, 10)) == "Aoo-"
    # Each unit rounds so that the total is met.
    assert chosen(Offload(0.5), layer, layer, layer, layer) == "o- -- o- --"
    assert chosen(Offload(0.5, 0.5), *[(8,)] * 6).count("A") == 3
    assert chosen(Offload(0.34), (), *[(8,)] * 9).count("o") == 3
    assert fsdp_offload.choose(None, [torch.empty(3)]) is None


def test_fractions_that_are_none() -> None:
    for optimizer, params in ((0.5, 0.6), (1.1, 0.0), (0.5, -0.1), ("1", 0), (True, 0)):
        with raises(ValueError, "expected 0 <= params <= optimizer <= 1", form=RANKLESS_FORM):
            Offload(optimizer, params)  # type: ignore[arg-type]
    assert isinstance(Offload(), OffloadPolicy) and Offload(0.5) == Offload(0.5)
    assert repr(Offload(0.5)) == "Offload(optimizer=0.5, params=0.0, pin_memory=True)"


# --- Training ------------------------------------------------------------------------------------

POLICIES = (
    Offload(0.5, 0.25, pin_memory=False),
    Offload(1.0, 0.0, pin_memory=False),
    CPUOffloadPolicy(pin_memory=False),
)


def offload_from_here() -> None:
    fsdp_offload.offloads_from = lambda device: True


@on_gloo_ranks(2)
def test_as_one_process_and_as_torch(rank: int) -> None:
    """Accumulation in both ways, evaluation, writes, other dtypes."""
    offload_from_here()
    for policy in POLICIES:
        ours, one = pair(mlp, AdamW, options={"offload_policy": policy}, lr=0.01)
        for step in range(3):
            with torch.no_grad():
                torch.testing.assert_close(evaluate(ours, 9), evaluate(one, 9))
            train_both(ours, one, step)
        for training in (ours, one):
            training.optimizer.zero_grad()
            training.backward(0, sync=False)
            training.backward(1)
            training.backward(2)  # is added to what is there
        step_both(ours, one)
        state = {name: value.clone() for name, value in ours.model.state_dict().items()}
        ours.model.load_state_dict(state)
        train_both(ours, one, 3)
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for policy in (POLICIES[1], POLICIES[2]):
        half = sharded(mlp, options={"offload_policy": policy, "mp_policy": bf16}, lr=0.1)
        plain = sharded(mlp, options={"mp_policy": bf16}, lr=0.1)
        for step in range(3):
            for training in (half, plain):
                training.train(step)
        assert_locals(half.model, plain.model, rtol=0, atol=0)
    ours, theirs = torch_pair(mlp, SGD, lr=0.1, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for step in range(2):
        for training in (ours, theirs):
            training.train(step)
    assert_locals(ours.model, theirs.model)


@on_gloo_ranks(2)
def test_what_lies_where(rank: int) -> None:
    """Gradients are copies, final when a hook on them runs and when backward is over."""
    offload_from_here()
    policy = Offload(0.5, 0.5, pin_memory=False)
    ours, one = pair(mlp, options={"offload_policy": policy})
    units = [ours.model[index]._get_fsdp_state() for index in (0, 2, 4)]
    total = sum(param.numel() for param in one.model.parameters())
    offloaded = sum(
        unit.params[index].sharded.numel() for unit in units for index in unit.offload.everything
    )
    assert abs(offloaded / total - 0.5) < 0.25
    assert not any(unit.offload.optimizers for unit in units)
    seen: list[Any] = []
    for param in ours.model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda param: seen.append(param.grad.to_local().clone())
        )
    train_both(ours, one, 0)
    grads = [param.grad.to_local() for param in ours.model.parameters()]
    assert len(seen) == len(grads)
    sizes = [grad.numel() for grad in grads]
    assert sorted(tensor.numel() for tensor in seen) == sorted(sizes)
    for unit in units:
        for index, param in enumerate(unit.params):
            grad = param.sharded.grad.to_local()
            is_alone = grad.untyped_storage().nbytes() == grad.nbytes
            assert is_alone or index not in unit.offload.everything


@on_gloo_ranks(2)
def test_pinned_memory_is_refused(rank: int) -> None:
    if torch.cuda.is_available():
        return
    offload_from_here()
    text = "[fully_shard] got no pinned memory for the offloaded part of '0.weight'"
    with raises(RuntimeError, text, "Pass pin_memory=False"):
        trireme.fully_shard(mlp(), offload_policy=CPUOffloadPolicy())


@on_shm_ranks(2, fresh=True)
def test_on_cpu_there_is_nothing_to_do(rank: int) -> None:
    """It is said once, and nothing is pinned."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = trireme.get_logger()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for policy in (Offload(0.5), CPUOffloadPolicy()):
        ours, one = pair(mlp, options={"offload_policy": policy})
        train_both(ours, one, 0)
    for name in ("Offload", "CPUOffloadPolicy"):
        expected = f"[fully_shard] {name}: parameters are in CPU memory already"
        assert sum(expected in text for text in said) == 1, said
    with pytest.raises(TypeError, match="got str as offload_policy"):
        trireme.fully_shard(mlp(), offload_policy="cpu")  # type: ignore[arg-type]
