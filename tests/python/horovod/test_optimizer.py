"""DistributedOptimizer: N ranks train as one process on the whole batch does."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
import trireme.horovod as hvd
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

from harness import pretended_hosts
from harness.deaths import assert_seen_soon
from harness.faults import kill_this_rank, note_death, raises
from harness.meeting import say, stay_until
from harness.models import batch, mlp
from harness.ranks import run_ranks

ROWS = 12  # as many for each rank, of 1 to 4

Make = Callable[[list[torch.Tensor]], Optimizer]


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def own_rows(step: int) -> torch.Tensor:
    return batch(step, ROWS)[hvd.rank() :: hvd.size()]


def expect_same(ours: nn.Module, one: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=name)


def train_alone(make: Make, factor: float, steps: int = 4) -> nn.Module:
    """One process on whole batches; the loss is multiplied."""
    model = mlp()
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        (factor * loss_of(model, batch(step, ROWS))).backward()
        optimizer.step()
    return model


def wrapped(model: nn.Module, make: Make = sgd, named: bool = True, **options: Any) -> Any:
    plain = make(list(model.parameters()))
    names = model.named_parameters() if named else None
    return hvd.DistributedOptimizer(plain, names, **options)


def equal_one_process(rank: int) -> None:
    hvd.init()
    world = hvd.size()
    fp16 = {"compression": hvd.Compression.fp16}
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({}, 1, 1e-5),
        ({"gradient_predivide_factor": 4.0}, 1, 1e-5),
        ({"backward_passes_per_step": 2}, 2, 1e-5),
        ({"backward_passes_per_step": 2, "op": hvd.Sum}, 2.0 * world, 1e-4),
        (fp16, 1, 2e-2),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, float(world), 5e-2),
        ({"groups": 2, "sparse_as_dense": True}, 1, 1e-5),
    ]
    for make in (sgd, adamw):
        for number, (options, factor, tolerance) in enumerate(cases):
            model = mlp()
            optimizer = wrapped(model, make, named=number % 2 == 0, **options)
            assert isinstance(optimizer, make([nn.Parameter(torch.ones(1))]).__class__)
            passes = options.get("backward_passes_per_step", 1)
            for step in range(4):
                optimizer.zero_grad()
                for _ in range(passes):
                    loss_of(model, own_rows(step)).backward()
                optimizer.step()
            expect_same(model, train_alone(make, factor), tolerance)
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_it_equals_one_process(world: int) -> None:
    run_ranks(equal_one_process, world, timeout=60)


def clip_between(rank: int) -> None:
    """Clipping sees the norm of the average; a step may skip to synchronize, or does so again."""
    one, model = mlp(), mlp()
    plain, optimizer = sgd(one.parameters()), wrapped(model)
    for step in range(3):
        plain.zero_grad()
        optimizer.zero_grad()
        loss_of(one, batch(step, ROWS)).backward()
        loss_of(model, own_rows(step)).backward()
        optimizer.synchronize()
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.05) for net in (one, model)]
        torch.testing.assert_close(norms[0], norms[1])
        plain.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
    expect_same(model, one)
    optimizer.zero_grad()
    loss_of(model, own_rows(0)).backward()
    optimizer.synchronize()
    model[0].bias.grad.fill_(float(rank))  # is averaged again
    with pytest.warns(UserWarning, match=r"called without optimizer.skip_synchronize\(\) context"):
        optimizer.step()
    mean = sum(range(hvd.size())) / hvd.size()
    torch.testing.assert_close(model[0].bias.grad, torch.full((13,), mean))


def count_passes(rank: int) -> None:
    """Fewer passes are reduced by the step; one too many is refused, and the step works."""
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model, backward_passes_per_step=3), sgd(one.parameters())
    for step, passes in enumerate((2, 3, 1, 3)):
        plain.zero_grad()
        optimizer.zero_grad()
        (passes * loss_of(one, batch(step, ROWS))).backward()
        for _ in range(passes):
            loss_of(model, own_rows(step)).backward()
        with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
            optimizer.zero_grad()
        if passes == 3:
            with raises(AssertionError, "backward_passes_per_step", "'4."):
                loss_of(model, own_rows(step)).backward()
            with raises(AssertionError, "backward_passes_per_step"):
                optimizer.set_backward_passes_per_step(4)
        plain.step()
        optimizer.step()
        expect_same(model, one)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    plain.zero_grad()
    loss_of(one, batch(9, ROWS)).backward()
    loss_of(model, own_rows(9)).backward()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)  # backward has reduced it
    optimizer.step()
    plain.step()
    # As many passes on no two ranks: those with fewer take part when they step.
    optimizer.set_backward_passes_per_step(hvd.size())
    optimizer.zero_grad()
    for _ in range(rank + 1):
        loss_of(model, batch(10, ROWS)).backward()
    optimizer.step()
    plain.zero_grad()
    ((hvd.size() + 1) / 2 * loss_of(one, batch(10, ROWS))).backward()
    plain.step()
    expect_same(model, one)


class Parts(nn.Module):
    """Layers that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number in used:
                x = layer(x).tanh()
        return x.square().mean()


