"""checkpoint(): torch's function of that name, with hooks in C++ and more to choose from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint as torchs
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from trireme import _C
from trireme._activation import refuse
from trireme._activation.partition import packer_of
from trireme._C import error_text

__all__ = [
    "CheckpointError",
    "CheckpointPolicy",
    "SelectiveCheckpointContext",
    "checkpoint",
    "create_selective_checkpoint_contexts",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
]

P = ParamSpec("P")
T = TypeVar("T")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Group = dist.ProcessGroup | DeviceMesh
Folder = str | os.PathLike[str]


@overload
def checkpoint(
    function: Callable[..., T],
    *args: Any,
    preserve_rng_state: bool = True,
    context_fn: Contexts = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    offload: bool | Folder = False,
    partition: Group | None = None,
    use_reentrant: bool | None = False,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> T: ...


@overload
def checkpoint(
    function: None = None,
    *,
    preserve_rng_state: bool = True,
    context_fn: Contexts = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    offload: bool | Folder = False,
    partition: Group | None = None,
    use_reentrant: bool | None = False,
    respect_saved_tensors_hooks: bool | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    preserve_rng_state: bool = True,
    context_fn: Contexts = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    offload: bool | Folder = False,
    partition: Group | None = None,
    use_reentrant: bool | None = False,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Calls ``function(*args, **kwargs)`` and keeps only its inputs for the backward, which calls
    the function once more.

    Torch's equivalent is ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``, whose promises
    hold: the same bits, random numbers and autocast as without it, nesting, several backwards,
    double backward, threads, selective policies. Beyond them, tensors in keyword arguments, lists,
    tuples and dicts are watched for changes in place, too.

    Args:
        function: Any callable. Without it a decorator is returned that has the other options.
        preserve_rng_state: The second call draws the random numbers of the first one: those of the
            CPU and of the devices of the inputs.
        context_fn: Returns two context managers, one for each call, as of
            :func:`create_selective_checkpoint_contexts`.
        determinism_check: ``"default"`` compares shape, dtype and device of what both calls save;
            ``"none"`` does not.
        debug: An error lists the operators of both calls.
        early_stop: The second call ends with the last tensor that the backward needs.
        offload: Nothing is called again. What autograd saves goes to the memory of the host (with
            ``True``; tensors of the CPU are there already) or to files without names in a folder,
            and comes back in the backward. Goes with none of the options above but
            ``preserve_rng_state`` and ``early_stop``, which are of no consequence then.
        partition: A group, or a mesh of one dimension, of ranks that call this with equal inputs:
            those of one host keep one copy in shared memory, others a slice each. Collective.
        use_reentrant: Here for torch's sake. ``True`` is refused.
        respect_saved_tensors_hooks: As in torch: whether what a selective policy saves goes through
            the hooks of :class:`torch.autograd.graph.saved_tensors_hooks` around.

    Raises:
        ValueError: For options that contradict each other.
        CheckpointError: Out of the backward: the second call saved something else than the first.
        RuntimeError: Out of the backward: an input was changed in place after the call.

    Extra time: a forward of the function and some 30 us. Memory: its inputs. What the function
    raises in its second call comes out of the backward.
    """
    if torch.compiler.is_compiling():  # the compiler knows torch's function, and plans by it
        return _compiled(
            function,
            args,
            kwargs,
            refused=offload is not False or partition is not None or bool(use_reentrant),
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
        )
    if (
        function is not None
        and context_fn is noop_context_fn
        and determinism_check == "default"
        and offload is False
        and partition is None
        and not (debug or use_reentrant)
        and torchs._checkpoint_debug_enabled is None
        and torchs._enable_checkpoint_early_stop is None
        and torch._C._len_torch_function_stack() == 0
    ):
        return _C.checkpoint(
            function, function, args, kwargs, preserve_rng_state, early_stop, True, None, None
        )
    options = _Options(
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        offload=offload,
        partition=partition,
        respect_saved_tensors_hooks=respect_saved_tensors_hooks,
    )
    if use_reentrant:
        refuse(
            "got use_reentrant=True, expected False: torch's older way gives wrong gradients for "
            "keyword arguments and nested tensors, and none for torch.autograd.grad()",
            "Leave it out.",
        )
    if function is not None:
        return options.chosen().call(function, args, kwargs)
    if args or kwargs:
        refuse(
            "got arguments without a function",
            "Pass the function first, or options only for a decorator.",
            kind=TypeError if args else ValueError,
        )
    return options.decorate


def _chosen(by_context: bool | None, given: bool) -> bool:
    """What torch's context managers say goes before what a call says."""
    return given if by_context is None else by_context


