"""Point-to-point operations of the backend ``trireme``: send, recv, their batches, their faults."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from harness.faults import message_of, raises
from harness.interpreters import Interpreter
from harness.meeting import say, set_timeout, stay_until, until
from harness.on_ranks import AGES_S, on_shm_ranks
from harness.tensors import assert_bits
from shm.ranks import MOVED, backend_of, values

# Nothing, one line, more than a chunk, more than a ring (256 KiB for two ranks).
SIZES = (0, 1, 7, 3001, 40_000, 150_001)


@on_shm_ranks()
def test_every_dtype_and_size(rank: int) -> None:
    for dtype in MOVED:
        for numel in SIZES:
            sent = values(0, numel, dtype)
            if rank == 0:
                dist.send(sent, 1)
            else:
                got = torch.empty(numel, dtype=dtype)
                assert dist.recv(got, 0) == 0
                assert_bits(got, sent, dtype, numel)


@on_shm_ranks()
def test_tags_in_any_order(rank: int) -> None:
    numels = {3: 200_000, 1: 5, 2: 0, 7: 200_000}
    if rank == 0:
        for tag, numel in numels.items():
            dist.send(torch.full((numel,), float(tag)), 1, tag=tag)
        return
    for tag in (7, 2, 3, 1):
        got = torch.empty(numels[tag])
        dist.recv(got, 0, tag=tag)
        assert torch.equal(got, torch.full_like(got, tag))


@on_shm_ranks()
def test_isend_and_irecv_complete_without_wait(rank: int) -> None:
    expected = values(0, 300_000, torch.float32)
    tensor = expected.clone() if rank == 0 else torch.empty(300_000)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    until(work.is_completed)
    assert work.is_success()
    assert_bits(tensor, expected)
    assert work.get_future().wait()[0] is not None
    work.wait()
    if rank == 1:
        assert work.source_rank() == 0


@on_shm_ranks()
def test_future_of_a_recv_is_settled_by_itself(rank: int) -> None:
    if rank == 0:
        stay_until("1 has posted")
        dist.send(torch.arange(4.0), 1)
        return
    got = torch.empty(4)
    sums = dist.irecv(got, 0).get_future().then(lambda future: future.value()[0].sum())
    say("1 has posted")
    assert sums.wait() == 6
    assert torch.equal(got, torch.arange(4.0))


@on_shm_ranks(timeout=40)
def test_a_callback_may_wait_for_messages(rank: int) -> None:
    """For its own one, too, and for one that comes together with it; also if none comes."""
    group = dist.new_group()
    if rank == 0:
        stay_until("1 has posted")
        for number in (1.0, 2.0):
            dist.send(torch.full((4,), number), 1)
        return stay_until("1 has ended")
    works: list[Any] = []

    def wait_for_all(future: Any) -> list[str]:
        return [text_of_wait(work) for work in works]

    got = [torch.empty(4), torch.empty(4)]
    works += [dist.irecv(tensor, 0) for tensor in got]
    waits = [work.get_future().then(wait_for_all) for work in works]
    say("1 has posted")
    assert [wait.wait() for wait in waits] == [["", ""]] * 2
    assert torch.equal(got[0] + got[1], torch.full((4,), 3.0))

    works[:] = [dist.irecv(tensor, 0, group=group) for tensor in got]
    waits = [work.get_future().then(wait_for_all) for work in works]
    dist.destroy_process_group(group)  # ends both at once
    del group
    for wait in waits:
        texts = wait.wait()
        assert all("the group ended before a message came" in text for text in texts), texts
    return say("1 has ended")


def text_of_wait(work: Any) -> str:
    try:
        work.wait()
    except dist.DistBackendError as error:
        return message_of(error)
    return ""


@pytest.mark.parametrize("world", [2, 3, 4])
@on_shm_ranks("world")
def test_ring_exchange_in_a_batch(rank: int, world: int) -> None:
    for numel in (1, 1000, 300_000):
        mine, got = values(rank, numel, torch.float32), torch.empty(numel)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % world),
                dist.P2POp(dist.irecv, got, (rank - 1) % world),
            ]
        )
        for work in works:
            work.wait()
        assert_bits(got, values((rank - 1) % world, numel, torch.float32))


@on_shm_ranks()
def test_blocking_sends_that_cross_do_not_hang(rank: int) -> None:
    for step in range(50):
        dist.send(torch.full((10_000,), float(rank + step)), 1 - rank)
        got = torch.empty(10_000)
        dist.recv(got, 1 - rank)
        assert torch.equal(got, torch.full_like(got, 1 - rank + step))


@on_shm_ranks(4)
def test_recv_from_any_rank(rank: int) -> None:
    if rank != 0:
        for step in range(5):
            dist.send(torch.tensor([rank * 10 + step]), 0, tag=3)
        return
    seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for _ in range(15):
        got = torch.empty(1, dtype=torch.int64)
        source = dist.recv(got, tag=3)
        seen[source].append(int(got))
    assert seen == {source: [source * 10 + step for step in range(5)] for source in (1, 2, 3)}


@on_shm_ranks()
def test_a_subgroup_counts_its_own_ranks(rank: int) -> None:
    group = dist.new_group([1, 0], backend="trireme", use_local_synchronization=False)
    tensor = torch.tensor([float(rank)])
    if rank == 0:
        dist.send(tensor, 1, group=group)
    else:
        assert dist.recv(tensor, group=group) == 0
        assert tensor.item() == 0


@on_shm_ranks()
def test_a_rank_sends_to_itself(rank: int) -> None:
    backend = backend_of()
    for numel in SIZES:
        sent, got = values(rank, numel, torch.float32), torch.empty(numel)
        sending = backend.send([sent], rank, 5)
        backend.recv([got], rank, 5).wait()
        sending.wait()
        assert_bits(got, sent)


@on_shm_ranks()
def test_twenty_mebibytes_both_ways(rank: int) -> None:
    numel = 5 * 2**20
    mine, got = torch.full((numel,), float(rank)), torch.empty(numel)
    works = [dist.isend(mine, 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        work.wait()
    assert torch.equal(got, torch.full((numel,), 1.0 - rank))


@on_shm_ranks()
def test_tensors_that_are_not_contiguous(rank: int) -> None:
    sent = values(0, (300, 200), torch.complex64).requires_grad_()
    layouts: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (lambda t: t.t(), lambda t: t.t().contiguous()),
        (lambda t: t[::2, 1::3], lambda t: t[::2, 1::3].contiguous()),
        (lambda t: t.conj(), lambda t: t.conj().resolve_conj()),
    ]
    backend = backend_of()  # dist.send itself cannot take what is conjugated
    for of, plain in layouts:
        expected = plain(sent.detach())
        if rank == 0:
            backend.send([of(sent)], 1, 0).wait()
            backend.send([of(sent)], 1, 0).wait()
            continue
        place = torch.empty(expected.shape[::-1], dtype=sent.dtype).t()
        backend.recv([place], 0, 0).wait()
        assert_bits(place, expected)
        leaf = torch.empty_like(expected, requires_grad=True)
        backend.recv([leaf], 0, 0).wait()
        assert_bits(leaf, expected)


@on_shm_ranks()
def test_another_size_or_dtype_raises_and_the_group_goes_on(rank: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(10), 1, tag=3)
        with raises(  # it does not fit into the ring, so its end comes after the mismatch
            dist.DistBackendError,
            "send of 300000 float32 to rank 1 with tag 3 sent 1200000 bytes of float32",
            "but rank 1 expected 8 bytes of float32 (rank 0 of 2)",
        ):
            dist.send(torch.zeros(300_000), 1, tag=3)
        dist.send(torch.zeros(2, dtype=torch.int32), 1, tag=3)
        dist.send(torch.zeros(2, dtype=torch.float8_e4m3fn), 1, tag=3)
        dist.send(torch.ones(2), 1, tag=3)
    else:
        got = torch.empty(2)
        for said in ("40 bytes of float32", "1200000 bytes of float32", "8 bytes of int32"):
            with raises(
                dist.DistBackendError,
                "recv of 2 float32 from rank 0 with tag 3",
                f"{said} from rank 0, expected 8 bytes of float32",
            ):
                dist.recv(got, 0, tag=3)
        with raises(
            dist.DistBackendError,
            "2 bytes of float8_e4m3fn from rank 0, expected 2 bytes of float8_e5m2",
        ):
            dist.recv(torch.empty(2, dtype=torch.float8_e5m2), 0, tag=3)
        dist.recv(got, 0, tag=3)
        assert got.tolist() == [1, 1]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


@on_shm_ranks()
def test_what_cannot_be_sent_raises_here(rank: int) -> None:
    backend = backend_of()
    with raises(ValueError, "send got rank 2"):
        backend.send([torch.ones(1)], 2, 0)
    with raises(ValueError, "recv got rank -1"):
        backend.recv([torch.ones(1)], -1, 0)
    with raises(ValueError, "recv got 2 tensors, expected 1"):
        backend.recv([torch.ones(1), torch.ones(1)], 1 - rank, 0)
    with raises(ValueError, "not dense"):
        backend.send([torch.ones(1).to_sparse()], 1 - rank, 0)


@on_shm_ranks(3)
def test_messages_between_collectives_in_flight(rank: int) -> None:
    for step in range(20):
        total = torch.ones(100_000)
        reducing = dist.all_reduce(total, async_op=True)
        got = torch.empty(50_000)
        coming = dist.irecv(got, (rank - 1) % 3)
        dist.send(torch.full((50_000,), float(step)), (rank + 1) % 3)
        coming.wait()
        reducing.wait()
        assert got[-1].item() == step and total[-1].item() == 3


def killed_while_receiving(rank: int, source: int | None) -> None:
    got = torch.empty(1)
    if rank == 1:
        dist.recv(got, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(got, 1)
    with raises(dist.DistBackendError, "rank 1 (process ", "has died"):
        dist.recv(got, source)
    with raises(dist.DistBackendError, "rank 1 (process "):
        dist.send(got, 1)


@on_shm_ranks(dying=[1], patience_s=AGES_S)
def test_a_killed_peer_is_named(rank: int) -> None:
    killed_while_receiving(rank, 1)


@on_shm_ranks(dying=[1], patience_s=AGES_S)
def test_a_killed_peer_is_named_by_a_recv_from_any(rank: int) -> None:
    killed_while_receiving(rank, None)


@on_shm_ranks()
def test_a_timeout_ends_the_group(rank: int) -> None:
    got = torch.empty(4)
    if rank == 0:
        set_timeout(1)
        with raises(
            dist.DistBackendError,
            "recv of 4 float32 from rank 1 with tag 6: rank 1 (process ",
            "has not sent within 1 s",
        ):
            dist.recv(got, 1, tag=6)
        return say("it has failed")
    stay_until("it has failed")
    with raises(dist.DistBackendError, "rank 0 says: [mailbox] recv of 4 float32"):
        dist.recv(got, 0)


@on_shm_ranks()
def test_a_wait_with_its_own_time_leaves_the_recv_alone(rank: int) -> None:
    got = torch.zeros(4)
    if rank == 0:
        coming = dist.irecv(got, 1)
        with raises(dist.DistBackendError, "recv is not done after a wait of 30 ms"):
            coming.wait(timedelta(milliseconds=30))
        dist.send(got, 1)
        coming.wait()
        assert got.tolist() == [1, 1, 1, 1]
    else:
        dist.recv(got, 0)
        dist.send(torch.ones(4), 0)


@on_shm_ranks()
def test_an_abort_is_heard(rank: int) -> None:
    got = torch.empty(1)
    if rank == 0:
        stay_until("1 has posted")
        backend_of().abort()
        return
    coming = dist.irecv(got, 0)
    say("1 has posted")
    with raises(dist.DistBackendError, "rank 0 says: [shm_backend] the group was aborted"):
        coming.wait()


@on_shm_ranks()
def test_messages_outlive_their_sender(rank: int) -> None:
    if rank == 0:
        dist.send(torch.arange(1000.0), 1)
        return say("0 ends")  # with its process, as soon as the message has been seen
    stay_until("0 ends")
    got = torch.empty(1000)
    dist.recv(got, 0)
    assert torch.equal(got, torch.arange(1000.0))


JUST_ENDS = """
import atexit, sys, torch, torch.distributed as dist, trireme
rank = int(sys.argv[1])
dist.init_process_group("trireme", init_method=sys.argv[2], rank=rank, world_size=2)
if rank == 0:
    dist.send(torch.arange(100.0), 1)
    atexit.register(print, "rank 0 ends", flush=True)
