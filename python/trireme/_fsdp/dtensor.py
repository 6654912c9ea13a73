"""Parameters that were DTensors before fully_shard: parts of a model, which are sharded once more.

To the core such a parameter is its local tensor: what the ranks of the data mesh share. Around that
there are two DTensors. The optimizer has one on the mesh of all dimensions, placed as torch's
FSDP2 places it. The module shows, unsharded, one on the mesh that the parameter had before, a leaf
whose gradient goes on into the core's leaf as a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from trireme._C import accumulate_through
from trireme._core.meshes import is_cut
from trireme._fsdp import refuse

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trireme._fsdp.mesh import FsdpMesh


def check_placement(name: str, param: nn.Parameter, mesh: FsdpMesh) -> None:
    """Whether the parameter lies where ``mesh`` can shard it.

    Raises:
        ValueError: it does not.
    """
    full = mesh.full
    if not isinstance(param, DTensor):
        if full is not None:
            refuse(
                f"got '{name}', which is a plain tensor, expected a DTensor on {full.mesh}, since "
                "dp_mesh_dims is given",
                "Distribute the model on that mesh first, or leave dp_mesh_dims out.",
            )
        return
    own = param.device_mesh
    if own.device_type != mesh.device.type:
        refuse(
            f"got '{name}' on a mesh of {own.device_type}, expected one of {mesh.device.type}",
            "Cut both meshes from one.",
        )
    if full is None:
        _check_apart(name, own, mesh)
        return
    if own != full.mesh:
        refuse(
            f"got '{name}' on {own}, expected {full.mesh}, which was passed as mesh",
            "Distribute all parameters on that mesh.",
        )
    for index in full.data_dims:
        if not isinstance(param.placements[index], Replicate):
            refuse(
                f"got '{name}' placed {param.placements[index]} on dimension '{full.name(index)}', "
                "expected Replicate(), since fully_shard shards there",
                "Leave data parallel dimensions to fully_shard.",
            )


def _check_apart(name: str, own: DeviceMesh, mesh: FsdpMesh) -> None:
    try:
        mesh.joined_with(own)
    except (RuntimeError, TypeError, ValueError) as error:
        refuse(
            f"got '{name}' on {own}, expected another dimension of the mesh that {mesh.mesh} is "
            f"of ({error})",
            "Cut both from one: mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', "
            "'tp')), then mesh['dp'] and mesh['tp'].",
        )


def contiguous_meta(shape: torch.Size, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)


def sharded_spec(param: DTensor, dim: int | None, mesh: FsdpMesh) -> DTensorSpec:
    """Says how the optimizer's DTensor lies, as torch has it; ``dim`` is sharded, if any."""
    spec = param._spec
    meta = contiguous_meta(spec.shape, param.dtype)
    if mesh.full is None:
        own = mesh.placements(dim)
        if dim is not None:
            own = (*own[:-1], _shard_over(spec, dim, after=-1))
        placements = (*own, *spec.placements)
        return DTensorSpec(mesh.joined_with(spec.mesh), placements, tensor_meta=meta)
    placed = list(spec.placements)
    for index in mesh.full.shard_dims:
        if dim is not None:
            placed[index] = _shard_over(spec, dim, after=index)
    if len(mesh.full.shard_dims) <= 1:
        return DTensorSpec(spec.mesh, tuple(placed), tensor_meta=meta)
    return _with_one_shard_dim(placed, mesh, meta)


def _shard_over(spec: DTensorSpec, dim: int, *, after: int) -> Placement:
    """Cuts what the dimensions of the mesh behind ``after`` have left."""
    later = [
        i for i, placement in enumerate(spec.placements) if i > after and is_cut(placement, dim)
    ]
    parts = math.prod(spec.mesh.size(i) for i in later)
    return _StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)


def _with_one_shard_dim(
    placed: Sequence[Placement], mesh: FsdpMesh, meta: TensorMeta
) -> DTensorSpec:
    """On a mesh that has one dimension in place of those that are sharded together."""
    full = mesh.full
    assert full is not None
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for index, placement in enumerate(placed):
        if index == full.shard_dims[0]:
            meshes.append(mesh.mesh)
            placements += [*([Replicate()] if mesh.mesh.ndim == 2 else []), placement]
        elif index not in full.data_dims:
            meshes.append(full.mesh[full.name(index)])
            placements.append(placement)
    return DTensorSpec(mesh.join(meshes), tuple(placements), tensor_meta=meta)


