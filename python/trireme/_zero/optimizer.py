"""ZeroRedundancyOptimizer: optimizer state, and with stage 2 gradients, sharded over the ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer

from trireme._C import Zero, ZeroCores, ZeroOptions
from trireme._core.clip_grad import clip_grad_norm_
from trireme._core.compression import Compression, checked, core_of, note_codes
from trireme._core.group_communicator import communicator_of, device_of_numbers
from trireme._core.joined_steps import JoinedSteps
from trireme._core.modules_around import ModulesAround
from trireme._core.owners import ShardedOptimizer, hyperparameters, note_optimizer
from trireme._core.writing import abandoning
from trireme._zero import AREA, refuse
from trireme._zero.agreement import agree_on_names, together
from trireme._zero.checks import (
    as_param_groups,
    check_averaged,
    check_fused_step,
    check_optimizer_class,
    check_parameters,
    check_stage,
    names_of,
    placement_for,
)
from trireme._zero.fused import fused_adam_step
from trireme._zero.join import ZeroJoinHook
from trireme._zero.loading import watch_loading
from trireme._zero.scaler import ScalerCheck
from trireme._zero.state import LoadedState, ShardLayout, consolidate

# torch means to replace the keyword by attributes, which cannot tell the scaler what the other
# ranks found. Until then the keyword is the way to take the same decision on all ranks.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


class ZeroRedundancyOptimizer(TorchZero, ShardedOptimizer):
    """ZeRO stages 1 and 2; replaces ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Each rank runs ``optimizer_class`` on its shards of the parameters only, so the optimizer's
    state is there once per group of ranks. With ``stage=2`` the gradients are sharded, too: this
    class averages them while backward computes them, and needs no DistributedDataParallel.

    On ranks that share a host (backend ``trireme``) the parameters lie once, in memory that all of
    them map; a rank's optimizer writes its shards in place and nothing is gathered. ``step()`` is
    the gate: it waits until nobody reads the parameters any more, writes, waits until all have
    written. Elsewhere parameters are private and ``step()`` gathers them.

    Signature, ``state_dict`` format and ``consolidate_state_dict`` are those of torch's class, of
    which this is a subclass; a state dict fits any number of ranks, and the plain optimizer.

    What differs:

    * Parameters of several dtypes; parameter groups added later; every optimizer class. One that
      is known to treat elements alike (``torch.optim`` but for the following, ``trireme.optim``)
      gets a slice of each parameter; any other (``Muon``, ``Adafactor``, yours) whole parameters,
      balanced by size. ``placement="shards"`` or ``"whole"`` decides otherwise. ``LBFGS`` is
      refused: it needs all of them at once.
    * An in-place write to a parameter outside of ``step()`` raises at the next one, since all ranks
      would write the same memory; do it inside ``with trireme.writing(optimizer):``. Writes through
      ``.data`` raise, too, if they change a sampled element: those to whole parameters do.
      ``model.load_state_dict()`` needs no such thing: load the same on all ranks.
    * One that is made over all parameters of another takes over: the first one raises from then on.
    * With ``stage=2`` a ``.grad`` has its full shape, but holds this rank's shards of the average
      and zeros elsewhere. Clip with ``optimizer.clip_grad_norm_()`` or
      ``trireme.clip_grad_norm_()``. What changes such a gradient otherwise makes ``step()`` raise
      (``GradScaler`` is welcome).
    * ``overlap_with_ddp=True`` is refused: there is nothing to overlap.
      ``parameters_as_bucket_view`` is accepted and unneeded.

    Args:
        params: parameters, named parameters or groups, the same on all ranks, on one device. Ranks
            start from rank 0's values. Messages call a parameter by the name that is given, else by
            the one that the module has in which it hangs.
        optimizer_class: of ``torch.optim``, ``trireme.optim`` or yours; ``**defaults`` go to it.
        process_group: of torch.distributed; the default group if None.
        stage: 1 or 2.
        host_params: False keeps parameters private to each rank.
        placement: ``"shards"``, ``"whole"`` or None (see above).
        fused_step: with stage 2 and ``trireme.optim.Adam`` or ``AdamW``, on ranks that share
            memory: gradients are summed up, averaged and stepped with in one pass inside
            ``step()``. ``.grad`` stays None, so use ``optimizer.zero_grad()``, which forgets what
            was not stepped with. ``clip_grad_norm_`` and ``GradScaler.step`` make the sums first.
            Takes memory for all gradients of each rank.
        compression: with stage 2, what gradients become on slow links, of ``trireme.compression``;
            themselves if None. The same on all ranks. Under stage 1 DistributedDataParallel has it.

    Raises:
        ValueError, TypeError: bad arguments; parameters that differ between ranks (on all ranks).
        RuntimeError: out of ``step()``, on all ranks: a parameter or gradient was changed in a way
            that ranks cannot follow.
        torch.distributed.DistBackendError: the group failed.

    Cost: see ``csrc/strategies/zero/zero.h``; ``step()`` is two small collectives.
    """

    # GradScaler leaves unscaling and the decision to step to us.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        stage: int = 1,
        host_params: bool = True,
        placement: str | None = None,
        fused_step: bool = False,
        compression: Compression | None = None,
        **defaults: Any,
    ) -> None:
        # torch's __init__ would partition whole parameters; its methods below are all replaced.
        self.process_group = AREA.expect_group(
            process_group, "Make the optimizer on the ranks of the group only."
        )
        check_stage(stage, overlap_with_ddp, self.process_group)
        check_optimizer_class(optimizer_class, stage, self.process_group)
        groups = as_param_groups(params, self.process_group)
        self.initialized = False
        Optimizer.__init__(self, groups, dict(defaults))
        Joinable.__init__(self)
        self.stage = stage
        self.world_size = self.process_group.size()
        self.rank = self.process_group.rank()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._options = ZeroOptions()
        self._options.stage = stage
        self._options.host_params = host_params
        self._options.placement = placement_for(optimizer_class, placement, self.process_group)
        check_fused_step(fused_step, stage, optimizer_class, self.process_group)
        self._options.fused_step = fused_step
        self.compression = checked(compression, partial(refuse, group=self.process_group))
        self._options.compression = core_of(self.compression)
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self._shards: dict[torch.Tensor, torch.Tensor] = {}
        self._default_device = self.param_groups[0]["params"][0].device
        self._joined: JoinedSteps | None = None
        self._communicator = communicator_of(self.process_group)  # lives as long as this
        alive = weakref.ref(self)  # what the core calls must not keep this
        self._zero_cores = ZeroCores(
            communicator=self._communicator,
            options=self._options,
            retired=lambda: _drop_shards(alive()),
        )
        note_optimizer(self._zero_cores, self)
        if self.compression is not None:
            note_codes(self, self._zero_cores)
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._add_core(self.param_groups)
        with self._together():
            local = [self._local_group(group) for group in self.param_groups]
            self.optim = optimizer_class(local, **defaults)
        self._show_defaults()
        self.initialized = True

    @property
    def _cores(self) -> list[Zero]:
        """One of the constructor, and one of each ``add_param_group``. Raises RuntimeError if
        another optimizer has taken over the parameters."""
        return self._zero_cores.live()

    def _add_core(self, groups: list[dict[str, Any]]) -> None:
        """Shards the parameters of ``groups``. Collective."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        around = ModulesAround(parameters)
        names = names_of(groups, len(self.param_groups) - len(groups), around.names())
        numbers = device_of_numbers(self.process_group)
        try:
            with together("parameters", numbers, self.process_group):
                check_parameters(names, self.process_group)
                check_averaged(names, self.stage, self.process_group)
                self._zero_cores.claim([names[parameter] for parameter in parameters], parameters)
            were_given = "param_names" in groups[0]
            names = agree_on_names(names, were_given, numbers, self.process_group)
            self._zero_cores.shard([names[parameter] for parameter in parameters], parameters)
        except Exception:
            self._zero_cores.undo()
            raise
        self._note_places()
        watch_loading(around.holders)

    def _note_places(self) -> None:
        self._places.clear()
        self._shards.clear()
        for number, core in enumerate(self._cores):
            for index, parameter in enumerate(core.parameters()):
                self._places[parameter] = (number, index)
            self._shards.update(zip(core.parameters(), core.shards(), strict=True))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What an optimizer of one rank refuses is refused on all ranks, and the parameters of the
        core that was added last are as before. Collective."""
        try:
            with together("an optimizer", self._default_device, self.process_group):
                yield
        except Exception:
            self._zero_cores.undo()
            self._note_places()
            raise
        self._zero_cores.commit()

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """``group`` for this rank's optimizer: of its parameters the shards that it owns."""
        shards = [self._shards[parameter] for parameter in group["params"]]
        owned = [shard for shard in shards if shard.numel() > 0]
        return {"params": owned, **hyperparameters(group)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does what torch's does; collective once the optimizer is made."""
        if self.initialized:
            self._zero_cores.live()
        Optimizer.add_param_group(self, param_group)
        if not self.initialized:
            return
        added = self.param_groups[-1]
        try:
            self._add_core([added])
            with self._together():
                self.optim.add_param_group(self._local_group(added))
        except Exception:
            self.param_groups.pop()
            del self.optim.param_groups[len(self.param_groups) :]  # where this rank's took it
            raise
        self._show_defaults()

    def _show_defaults(self) -> None:
        """Shows what the inner optimizer has filled in: schedulers look for it in our groups."""
        for shown, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key, value in hyperparameters(local).items():
                shown.setdefault(key, value)
        for key, value in self.optim.defaults.items():
            self.defaults.setdefault(key, value)

    def _sync_hyperparameters(self) -> None:
        for shown, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            local.update(hyperparameters(shown))

    # the step

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step of all ranks together; when it returns every parameter is whole. Collective.

        ``closure`` is called once, before anything is written. ``grad_scaler`` is what
        ``GradScaler.step`` passes: gradients are unscaled here, and no rank steps if any rank found
        an inf. Further arguments go to the optimizer.

        Raises:
            RuntimeError: a parameter was written outside, or with stage 2 a gradient changed.
            torch.distributed.DistBackendError: another rank failed in its step.
        """
        cores, loss = self._cores, None
        if closure is not None:
            with torch.enable_grad(), abandoning(cores):
                loss = closure()
        if self.stage == 1:
            Join.notify_join_context(self)
        if self._joined is not None and (self._joined.has_run_out or self._in_join() is not None):
            self._joined.share_step()
        scaler = ScalerCheck(grad_scaler, self)
        goes = self._zero_cores.begin_step(scaler.found_inf, scaler.writes)
        scaler.tell(found_inf=not goes)
        with abandoning(cores):
            if goes:
                self._sync_hyperparameters()
                scaler.unscale(self._shards.values())
                for number, core in enumerate(cores):
                    fused_adam_step(self, number, core)
                self.optim.step(**kwargs)
        self._zero_cores.end_step()
        return loss

    def _in_join(self) -> JoinedSteps | None:
        joined = self._joined
        is_told = joined is not None and not joined.has_run_out and self._join_config.enable
        return joined if is_told else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what torch's does; under stage 2 zeros take memory for this rank's shards only."""
        self._zero_cores.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate on this rank; the next one outside averages. Stage 2.

        Gradients that were averaged before are set aside meanwhile and added then.
        """
        if self.stage == 1:
            refuse(
                "got no_sync() under stage 1, where DistributedDataParallel averages",
                "Use the no_sync() of the wrapped module.",
                self.process_group,
                kind=RuntimeError,
            )
        self._zero_cores.live()
        self._zero_cores.set_synchronize(False)
        try:
            yield
        finally:
            self._zero_cores.set_synchronize(True)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scales the gradients of all parameters to a common norm of at most ``max_norm``.

        Returns the norm before, the same on all ranks. Under stage 2 one all-reduce of one number
        per call of ``add_param_group`` and constructor, under stage 1 none. Collective.
        """
        self._zero_cores.live()
        parameters = self._parameters()
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def last_step(self) -> dict[str, float]:
        """Says where the time of the last synchronized backward went; keys as in DDP's. Stage 2."""
        if self.stage == 1:
            refuse(
                "got last_step() under stage 1, which moves no gradients",
                "Ask the DistributedDataParallel module.",
                self.process_group,
                kind=RuntimeError,
            )
        return self._cores[0].last_step()

    # state

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the state of all shards to rank ``to``, on CPU. Collective.

        Tensors are broadcast as they are, about 32 MiB at a time, and described by text: nothing is
        pickled. Costs the state of the other ranks once in the memory of ``to``, and a batch of it
        elsewhere.
        """
        layout = self._layout()
        self._sync_hyperparameters()
        self._consolidated = consolidate(self.optim, layout, self.process_group, to)

    def state_dict(self) -> dict[str, Any]:
        """Returns what ``consolidate_state_dict`` brought here last, as the plain optimizer has it.

        Raises:
            RuntimeError: nothing was brought to this rank.
        """
        if self._consolidated is None:
            refuse(
                "got state_dict() of a state that was not consolidated here",
                f"Call consolidate_state_dict(to={self.rank}) on all ranks before.",
                self.process_group,
                kind=RuntimeError,
            )
        shown = Optimizer.state_dict(self)
        return {**shown, "state": self._consolidated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a whole state dict: of this class, at any number of ranks, of
        torch's, or of the plain optimizer. Hooks of loading see all of it.

        Raises:
            ValueError: it belongs to other parameters.
        """
        state_dict = state_dict.copy()  # as in torch: hooks may write into this one
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            if changed is not None:
                state_dict = changed
        loaded = LoadedState(state_dict, self._layout(), self.process_group)
        for shown, group in zip(self.param_groups, loaded.param_groups, strict=True):
            shown.update(group)
        self._sync_hyperparameters()
        loaded.put_into(self.optim)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _counts(self) -> list[int]:
        """Says how many parameters each core holds."""
        counts = [0] * len(self._cores)
        for core, _ in self._places.values():
            counts[core] += 1
        return counts

    def _layout(self) -> ShardLayout:
        sharded = [core.sharded_parameters() for core in self._cores]
        places = [self._places[parameter] for parameter in self._parameters()]
        return ShardLayout(
            parameters=[sharded[core][index] for core, index in places],
            shards=[self._shards[parameter] for parameter in self._parameters()],
            group_sizes=[len(group["params"]) for group in self.param_groups],
            device=self._default_device,
        )

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``Join([optimizer])`` under stage 2, ``Join([module, optimizer])`` under stage 1.

        A rank that has joined takes part in the others' backwards with zeros, and steps its shards.
        Under stage 1 it gets the averages from Trireme's DistributedDataParallel; torch's leaves
        its gradients as they are. ``divide_by_initial_world_size`` as for DDP (stage 2).
        """
        return ZeroJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Says where torch's ``Join`` puts the tensor by which ranks tell whether they have
        inputs."""
        return self._default_device

    @property
    def join_process_group(self) -> Any:
        """The group over which torch's ``Join`` counts the ranks that have inputs."""
        return self.process_group


def _drop_shards(optimizer: ZeroRedundancyOptimizer | None) -> None:
    """Drops the shards, whose parameters another one has; what was consolidated stays."""
    if optimizer is None:
        return
    optimizer._places.clear()
    optimizer._shards.clear()
    optimizer.optim.param_groups = []
    optimizer.optim.state.clear()
