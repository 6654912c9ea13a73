"""Communication hooks: torch's own run unchanged and train as under torch's class."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.ranks import backward, run_steps, sgd
from harness.faults import raises
from harness.models import batch, mlp
from harness.on_ranks import WORLD, on_ranks
from harness.training import assert_same_on_all_ranks, gradients

Register = Callable[[Any], None]
Future = torch.futures.Future[torch.Tensor]


def with_hook(hook: Any, state: Any = None) -> Register:
    return lambda ddp: ddp.register_comm_hook(state, hook)


def power_sgd(**options: Any) -> Register:
    def register(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def local_sgd(ddp: Any) -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


HOOKS: dict[str, Register] = {
    "allreduce": with_hook(default_hooks.allreduce_hook),
    "fp16": with_hook(default_hooks.fp16_compress_hook),
    "fp16 around allreduce": with_hook(
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "power sgd": power_sgd(min_compression_rate=0.1),
    "power sgd rank 2, cold": power_sgd(matrix_approximation_rank=2, warm_start=False),
    "post local sgd": local_sgd,
    "per-tensor quantization": with_hook(quantization_hooks.quantization_pertensor_hook),
    "per-channel quantization": with_hook(quantization_hooks.quantization_perchannel_hook),
    "noop": with_hook(debugging_hooks.noop_hook),
    "registry": lambda ddp: register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, ddp),
    "builtin allreduce": lambda ddp: ddp._register_builtin_comm_hook(
        dist.BuiltinCommHookType.ALLREDUCE
    ),
    "builtin fp16": lambda ddp: ddp._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks()
def test_equals_torch_with_the_same_hook(rank: int, name: str) -> None:
    """One bucket on both sides: how gradients share buckets is part of a compression's result."""
    theirs, ours = TorchDDP(mlp()), trireme.DistributedDataParallel(mlp())
    seen = []
    for ddp in (theirs, ours):
        HOOKS[name](ddp)
        torch.manual_seed(rank)
        seen.append(run_steps(ddp, sgd(ddp), backward, rank, 5))
    # Torch's first bucket is in the guessed order, ours too; afterwards both know the order.
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if "quantization" in name else {}
    torch.testing.assert_close(seen[1], seen[0], **tolerance)


@on_ranks()
def test_bfloat16_needs_no_gpu(rank: int) -> None:
    """torch's class asks for NCCL; here the engine decides, and Gloo can."""
    for hook in (
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        ddp = trireme.DistributedDataParallel(mlp())
        ddp.register_comm_hook(None, hook)
        backward(ddp, 0, rank)
        alone = mlp()
        alone(batch(0)).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone), rtol=2e-2, atol=1e-3)
        assert_same_on_all_ranks([p.grad for p in ddp.parameters()])


@on_ranks()
def test_what_a_hook_sees(rank: int) -> None:
    """Index, parameters, gradients as views of the buffer, the sum not yet divided, no tail."""
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    seen: list[Any] = []

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        assert state == "state"
        flat = bucket.buffer()
        for grad, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert grad.shape == parameter.shape
            assert grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert flat.numel() == sum(p.numel() for p in bucket.parameters())
        own = [names[parameter] for parameter in bucket.parameters()]
        seen.append((bucket.index(), bucket.is_last(), own))
        bucket.set_buffer(flat * 2)  # a new buffer may be put in its place
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook("state", hook)
    for step in range(3):
        seen.clear()
        ddp.zero_grad()
        backward(ddp, step, rank)
    assert [bucket[0] for bucket in seen] == list(range(len(seen)))
    assert [bucket[1] for bucket in seen] == [False] * (len(seen) - 1) + [True]
    assert [bucket[2] for bucket in seen] == ddp._core.plan()
    alone = mlp()
    (2 * alone(batch(2)).square().mean()).backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_buckets_keep_their_contents_once_hooks_have_seen_them(rank: int) -> None:
    """Compression keeps its errors by bucket index: unused parameters move no bucket then."""
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(2):
        backward(ddp, step, rank)
    plan = ddp._core.plan()
    for _ in range(3):
        ddp.module.forward = ddp.module[0].forward  # the other layers are unused from here on
        backward(ddp, 0, rank)
        assert ddp._core.plan() == plan