@dataclass(frozen=True)
class ModelLayout:
    """How a module shows a parameter that is one of its parts of a model."""

    spec: DTensorSpec
    data_dims: frozenset[int]
    """Dimensions of its mesh along which fully_shard averages gradients."""
    dim: int
    """Which is first in memory."""

    def show(
        self,
        leaf: nn.Parameter,
        reduce_dtype: torch.dtype | None,
        grad_dtype: torch.dtype | None,
    ) -> nn.Parameter:
        """A DTensor over the memory of ``leaf``, and a leaf like it. Gradients that reach it go on
        into ``leaf``; ``requires_grad`` of the two is the caller's to keep alike."""
        reduce_dtype = reduce_dtype or grad_dtype
        with torch.inference_mode(False):
            whole = DTensor(leaf.detach(), self._spec_for(leaf.dtype), requires_grad=False)
            shown = nn.Parameter(whole, requires_grad=leaf.requires_grad)
            shown._local_tensor = leaf.detach()  # type: ignore[attr-defined] # one version counter
            if leaf.is_floating_point() or leaf.is_complex():
                through = self._through(leaf, reduce_dtype)
                accumulate_through(shown, through)
                if grad_dtype is not None:
                    shown.grad_dtype = reduce_dtype
                shown._trireme_through = through  # type: ignore[attr-defined] # keeps the node
        return shown

    def _through(self, leaf: nn.Parameter, reduce_dtype: torch.dtype | None) -> torch.Tensor:
        requires_grad = leaf.requires_grad
        leaf.requires_grad_(True)
        with torch.enable_grad():
            through: torch.Tensor = _IntoLeaf.apply(leaf, self, reduce_dtype)
        leaf.requires_grad_(requires_grad)
        return through

    def _spec_for(self, dtype: torch.dtype) -> DTensorSpec:
        shape = list(self.spec.shape)
        if shape:
            shape.insert(0, shape.pop(self.dim))
        stored = torch.empty(shape, device="meta")
        stride = stored.movedim(0, self.dim).stride() if shape else ()
        meta = TensorMeta(self.spec.shape, stride, dtype)
        return DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)

    def local_gradient(self, grad: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.Tensor:
        """This rank's part, placed like the parameter. What is to be summed up along the data
        dimensions stays so: the core does that. Collective where ranks have computed summands, as
        for the weights of a norm under sequence parallelism; these are added in ``reduce_dtype``.
        """
        given: Any = _arrived(grad)
        assert isinstance(given, DTensor), f"got a gradient of type {type(given).__name__}"
        wanted = tuple(
            self._of_data(placement) if index in self.data_dims else self.spec.placements[index]
            for index, placement in enumerate(given.placements)
        )
        if given.placements != wanted:
            if reduce_dtype is not None and any(
                placement.is_partial() for placement in given.placements
            ):
                given = given.to(reduce_dtype)
            given = given.redistribute(placements=wanted)
        return _arrived(given._local_tensor).to(grad.dtype)

    @staticmethod
    def _of_data(placement: Placement) -> Placement:
        return Replicate() if is_cut(placement) else placement


def model_layout(param: DTensor, dim: int, mesh: FsdpMesh) -> ModelLayout:
    data_dims = () if mesh.full is None else mesh.full.data_dims
    return ModelLayout(param._spec, frozenset(data_dims), dim)


def _arrived(tensor: Any) -> torch.Tensor:
    done: torch.Tensor = tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return done


class _IntoLeaf(torch.autograd.Function):
    """The node between the DTensor that a module shows and the leaf that the core has."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, layout: ModelLayout, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.layout, ctx.reduce_dtype = layout, reduce_dtype
        ctx.set_materialize_grads(False)
        return DTensor(leaf.detach(), layout._spec_for(leaf.dtype), requires_grad=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        return ctx.layout.local_gradient(grad, ctx.reduce_dtype), None, None
