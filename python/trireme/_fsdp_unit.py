"""A unit: modules whose parameters are unsharded together."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trireme._C import ParamGroup
from trireme._ddp_find_tensors import find_tensors
from trireme._fsdp_checks import refuse
from trireme._fsdp_join import notify_of_forward
from trireme._fsdp_mesh import FsdpMesh
from trireme._fsdp_params import ShardedParameter, adopt, copy_shards, note_casts, shard
from trireme._parameter_owners import note_unit

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trireme._fsdp_root import FsdpRoot


class FsdpUnit:
    """What torch calls the state of an FSDPModule, and where its hooks are.

    ``_pre_forward`` and ``_post_forward`` have torch's names and arguments, since
    ``register_fsdp_forward_method`` calls them; so have ``_comm_ctx`` and ``_fsdp_param_groups``,
    which torch's pipelining and ``share_comm_ctx`` read, and what the pipelining of torch 2.11
    reads: ``_fsdp_param_group``, ``_state_ctx``, ``_root_post_backward_final_callback``.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: list[ShardedParameter],
        mesh: FsdpMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = tuple(modules)
        self.params = params
        self.mesh = mesh
        self.policy = policy
        self.root: FsdpRoot | None = None
        self.is_root = False
        self.synchronizes = True
        self.post_optim_event: torch.Event | None = None
        self.divide_factor = 0.0  # 0: the number of ranks
        self.reshard_after_forward: bool | None = None  # None: if it is not the root
        self.ahead: dict[str, list[FsdpUnit]] = {}  # by the core's method that is told of it
        self.gathers_dynamically = False  # of the root
        self._is_entered = False
        self._comm_ctx = object()
        self._fsdp_param_groups: list[Any] = []
        self._fsdp_param_group = None
        self._state_ctx = SimpleNamespace(all_states=[])
        self.group: ParamGroup | None = None
        if params:
            self.group = self._make_group()
            self.shards = self.group.sharded()
            shard(self.group, params, mesh)
            self._place()
        self._cast_inputs = _caster(policy.param_dtype if policy.cast_forward_inputs else None)
        self._cast_outputs = _caster(policy.output_dtype)
        self._register_hooks()

    def _make_group(self) -> ParamGroup:
        return ParamGroup(
            specs=[one.spec() for one in self.params],
            communicator=self.mesh.shard_communicator,
            gathers_with=self.mesh.gather_communicator,
            device=self.mesh.device,
        )

    def _place(self) -> None:
        """Tells the core, and the parameters, which tensors hang where."""
        assert self.group is not None
        places = [
            (module, name, index)
            for index, one in enumerate(self.params)
            for module, name in one.places
        ]
        sharded = [one.sharded for one in self.params]
        self.group.set_places(places, sharded, [one.unsharded for one in self.params])
        for one in self.params:
            assert one.sharded is not None
            note_unit(one.sharded, self)

    def _register_hooks(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            if self.mesh.gathers:
                module.register_forward_hook(self._after_forward, always_call=True)
        for module in {module for one in self.params for module, _ in one.places}:
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load)

    def _before_state_dict(self, *_: Any) -> None:
        self._show_sharded()

    def _before_load(self, *_: Any) -> None:
        self._show_sharded()
        if self.root is not None:
            self.root.begin_writing_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpUnit:
        """A unit of the copies of its modules, with memory of its own. Collective."""
        self._show_sharded()
        made = copy.copy(self)
        memo[id(self)] = made
        made.root, made.is_root = None, False
        made.ahead = {}  # of other units than the copies of these
        made._comm_ctx = object()
        if self.group is not None:
            made.group = self._another_group(self.group)
            made.shards = made.group.sharded()
            made.params = copy_shards(made.group, self.params, memo)
        made.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        for one in made.params:
            one.places = [(copy.deepcopy(module, memo), name) for module, name in one.places]
        if made.group is not None:
            made._place()
        return made

    def _another_group(self, like: ParamGroup) -> ParamGroup:
        group = self._make_group()
        group.reshard_after_forward = like.reshard_after_forward
        group.reshard_after_backward = like.reshard_after_backward
        return group

    def follow_casts(self) -> None:
        """Before the first forward: memory of the dtypes to which parameters were cast, if any
        was. Collective then."""
        if self.group is None or not note_casts(self.params, self.policy):
            return
        self.group = self._another_group(self.group)
        self.shards = self.group.sharded()
        for one, whole in zip(self.params, self.group.unsharded(), strict=True):
            assert one.sharded is not None
            one.unsharded = nn.Parameter(whole, requires_grad=one.sharded.requires_grad)
        self._place()  # settle() brings the values

    # around forward

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(self._enter)(module, args, kwargs)
        return self._enter(module, args, kwargs)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.own_root()
        self._is_entered = True
        if self.is_root:
            notify_of_forward(root)
            self._await_post_optim_event()
        if root.core is not None:
            if root.core.is_writing:
                root.settle()
            root.core.pre_forward(self.group, self.is_root, self._inputs_of(args, kwargs))
        if self._cast_inputs is not None:
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        return args, kwargs

    def _await_post_optim_event(self) -> None:
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    def _inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Those that backward may bring gradients to."""
        if self.group is None or not self.group.gathers or not torch.is_grad_enabled():
            return []
        return find_tensors((args, kwargs))[0]

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(self._leave)(output)
        return self._leave(output)

    def _leave(self, output: Any) -> Any:
        self._is_entered = False
        core = self.own_root().core
        if core is not None:
            core.post_forward(self.group, self.is_root, *find_tensors(output))
        return output if self._cast_outputs is None else self._cast_outputs(output)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called also where forward has raised; then nobody calls ``_post_forward``."""
        if not self._is_entered:
            return
        self._is_entered = False
        error = sys.exc_info()[1]
        core = self.own_root().core
        if self.is_root and core is not None and error is not None:
            core.abandon_forward(f"{type(error).__name__}: {error}")

    # for torch's pipelining and FSDPModule

    def _root_post_backward_final_callback(self) -> None:
        if (core := self.own_root().core) is not None:
            core.finalize_backward()

    def own_root(self) -> FsdpRoot:
        """The root of this unit; if there is none yet, this unit is."""
        if self.root is None:
            from trireme._fsdp_root import FsdpRoot

            if len(self.modules) > 1:
                refuse(
                    f"got {len(self.modules)} modules as the outermost unit, expected one",
                    "Call fully_shard on the module around them, and run that.",
                    kind=RuntimeError,
                )
            FsdpRoot(self)
        assert self.root is not None
        return self.root

    def settle_reshard(self, *, is_root: bool) -> None:
        """Says to the core whether to reshard after forward."""
        if self.group is not None:
            default = not (is_root and self.mesh.gathers)
            chosen = self.reshard_after_forward
            self.group.reshard_after_forward = default if chosen is None else chosen

    def unshard(self) -> None:
        if self.root is not None and self.root.core is not None:
            self.root.settle()
            self.root.core.begin_reading()
            if self.group is not None:
                self.root.core.unshard(self.group)
        elif self.group is not None:  # no forward yet, so no gate
            self.settle()
            self.group.share_writes()
            self.group.unshard()
            self.group.show_unsharded()

    def begin_unshard(self) -> None:
        """For who reads parameters later, and calls ``unshard()`` or a forward first."""
        if self.root is None or self.root.core is None or self.group is None:
            return
        self.root.settle()
        self.root.core.begin_reading()
        self.root.core.begin_unshard(self.group)

    def reshard(self) -> None:
        if self.group is None:
            return
        if self.root is not None and self.root.core is not None:
            self.root.core.reshard(self.group)
        else:
            self.group.reshard()

    def _show_sharded(self) -> None:
        if self.group is not None:
            self.group.show_sharded()

    def settle(self) -> None:
        """What the user has replaced comes back into the memory that all ranks share."""
        if self.group is None or self.group.is_settled:
            return
        adopt(self.group, self.params, self.shards)
        self._place()


def _caster(dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in a structure as ``dtype``; None if there is nothing to do."""
    if dtype is None:
        return None
    from torch.distributed.utils import _apply_to_tensors

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return functools.partial(_apply_to_tensors, cast)
