"""A unit: modules whose parameters are unsharded together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trireme import _C
from trireme._ddp_find_tensors import find_tensors
from trireme._fsdp_checks import refuse
from trireme._fsdp_params import ShardedParameter, adopt, shard
from trireme._group_communicator import communicator_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trireme._fsdp_root import FsdpRoot


class FsdpUnit:
    """What torch calls the state of an FSDPModule, and where its hooks are.

    ``_pre_forward`` and ``_post_forward`` have torch's names and arguments, since
    ``register_fsdp_forward_method`` calls them; so have ``_comm_ctx`` and ``_fsdp_param_groups``,
    which torch's pipelining and ``share_comm_ctx`` read.
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
        self.group: _C.ParamGroup | None = None
        if params:
            specs = [one.spec() for one in params]
            self.group = _C.ParamGroup(specs=specs, communicator=self.communicator)
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
            one.tag(self)

    def _register_hooks(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
        held = weakref.ref(self)

        def before_state_dict(*_: Any) -> None:
            if (unit := held()) is not None:
                unit.reshard()

        def before_load(*_: Any) -> None:
            if (unit := held()) is not None:
                unit.reshard()
                if unit.root is not None:
                    unit.root.begin_writing()

        for module in {module for one in self.params for module, _ in one.places}:
            module.register_state_dict_pre_hook(before_state_dict)
            module.register_load_state_dict_pre_hook(before_load)

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
        core = self.own_root().core
        if core is not None:
            if core.is_writing:
                self.own_root().settle()
            core.pre_forward(self.group, self.is_root)
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

    # for FSDPModule

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
        root = self.own_root()
        if root.core is not None:
            root.settle()
            root.core.begin_reading()
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
