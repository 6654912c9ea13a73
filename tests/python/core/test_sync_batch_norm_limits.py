"""SyncBatchNorm at its edges: what it refuses and how, and what conversion keeps."""

import inspect
from typing import Any

import pytest
import torch
import trireme
from torch import nn

from harness.ranks import run_ranks


def message(call: Any, *inputs: Any) -> str:
    try:
        call(*inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\nException raised from")[0]
    return "accepted"


def disagree(rank: int) -> dict[str, str]:
    with trireme.init(device="cpu"):
        plain = {"affine": False, "track_running_stats": False}
        layer = trireme.SyncBatchNorm(4, **plain)
        texts = {
            "channels": message(layer, torch.ones(2, 4 + rank)),
            "precision": message(layer, torch.ones(2, 4, dtype=[torch.half, torch.double][rank])),
            "one value": message(layer, torch.ones(1 - rank, 4)),
            "after": message(layer, torch.ones(2, 4, dtype=torch.double)),
        }
        input = torch.randn(2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(input).pow(3).sum(), input, create_graph=True)
        texts["second"] = message(grad.sum().backward)
        return texts


def test_ranks_that_differ_all_raise_and_can_go_on() -> None:
    for rank, texts in enumerate(run_ranks(disagree, 2)):
        where = f"(rank {rank} of 2)"
        layout = "channels with statistics in"
        assert texts == {
            "channels": f"ValueError: [sync_batch_norm] got 4 {layout} Float on rank 0 but 5 "
            f"{layout} Float on rank 1, expected the same {where}. Build and cast the model alike "
            "on every rank.",
            "precision": f"ValueError: [sync_batch_norm] got 4 {layout} Float on rank 0 but 4 "
            f"{layout} Double on rank 1, expected the same {where}. Build and cast the model alike "
            "on every rank.",
            "one value": "ValueError: [sync_batch_norm] got 1 value per channel on all ranks "
            f"together, expected more: its variance is unknown {where}. Train with a larger batch.",
            "after": "accepted",
            "second": "NotImplementedError: [sync_batch_norm] got a second derivative, expected "
            "the first only. Use GroupNorm or LayerNorm where the loss holds gradients.",
        }


def test_a_group_of_one_is_batch_norm(lone_rank: trireme.Context) -> None:
    layer, plain = trireme.SyncBatchNorm(3), nn.BatchNorm1d(3)
    input = torch.randn(4, 3, requires_grad=True)
    for _ in range(2):
        assert torch.equal(layer(input), plain(input))
    assert layer.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    assert message(layer, torch.ones(1, 3)) == (
        "ValueError: [sync_batch_norm] got 1 value per channel, expected more in training "
        "(rank 0 of 1). Train with a larger batch."
    )


@pytest.mark.parametrize(
    ("input", "text"),
    [
        (
            torch.ones(3),
            "ValueError: [sync_batch_norm] got an input of shape [3], expected (batch, channels, "
            "...) with at least 1 channel (rank 0 of 1). Give the input its batch and channel "
            "dimensions.",
        ),
        (
            torch.ones(2, 0, 4),
            "ValueError: [sync_batch_norm] got an input of shape [2, 0, 4], expected (batch, "
            "channels, ...) with at least 1 channel (rank 0 of 1). Give the input its batch and "
            "channel dimensions.",
        ),
        (
            torch.ones(2, 4),
            "ValueError: [sync_batch_norm] got an input of 4 channels, expected 3 as in weight "
            "(rank 0 of 1). Construct the layer with that many features.",
        ),
        (
            torch.ones(2, 3, dtype=torch.long),
            "TypeError: [sync_batch_norm] got a Long input, expected floating-point numbers "
            "(rank 0 of 1). Cast the input.",
        ),
        (
            torch.ones(2, 3, dtype=torch.double),
            "TypeError: [sync_batch_norm] got a Double input, expected Float as weight is "
            "(rank 0 of 1). Cast the input or the layer; half inputs also go with float "
            "parameters.",
        ),
    ],
)
def test_bad_inputs(lone_rank: trireme.Context, input: torch.Tensor, text: str) -> None:
    assert message(trireme.SyncBatchNorm(3), input) == text


def test_training_needs_a_group_and_evaluation_does_not() -> None:
    layer = trireme.SyncBatchNorm(3)
    assert message(layer, torch.ones(2, 3)) == (
        "ValueError: [sync_batch_norm] got no process group, expected an initialised one for "
        "training. Call trireme.init() first, or model.eval()."
    )
    assert layer.num_batches_tracked == 0
    layer.eval()
    torch.testing.assert_close(layer(torch.ones(2, 3)), torch.ones(2, 3))
    assert message(layer, torch.ones(3)).startswith("ValueError: [sync_batch_norm] got an input")


def test_bad_arguments() -> None:
    assert message(lambda: trireme.SyncBatchNorm(3, momentum="0.1")) == (
        "TypeError: [sync_batch_norm] got a momentum of type str, expected a number or None. "
        "Pass None for the plain average of all batches."
    )
    assert message(lambda: trireme.SyncBatchNorm(3, process_group=[0, 1])) == (
        "TypeError: [sync_batch_norm] got list as process_group, expected a "
        "torch.distributed.ProcessGroup. Make one with torch.distributed.new_group(), or leave it "
        "out."
    )
    assert message(trireme.convert_sync_batchnorm, [nn.BatchNorm1d(3)]) == (
        "TypeError: [sync_batch_norm] got list as module, expected a torch.nn.Module. Pass the "
        "model itself."
    )
    assert message(trireme.convert_sync_batchnorm, nn.Sequential(nn.LazyBatchNorm2d())) == (
        "ValueError: [sync_batch_norm] got a LazyBatchNorm2d without a number of features, "
        "expected an initialised layer. Run one forward before converting."
    )


def test_signature_is_that_of_torch() -> None:
    ours, torchs = (
        list(inspect.signature(kind).parameters.values())
        for kind in (trireme.SyncBatchNorm, nn.SyncBatchNorm)
    )
    assert [(p.name, p.default, p.kind) for p in ours][: len(torchs)] == [
        (p.name, p.default, p.kind) for p in torchs
    ]
    assert issubclass(trireme.SyncBatchNorm, nn.SyncBatchNorm)


def test_conversion_keeps_the_layers() -> None:
    shared = nn.BatchNorm2d(4, eps=0.1, momentum=None).eval()
    calls: list[str] = []
    handle = shared.register_forward_hook(lambda *_: calls.append("hooked"))
    model = nn.ModuleDict(
        {
            "first": shared,
            "again": nn.Sequential(shared, nn.ReLU()),
            "torchs": nn.SyncBatchNorm(2, affine=False),
            "other": nn.GroupNorm(1, 4),
        }
    )
    before = model.state_dict(keep_vars=True)
    assert trireme.convert_sync_batchnorm(model) is model
    layer = model["first"]
    assert type(layer) is type(model["torchs"]) is trireme.SyncBatchNorm
    assert model["again"][0] is layer and type(model["other"]) is nn.GroupNorm
    assert (layer.eps, layer.momentum, layer.training) == (0.1, None, False)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    layer(torch.ones(1, 4, 2, 2))
    assert calls == ["hooked"]
    handle.remove()
    assert not layer._forward_hooks

    alone = trireme.SyncBatchNorm.convert_sync_batchnorm(shared)
    assert alone.weight is shared.weight and type(shared) is nn.BatchNorm2d
