"""Operators that write what they have saved, draw random numbers, or have buffers of their own: the
bits of a plain call, however it is checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn
from torch.nn import functional as F
from trireme import _C

from activation.programs import assert_same_bits

Function = Callable[[Tensor], Tensor]

BATCH_NORM = nn.BatchNorm1d(256)
INSTANCE_NORM = nn.InstanceNorm1d(64, track_running_stats=True)
LSTM = nn.LSTM(256, 8, num_layers=2, dropout=0.5)

OPERATORS: dict[str, Function] = {
    # The noise is saved, then written.
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "rrelu in place": lambda x: F.rrelu_(x * 2, 0.1, 0.9, training=True),
    "rrelu, then others": lambda x: F.rrelu(x, 0.1, 0.9, training=True).exp().sin(),
    "rrelu after others": lambda x: F.rrelu(x.exp().sin(), 0.1, 0.9, training=True),
    "rrelu twice": lambda x: F.rrelu(F.rrelu(x, training=True), training=True),
    "rrelu, evaluated": lambda x: F.rrelu(x, 0.1, 0.9, training=False),
    "rrelu with noise": lambda x: torch.ops.aten.rrelu_with_noise(
        x, torch.empty_like(x), 0.1, 0.9, True
    ),
    # What is saved is drawn or computed before.
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 2, 0.3, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout2d(x[None, None].view(1, 64, 16, 16), 0.3),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "multiplied by noise": lambda x: x * torch.empty_like(x).uniform_(),
    "fractional max pool": lambda x: F.fractional_max_pool2d(x.view(1, 4, 64, 64), 3, 20),
    "fractional max pool 3d": lambda x: F.fractional_max_pool3d(x.view(1, 4, 16, 16, 16), 3, 5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2),
    # What is saved is an output, beside the result.
    "max pool": lambda x: F.max_pool2d(x.view(1, 4, 64, 64), 3),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x.view(1, 4, 64, 64), 5),
    "ctc loss": lambda x: F.ctc_loss(
        x.view(64, 4, 64).log_softmax(-1),
        torch.arange(1, 41).view(4, 10),
        torch.full((4,), 64),
        torch.full((4,), 10),
    ),
    "log sigmoid": F.logsigmoid,
    "median": lambda x: x.median(0).values,
    "cumulative maximum": lambda x: x.cummax(0).values,
    "embedding bag": lambda x: F.embedding_bag(torch.arange(60).view(6, 10), x, mode="max"),
    "multilabel margin loss": lambda x: F.multilabel_margin_loss(
        x, torch.arange(64 * 256).view(64, 256) % 7
    ),
    "linear solve": lambda x: torch.linalg.solve(x.T @ x + 9 * torch.eye(256), x.T),
    # Buffers are written while the operator runs.
    "batch norm": BATCH_NORM,
    "batch norm without weights": lambda x: F.batch_norm(
        x, torch.zeros(256), torch.ones(256), training=True
    ),
    "instance norm": lambda x: INSTANCE_NORM(x[None]),
    "fake quantize": lambda x: torch.fused_moving_avg_obs_fake_quant(
        x,
        *(torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)),
        *(torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int32)),
        *(0.01, 0, 255, 0),
    ),
    "recurrent": lambda x: LSTM(x)[0],
}

FORMS: dict[str, dict[str, Any]] = {
    "early stop": {},
    "late stop": {"early_stop": False},
    "nested": {"early_stop": True},
    "offload": {"offload": True},
}


def results_of(function: Function, call: Callable[..., Tensor], **options: Any) -> list[Any]:
    """The result, its gradient, and which random numbers come next."""
    torch.manual_seed(7)
    x = torch.randn(64, 256).requires_grad_()
    result = call(function, x, **options)
    result.square().sum().backward()
    return [result.detach(), x.grad, torch.rand(2)]


def nested(function: Function, x: Tensor, **options: Any) -> Tensor:
    return trireme.checkpoint(trireme.checkpoint, function, x, **options)


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_a_plain_call(form: str, tmp_path: Path) -> None:
    options = {**FORMS[form]}
    if "offload" in options:
        options["offload"] = tmp_path
    call = nested if form == "nested" else trireme.checkpoint
    for name, function in OPERATORS.items():
        expected = results_of(function, lambda function, x: function(x))
        assert_same_bits(results_of(function, call, **options), expected, f"{name}, {form}")


def test_noise_is_offloaded_once_it_is_written(tmp_path: Path) -> None:
    """When the next operator saves, or at the end of the function."""
    for name, others in (("rrelu", 0), ("rrelu, then others", 1)):
        x = torch.randn(64, 256).requires_grad_().exp()
        before, written = _C.offloaded_bytes()
        result = trireme.checkpoint(OPERATORS[name], x, offload=tmp_path)
        expected = (2 + others) * x.nbytes  # the input, the noise, what others save
        assert _C.offloaded_bytes() == (before + expected, written + expected), name
        del result
        assert _C.offloaded_bytes()[0] == before, name


def test_replicas_write_what_they_have_saved(tmp_path: Path) -> None:
    """In threads of theirs; the slope of each element is that of its output."""
    net = trireme.DataParallel(nn.Sequential(nn.Linear(256, 256), nn.RReLU(0.1, 0.9)), replicas=2)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    nn.init.constant_(net.module[0].bias, -1)
    for _ in range(3):
        net.zero_grad()
        output = trireme.checkpoint(net, torch.zeros(512, 256), offload=str(tmp_path))
        output.sum().backward()
        torch.testing.assert_close(net.module[0].bias.grad, -output.detach().sum(0))
