"""Modules that the tests of remote.Module have at other ranks, and what these say of them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trireme import ps, remote

from remote.functions import gate

PATIENCE_S = 30.0

shared: dict[str, nn.Module] = {}
lock = threading.Lock()


class Token:
    """Lives as long as a node of a graph."""


TOKENS: weakref.WeakSet[Token] = weakref.WeakSet()


class Marked(torch.autograd.Function):
    """Does nothing, but is counted while its graph lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        TOKENS.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Calling(torch.autograd.Function):
    """Calls something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, program: Callable[[], None]) -> Tensor:
        ctx.program = program
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.program()
        return grad, None


class Counted(nn.Module):
    """Its graphs are counted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Marked.apply(self.inner(x))


class Raising(nn.Module):
    """Raises, or does something else, in its forward or its backward."""

    def __init__(self, program: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.program = program

    def forward(self, x: Tensor, where: str = "nowhere") -> Tensor:
        if where == "forward":
            self.program()
        out = self.linear(x)
        return Calling.apply(out, self.program) if where == "backward" else out


class Several(nn.Module):
    """Takes nested arguments, and returns nested results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, inputs: dict[str, Any], *, scale: float = 1.0, names: Any = ()) -> Any:
        x, y = inputs["x"], inputs["rest"][0]
        first = self.first(x) * scale
        second = self.second(x + y).tanh()
        return {
            "first": first,
            "rest": (second, [first.sum(), len(names), None]),
            "where": first.argmax(1),
            "constant": torch.ones(2),
        }


class Chain(nn.Module):
    """Has a module of another rank inside."""

    def __init__(self, inner: nn.Module, *, is_frozen: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(3, 2)
        self.inner = inner
        for parameter in self.parameters() if is_frozen else ():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x).tanh()).tanh())


@remote.function
def make_mlp(seed: int = 7, dtype: str = "float32") -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


@remote.function
def make_lazy() -> nn.Module:
    """Its gradients have a minus that torch has put off."""
    net = make_mlp()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: torch._neg_view(-gradient))
    return net


@remote.function
def make_counted(width: int = 6) -> nn.Module:
    torch.manual_seed(7)
    return Counted(nn.Linear(width, width))


@remote.function
def make_several() -> nn.Module:
    torch.manual_seed(7)
    return Several()


@remote.function
def make_noisy() -> nn.Module:
    """A mode and buffers."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


@remote.function
def make_normed() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))


@remote.function
def make_embedding() -> nn.Module:
    torch.manual_seed(7)
    return nn.Embedding(10, 6)


@remote.function
def make_frozen() -> nn.Module:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for parameter in net[0].parameters():
        parameter.requires_grad_(False)
    return net


@remote.function
def make_shared(name: str, width: int = 1) -> nn.Module:
    """The same module for the same name; all its weights are zero."""
    with lock:
        if name not in shared:
            shared[name] = nn.Linear(width, width, bias=False)
            nn.init.zeros_(shared[name].weight)
        return shared[name]


@remote.function
def weight_of_shared(name: str) -> Tensor:
    return shared[name].weight.detach().clone()


class InPlace(nn.Module):
    """Works in place on its inputs first, and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x.mul_(2)
        x[:, 1:3].add_(1)
        if y is not None:
            y[:, 1:] += 1
            x = x + y.exp_()
        return self.linear(x.relu_())


@remote.function
def make_in_place() -> nn.Module:
    torch.manual_seed(7)
    return InPlace()


@remote.function
def make_relu() -> nn.Module:
    """Returns its input, written in place."""
    return nn.ReLU(inplace=True)


@remote.function
def make_mixed() -> nn.Module:
    """Autocast does something to its layers, and nothing to its norm."""
    torch.manual_seed(7)
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.LayerNorm(6), shared, nn.Tanh(), nn.Linear(6, 3))


@remote.function
def autocast_there() -> bool:
    return torch.is_autocast_enabled("cpu")


@remote.function
def make_chain(to: str, lr: float, is_frozen: bool = False) -> nn.Module:
    """A module whose middle is at another rank, kept under the name "chain"."""
    torch.manual_seed(8)
    chain = Chain(remote.Module(to, make_mlp, 7, optimizer=ps.SGD(lr)), is_frozen=is_frozen)
    shared["chain"] = chain
    return chain


@remote.function
def step_inside() -> None:
    """The owner of a chain steps what it has elsewhere."""
    for module in shared["chain"].modules():
        if isinstance(module, remote.Module):
            module.step()
            module.zero_grad()


@remote.function
def state_inside() -> dict[str, Tensor]:
    found = [module for module in shared["chain"].modules() if isinstance(module, remote.Module)]
    return dict(found[0].state_dict())


@remote.function
def make_raising(text: str) -> nn.Module:
    def program() -> None:
        raise ArithmeticError(text)

    return Raising(program)


@remote.function
def make_waiting() -> nn.Module:
    def program() -> None:
        assert gate.wait(PATIENCE_S)

    return Raising(program)


@remote.function
def no_module() -> int:
    return 3


@remote.function
def count_graphs() -> int:
    gc.collect()
    return len(TOKENS)


@remote.function
def memory_in_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