def use_parts(rank: int) -> None:
    """A gradient that only some ranks have: the others count as zeros. One that none has is None.
    Parts frozen and unfrozen, backwards that reach different parts, one after the other."""
    world = hvd.size()
    model, one = Parts(), Parts()
    model.layers[1].requires_grad_(False)
    optimizer, plain = wrapped(model, adamw), adamw(one.parameters())
    for step in range(6):
        frozen = step in (0, 3, 4)
        for net in (model, one):
            net.layers[1].requires_grad_(not frozen)
        optimizer.zero_grad()
        plain.zero_grad()
        x = batch(step, ROWS)
        for other in range(world):
            (one(x, {0, 1, 2 + other % 2 if step else 2}) / world).backward()
        model(x, {0, 1, 2 + rank % 2 if step else 2}).backward()
        if step == 0 or world == 1:
            assert model.layers[3].weight.grad is None
        assert (model.layers[1].weight.grad is None) == frozen
        optimizer.step()
        plain.step()
        expect_same(model, one, 1e-4)
    optimizer.zero_grad()
    plain.zero_grad()
    for used in ({0}, {2, 3}):
        model(own_rows(7), used).backward()
        one(batch(7, ROWS), used).backward()
    optimizer.step()
    plain.step()
    expect_same(model, one, 1e-4)
    if rank == 0:  # ranks with nothing to reduce take part
        model(own_rows(8), {0}).backward()
    optimizer.step()


