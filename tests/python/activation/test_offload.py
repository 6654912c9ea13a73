"""checkpoint(offload=...): nothing is recomputed; what autograd saves lies elsewhere meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trireme
from torch import Tensor, nn

from harness.faults import RANKLESS_FORM, raises

WIDTH = 256  # 64 rows of it are the least that is offloaded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        q, k, v = self.wide(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return x + nn.functional.dropout(mixed * scale, 0.5).relu_()


def rows(*, requires_grad: bool = True) -> Tensor:
    return torch.randn(64, WIDTH, requires_grad=requires_grad)


def is_in_use(folder: Path) -> bool:
    """Whether this process has files of the folder mapped or open."""
    names = [Path("/proc/self/maps").read_text()]
    for file in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(file))
        except FileNotFoundError:  # what listed them
            continue
    return any(str(folder) in name for name in names)


@pytest.fixture(params=["memory", "folder", "path"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> bool | str | Path:
    return {"memory": True, "folder": str(tmp_path), "path": tmp_path}[request.param]


def test_bits_are_those_of_a_plain_call(place: bool | str | Path, tmp_path: Path) -> None:
    net, x = nn.ModuleList(Block() for _ in range(3)), rows()

    def train(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        net.zero_grad()
        value = x
        for block in net:
            value = run(block, value)
        value.square().sum().backward()
        found = [value.detach(), x.grad, *(p.grad for p in net.parameters()), torch.rand(())]
        x.grad = None
        return found

    def offloaded(block: Block, value: Tensor) -> Tensor:
        result = trireme.checkpoint(block, value, scale=0.5, offload=place)
        assert is_in_use(tmp_path) == (place is not True)
        assert not list(tmp_path.iterdir())
        return result

    plain = train(lambda block, value: block(value, scale=0.5))
    found = train(offloaded)
    assert all(torch.equal(ours, other) for ours, other in zip(found, plain, strict=True))
    assert [block.calls for block in net] == [2, 2, 2]
    assert not is_in_use(tmp_path)


def test_several_backwards_and_a_second_derivative(place: bool | str | Path) -> None:
    x = rows()

    def function(v: Tensor) -> Tensor:
        return v.sin().exp()

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        loss = run(x).sum()
        once = torch.autograd.grad(loss, x, retain_graph=True)
        again = torch.autograd.grad(loss, x)
        (first,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return [*once, *again, *torch.autograd.grad(first.square().sum(), x)]

    def nested(v: Tensor) -> Tensor:
        return trireme.checkpoint(trireme.checkpoint, function, v, offload=place)

    plain = gradients(function)
    for run in (lambda v: trireme.checkpoint(function, v, offload=place), nested):
        assert all(map(torch.equal, gradients(run), plain))


class Twice(torch.autograd.Function):
    """Asks twice for what it has saved, and looks at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, x.t(), frozen)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x, transposed, frozen = ctx.saved_tensors
        again, _, _ = ctx.saved_tensors
        assert torch.equal(x, transposed.t()) and torch.equal(x, again)
        assert transposed.stride() == (1, WIDTH)
        assert torch.equal(frozen, torch.ones(WIDTH, WIDTH))
        return gradient * x.sign(), None


def test_functions_of_the_users(place: bool | str | Path) -> None:
    x, frozen = rows(), nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    for _ in range(2):
        x.grad = None
        trireme.checkpoint(lambda v: Twice.apply(v * 3, frozen), x, offload=place).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, 3 * x.detach().sign())


def test_changes_in_place_are_noticed(place: bool | str | Path) -> None:
    output = trireme.checkpoint(torch.exp, rows(), offload=place)
    output.add_(1)
    text = "[checkpoint] one of the variables needed for gradient computation has been modified"
    with raises(RuntimeError, text, form=RANKLESS_FORM):
        output.sum().backward()


def test_nothing_is_left_of_a_graph_without_backward(tmp_path: Path) -> None:
    def broken(v: Tensor) -> Tensor:
        v.exp().exp()
        raise ArithmeticError("mine")

    output = trireme.checkpoint(torch.exp, rows(), offload=tmp_path)
    assert is_in_use(tmp_path)
    del output
    with pytest.raises(ArithmeticError, match="mine"):
        trireme.checkpoint(broken, rows(), offload=tmp_path)
    assert not is_in_use(tmp_path)
    with torch.no_grad():
        assert not trireme.checkpoint(torch.exp, rows(), offload=tmp_path).requires_grad


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    for none in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with raises(ValueError, f"got '{none}' to offload to, expected a", form=RANKLESS_FORM):
            trireme.checkpoint(torch.exp, rows(), offload=none)
    with raises(ValueError, "got '' as offload, expected a bool or a", form=RANKLESS_FORM):
        trireme.checkpoint(torch.exp, rows(), offload="")  # a variable that is not set
    text = "cannot offload 65536 bytes to a file in '/proc'"
    with raises(RuntimeError, text, "Make room there", form=RANKLESS_FORM):
        trireme.checkpoint(torch.exp, rows(), offload="/proc")


def test_threads_offload_at_once(tmp_path: Path) -> None:
    net, x = Block().eval(), rows()
    torch.manual_seed(1)
    wrong: list[int] = []

    def function(v: Tensor) -> Tensor:
        return net.wide(net.norm(v)).tanh()

    plain = torch.autograd.grad(function(x).sum(), x)

    def work() -> None:
        for number in range(10):
            loss = trireme.checkpoint(function, x, offload=tmp_path).sum()
            if not torch.equal(torch.autograd.grad(loss, x)[0], plain[0]):
                wrong.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_keeps_nothing_of_what_is_offloaded(tmp_path: Path) -> None:
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def function(v: Tensor) -> Tensor:
        for _ in range(8):
            v = v.sin().exp()
        return v

    (plain,) = torch.autograd.grad(function(x).sum(), x)
    for place in (True, tmp_path):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = trireme.checkpoint(function, x, offload=place).sum()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 3 * x.nbytes
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(found, plain)
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
