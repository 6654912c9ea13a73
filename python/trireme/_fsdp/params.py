"""The parameters of a unit: found in its modules, and as DTensors over the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from trireme._C import ShardedParamSpec
from trireme._core.owners import local_of
from trireme._fsdp import refuse
from trireme._fsdp.checks import check_parameter, chosen_grad_dtype, resolve_placement, shard_dim
from trireme._fsdp.dtensor import (
    ModelLayout,
    check_placement,
    contiguous_meta,
    model_layout,
    sharded_spec,
)
from trireme._fsdp.found_inf import look_past_scalars

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from trireme._C import ParamGroup
    from trireme._fsdp.mesh import FsdpMesh

# Up to torch 2.14 gradients were reduced in param_dtype where no reduce_dtype was given.
_REDUCES_IN_ORIGINAL_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


@dataclass
class ShardedParameter:
    """One parameter of a unit, in all modules where it hangs."""

    name: str  # within the unit
    original: nn.Parameter | None  # until it is sharded
    places: list[tuple[nn.Module, str]]
    dim: int
    sizes: list[int]  # what is sharded has them: of a DTensor this rank's part
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None  # if the user has chosen one
    specs: dict[torch.dtype, DTensorSpec] = field(default_factory=dict)
    sharded: nn.Parameter | None = None  # a DTensor
    unsharded: nn.Parameter | None = None  # what the core computes the gradient of
    layout: ModelLayout | None = None  # what was a DTensor before has one
    shown: nn.Parameter | None = None  # what the module shows for the unsharded one

    def spec(self) -> ShardedParamSpec:
        """Says of the parameter what the core wants to know."""
        return ShardedParamSpec(
            name=self.name,
            sizes=self.sizes,
            dtype=self.present.dtype,
            dim=self.dim,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            requires_grad=self.present.requires_grad,
            grad_dtype=self.grad_dtype,
        )

    @property
    def present(self) -> nn.Parameter:
        """Returns the parameter as it is now, sharded or not yet."""
        present = self.original if self.sharded is None else self.sharded
        assert present is not None
        return present

    def as_dtensor(self, local: torch.Tensor, *, requires_grad: bool = False) -> DTensor:
        """``local`` as this rank's part of the parameter, or of its gradient."""
        spec = self.specs.get(local.dtype)
        if spec is None:
            known = next(iter(self.specs.values()))
            spec = self.specs[local.dtype] = _cast(known, local.dtype)
        return DTensor(local, spec, requires_grad=requires_grad)

    def model_part(self) -> str:
        """Says which part of the model's tensor is sharded, if a mesh of tensor parallelism has cut
        it; else nothing."""
        if self.layout is None:
            return ""
        mesh = self.layout.spec.mesh
        place = tuple(mesh.get_coordinate() or ())
        dims = [dim for dim in range(len(place)) if dim not in self.layout.data_dims]
        ways = [f"{place[dim]}/{mesh.size(dim)}" for dim in dims]
        return f" of part {', '.join(ways)}" if ways else ""

    def describe_on(self, mesh: FsdpMesh) -> None:
        """Says how the parameter lies on ``mesh``."""
        original = self.original
        assert original is not None
        dim = self.dim if original.ndim else None
        if dim is None:
            look_past_scalars()
        if isinstance(original, DTensor):
            self.layout = model_layout(original, self.dim, mesh)
            self.specs[original.dtype] = sharded_spec(original, dim, mesh)
        else:
            meta = contiguous_meta(original.shape, original.dtype)
            spec = DTensorSpec(mesh.mesh, mesh.placements(dim), tensor_meta=meta)
            self.specs[original.dtype] = spec

    def compute_with(self, whole: torch.Tensor, *, requires_grad: bool) -> None:
        """``whole`` is the memory of the unsharded parameter."""
        self.unsharded = nn.Parameter(whole, requires_grad=requires_grad)
        self.shown = self.unsharded
        if self.layout is not None:
            self.shown = self.layout.show(self.unsharded, self.reduce_dtype, self.grad_dtype)

    def become(self, sharded: nn.Parameter) -> None:
        """``sharded`` is what the optimizer has from now on."""
        self.sharded = sharded
        if self.grad_dtype is not None:
            sharded.grad_dtype = self.grad_dtype

    def check_grad_dtype(self, dtype: torch.dtype | None) -> None:
        expected = self.grad_dtype or self.present.dtype
        if dtype != expected:
            refuse(
                f"got '{self.name}' with grad_dtype={dtype} after the first forward, expected "
                f"{expected}",
                "Set grad_dtype before fully_shard.",
                kind=RuntimeError,
            )

    def receive(self, part: torch.Tensor) -> None:
        """``part`` of the averaged gradient becomes ``.grad``, or is added to it, between the
        user's hooks."""
        param = self.sharded
        assert param is not None
        for hook in user_hooks(param, "_backward_hooks"):
            part = self._hooked(hook, part)
        grad = param.grad
        if grad is None:
            try:
                param.grad = self.as_dtensor(part)
            except RuntimeError:
                self.check_grad_dtype(param.grad_dtype)
                raise
        else:
            with torch.no_grad():
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                local.add_(part)
        for hook in user_hooks(param, "_post_accumulate_grad_hooks"):
            hook(param)

    def _hooked(self, hook: Callable[..., Any], part: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of what a hook of ``register_hook`` makes of a gradient."""
        given = self.as_dtensor(part)
        made = hook(given)
        if made is None:
            return part
        if not isinstance(made, DTensor):
            refuse(
                f"got {type(made).__name__} from a hook on '{self.name}', expected a DTensor like "
                "the gradient, or None",
                "Return what is computed of the gradient that the hook gets.",
                kind=TypeError,
            )
        spec = (made.shape, made.dtype, made.placements)
        if made.device_mesh != given.device_mesh or spec != (
            given.shape,
            given.dtype,
            given.placements,
        ):
            refuse(
                f"got {made.dtype} of shape {tuple(made.shape)} placed {made.placements} from a "
                f"hook on '{self.name}', expected {given.dtype} of shape {tuple(given.shape)} "
                f"placed {given.placements}",
                "Return a gradient like the one that the hook gets.",
                kind=RuntimeError,
            )
        return local_of(made)


def user_hooks(param: torch.Tensor, kind: str) -> tuple[Callable[..., Any], ...]:
    """The hooks that a user has registered on ``param``; ``kind`` is torch's dictionary of them."""
    hooks = getattr(param, kind, None)
    return tuple(hooks.values()) if hooks else ()


def collect(
    modules: Iterable[nn.Module],
    roots: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    placement_of: Callable[[nn.Parameter], Any] | None,
    policy: MixedPrecisionPolicy,
    mesh: FsdpMesh,
) -> dict[FsdpMesh, list[ShardedParameter]]:
    """The parameters of ``modules``, each once, in the order of their names: those over ``mesh``,
    and over what ``placement_of`` says for others.

    Raises:
        ValueError, NotImplementedError: one of them cannot be sharded.
    """
    prefixes = {module: name for root in roots for name, module in root.named_modules()}
    found: dict[nn.Parameter, ShardedParameter] = {}
    by_mesh: dict[FsdpMesh, list[ShardedParameter]] = {mesh: []}
    others: dict[DeviceMesh, FsdpMesh] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            if param not in found:
                full_name = f"{prefixes[module]}.{name}".removeprefix(".")
                given = None if placement_of is None else placement_of(param)
                placement, own_mesh = resolve_placement(full_name, given, mesh, others)
                check_parameter(full_name, param, own_mesh.device)
                check_placement(full_name, param, own_mesh)
                dim = shard_dim(full_name, param, placement)
                sizes = list(local_of(param).shape)
                found[param] = ShardedParameter(full_name, param, [], dim, sizes)
                _set_dtypes(found[param], policy)
                by_mesh.setdefault(own_mesh, []).append(found[param])
            found[param].places.append((module, name))
    return by_mesh


def _set_dtypes(one: ShardedParameter, policy: MixedPrecisionPolicy) -> None:
    """Takes over what torch's policy says for this parameter."""
    if not one.present.is_floating_point():
        return
    resolved = policy
    if hasattr(policy, "_resolve_for_param"):
        resolved = policy._resolve_for_param(one.present)
    one.param_dtype = resolved.param_dtype
    one.reduce_dtype = resolved.reduce_dtype
    one.grad_dtype = chosen_grad_dtype(one.name, one.present) or one.grad_dtype
    follows_param = one.grad_dtype is None and not _REDUCES_IN_ORIGINAL_DTYPE
    if one.reduce_dtype is None and follows_param:
        one.reduce_dtype = one.param_dtype


def _cast(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    meta = TensorMeta(spec.shape, spec.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def shard(group: ParamGroup, params: Sequence[ShardedParameter], mesh: FsdpMesh) -> None:
    """Writes this rank's shards of the original parameters, which are given up for DTensors."""
    locals_, wholes = group.sharded(), group.unsharded()
    for index, param in enumerate(params):
        original = param.original
        assert original is not None
        param.describe_on(mesh)
        local = locals_[index]
        given = local_of(original)
        if given.is_meta:
            local = torch.empty_like(local, device="meta")
        else:
            group.write_whole(index, given.detach())
        sharded = nn.Parameter(param.as_dtensor(local), requires_grad=original.requires_grad)
        sharded._local_tensor = local  # type: ignore[attr-defined]  # nn.Parameter made an alias
        sharded.__dict__.update(original.__dict__)
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if user_hooks(original, kind):  # their handles know this dictionary
                setattr(sharded, kind, getattr(original, kind))
        param.become(sharded)
        param.compute_with(wholes[index], requires_grad=original.requires_grad)
        original._trireme_sharded = param.name  # type: ignore[attr-defined]
        param.original = None
        for module, name in param.places:
            _put(module, name, sharded)


def _put(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Calls a setattr of the class's own: layers with caches of their parameters renew them."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = param
    else:
        setattr(module, name, param)


def copy_shards(
    group: ParamGroup, params: Sequence[ShardedParameter], memo: dict[int, Any]
) -> list[ShardedParameter]:
    """Copies of ``params`` over the memory of ``group``, under their modules' old places. ``memo``
    is that of the deep copy: who meets a parameter later takes its copy."""
    copies = []
    wholes = group.unsharded()
    for index, (param, shard_) in enumerate(zip(params, group.sharded(), strict=True)):
        sharded = param.sharded
        assert sharded is not None
        local = local_of(sharded)
        if local.is_meta:
            shard_ = local
        else:
            group.write_shard(index, local.detach())
        made = replace(param, places=list(param.places))
        requires_grad = sharded.requires_grad
        copied = nn.Parameter(param.as_dtensor(shard_), requires_grad=requires_grad)
        copied._local_tensor = shard_  # type: ignore[attr-defined]  # nn.Parameter made an alias
        made.become(copied)
        made.compute_with(wholes[index], requires_grad=requires_grad)
        memo[id(sharded)] = made.sharded
        copies.append(made)
    return copies


def note_casts(params: Sequence[ShardedParameter], policy: MixedPrecisionPolicy) -> bool:
    """Takes over the dtypes to which sharded parameters, or their gradients, were cast; whether any
    was."""
    any_cast = False
    for param in params:
        module, name = param.places[0]
        given = module._parameters[name]
        dtype, spec = next(iter(param.specs.items()))
        if not isinstance(given, DTensor):
            continue
        grad_dtype = chosen_grad_dtype(param.name, given) or param.grad_dtype
        if given.dtype == dtype and grad_dtype == param.grad_dtype:
            continue
        param.specs = {given.dtype: _cast(spec, given.dtype)}
        param.sharded = given
        _set_dtypes(param, policy)
        param.become(given)
        any_cast = True
    return any_cast


def check_data(groups: Iterable[tuple[ParamGroup, Sequence[ShardedParameter]]]) -> None:
    """Refuses ``.data =`` on parameters of units, once: torch has not put the values there.

    Raises:
        RuntimeError: a parameter has got another ``.data`` since this was asked.
    """
    given = [params[index].name for group, params in groups for index in group.take_given_data()]
    if given:
        refuse(
            f"got '{given[0]}' with another .data, which a DTensor does not take over: its values "
            "are those from before",
            "Write in place: with torch.no_grad(): param.copy_(values).",
            kind=RuntimeError,
        )


def is_cast(param: ShardedParameter) -> bool:
    """Whether the user has put another dtype in place of a sharded parameter."""
    module, name = param.places[0]
    given = module._parameters[name]
    return given is not None and given.dtype != next(iter(param.specs))


def adopt(
    group: ParamGroup, params: Sequence[ShardedParameter], shards: Sequence[torch.Tensor]
) -> None:
    """What the user has put in place of sharded parameters, or of their memory, is brought back
    into the memory that all ranks share.

    Raises:
        ValueError: it does not fit.
    """
    for index, param in enumerate(params):
        module, name = param.places[0]
        given = module._parameters[name]
        if given is None or given is param.shown:
            continue
        sharded = _checked(param, given)
        for other, other_name in param.places[1:]:
            _put(other, other_name, sharded)
        local = sharded._local_tensor  # type: ignore[attr-defined]
        shard_ = shards[index]
        if local.is_meta:
            refuse(
                f"got parameter '{param.name}' on the meta device at its first use",
                "Call model.to_empty(device='cpu') and initialise the parameters.",
                kind=RuntimeError,
            )
        if not (group.lies_in_store(index) and local.is_set_to(shard_)):
            values = local.detach().clone()
            group.return_to_store(index)
            group.write_shard(index, values)
        sharded._local_tensor = shard_  # type: ignore[attr-defined]
        param.become(sharded)


def _checked(one: ShardedParameter, given: nn.Parameter) -> nn.Parameter:
    expected = next(iter(one.specs.values()))
    if not isinstance(given, DTensor):
        got = f"got a plain tensor for '{one.name}', expected a DTensor on {expected.mesh}"
        refuse(got, "Load with torch.distributed.checkpoint.state_dict.set_model_state_dict.")
    dtype = next(iter(one.specs))
    if given.shape != expected.shape or given.dtype != dtype:
        refuse(
            f"got '{one.name}' as {given.dtype} of shape {tuple(given.shape)}, expected "
            f"{dtype} of shape {tuple(expected.shape)}",
            "Change shapes before fully_shard, and dtypes before the first forward.",
        )
    if given.placements != expected.placements or given.device_mesh != expected.mesh:
        refuse(
            f"got '{one.name}' placed {given.placements} on {given.device_mesh}, expected "
            f"{expected.placements} on {expected.mesh}",
            "Keep the placement that fully_shard gave it.",
        )
    if (chosen := chosen_grad_dtype(one.name, given)) is not None:
        one.check_grad_dtype(chosen)
    return given