class Tail(nn.Module):
    """Layers whose gradients do not depend on what lies behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.tail = nn.Sequential(nn.Linear(3, 11), nn.Linear(11, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        return torch.cat([hidden, self.tail(hidden.detach())], dim=1)


def tailed(frozen: bool = True) -> Tail:
    torch.manual_seed(2)
    model = Tail()
    model.tail.requires_grad_(not frozen)
    return model


def replace_tail(model: Any) -> None:
    torch.manual_seed(6)
    model.tail = nn.Sequential(nn.Linear(3, 17), nn.Linear(17, 4))


CHANGES: dict[int, Callable[[Any], object]] = {
    3: lambda model: model.tail.requires_grad_(True),
    5: lambda model: model.body[2].requires_grad_(False),
    6: lambda model: model.body.requires_grad_(False),
    8: lambda model: model.body.requires_grad_(True),
    9: replace_tail,
    11: lambda model: setattr(model.tail[1].weight, "grad_dtype", torch.float64),
}


@on_ranks()
def test_an_index_keeps_its_meaning(rank: int) -> None:
    """From the first step on, whatever is frozen, unfrozen or replaced."""
    ddp, alone = trireme.DistributedDataParallel(tailed(), bucket_cap_mb=0.00001), tailed()
    names: dict[nn.Parameter, str] = {}
    meaning: dict[int, list[str]] = {}
    seen: list[int] = []
    last: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        own = [names[parameter] for parameter in bucket.parameters()]
        assert meaning.setdefault(bucket.index(), own) == own
        assert bucket.index() not in seen
        seen.append(bucket.index())
        if bucket.is_last():
            last.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    indices: list[list[int]] = []
    for step in range(13):
        seen.clear()
        last.clear()
        for model in (ddp, alone):
            model.zero_grad()
        for module in (ddp.module, alone):
            CHANGES.get(step, id)(module)
        for name, parameter in ddp.module.named_parameters():
            names.setdefault(parameter, f"{step} {name}")
        backward(ddp, step, rank)
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))
        assert len(last) == 1
        assert last == seen[-1:] or step in CHANGES  # what comes in addition is behind the last
        indices.append(list(seen))
    body = indices[0]
    tail = list(range(len(body), len(indices[4])))
    assert body == list(range(len(body))) == indices[1] == indices[2] and tail
    assert indices[3] == indices[4] == indices[5] == body + tail
    assert set(indices[6]) < set(indices[5])  # one layer is frozen
    assert indices[7] == tail
    assert indices[8] == tail + body
    new = indices[10][len(body) :]
    assert indices[9] == body + tail + new and indices[10] == body + new
    assert new == [place + len(tail) for place in tail]
    cast = indices[11][-1]
    assert indices[11] == [*body, *new, cast] and cast == new[-1] + 1
    assert cast in indices[12] and set(indices[12]) < set(indices[11])


def compressed_power_sgd(ddp: Any) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    wrapped = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    ddp.register_comm_hook(state, wrapped)


KEEPING_STATE: dict[str, Register] = {
    "power sgd": power_sgd(min_compression_rate=0.1),
    "power sgd in bf16": compressed_power_sgd,
    "post local sgd": local_sgd,
    "quantization": HOOKS["per-channel quantization"],
}


@pytest.mark.parametrize("change", ["unfreeze", "replace", "freeze again"])
@pytest.mark.parametrize("name", KEEPING_STATE)
@on_ranks()
def test_state_of_earlier_buckets_is_untouched(rank: int, name: str, change: str) -> None:
    """The body's gradients are to the bit those of a run in which nothing changes behind it."""
    runs = []
    for changes in (False, True):
        model = tailed(frozen=change == "unfreeze")
        ddp = trireme.DistributedDataParallel(model, bucket_cap_mb=0.0003)
        torch.manual_seed(9)
        KEEPING_STATE[name](ddp)
        seen = []
        for step in range(9):
            if changes and step == 4:
                replace_tail(model) if change == "replace" else None
                model.tail.requires_grad_(change != "freeze again")
            if changes and step == 6:
                model.tail.requires_grad_(True)
            ddp.zero_grad()
            backward(ddp, step, rank)
            seen.append(gradients(model.body))
            tail = gradients(model.tail).values()
            assert not changes or step < 6 or all(tensor.isfinite().all() for tensor in tail)
            assert_same_on_all_ranks(
                [gradient for gradient in gradients(model).values() if gradient is not None]
            )
        runs.append(seen)
    for with_it, without in zip(*runs, strict=True):
        for key, grad in with_it.items():
            assert torch.equal(grad, without[key]), key


@on_ranks()
def test_a_state_that_was_saved_goes_on(rank: int) -> None:
    """A new process knows the order of gradients only after its first backward."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    ddp = trireme.DistributedDataParallel(Ordered(), bucket_cap_mb=0.0003)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(8):
        if step == 4:
            saved = pickle.dumps(state)
        ddp.zero_grad()
        backward(ddp, step, rank)
    again = trireme.DistributedDataParallel(Ordered(), bucket_cap_mb=0.0003)
    assert again._core.plan() != ddp._core.plan()
    again.register_comm_hook(pickle.loads(saved), powerSGD_hook.powerSGD_hook)
    for step in range(4, 8):
        again.zero_grad()
        backward(again, step, rank)
    for key, grad in gradients(again).items():
        assert torch.equal(grad, gradients(ddp)[key]), key


class Ordered(nn.Module):
    """Layers are used in another order than they were made in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.last = nn.Linear(9, 3)
        self.first = nn.Linear(6, 12)
        self.middle = nn.Linear(12, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh())


