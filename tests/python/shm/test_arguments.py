"""What the backend ``trireme`` is called with: layouts of tensors, and calls that do not match.

A call that cannot work raises on every rank, also if only one of them made the mistake; nothing is
moved, and the next call works.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions

from harness.faults import raises
from harness.meeting import until
from harness.on_ranks import AGES_S, on_shm_ranks
from harness.tensors import assert_bits, assert_lists
from shm.ranks import backend_of, of_all, total, values

WORLD = 3

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

Layout = Callable[[torch.Tensor], torch.Tensor]

# Each makes from a matrix one with the same values in another layout.
LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda t: t,
    "with gaps": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "transposed": lambda t: t.t().contiguous().t(),
    "some columns of a matrix": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    "a slice": lambda t: torch.cat([t, t])[t.shape[0] :],
}


@pytest.mark.parametrize("rows", [4, 20_000])
@on_shm_ranks(WORLD)
def test_layouts(rank: int, rows: int) -> None:
    shape, gathered_shape = (rows, 6), (WORLD * rows, 6)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        of_ranks = of_all(WORLD, shape, dtype)
        whole = [values(peer + 9, gathered_shape, dtype) for peer in range(WORLD)]
        for name, lay_out in LAYOUTS.items():
            tensor = lay_out(of_ranks[rank].clone())
            assert tensor.is_contiguous() == (name in ("contiguous", "a slice"))
            dist.all_reduce(tensor)
            assert_bits(tensor, total(of_ranks), name, "all_reduce")
            tensor = lay_out(of_ranks[rank].clone())
            dist.broadcast(tensor, 1)
            assert_bits(tensor, of_ranks[1], name, "broadcast")
            tensor = lay_out(of_ranks[rank].clone())
            dist.reduce(tensor, 2)
            assert_bits(tensor, total(of_ranks) if rank == 2 else of_ranks[rank], name, "reduce")
            outputs = [lay_out(torch.zeros_like(tensor)) for _ in range(WORLD)]
            dist.all_gather(outputs, lay_out(of_ranks[rank].clone()))
            assert_lists(outputs, of_ranks, name, "all_gather")
            output = lay_out(torch.zeros(shape, dtype=dtype))
            dist.reduce_scatter(output, list(lay_out(whole[rank]).chunk(WORLD)))
            assert_bits(output, total(whole).chunk(WORLD)[rank], name, "reduce_scatter")
            outputs = [lay_out(torch.zeros(shape, dtype=dtype)) for _ in range(WORLD)]
            dist.all_to_all(outputs, [lay_out(part) for part in whole[rank].chunk(WORLD)])
            expected = [tensor.chunk(WORLD)[rank] for tensor in whole]
            assert_lists(outputs, expected, name, "all_to_all")
            dist.gather(lay_out(of_ranks[rank].clone()), outputs if rank == 0 else None)
            assert_lists(outputs, of_ranks if rank == 0 else expected, name, "gather")
            output = lay_out(torch.zeros(shape, dtype=dtype))
            dist.scatter(output, list(lay_out(whole[0]).chunk(WORLD)) if rank == 0 else None)
            assert_bits(output, whole[0].chunk(WORLD)[rank], name, "scatter")


@on_shm_ranks(WORLD)
def test_a_result_leaves_what_is_between_its_elements(rank: int) -> None:
    memory = torch.full((50, 2), -7.0)
    memory[:, 0] = values(rank, 50, torch.float32)
    dist.all_reduce(memory[:, 0])
    assert_bits(memory[:, 0], total(of_all(WORLD, 50, torch.float32)))
    assert torch.all(memory[:, 1] == -7.0)


@on_shm_ranks(WORLD)
def test_inputs_that_repeat_one_element(rank: int) -> None:
    expanded = torch.tensor([float(rank + 1)]).expand(20)
    outputs = [torch.zeros(20) for _ in range(WORLD)]
    dist.all_gather(outputs, expanded)
    assert_lists(outputs, [torch.full((20,), float(peer + 1)) for peer in range(WORLD)])
    output = torch.zeros(20)
    dist.reduce_scatter(output, [expanded] * WORLD)
    assert torch.all(output == 6)
    dist.broadcast(expanded if rank == 1 else output, 1)
    assert torch.all(output == 2) or rank == 1


@on_shm_ranks(WORLD)
def test_results_that_share_one_element(rank: int) -> None:
    """Nothing can be written there; torch says so, and the ranks stay in step."""
    if rank == 1:
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            dist.all_reduce(torch.ones(1).expand(4))
    else:
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert torch.all(tensor == WORLD)
    dist.all_reduce(torch.ones(2))


@on_shm_ranks(WORLD)
def test_conjugates_and_negatives(rank: int) -> None:
    """Views that torch resolves when they are read.

    By the backend itself: torch's dispatcher would hand it resolved copies and drop the results.
    """
    sources = of_all(WORLD, 40, torch.complex64)
    conjugates = [source.conj() for source in sources]
    tensor = sources[rank].clone().conj()
    assert tensor.is_conj()
    backend_of().allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.is_conj()
    assert_bits(tensor, total([conjugate.resolve_conj() for conjugate in conjugates]), "all_reduce")
    outputs = [torch.zeros(40, dtype=torch.complex64).conj() for _ in range(WORLD)]
    backend_of().allgather([outputs], [sources[rank].conj()], AllgatherOptions()).wait()
    assert_lists(outputs, conjugates, "all_gather")
    negative = sources[rank].clone().conj().imag
    assert negative.is_neg()
    backend_of().allreduce([negative], dist.AllreduceOptions()).wait()
    assert_bits(
        negative, total([conjugate.imag.resolve_neg() for conjugate in conjugates]), "negative"
    )


@on_shm_ranks(WORLD)
def test_tensors_that_require_a_gradient(rank: int) -> None:
    """torch's c10d allows them, and no graph grows from it."""
    for lay_out in (LAYOUTS["contiguous"], LAYOUTS["transposed"]):
        for asynchronous in (False, True):
            leaf = lay_out(values(rank, (4, 6), torch.float32)).detach().requires_grad_()
            work = dist.all_reduce(leaf, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert_bits(leaf, total(of_all(WORLD, (4, 6), torch.float32)))
            assert leaf.is_leaf and leaf.requires_grad
            dist.broadcast(leaf, 0)
            outputs = [lay_out(torch.zeros(4, 6)) for _ in range(WORLD)]
            dist.all_gather(outputs, leaf)
            assert not outputs[0].requires_grad


@on_shm_ranks(WORLD)
def test_results_made_under_inference_mode(rank: int) -> None:
    """Nobody waits for the operations, so a thread of the group writes: it is in no such mode."""
    with torch.inference_mode():
        tensor = LAYOUTS["transposed"](values(rank, (4, 6), torch.float32))
        sparse = torch.eye(4).to_sparse()
        assert tensor.is_inference() and sparse.is_inference()
        works = [dist.all_reduce(result, async_op=True) for result in (tensor, sparse)]
        for work in works:
            until(work.is_completed)
            work.wait()
        assert_bits(tensor, total(of_all(WORLD, (4, 6), torch.float32)))
        assert torch.equal(sparse.to_dense(), WORLD * torch.eye(4))


@on_shm_ranks(WORLD)
def test_nothing_to_move(rank: int) -> None:
    """Zero elements and, where torch allows it, zero tensors."""
    dist.all_reduce(torch.empty(0, 5))
    dist.broadcast(torch.empty(3, 0), 0)
    dist.all_to_all_single(torch.empty(0, 4), torch.empty(0, 4), [0] * WORLD, [0] * WORLD)
    backend_of().allreduce_coalesced([], dist.AllreduceCoalescedOptions()).wait()
    dist.all_reduce(torch.ones(()))


def mismatches(rank: int) -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """What ranks call differently, and what the error must name besides."""
    odd = rank == 1
    parts = WORLD * [torch.ones(4)]
    group = dist.group.WORLD

    def root(kind: Any) -> Any:
        options = kind()
        options.rootRank = int(odd)
        return options

    return {
        "shape": (
            lambda: dist.all_reduce(torch.ones(5 if odd else 4)),
            ("all_reduce of 5 float32 by SUM", "all_reduce of 4 float32 by SUM"),
        ),
        "large shape": (
            lambda: dist.all_reduce(torch.ones(700_000 if odd else 500_000)),
            ("700000", "500000"),
        ),
        "dtype": (
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
            ("float64", "float32"),
        ),
        "dtype that is only moved": (
            lambda: dist.all_gather_into_tensor(
                torch.empty(3 * WORLD, dtype=FLOAT8[odd]), torch.empty(3, dtype=FLOAT8[odd])
            ),
            ("all_gather of 9 float8_e4m3fn", "all_gather of 9 float8_e5m2"),
        ),
        "op": (
            lambda: dist.all_reduce(torch.ones(4), ReduceOp.MAX if odd else ReduceOp.SUM),
            ("by MAX", "by SUM"),
        ),
        "root": (
            lambda: group.broadcast([torch.ones(4)], root(dist.BroadcastOptions)).wait(),
            ("with root 1", "with root 0"),
        ),
        "verb": (
            lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4)),
            ("called barrier", "called all_reduce of 4 float32"),
        ),
        "size of all_gather": (
            lambda: dist.all_gather([torch.ones(3 + odd)] * WORLD, torch.ones(3 + odd)),
            ("all_gather of 12 float32", "all_gather of 9 float32"),
        ),
        "splits": (
            lambda: dist.all_to_all_single(
                torch.zeros(WORLD), torch.ones(3), [1] * WORLD, [2, 0, 1] if odd else [1, 1, 1]
            ),
            ("rank 1 sends 8 bytes to rank 0, which expects 4",),
        ),
        "parts of reduce_scatter": (
            lambda: dist.reduce_scatter(
                torch.ones(4), [torch.ones(5), torch.ones(4), torch.ones(3)] if odd else parts
            ),
            ("reduce_scatter of 12 float32 by SUM",),
        ),
        # As many elements in all; added up in one run, each would go to another tensor.
        "tensors of a list": (
            lambda: group.allreduce_coalesced(
                [torch.ones(2 + odd), torch.ones(3 - odd)], dist.AllreduceCoalescedOptions()
            ).wait(),
            ("all_reduce of 5 float32 by SUM of some shapes", "of other shapes"),
        ),
        "number of tensors in a list": (
            lambda: group.allreduce_coalesced(
                [torch.ones(5)] if odd else [torch.ones(2), torch.ones(3)],
                dist.AllreduceCoalescedOptions(),
            ).wait(),
            ("all_reduce of 5 float32 by SUM of some shapes", "of other shapes"),
        ),
        "lists of reduce_scatter": (
            lambda: coalesced(
                lambda n: dist.reduce_scatter_tensor(torch.zeros(n), torch.ones(WORLD * n)),
                (2 + odd, 3 - odd),
            ),
            ("reduce_scatter of 15 float32 by SUM of some shapes", "of other shapes"),
        ),
        "lists of all_gather": (
            lambda: coalesced(
                lambda n: dist.all_gather_into_tensor(torch.zeros(WORLD * n), torch.ones(n)),
                (2 + odd, 3 - odd),
            ),
            ("all_gather of 15 float32 of some shapes", "of other shapes"),
        ),
        "lists of all_gather_coalesced": (
            lambda: dist.all_gather_coalesced(
                [[torch.zeros(2 + odd), torch.zeros(3 - odd)]] * WORLD,
                [torch.ones(2 + odd), torch.ones(3 - odd)],
            ),
            ("all_gather of 15 float32 of some shapes", "of other shapes"),
        ),
    }


