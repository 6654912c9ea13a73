"""A unit: modules whose parameters are unsharded together."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trireme._C import ParamGroup
from trireme._ddp_find_tensors import find_tensors
from trireme._fsdp_checks import refuse
from trireme._fsdp_join import notify_of_forward
from trireme._fsdp_params import ShardedParameter, adopt, copy_shards, note_casts, shard
from trireme._group_communicator import communicator_of
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
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = tuple(modules)
        self.params = params
        self.mesh = mesh
        self.policy = policy
        self.communicator = communicator_of(mesh.get_group())
        self.root: FsdpRoot | None = None
        self.is_root = False
        self.synchronizes = True
        self._comm_ctx = object()
        self._fsdp_param_groups: list[Any] = []
        self._fsdp_param_group = None
        self._state_ctx = SimpleNamespace(all_states=[])
        self.group: ParamGroup | None = None
        if params:
            specs = [one.spec() for one in params]
            self.group = ParamGroup(specs=specs, communicator=self.communicator)
            self.shards = self.group.sharded()
            shard(self.group, params, mesh)
            self._place()
        self._cast_inputs = _caster(policy.param_dtype if policy.cast_forward_inputs else None)
        self._cast_outputs = _caster(policy.output_dtype)
        self._register_hooks()

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
        for module in {module for one in self.params for module, _ in one.places}:
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_load)

    def _before_state_dict(self, *_: Any) -> None:
        self.reshard()

    def _before_load(self, *_: Any) -> None:
        self.reshard()
        if self.root is not None:
            self.root.begin_writing_anew()

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpUnit:
        """A unit of the copies of its modules, with memory of its own. Collective."""
        self.reshard()
        made = copy.copy(self)
        memo[id(self)] = made
        made.root, made.is_root = None, False
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
        specs = [one.spec() for one in self.params]
        group = ParamGroup(specs=specs, communicator=self.communicator)
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
        if self.is_root:
            notify_of_forward(root)
        if root.core is not None:
            if root.core.is_writing:
                root.settle()
            root.core.pre_forward(self.group, self.is_root)
        if self._cast_inputs is not None:
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch._dynamo.disable(self._leave)(output)
        return self._leave(output)

    def _leave(self, output: Any) -> Any:
        core = self.own_root().core
        if core is not None:
            core.post_forward(self.group, self.is_root, *find_tensors(output))
        return output if self._cast_outputs is None else self._cast_outputs(output)

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

    def unshard(self) -> None:
        if self.root is not None:
            if self.root.core is not None:
                self.root.settle()
                self.root.core.begin_reading()
        elif self.group is not None:  # no forward yet, so no gate
            self.settle()
            self.group.finish_writes()
            dist.barrier(self.mesh.get_group())
        if self.group is not None:
            self.group.unshard()

    def reshard(self) -> None:
        if self.group is not None:
            self.group.reshard()

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
