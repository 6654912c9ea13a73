"""How a program makes a step of a pair: plainly, in other threads, called from another rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import trireme
from torch import Tensor, nn
from torch.amp import GradScaler
from trireme import remote

Seen = dict[str, Tensor]
Manner = Callable[[Any, int], Seen]
"""Makes a step of a run (pair_columns.py) and returns what else has been seen."""

CALLS = 3  # that many at once


FREEZING = {"alpha": 0.4}


def plainly(run: Any, number: int) -> Seen:
    run.begin()
    loss = run.backward(number)
    run.end()
    return {} if loss is None else {"loss": loss}


def accumulating(run: Any, number: int) -> Seen:
    """Two batches, of which the first averages nothing."""
    run.begin()
    with run.no_sync():
        run.backward(number + 50)
    run.backward(number)
    run.end()
    return {}


def scaling(run: Any, number: int) -> Seen:
    run.begin()
    loss = run.backward(number, run.scaler)
    run.end(run.scaler)
    return {} if loss is None else {"loss": loss}


def freezing(run: Any, number: int) -> Seen:
    """Layers are frozen behind each step, by the gradients of that step."""
    run.begin()
    loss = run.backward(number)
    run.measure()
    run.end()
    seen = {"frozen": torch.tensor(run.advance())}
    return seen if loss is None else seen | {"loss": loss}


def new_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=4.0)


def inferring(run: Any, number: int) -> Seen:
    """A step, and an evaluation in inference mode before and behind it."""
    with torch.inference_mode():
        before = run.evaluate(number)
    seen = plainly(run, number)
    with torch.inference_mode():
        behind = run.evaluate(number)
    outputs = {"outputs before": before, "outputs behind": behind}
    return seen | {name: output.clone() for name, output in outputs.items() if output is not None}


def evaluations(run: Any, number: int, evaluate: Callable[[int], Any]) -> Seen:
    """Several at once, where a rank can run the model while others do something else."""
    numbers = [number + 10 * call for call in range(CALLS)]
    with ThreadPoolExecutor(1 if run.together else CALLS) as threads:
        found = list(threads.map(evaluate, numbers))
    return {f"outputs of {at}": it for at, it in zip(numbers, found, strict=True) if it is not None}


def from_threads(run: Any, number: int) -> Seen:
    """A step in a thread of its own; evaluations in several at once."""
    seen: list[Seen | BaseException] = []

    def step() -> None:
        try:
            seen.append(plainly(run, number))
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    if isinstance(seen[0], BaseException):
        raise seen[0]
    return seen[0] | evaluations(run, number, run.evaluate)


SERVED: dict[str, Any] = {}


@remote.function
def step_of_pairs(number: int) -> Any:
    return plainly(SERVED["run"], number)


@remote.function
def evaluate_of_pairs(number: int) -> Any:
    return SERVED["run"].evaluate(number)


def calling_from_afar(run: Any, number: int) -> Seen:
    """The next rank asks for a step, and for several evaluations at once."""
    if run.place.alone:
        return plainly(run, number) | evaluations(run, number, run.evaluate)
    SERVED["run"] = run
    run.place.meet()
    to = f"p{(dist.get_rank() + 1) % dist.get_world_size()}"
    try:
        seen = remote.call(to, step_of_pairs, number)
        seen |= evaluations(run, number, lambda at: remote.call(to, evaluate_of_pairs, at))
        run.place.meet()
    finally:
        SERVED.clear()
    return seen


def writing(change: Callable[[nn.Module], None]) -> Manner:
    """A step, and a change of all parameters behind the first one."""

    def manner(run: Any, number: int) -> Seen:
        seen = plainly(run, number)
        if number > 0:
            return seen
        with nullcontext() if run.place.alone else trireme.writing(run.model):
            change(run.model)
        run.follow()
        return seen

    return manner
