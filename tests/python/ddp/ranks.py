"""Lets a test function of DDP be the program of its ranks, and compares with torch's class.

    @on_ranks(2)
    def test_something(rank: int) -> None:
        model = trireme.DistributedDataParallel(...)

Every rank is a fresh process with a group; an assertion that fails on one fails the test.
"""

import functools
import importlib
import inspect
import os
import re
import signal
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from trireme import _C
from trireme._core.group_communicator import communicator_of

from distributed import run_ranks

WORLD = 2
# [area] what went wrong (rank r of w). next step
HOUSE_FORM = re.compile(r"^\[\w+\] \S.* \(rank \d+ of \d+\)\. [A-Z].*\S$", re.DOTALL)
# Before a group is known the form names no rank.
RANKLESS_FORM = re.compile(r"^\[\w+\] \S.*[^.)]\. [A-Z].*\S$", re.DOTALL)

_PATIENCE_S = 30.0
# The timeout of a group where failures end every wait at once: if one does not, run_ranks ends the
# test, with the stack of each rank.
AGES_S = 300.0

Program = Callable[..., None]
ModelMaker = Callable[[], nn.Module]


def on_ranks(
    world: int | str = WORLD,
    *,
    timeout: float = 60,
    patience_s: float = _PATIENCE_S,
    backend: str = os.environ.get("TRIREME_TEST_BACKEND", "gloo"),
    dying: Collection[int] = (),
    prepare: Callable[[int], None] | None = None,
) -> Any:
    """Runs the decorated test on ``world`` ranks; it gets its ``rank`` before its other arguments.

    ``world`` may be the name of an argument of the test that holds the number. ``patience_s`` is
    the timeout of the group, ``timeout`` that of the whole test; see run_ranks for ``dying``.
    ``prepare`` is called with the rank, before there is a group.
    """

    def decorate(program: Program) -> Program:
        @functools.wraps(program)
        def test(**case: Any) -> None:
            place = (program.__module__, program.__qualname__, backend, patience_s, prepare)
            count = case[world] if isinstance(world, str) else world
            run_ranks(run_program, count, *place, case, timeout=timeout, dying=dying)

        test.__signature__ = signature_without_rank(program)  # type: ignore[attr-defined]
        return test

    return decorate


on_gloo_ranks = functools.partial(on_ranks, backend="gloo")


def signature_without_rank(program: Program) -> inspect.Signature:
    signature = inspect.signature(program)
    asked = [parameter for name, parameter in signature.parameters.items() if name != "rank"]
    return signature.replace(parameters=asked)


def run_program(
    rank: int,
    module: str,
    name: str,
    backend: str,
    patience_s: float,
    prepare: Callable[[int], None] | None,
    case: Any,
) -> None:
    """Runs on one rank the test of that name, as ``on_ranks`` and its kin have decorated it."""
    program = getattr(importlib.import_module(module), name).__wrapped__
    torch.manual_seed(0)
    if prepare is not None:
        prepare(rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=patience_s))
    tell_process(rank)
    program(rank, **case)
    dist.destroy_process_group()


def tell_process(rank: int) -> None:
    """Lets other ranks ask for this one's process_of()."""
    dist.distributed_c10d._get_default_store().set(f"process {rank}", str(os.getpid()))


def process_of(rank: int) -> int:
    return int(dist.distributed_c10d._get_default_store().get(f"process {rank}"))


def set_timeout(timeout: float | timedelta, group: Any = None) -> None:
    """Gives a group, by default that of all ranks, another timeout: seconds, or a timedelta.

    A short one is set after ranks have met: on a busy machine they begin longer after each other.
    """
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has a public name for it
        dist.distributed_c10d._set_pg_timeout(limit, group)


def say(word: str) -> None:
    """To ranks that stay until they hear it."""
    dist.distributed_c10d._get_default_store().set(word, "yes")


def stay_until(*words: str) -> None:
    """Until other ranks have said these; meanwhile this one is there, and does nothing."""
    store = dist.distributed_c10d._get_default_store()
    store.wait(list(words), timedelta(seconds=_PATIENCE_S))


@contextmanager
def raises(
    kind: type[BaseException], *parts: str, form: re.Pattern[str] = HOUSE_FORM
) -> Iterator[None]:
    """Expects an error of that form whose text contains ``parts``."""
    try:
        yield
    except kind as error:
        text = message_of(error)
        assert form.match(text), f"not in the house form: {text}"
        missing = [part for part in parts if part not in text]
        assert not missing, f"{missing} not in: {text}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def message_of(error: BaseException) -> str:
    """Without the C++ stack that torch adds when asked to."""
    return str(error).split("\nException raised from")[0].strip()


def break_it(*_: Any) -> None:
    raise ArithmeticError("the data of this rank are broken")


def kill_this_rank(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Tied(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        layers = {"embed": nn.Linear(6, 6, bias=False), "mid": nn.Linear(6, 6), "tanh": nn.Tanh()}
        super().__init__(OrderedDict(layers, head=nn.Linear(6, 6)))
        self.head.weight = self.embed.weight


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Three layers of uneven shapes; the same on every rank."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, rows: int = 8, width: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    """The whole batch of a step; rank r of w takes ``batch[r::w]``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, width, generator=generator).to(dtype)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies, by the name inside the wrapper."""
    module = model.module if isinstance(model, (TorchDDP, nn.DataParallel)) else model
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers, by the name inside the wrapper."""
    module = model.module if isinstance(model, (TorchDDP, nn.DataParallel)) else model
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same_on_all_ranks(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        mine = tensor.detach().contiguous()
        of_rank_0 = mine.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(mine, of_rank_0), "ranks drifted apart"


Step = Callable[[nn.Module, int, int], None]
"""Forward and backward of one step: (model, step, rank)."""


def run_steps(model: nn.Module, optimizer: Any, step_fn: Step, rank: int, steps: int) -> list[Any]:
    """The gradients after every backward, then the values after the last step."""
    seen: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        step_fn(model, step, rank)
        seen.append(gradients(model))
        optimizer.step()
    return [*seen, values(model)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_equals_torch(
    make_model: ModelMaker,
    step_fn: Step,
    rank: int,
    *,
    steps: int = 4,
    make_optimizer: Callable[[nn.Module], Any] = sgd,
    torch_options: dict[str, Any] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    **options: Any,
) -> None:
    """Trains with torch's class and with ours and compares gradients and values after every step.

    ``options`` go to both, ``torch_options`` are what torch needs to be told in addition.
    """
    theirs = TorchDDP(make_model(), **{**options, **(torch_options or {})})
    expected = run_steps(theirs, make_optimizer(theirs), step_fn, rank, steps)
    ours = trireme.DistributedDataParallel(make_model(), **options)
    got = run_steps(ours, make_optimizer(ours), step_fn, rank, steps)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    assert_same_on_all_ranks(list(ours.parameters()))


def record_wire(ddp: trireme.DistributedDataParallel) -> _C.RecordingCommunicator:
    """What the module sends from now on. Builds its core anew, as if it had just been wrapped."""
    recorder = _C.RecordingCommunicator(communicator_of(ddp.process_group))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trireme._ddp.module.communicator_of", lambda group: recorder)
        ddp._rebuild_core()
    return recorder