def coalesced(call: Callable[[int], Any], numels: tuple[int, ...]) -> None:
    with dist._coalescing_manager():
        for numel in numels:
            call(numel)


def only_one_rank(rank: int) -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """What one rank can see by itself; torch.distributed lets it through."""
    odd = rank == 1
    ones = torch.ones
    group = dist.group.WORLD
    return {
        "outputs of all_gather": (
            lambda: dist.all_gather([torch.zeros(2)] * (WORLD + odd), ones(2)),
            ("all_gather got 4 outputs, expected 3",),
        ),
        "size of an output of all_gather": (
            lambda: dist.all_gather([torch.zeros(2 + odd)] * WORLD, ones(2)),
            ("all_gather got 2 elements in the input, expected 3",),
        ),
        "outputs of all_gather_coalesced": (
            lambda: dist.all_gather_coalesced(
                [[torch.zeros(2 + odd), torch.zeros(3 - odd)]] * WORLD, [ones(2), ones(3)]
            ),
            ("all_gather got 3 elements in a tensor of a list, expected 2",),
        ),
        "number of outputs of all_gather_coalesced": (
            lambda: dist.all_gather_coalesced(
                [[torch.zeros(5)] if odd else [torch.zeros(2), torch.zeros(3)]] * WORLD,
                [ones(2), ones(3)],
            ),
            ("all_gather got 1 tensors in a list, expected 2",),
        ),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(torch.zeros(6 + odd), ones(2)),
            ("all_gather got 7 elements in an output, expected 6",),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(torch.zeros(2), ones(6 + odd)),
            ("reduce_scatter got 7 elements in an input, expected 6",),
        ),
        "inputs of reduce_scatter": (
            lambda: dist.reduce_scatter(torch.zeros(2), [ones(2)] * (WORLD + odd)),
            ("reduce_scatter got 4 inputs, expected 3",),
        ),
        "dtypes of one call": (
            lambda: group.allreduce_coalesced(
                [ones(2), ones(2, dtype=torch.float64 if odd else torch.float32)],
                dist.AllreduceCoalescedOptions(),
            ).wait(),
            ("all_reduce got Float and Double in one call",),
        ),
        "inputs of all_to_all": (
            lambda: dist.all_to_all([torch.zeros(2)] * WORLD, [ones(2)] * (WORLD + odd)),
            ("all_to_all got 4 inputs, expected 3",),
        ),
        "rows of all_to_all_single": (
            lambda: dist.all_to_all_single(torch.zeros(WORLD + odd), ones(WORLD + odd)),
            ("all_to_all got 4 rows in the output, expected a multiple of 3",),
        ),
        "sum of splits": (
            lambda: dist.all_to_all_single(
                torch.zeros(3), ones(3), [1, 1, 1 + odd], [1, 1, 1 + odd]
            ),
            ("splits of 4 rows for the 3 in the output",),
        ),
        "outputs of gather": (
            lambda: dist.gather(ones(2), [ones(2)] * (WORLD + odd) if odd else None, dst=1),
            ("gather got 4 outputs, expected 3",),
        ),
        "inputs of scatter": (
            lambda: dist.scatter(ones(2), [ones(2 + odd)] * WORLD if odd else None, src=1),
            ("scatter got 3 elements in an input, expected 2",),
        ),
        "another op on a sparse tensor": (
            lambda: dist.all_reduce(ones(2).to_sparse(), ReduceOp.MAX if odd else ReduceOp.SUM),
            ("a sparse tensor and another ReduceOp than SUM",),
        ),
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@on_shm_ranks(WORLD, patience_s=AGES_S)
def test_ranks_that_do_not_agree(rank: int, asynchronous: bool) -> None:
    """The operation is compared before a byte is read; with an async one ahead it is queued."""
    for name, (call, parts) in {**mismatches(rank), **only_one_rank(rank)}.items():
        ahead = dist.all_reduce(torch.ones(3), async_op=True) if asynchronous else None
        with raises(dist.DistBackendError, *parts, "rank 1 ", f"(rank {rank} of {WORLD})"):
            call()
        if ahead is not None:
            ahead.wait()
        tensor = values(rank, 9000, torch.float32)
        dist.all_reduce(tensor)
        assert_bits(tensor, total(of_all(WORLD, 9000, torch.float32)), "after", name)