class Rows(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(20, 4, sparse=sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().sum()


def use_rows(rank: int) -> None:
    """Sparse gradients stay sparse, unless they are to become dense."""
    ids = torch.arange(12) % 7
    for make, sparse, options in (
        (lambda parameters: SparseAdam(parameters, lr=0.01), True, {}),
        (sgd_plain, True, {"backward_passes_per_step": 2}),
        (lambda parameters: SparseAdam(parameters, lr=0.01), True, {"sparse_as_dense": True}),
        (adamw, False, {}),
    ):
        model, one = Rows(sparse), Rows(sparse)
        optimizer, plain = wrapped(model, make, **options), make(list(one.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            passes = options.get("backward_passes_per_step", 1)
            for _ in range(passes):
                model(ids[rank :: hvd.size()]).backward()
            gradient = model.table.weight.grad
            assert gradient is not None
            assert gradient.is_sparse == sparse
            (passes * one(ids) / hvd.size()).backward()
            optimizer.step()
            plain.step()
        expect_same(model, one)
    table = nn.Parameter(torch.ones(5, 2))
    optimizer = hvd.DistributedOptimizer(sgd_plain([table]))
    with raises(ValueError, "sparse gradient of 'allreduce.noname.0.0'", "sparse_as_dense=True"):
        functional.embedding(torch.tensor([1]), table, sparse=True).sum().backward()


def sgd_plain(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1)


def live_with_others(rank: int) -> None:
    """Schedulers, closures, groups that are added, states that are loaded, graphs, copies."""
    model, one = mlp(), mlp()
    plain, inner = adamw(one.parameters()), adamw(model[0].parameters())
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=1.0)  # its step is not ours
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    optimizer.add_param_group({"params": list(model[2:].parameters())})
    assert early.optimizer.param_groups is optimizer.param_groups
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (optimizer, plain)]
    for step in range(2):
        for each, net, x in ((plain, one, batch(step, ROWS)), (optimizer, model, own_rows(step))):
            each.zero_grad()
            loss_of(net, x).backward(create_graph=step == 1)
            if step == 1:
                for parameter in net.parameters():
                    parameter.grad = parameter.grad.detach()
            each.step()
        for schedule in schedules:
            schedule.step()
    expect_same(model, one)
    state = copy.deepcopy(optimizer.state_dict())
    loss_of(model, own_rows(5)).backward()
    optimizer.load_state_dict(state)  # and forgets what came
    optimizer.zero_grad()

    def closure(each: Any, net: nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            each.zero_grad()
            loss = loss_of(net, x)
            loss.backward()
            return loss

        return run

    for step in range(2):
        assert optimizer.step(closure(optimizer, model, own_rows(step))) > 0
        plain.step(closure(plain, one, batch(step, ROWS)))
    expect_same(model, one)
    copied = copy.deepcopy(optimizer)
    with raises(ValueError, "a copy of a DistributedOptimizer"):
        copied.step()

    def refuse(gradient: torch.Tensor) -> None:
        if hvd.rank() == 0:
            raise KeyError("no such gradient")

    hook = model[0].weight.register_hook(refuse)
    with pytest.raises((KeyError, hvd.HorovodInternalError), match="no such gradient"):
        loss_of(model, own_rows(6)).backward()
    hook.remove()
    optimizer.zero_grad()  # what was abandoned is dropped
    plain.zero_grad()
    loss_of(model, own_rows(7)).backward()
    loss_of(one, batch(7, ROWS)).backward()
    optimizer.step()
    plain.step()
    expect_same(model, one)


def scale_gradients(rank: int) -> None:
    """A GradScaler unscales what was reduced; an inf on one rank skips the step of all."""
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model, adamw), adamw(one.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        overflows = float("inf") if step == 1 else 1.0
        own = overflows if rank == 0 else 1.0
        scalers[0].scale(own * loss_of(model, own_rows(step))).backward()
        scalers[1].scale(overflows * loss_of(one, batch(step, ROWS))).backward()
        optimizer.synchronize()
        scalers[0].unscale_(optimizer)
        with optimizer.skip_synchronize():
            scalers[0].step(optimizer)
        scalers[1].step(plain)
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        expect_same(model, one)


def run_programs(rank: int) -> None:
    hvd.init()
    programs = (clip_between, count_passes, use_parts, use_rows, live_with_others)
    for program in (*programs, scale_gradients):
        program(rank)
        hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_programs(world: int) -> None:
    run_ranks(run_programs, world, timeout=90)


def combined(vectors: list[torch.Tensor]) -> torch.Tensor:
    """The formula."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = combined(vectors[:half]).double(), combined(vectors[half:]).double()
    dot = a.flatten() @ b.flatten()
    of_a = 1 - dot / (2 * a.square().sum()) if a.any() else 1.0
    of_b = 1 - dot / (2 * b.square().sum()) if b.any() else 1.0
    return (a * of_a + b * of_b).float()


def combine_changes(rank: int) -> None:
    hvd.init()
    world = hvd.size()
    if world == 3:
        with raises(ValueError, "Adasum over 3 ranks"):
            wrapped(mlp(), op=hvd.Adasum)
        pair = hvd.add_process_set([0, 2])
    else:
        pair = hvd.global_process_set
    ranks = pair.ranks
    assert ranks is not None
    model, all_ = mlp(), [mlp() for _ in ranks]
    optimizer = wrapped(model, op=hvd.Adasum, backward_passes_per_step=2, process_set=pair)
    if rank not in ranks:
        hvd.barrier()
        hvd.shutdown()
        return
    plain = [sgd(each.parameters()) for each in all_]
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(model, batch(step, ROWS)[rank::world]).backward()
        with raises(AssertionError, "backward_passes_per_step"):
            loss_of(model, batch(step, ROWS)[rank::world]).backward()
        with raises(AssertionError, "zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        for other, each, theirs in zip(ranks, all_, plain, strict=True):
            theirs.zero_grad()
            (2 * loss_of(each, batch(step, ROWS)[other::world])).backward()
            theirs.step()
        for number, (start, mine) in enumerate(zip(before, model.parameters(), strict=True)):
            theirs_ = [list(each.parameters())[number] for each in all_]
            expected = start + combined([one.detach() - start for one in theirs_])
            torch.testing.assert_close(mine.detach(), expected)
            with torch.no_grad():
                for one in theirs_:
                    one.copy_(mine)
    with raises(AssertionError, "not supported when using Adasum"), optimizer.skip_synchronize():
        pass
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adasum_combines_what_steps_change(world: int) -> None:
    run_ranks(combine_changes, world, timeout=60)


def reduce_in_sets(rank: int) -> None:
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model, process_set=pair), sgd(one.parameters())
    other = wrapped(mlp())  # of all ranks, meanwhile
    handle = hvd.allreduce_async(torch.ones(1000), name="meanwhile")
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        x = batch(step, ROWS)
        loss_of(model, x[rank::3]).backward()
        if rank == 1:
            loss_of(one, x[1::3]).backward()
        else:
            ((loss_of(one, x[0::3]) + loss_of(one, x[2::3])) / 2).backward()
        optimizer.step()
        plain.step()
    expect_same(model, one)
    hvd.synchronize(handle)
    assert hvd.remove_process_set(pair)
    optimizer.zero_grad()
    loss_of(model, batch(9, ROWS)).backward()
    if rank != 1:
        with raises(ValueError, "after its process set was removed", "Wrap the optimizer again"):
            optimizer.step()
    else:
        optimizer.step()
    hvd.shutdown()
    with raises(ValueError, "after hvd.shutdown()"):
        other.step()
    hvd.init()
    with raises(ValueError, "after hvd.shutdown()"):
        other.step()
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model), sgd(one.parameters())
    loss_of(model, own_rows(0)).backward()
    loss_of(one, batch(0, ROWS)).backward()
    optimizer.step()
    plain.step()
    expect_same(model, one)
    hvd.shutdown()


def test_process_sets_and_runs() -> None:
    run_ranks(reduce_in_sets, 3, timeout=60)


def ask_for_nonsense(rank: int) -> None:
    with pytest.raises(ValueError, match=r"before hvd\.init"):
        wrapped(mlp())
    hvd.init()
    model = mlp()
    parameters = list(model.parameters())
    named = list(model.named_parameters())
    gone = hvd.ProcessSet([0])

    class Own(hvd.Compression.none):  # type: ignore[misc, name-defined]
        pass

    cases: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
        "groups=-1": (ValueError, {"groups": -1}),
        "a parameter twice": (ValueError, {"groups": [[parameters[0]], [parameters[0]]]}),
        "int in groups": (ValueError, {"groups": [[3]]}),
        "str as groups": (ValueError, {"groups": "all"}),
        "more than once": (ValueError, {"named_parameters": [("x", p) for p in parameters]}),
        "without parameters": (ValueError, {"named_parameters": named[1:]}),
        "no tuples": (ValueError, {"named_parameters": [p for _, p in named]}),
        "another op": (ValueError, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        "op=Max": (ValueError, {"op": hvd.Max}),
        "op=77": (ValueError, {"op": 77}),
        "backward_passes_per_step=0": (ValueError, {"backward_passes_per_step": 0}),
        "backward_passes_per_step=1.5": (ValueError, {"backward_passes_per_step": 1.5}),
        "as compression": (ValueError, {"compression": Own}),
        "a process set": (ValueError, {"process_set": gone}),
    }
    for part, (kind, options) in cases.items():
        with raises(kind, part):
            hvd.DistributedOptimizer(sgd(parameters), **options)
    with raises(TypeError, "as optimizer"):
        hvd.DistributedOptimizer(model)
    with raises(ValueError, "LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(parameters))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = wrapped(model, num_groups=3)
    with raises(ValueError, "Wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    # On all ranks, where they differ.
    with raises(ValueError, "backward_passes_per_step=1 on rank 0", "=2 on rank 1"):
        wrapped(mlp(), backward_passes_per_step=rank + 1)
    with raises(ValueError, "op=Average on rank 0 and op=Sum on rank 1"):
        wrapped(mlp(), op=hvd.Sum if rank else hvd.Average)
    with raises(ValueError, "rank 1"):
        wrapped(mlp()[:4] if rank else mlp())
    loss_of(model, own_rows(0)).backward()
    optimizer.step()
    hvd.shutdown()


def test_bad_input() -> None:
    run_ranks(ask_for_nonsense, 2, timeout=60)


def outlive(rank: int) -> None:
    hvd.init()
    model = mlp()
    optimizer = wrapped(model)
    loss_of(model, own_rows(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        stay_until("rank 0 goes on")
        note_death()
        kill_this_rank()
    say("rank 0 goes on")
    with raises(hvd.HorovodInternalError, "rank 1", "has died"):
        loss_of(model, own_rows(1)).backward()
    assert_seen_soon()


def test_a_rank_killed_in_a_backward() -> None:
    run_ranks(outlive, 2, timeout=60, fresh=True, dying=(1,))


def join_unevenly(rank: int) -> None:
    """Rank r has r + 2 batches: the others' gradients count as zeros, the divisor stays."""
    hvd.init()
    world = hvd.size()
    nets = [mlp(), mlp()]
    optimizers = [wrapped(net, backward_passes_per_step=2 - i) for i, net in enumerate(nets)]
    ones = [mlp(), mlp()]
    plain = [sgd(one.parameters()) for one in ones]
    for _ in range(2):
        for step in range(rank + 2):
            for i, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                for _ in range(2 - i if step else 1):
                    loss_of(net, batch(step, ROWS)).backward()
                optimizer.step()
            hvd.allreduce(torch.ones(3), name=f"loss {step}")
        assert hvd.join() == world - 1
        for step in range(world + 1):
            there = sum(step < other + 2 for other in range(world)) / world
            for i, (one, each) in enumerate(zip(ones, plain, strict=True)):
                each.zero_grad()
                ((2 - i if step else 1) * there * loss_of(one, batch(step, ROWS))).backward()
                each.step()
        if rank == world - 1:  # the others have stepped less
            for net, one in zip(nets, ones, strict=True):
                expect_same(net, one)
        for net, one, optimizer, each in zip(nets, ones, optimizers, plain, strict=True):
            with torch.no_grad():
                for mine, theirs in zip(net.parameters(), one.parameters(), strict=True):
                    mine.copy_(theirs)
            optimizer.load_state_dict(copy.deepcopy(each.state_dict()))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_has_joined_gives_zeros_to_backwards(world: int) -> None:
    run_ranks(join_unevenly, world, timeout=60)


def die_while_others_wait_in_join(rank: int) -> None:
    hvd.init()
    model = mlp()
    optimizer = wrapped(model)
    loss_of(model, own_rows(0)).backward()
    optimizer.step()
    if rank == 0:
        say("rank 0 joins")
        with raises(hvd.HorovodInternalError, "rank 1", "has died"):
            hvd.join()
        assert_seen_soon()
        return
    stay_until("rank 0 joins")
    note_death()
    kill_this_rank()


def test_a_rank_killed_while_another_has_joined() -> None:
    run_ranks(die_while_others_wait_in_join, 2, timeout=60, fresh=True, dying=(1,))


def train_elsewhere(rank: int, where: str) -> None:
    """Ranks of several hosts, and over Gloo, join included."""
    if where == "gloo":
        trireme.init(backend="gloo", device="cpu")
    else:
        dist.init_process_group("trireme", pg_options=pretended_hosts.place_of(rank, where))
    hvd.init()
    world = hvd.size()
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model), sgd(one.parameters())
    steps = 3 + (rank == world - 1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, ROWS)).backward()
        optimizer.step()
    assert hvd.join() == world - 1
    for step in range(steps):
        plain.zero_grad()
        ((1.0 if step < 3 else 1 / world) * loss_of(one, batch(step, ROWS))).backward()
        plain.step()
    if rank == world - 1:  # the others have stepped less
        expect_same(model, one)
    hvd.barrier()
    hvd.shutdown()
    if where == "gloo":
        trireme.shutdown()
    else:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["gloo", "2x2"])
def test_other_groups(where: str) -> None:
    world = 2 if where == "gloo" else len(pretended_hosts.LAYOUTS[where])
    run_ranks(train_elsewhere, world, where, timeout=60)


def join_in_a_set(rank: int) -> None:
    """Ranks outside of the optimizer's set have joined, too; one that has joined makes nothing of
    backwards of others."""
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    model, one = mlp(), mlp()
    optimizer, plain = wrapped(model, process_set=pair), sgd(one.parameters())
    steps = {0: 1, 1: 0, 2: 3}[rank]
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step, ROWS)).backward()
        optimizer.step()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    assert hvd.join() in (0, 1, 2)
    for before, parameter in zip(kept, model.parameters(), strict=True):
        assert torch.equal(before, parameter)
    for step in range(steps):
        plain.zero_grad()
        ((1.0 if step == 0 else 0.5) * loss_of(one, batch(step, ROWS))).backward()
        plain.step()
    expect_same(model, one)
    hvd.barrier()
    hvd.shutdown()


def test_join_beside_an_optimizer_over_a_set() -> None:
    run_ranks(join_in_a_set, 3, timeout=60)