@on_ranks(fresh=True)  # the module and its hook hold each other
def test_hooks_can_ask_whether_the_order_is_learned(rank: int) -> None:
    """torch's ZeRO hooks begin to step when they see _has_rebuilt_buckets."""
    ddp = trireme.DistributedDataParallel(mlp())
    seen: list[bool] = []

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        seen.append(ddp._has_rebuilt_buckets)
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        backward(ddp, step, rank)
    assert seen == [False, True, True]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, head: bool) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) if head else hidden


@on_ranks()
def test_unused_parameters_under_a_hook(rank: int) -> None:
    torch.manual_seed(1)
    ddp = trireme.DistributedDataParallel(Unused())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    for step, heads in enumerate([(True, True), (True, False), (False, False), (False, True)]):
        ddp.zero_grad()
        ddp(batch(step)[rank::WORLD], heads[rank]).square().mean().backward()
        torch.manual_seed(1)
        alone = Unused()
        for of in range(WORLD):
            (alone(batch(step)[of::WORLD], heads[of]).square().mean() / WORLD).backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_the_second_argument_may_have_any_name(rank: int) -> None:
    """torch looks it up as 'bucket' and raises KeyError otherwise."""
    done = []

    def hook(state: object, the_gradients: dist.GradBucket) -> Future:
        done.append(the_gradients.index())
        return default_hooks.allreduce_hook(None, the_gradients)

    def variadic(*state_and_bucket: Any) -> Future:
        return hook(*state_and_bucket)

    for each in (hook, variadic):
        ddp = trireme.DistributedDataParallel(mlp())
        ddp.register_comm_hook(None, each)
        backward(ddp, 0, rank)
    assert done == [0, 0]


@on_ranks(1)
def test_hooks_that_are_refused(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())

    def one_argument(bucket): ...
    def wrong_bucket(state, bucket: int): ...
    def wrong_result(state, bucket) -> int: ...

    with raises(TypeError, "[ddp] got str as communication hook", "(rank 0 of 1)"):
        ddp.register_comm_hook(None, "allreduce")
    with raises(TypeError, "['bucket']", "state and bucket"):
        ddp.register_comm_hook(None, one_argument)
    with raises(ValueError, "<class 'int'> for the bucket", "GradBucket"):
        ddp.register_comm_hook(None, wrong_bucket)
    with raises(ValueError, "return annotation"):
        ddp.register_comm_hook(None, wrong_result)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with raises(RuntimeError, "[ddp] got a second communication hook", "(rank 0 of 1)"):
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


@on_ranks()
def test_a_hook_that_raises(rank: int) -> None:
    """Its own exception comes out of backward() on every rank that called it."""
    ddp = trireme.DistributedDataParallel(mlp())

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        raise KeyError("from the hook")

    ddp.register_comm_hook(None, hook)
    with pytest.raises(Exception, match="from the hook"):
        backward(ddp, 0, rank)


@on_ranks()
def test_a_future_that_fails(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp())

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        def fail(future: Any) -> torch.Tensor:
            raise ArithmeticError("from the future")

        return default_hooks.allreduce_hook(None, bucket).then(fail)

    ddp.register_comm_hook(None, hook)
    with raises(dist.DistBackendError, "communication hook on bucket 0", "from the future"):
        backward(ddp, 0, rank)


@pytest.mark.parametrize("result", [None, 3])
@on_ranks()
def test_a_hook_that_returns_no_future(rank: int, result: object) -> None:
    """Where torch's class dies of None."""
    ddp = trireme.DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, lambda state, bucket: result)
    kind = type(result).__name__
    with raises(TypeError, f"[ddp] got {kind} from communication hook", "torch.futures.Future"):
        backward(ddp, 0, rank)


@on_ranks()
def test_hooks_that_chain_collectives_in_many_buckets(rank: int) -> None:
    """The second collective of a bucket comes from the engine's thread; ranks keep one order."""
    ddp = trireme.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)

    def twice(state: object, bucket: dist.GradBucket) -> Future:
        def again(future: Any) -> torch.Tensor:
            (reduced,) = future.value()
            dist.all_reduce(reduced)
            return reduced / WORLD**2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    ddp.register_comm_hook(None, twice)
    for step in range(8):
        ddp.zero_grad()
        backward(ddp, step, rank)
        alone = mlp()
        alone(batch(step)).square().mean().backward()
        torch.testing.assert_close(gradients(ddp), gradients(alone))


@on_ranks()
def test_no_sync_and_views_under_a_hook(rank: int) -> None:
    ddp = trireme.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with ddp.no_sync():
        backward(ddp, 0, rank)
    backward(ddp, 1, rank)
    alone = mlp()
    for step in range(2):
        alone(batch(step)).square().mean().backward()
    torch.testing.assert_close(gradients(ddp), gradients(alone), rtol=1e-2, atol=1e-3)