@dataclass(frozen=True)
class _Options:
    """Options of a call that are not all left as they are, as :func:`checkpoint` has them."""

    preserve_rng_state: bool
    context_fn: Contexts
    determinism_check: str
    debug: bool
    early_stop: bool
    offload: bool | Folder
    partition: Group | None
    respect_saved_tensors_hooks: bool | None

    def __post_init__(self) -> None:
        if self.determinism_check not in ("default", "none"):
            refuse(
                f'got determinism_check={self.determinism_check!r}, expected "default" or "none"',
                "Other checks do not exist.",
            )
        if self.debug and self.context_fn is not noop_context_fn:
            refuse(
                "got debug=True and a context_fn, expected one of them: debug watches operators "
                "by contexts of its own",
                "Leave context_fn out while you look for the operator.",
            )
        if not isinstance(self.offload, bool | str | os.PathLike):
            refuse(
                f"got {type(self.offload).__name__} as offload, expected a bool or a folder",
                "Pass True for the memory of the host.",
                kind=TypeError,
            )
        if not isinstance(self.offload, bool) and not os.fspath(self.offload):
            refuse(
                f"got {self.offload!r} as offload, expected a bool or a folder",
                "Look whether the variable with the folder is set, or pass True for the memory of "
                "the host.",
            )
        if self.offload is not False:
            self._check_offload()

    def _check_offload(self) -> None:
        given = {
            "context_fn": self.context_fn is not noop_context_fn,
            "debug=True": self.debug,
            "partition": self.partition is not None,
            'determinism_check="none"': self.determinism_check == "none",
        }
        for name, is_given in given.items():
            if is_given:
                refuse(
                    f"got offload and {name}, expected one of them: what is offloaded is not "
                    "recomputed",
                    "Leave one of them out.",
                )

    def chosen(self) -> _Options:
        """What holds at this moment, with what torch's context managers say."""
        return replace(
            self,
            debug=_chosen(torchs._checkpoint_debug_enabled, self.debug),
            early_stop=_chosen(torchs._enable_checkpoint_early_stop, self.early_stop),
        )

    def decorate(self, function: Callable[P, T]) -> Callable[P, T]:
        call: Callable[..., T] = checkpoint
        options = vars(self)

        @functools.wraps(function)
        def checkpointed(*args: P.args, **kwargs: P.kwargs) -> T:
            return call(function, *args, **options, **kwargs)

        return checkpointed

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self.offload is not False:
            folder = "" if self.offload is True else os.fspath(self.offload)
            packer = _C.make_offload_packer(folder)
            return _C.run_with_packer(packer, function, args, kwargs)
        forward, again, explain = self._both_calls(function)
        inputs = None if self.partition is None else packer_of(self.partition)
        return _C.checkpoint(
            forward,
            again,
            args,
            kwargs,
            self.preserve_rng_state,
            self.early_stop,
            self.determinism_check == "default",
            inputs,
            explain,
        )

    def _both_calls(
        self, function: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[str], None] | None]:
        """The function as the forward calls it, as the backward does, and who explains errors."""
        context_fn, explain = self.context_fn, None
        if self.debug:
            context_fn, raise_for = torchs._get_debug_context_and_cb()
            explain = functools.partial(_explain, raise_for)
        device = _default_device()
        if context_fn is noop_context_fn:
            if device is None:
                return function, function, None
            return function, _in_contexts(function, nullcontext(), device, has_result=False), None
        of_forward, of_recomputation = context_fn()
        if hasattr(of_forward, "respect_saved_tensors_hooks"):
            of_forward.respect_saved_tensors_hooks = self.respect_saved_tensors_hooks
        return (
            _in_contexts(function, of_forward, None, has_result=True),
            _in_contexts(function, of_recomputation, device, has_result=False),
            explain,
        )


def _explain(raise_for: Callable[[CheckpointError], None], text: str) -> None:
    raise_for(CheckpointError(text))


def _default_device() -> torch.device | None:
    """The device that ``with torch.device(...)`` or ``torch.set_default_device()`` has set."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def _in_contexts(
    function: Callable[..., Any],
    context: AbstractContextManager[Any],
    device: torch.device | None,
    *,
    has_result: bool,
) -> Callable[..., Any]:
    @functools.wraps(function, updated=())  # a module's attributes stay where they are
    def in_contexts(*args: Any, **kwargs: Any) -> Any:
        with context, nullcontext() if device is None else DeviceContext(device):
            return function(*args, **kwargs)
        if not has_result:  # a context suppressed an exception, such as the early stop
            return None
        raise RuntimeError(
            error_text(
                "checkpoint",
                "a context of context_fn suppressed an exception of the function, expected it to "
                "pass: there is no result to return",
                "Let its __exit__ return False.",
            )
        )

    return in_contexts


def _compiled(
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    refused: bool,
    context_fn: Contexts,
    **options: Any,
) -> Any:
    if context_fn is not noop_context_fn:  # the compiler knows the default by its absence only
        options["context_fn"] = context_fn
    if refused:
        raise NotImplementedError(
            "[checkpoint] got offload, partition or use_reentrant=True under torch.compile, "
            "expected none of them. Leave them out, or call checkpoint outside of what is compiled."
        )
    return torchs.checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
