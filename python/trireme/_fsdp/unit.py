"""A unit: modules whose parameters are unsharded together."""

from __future__ import annotations

import copy
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs

from trireme._C import (
    Communicator,
    DeferredSync,
    KeptCodes,
    ParamGroup,
    ParamPlace,
    UnitOffload,
)
from trireme._core.compression import Compression
from trireme._core.find_tensors import find_tensors
from trireme._core.joined_steps import JoinedSteps
from trireme._core.meshes import is_cut, ranks_of
from trireme._core.owners import note_unit
from trireme._fsdp import refuse
from trireme._fsdp.comms import customizable, hook_of, use_all_gather
from trireme._fsdp.join import in_join, notify_of_forward
from trireme._fsdp.mesh import FsdpMesh
from trireme._fsdp.params import (
    ShardedParameter,
    adopt,
    check_data,
    copy_shards,
    is_cast,
    note_casts,
    shard,
)
from trireme._fsdp.root import FsdpRoot
from trireme._fsdp.state_hooks import StateHooks

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FsdpUnit:
    """What torch calls the state of an FSDPModule, and where its hooks are.

    ``_pre_forward`` and ``_post_forward`` have torch's names and arguments, since
    ``register_fsdp_forward_method`` calls them; so have ``_comm_ctx`` and ``_fsdp_param_groups``,
    which torch's pipelining and ``share_comm_ctx`` read, and what the pipelining of torch 2.11
    reads: ``_fsdp_param_group``, ``_state_ctx``, ``_root_post_backward_final_callback``.

    Parameters of the same modules that are sharded over other meshes are units of their own,
    ``others`` of the first one, whose hooks serve them all.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: list[ShardedParameter],
        mesh: FsdpMesh,
        policy: MixedPrecisionPolicy,
        *,
        reshards_among: int = 0,
        offload: UnitOffload | None = None,
        others: Sequence[FsdpUnit] | None = (),
        compression: Compression | None = None,
    ) -> None:
        """``others`` is None for one of them."""
        self.compression = compression
        self.modules = tuple(modules)
        self.params = params
        self.mesh = mesh
        self.policy = policy
        self.reshards_among = reshards_among  # neighbouring ranks; 0: all
        self.offload = offload
        self.root: FsdpRoot | None = None
        self.is_root = False
        self.others = tuple(others or ())
        self.gathers = any(part.mesh.gathers for part in self.all)  # any of its modules' parameters
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_gather: Any = None  # torch's AllGather and ReduceScatter, if the user has set them
        self.reduce_scatter: Any = None
        self.allocates_from_group = False
        self.post_optim_event: torch.Event | None = None
        self.reshard_after_forward: bool | None = None  # None: if it is not the root
        self.ahead: dict[str, list[FsdpUnit]] = {}  # goes by the core's method that is told of it
        self.gathers_dynamically = False  # is asked of the root
        self._entered_by: int | None = None  # a thread
        self._making_root = threading.Lock()
        self.uses = 0  # how often it was entered, or resharded
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
        if others is not None:
            self._register_hooks()
        self._state_hooks = StateHooks()
        self._state_hooks.follow(self)
        for module in {module for param in params for module, _ in param.places}:
            self._state_hooks.register(module)

    @property
    def all(self) -> tuple[FsdpUnit, ...]:
        """Those of its modules: this one and the others."""
        return (self, *self.others)

    def _make_group(self) -> ParamGroup:
        group = ParamGroup(
            specs=[param.spec() for param in self.params],
            communicator=self.mesh.shard_communicator,
            gathers_with=customizable(self.mesh.gather_communicator),
            device=self.mesh.device,
            reshards_with=self.mesh.neighbours(self.reshards_among),
            offload=self.offload,
        )
        use_all_gather(self, group)
        return group

    def _place(self) -> None:
        """Tells the core, and the parameters, which tensors hang where."""
        assert self.group is not None
        places = [
            ParamPlace(module, name, index)
            for index, param in enumerate(self.params)
            for module, name in param.places
        ]
        sharded = [param.sharded for param in self.params]
        leaves = [param.unsharded for param in self.params if param.unsharded is not None]
        self.group.set_places(places, sharded, leaves, [param.shown for param in self.params])
        for param in self.params:
            assert param.sharded is not None
            note_unit(param.sharded, self)

    def note_as_owner(self) -> None:
        """Says of the parameters in the modules that they are this unit's, as ``Module.to`` takes
        away: it swaps a DTensor with what it has made."""
        for param in self.params:
            for module, name in param.places:
                here = module._parameters.get(name)
                if here is not None:
                    note_unit(here, self)

    def _register_hooks(self) -> None:
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_forward_hook(self._after_forward, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> FsdpUnit:
        """A unit of the copies of its modules, with memory of its own. Collective."""
        self.show_sharded()
        made = copy.copy(self)
        memo[id(self)] = made
        made._state_hooks = copy.deepcopy(self._state_hooks, memo)
        made._state_hooks.follow(made)
        made.root, made.is_root = None, False
        made.others = tuple(copy.deepcopy(other, memo) for other in self.others)
        made.ahead = {}  # it named other units than the copies of these
        made._comm_ctx = object()
        if self.group is not None:
            made.group = self._another_group(self.group)
            made.group.set_all_reduce_hook(hook_of(made))
            made.shards = made.group.sharded()
            made.params = copy_shards(made.group, self.params, memo)
        made.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        for param in made.params:
            param.places = [(copy.deepcopy(module, memo), name) for module, name in param.places]
        if made.group is not None:
            made._place()
        return made

    def _another_group(self, like: ParamGroup) -> ParamGroup:
        group = self._make_group()
        group.copy_flags(like)
        return group

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """The core holds a hook that does not keep alive what the user's holds."""
        self.all_reduce_hook = hook
        if self.group is not None:
            self.group.set_all_reduce_hook(hook_of(self))

    def follow_casts(self) -> None:
        """Before the first forward: memory of the dtypes to which parameters were cast, if any
        was. Collective then."""
        if self.group is None or not note_casts(self.params, self.policy):
            return
        self.group = self._another_group(self.group)
        self.shards = self.group.sharded()
        for param, whole in zip(self.params, self.group.unsharded(), strict=True):
            assert param.sharded is not None
            param.compute_with(whole, requires_grad=param.sharded.requires_grad)
        self._place()  # copy_back() brings the values

    # around forward; torch.compiler.disable would import the compiler along with us

    @torch._disable_dynamo
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        root = self.own_root()
        if root.core is not None:
            root.core.begin_pass(self.is_root)
        self._entered_by = threading.get_ident()
        self.uses += 1
        if self.is_root:
            root.check_layers()
            root.follow_comms()
            notify_of_forward(root)
            self._await_post_optim_event()
            args, kwargs = self._on_device(args, kwargs)
        if root.core is not None:
            if root.core.is_writing:
                root.copy_back()
            inputs = self._inputs_of(args, kwargs)
            for part in self.all:
                root.core.pre_forward(part.group, self.is_root and part is self, inputs)
        if self._cast_inputs is not None:
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        return args, kwargs

    def _await_post_optim_event(self) -> None:
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()

    def _on_device(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the outermost forward where the parameters are, as in torch."""
        if self.mesh.device.type == "cpu" or not (args or kwargs):
            return args, kwargs
        moved, moved_kwargs = _to_kwargs(args, kwargs, self.mesh.device, False)
        return moved[0], moved_kwargs[0]

    def _inputs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Those that backward may bring gradients to."""
        if not self.gathers or not torch.is_grad_enabled():
            return []
        return find_tensors((args, kwargs))[0]

    @torch._disable_dynamo
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        core = self.own_root().core
        if core is not None:
            tensors, all_found = find_tensors(output)
            for part in reversed(self.all):
                is_root = self.is_root and part is self
                core.post_forward(part.group, is_root, tensors, all_found)
        self._entered_by = None
        return output if self._cast_outputs is None else self._cast_outputs(output)

    @torch._disable_dynamo
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called also where forward has raised; then nobody calls ``_post_forward``."""
        if self._entered_by != threading.get_ident():
            return
        self._entered_by = None
        error = sys.exc_info()[1]
        core = self.own_root().core
        if core is None or error is None:
            return
        for part in reversed(self.all):
            is_root = self.is_root and part is self
            core.abandon_forward(part.group, is_root, f"{type(error).__name__}: {error}")

    def deferred_sync(self) -> DeferredSync:
        """Says to a pipeline how to hold back its averaging."""
        assert self.group is not None
        return self.group.deferred_sync()

    # for torch's pipelining and FSDPModule

    def _root_post_backward_final_callback(self) -> None:
        if (core := self.own_root().core) is not None:
            core.finalize_backward()

    def in_join(self) -> JoinedSteps | None:
        """What tells ranks that have run out of inputs in a ``Join``, if this one has not."""
        return None if self.root is None else in_join(self.root)

    def own_root(self) -> FsdpRoot:
        """The root of this unit; if there is none yet, this unit is."""
        if self.root is None:
            if len(self.modules) > 1:
                refuse(
                    f"got {len(self.modules)} modules as the outermost unit, expected one",
                    "Call fully_shard on the module around them, and run that.",
                    kind=RuntimeError,
                )
            with self._making_root:
                if self.root is None:
                    FsdpRoot(self)
        assert self.root is not None
        return self.root

    def follow_reshard(self) -> None:
        """Says to the core whether to reshard after forward."""
        if self.group is not None:
            default = not (self.is_root and self.mesh.gathers)
            chosen = self.reshard_after_forward
            self.group.reshard_after_forward = default if chosen is None else chosen

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """As torch: among all ranks, whatever it was before."""
        if self.group is not None and self.reshards_among > 0:
            self.group.reshard_to_all()
        self.reshards_among = 0
        self.reshard_after_forward = reshard
        self.follow_reshard()

    def unshard(self) -> None:
        if self.root is not None and self.root.core is not None:
            self.root.copy_back()
            self.root.core.begin_reading()
            if self.group is not None:
                self.root.core.unshard(self.group)
        elif self.group is not None:  # no forward yet, so no gate
            self.copy_back()
            self.group.share_writes()
            self.group.unshard()
            self.group.show_unsharded()

    def begin_unshard(self) -> None:
        """For who reads parameters later, and calls ``unshard()`` or a forward first."""
        if self.root is None or self.root.core is None or self.group is None:
            return
        self.root.copy_back()
        self.root.core.begin_reading()
        self.root.core.begin_unshard(self.group)

    def reshard(self) -> None:
        self.uses += 1
        if self.group is None:
            return
        if self.root is not None and self.root.core is not None:
            self.root.core.reshard(self.group)
        else:
            self.group.reshard()

    def norm_over(self, param: Any) -> tuple[Communicator, int, torch.device] | None:
        """Of the ranks that have other parts of a sharded parameter of this unit; how many of them
        have the same part; where they talk. None if every rank has all of it. Collective over them
        where these are not those of its mesh, when first called.

        What fewer ranks share than the outermost unit may be another parameter on others (experts),
        which all count.
        """
        mesh: Any = param.device_mesh
        meshes = [] if self.root is None else self.root.meshes
        if len(meshes) > 1 and not meshes[0].ranks.issubset(ranks_of(mesh)):
            parts = math.prod(mesh.size(dim) for dim in _cut_dims(param))
            return meshes[0].communicator, mesh.size() // parts, self.mesh.device
        if param.ndim == 0:
            return None
        if mesh == self.mesh.mesh:
            return self.mesh.shard_communicator, 1, self.mesh.device
        sharers = self.mesh.communicator_over(mesh, _cut_dims(param))
        return sharers, 1, self.mesh.device

    def show_sharded(self) -> None:
        if self.group is not None:
            self.group.show_sharded()

    @property
    def is_in_place(self) -> bool:
        """Whether modules hold what the ranks share."""
        return self.group is None or self.group.is_in_place

    def copy_back(self, casts_wait: bool = False) -> None:
        """What the user has replaced comes back into the memory that all ranks share. With
        ``casts_wait`` a unit that has been cast stays as it is: it may be cast back."""
        if self.group is None or self.is_in_place:
            return
        if casts_wait and any(is_cast(param) for param in self.params):
            return
        check_data([(self.group, self.params)])
        adopt(self.group, self.params, self.shards)
        self._place()


def _cut_dims(param: Any) -> list[int]:
    """Of its mesh, those along which it is cut."""
    return [dim for dim, placement in enumerate(param.placements) if is_cut(placement)]


def _caster(dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in a structure as ``dtype``; None if there is nothing to do."""
    if dtype is None:
        return None
    from torch.distributed.utils import _apply_to_tensors

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return functools.partial(_apply_to_tensors, cast)


class UnitCodes:
    """What codes keep of the gradients of a unit with a compression, and of those in it."""

    def __init__(self, unit: FsdpUnit) -> None:
        self._unit = weakref.ref(unit)

    def kept_codes(self) -> list[KeptCodes]:
        """Makes the unit the outermost one, which it is."""
        unit = self._unit()
        return [] if unit is None else unit.own_root().kept_codes()