else:
    sys.stdin.readline()
    got = torch.empty(100)
    dist.recv(got, 0)
    print(got[-1].item())
"""


def test_messages_outlive_a_program_that_just_ends(tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'store'}"
    ranks = [Interpreter(JUST_ENDS, rank, place) for rank in range(2)]
    assert ranks[0].stdout.readline() == "rank 0 ends\n"
    assert ranks[1].communicate("receive\n")[0] == "99.0\n"
    assert ranks[0].communicate()[0] == ""


@on_shm_ranks()
def test_the_end_of_the_group_ends_a_recv(rank: int) -> None:
    group = dist.new_group()
    if rank == 1:
        stay_until("0 has ended")  # or what 0 hears is that 1 has left
    else:
        coming = dist.irecv(torch.empty(1), 1, group=group)
    dist.destroy_process_group(group)
    del group
    if rank == 0:
        with raises(dist.DistBackendError, "the group ended before a message came"):
            coming.wait()
        say("0 has ended")


@on_shm_ranks()
def test_a_forked_child_raises(rank: int) -> None:
    dist.send(torch.ones(1), 1 - rank)
    child = os.fork()
    if child == 0:
        try:
            dist.recv(torch.empty(1), 1 - rank)
        except dist.DistBackendError as error:
            os._exit(0 if "in a forked child" in message_of(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    got = torch.empty(1)
    dist.recv(got, 1 - rank)
    assert got.item() == 1


@on_shm_ranks()
def test_lists_of_objects(rank: int) -> None:
    sent: list[Any] = [{"loss": 1.5}, "text", list(range(1000)), torch.arange(5)]
    if rank == 0:
        dist.send_object_list(sent, 1)
        return
    got: list[Any] = [None] * len(sent)
    assert dist.recv_object_list(got, 0) == 0
    assert got[:3] == sent[:3] and torch.equal(got[3], sent[3])


WIDTH, ROWS, MICRO_BATCHES = 16, 24, 4


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@on_shm_ranks()
def test_a_pipeline_of_two_stages(rank: int, kind: type) -> None:
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    inputs, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    whole = nn.Sequential(*[nn.Sequential(*part) for part in parts])
    mean_loss(whole(inputs), target).backward()
    expected = [parameter.grad.clone() for parameter in parts[rank].parameters()]
    parts[rank].zero_grad()

    stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
    schedule = kind(stage, MICRO_BATCHES, loss_fn=mean_loss)
    for _ in range(3):
        parts[rank].zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=target, losses=losses)
            assert len(losses) == MICRO_BATCHES
        got = [parameter.grad for parameter in parts[rank].parameters()]
        torch.testing.assert_close(got, expected)