@pytest.mark.parametrize("asynchronous", [False, True])
@on_shm_ranks(WORLD, patience_s=AGES_S)
def test_a_rank_that_fails_before_it_enters(rank: int, asynchronous: bool) -> None:
    """No memory for a copy, say: the others hear of it at once, and the group goes on."""
    tensor = torch.ones(1).expand(2**46) if rank == 1 else torch.ones(4)
    try:
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was raised")
    if rank == 1:
        assert f"you tried to allocate {4 * 2**46} bytes" in text, text
    else:
        part = "rank 1 refused: all_reduce: "
        assert part in text and "allocate" in text.split(part)[1], text
        assert torch.all(tensor == 1)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert torch.all(total == WORLD)


@on_shm_ranks(WORLD)
def test_a_mismatch_names_both_sides_and_leaves_the_tensors(rank: int) -> None:
    """Also when the calls move megabytes; two ranks agree, so those name the third one."""
    tensor = values(rank, 600_000 + (rank == 2), torch.float32)
    before = tensor.clone()
    with raises(
        dist.DistBackendError,
        "rank 2 called all_reduce of 600001 float32 by SUM",
        "called all_reduce of 600000 float32 by SUM",
    ):
        dist.all_reduce(tensor)
    assert_bits(tensor, before)


@on_shm_ranks(WORLD)
def test_sparse_tensors_that_do_not_agree(rank: int) -> None:
    with raises(dist.DistBackendError):  # dense on one rank
        dist.all_reduce(torch.ones(4) if rank == 1 else torch.ones(4).to_sparse())
    with raises(dist.DistBackendError, "sparse tensors of different shapes"):
        dist.all_reduce(torch.ones(4 + (rank == 1)).to_sparse())
    with raises(dist.DistBackendError, "float64"):
        dist.all_reduce(
            torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32).to_sparse()
        )
    dist.all_reduce(torch.ones(2))


@on_shm_ranks(WORLD)
def test_a_root_that_does_not_exist(rank: int) -> None:
    """torch.distributed does not look at group_src."""
    for root in (WORLD, -1, 1 << 30):
        for call in (
            lambda root=root: dist.broadcast(torch.ones(2), group_src=root),
            lambda root=root: dist.reduce(torch.ones(2), group_dst=root),
            lambda root=root: dist.gather(torch.ones(2), group_dst=root),
            lambda root=root: dist.scatter(torch.ones(2), group_src=root),
        ):
            with raises(dist.DistBackendError, f"root {root}", "expected"):
                call()
    dist.all_reduce(torch.ones(2))
