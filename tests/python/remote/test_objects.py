"""Objects of other processes: who has them, how long they live, and what can be called."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trireme import remote

from harness.meeting import say, stay_until, until
from harness.on_ranks import on_shm_ranks
from remote.functions import FREED_S, type_there
from remote.objects import (
    Box,
    Counter,
    Louder,
    Silent,
    count_alive,
    drop,
    keep,
    kept,
    kept_here,
    until_alive,
    use,
    use_all,
    use_kept,
    value_of_kept,
)
from remote.ranks import (
    on_remote_ranks,
    on_remote_shm_and_gloo_ranks,
    raised,
    refused,
)


@on_remote_shm_and_gloo_ranks(2)
def test_objects_are_made_and_called(rank: int) -> None:
    if rank == 1:
        return
    for owner in ("p1", "p0"):
        counter = remote.create(owner, Counter, 5, step=2)
        assert isinstance(counter, remote.Ref) and counter.owner == owner
        assert counter.add(3) == 11 and counter.add() == 13 and counter.add(count=1) == 15
        assert counter.get(timeout=30) == 15
        pending = [counter.add.start(1, timeout=30) for _ in range(50)]
        assert sorted(call.wait() for call in pending) == list(range(17, 117, 2))
        assert counter.get.start().wait() == 115
        other = remote.create(owner, "Counter", timeout=30)  # a name will do
        assert other.get() == 0 and counter.get() == 115
        with raised(LookupError, "no such state", "method fail of Counter at " + owner):
            counter.fail("no such state")
        with raised(ValueError, "a counter of -1"):
            remote.create(owner, Counter, -1)
        with raised(TypeError, "__init__"):
            remote.create(owner, Counter, 1, 2, 3)
        with raised(TypeError, "add"):
            counter.add(1, 2)


@on_remote_ranks(2)
def test_methods_that_there_are_not(rank: int) -> None:
    if rank == 1:
        return
    for owner in ("p1", "p0"):
        counter = remote.create(owner, Counter)
        for name in ("nothing", "secret", "value", "take"):
            with pytest.raises(AttributeError) as caught:
                getattr(counter, name)
            text = str(caught.value)
            assert all(part in text for part in (name, "Counter", "add", "get", "myself"))
            assert "shout" not in text and not hasattr(counter, name)
        assert hasattr(counter, "add")
        box = remote.create(owner, Box)
        with pytest.raises(AttributeError, match="take"):  # a Box has only that
            box.add(1)


@on_remote_ranks(2)
def test_methods_are_inherited(rank: int) -> None:
    if rank == 1:
        return
    for owner in ("p1", "p0"):
        louder = remote.create(owner, Louder, 3)
        assert louder.add(1) == 4 and louder.get() == "4!" and louder.shout(3) == "!!!"
        assert remote.create(owner, Counter, 3).get() == 3
        assert remote.create(owner, Silent).call() == "called"  # it has no __init__


@on_remote_shm_and_gloo_ranks(3)
def test_a_ref_goes_to_a_third_rank_and_back(rank: int) -> None:
    if rank != 0:
        return
    for owner in ("p1", "p0", "p2"):
        counter = remote.create(owner, Counter)
        count, back = remote.call("p2", use, counter)
        assert count == 10 and back == counter and back.owner == owner
        assert back.add(1) == 11
        total, refs = remote.call("p2", use_all, {"one": [counter], "two": (None, counter)})
        assert total == 12 + 13 and refs == {"one": [counter], "two": (None, counter)}
        del back, refs
        assert counter.get() == 13


@on_remote_ranks(2)
def test_refs_of_one_object_are_equal(rank: int) -> None:
    if rank == 1:
        return
    for owner in ("p1", "p0"):
        one, other = remote.create(owner, Counter), remote.create(owner, Counter)
        again = one.myself()
        assert again == one and hash(again) == hash(one) and one != other
        assert {one: 1, other: 2}[again] == 1 and one != 3
        assert one.is_me(again) and not one.is_me(other)
        assert remote.call("p1", type_there, one) == "Ref"
        del one, again
        assert other.get() == 0


@on_remote_ranks(2)
def test_objects_of_this_process(rank: int) -> None:
    if rank == 0:
        counter = Counter(5)
        ref = remote.here(counter)
        assert ref.owner == "p0" and ref.local_value() is counter and remote.here(counter) == ref
        assert remote.call("p1", use, ref)[0] == 15 and counter.value == 15
        assert remote.call("p0", use, ref)[0] == 25 and counter.secret() == 25
        theirs = remote.call("p1", kept_here, "theirs", 7)
        assert theirs.owner == "p1" and theirs.add(1) == 8
        assert remote.call("p1", value_of_kept, "theirs") == 8
        with refused(RuntimeError, "p1"):
            theirs.local_value()
        own = remote.create("p0", Counter, 2)
        assert own.local_value().value == 2
        with pytest.raises(TypeError, match="int"):
            remote.here(3)


@on_remote_shm_and_gloo_ranks(3)
def test_an_object_is_freed_with_its_last_ref(rank: int) -> None:
    if rank != 0:
        return
    for owner in ("p1", "p0"):
        counter = remote.create(owner, Counter)
        again = counter.myself()
        del counter
        until_alive(owner, 1)
        assert again.get() == 0
        remote.call("p2", keep, "it", again)
        del again
        assert remote.call("p2", use_kept, "it") == 1  # it lives by the Ref of another rank
        assert remote.call(owner, count_alive) == 1
        remote.call("p2", drop, "it")
        until_alive(owner, 0)
        # A Ref on its way holds it, too; so does a call that is not done.
        for _ in range(20):
            remote.call("p2", keep, "it", remote.create(owner, Counter))
            assert remote.call("p2", use_kept, "it") == 1
        remote.call("p2", drop, "it")
        remote.create(owner, Counter).add.start(1).wait()
        until_alive(owner, 0)


@on_remote_ranks(2)
def test_what_here_was_given_lives_as_long_as_refs(rank: int) -> None:
    if rank == 1:
        return
    ref = remote.call("p1", kept_here, "mine", 3)
    remote.call("p1", drop, "mine")
    assert ref.add(1) == 4 and remote.call("p1", count_alive) == 1
    del ref
    until_alive("p1", 0)
    ref = remote.call("p1", kept_here, "mine", 3)
    del ref
    assert remote.call("p1", value_of_kept, "mine") == 3  # it has an owner of its own
    remote.call("p1", drop, "mine")
    until_alive("p1", 0)
    own = Counter(1)
    gone = weakref.ref(own)
    ref = remote.here(own)
    del own
    assert gone() is not None
    del ref
    until(lambda: gc.collect() >= 0 and gone() is None, FREED_S)


@on_remote_ranks(2)
def test_a_thousand_objects_come_and_go(rank: int) -> None:
    if rank == 1:
        return
    for _ in range(1000):
        assert remote.create("p1", Counter, 1).get() == 1
    refs = [remote.create("p1", Counter, number) for number in range(1000)]
    assert sum(ref.get() for ref in refs) == 499_500
    until_alive("p1", 1000)
    boxes = remote.create("p1", Box, refs)
    del refs[:]
    until_alive("p1", 1001)
    del boxes
    until_alive("p1", 0)


@on_remote_ranks(3)
def test_owners_hold_refs_of_each_other(rank: int) -> None:
    """Nobody looks for circles: one that is left open frees both, one that is left goes at stop."""
    if rank != 0:
        return
    left, right = remote.create("p1", Box), remote.create("p2", Box)
    counter = remote.create("p2", Counter)
    left.put(counter)
    assert left.use() == 1
    left.put(right)
    right.put(left)
    assert left.take() == right and right.take() == left
    left.put(right)
    right.put([left, counter])
    left.take()
    del left, right, counter
    until_alive("p1", 0)
    until_alive("p2", 0)
    left, right = remote.create("p1", Box), remote.create("p2", Box)
    left.put(right)
    right.put(left)


@on_remote_ranks(3)
def test_refs_are_passed_around_by_all(rank: int) -> None:
    """What is sent on while others drop it stays alive."""
    for number in range(50):
        counter = remote.create(f"p{(rank + 1) % 3}", Counter, number)
        box = remote.create(f"p{(rank + 2) % 3}", Box, counter)
        del counter
        assert box.use() == number + 1
        counter = box.take()
        assert counter.add(1) == number + 2
        del box, counter
    dist.barrier()
    for to in remote.names():
        until_alive(to, 0)
    dist.barrier()


@on_shm_ranks(2, timeout=60)
def test_a_ref_of_an_earlier_start(rank: int) -> None:
    remote.start(f"p{rank}")
    ref = remote.create(f"p{1 - rank}", Counter)
    own = remote.create(f"p{rank}", Counter)
    assert ref.add(1) == 1
    remote.stop()
    calls: list[Callable[[], Any]] = [
        *(lambda: ref.add(1), lambda: own.add(1), lambda: ref.add.start(1).wait()),
    ]
    for call in calls:
        with refused(RuntimeError, "stop"):
            call()
    remote.start(f"p{rank}")
    there = remote.create(f"p{1 - rank}", Counter, 100)
    for one in (ref, own):
        calls += [lambda one=one: remote.call(f"p{1 - rank}", keep, "it", one)]
    for call in calls:
        with refused(ValueError, "Ref"):
            call()
    with pytest.raises((RuntimeError, ValueError)):
        own.local_value()
    assert ref != there and there.add(1) == 101
    calls.clear()
    ref = own = None
    assert there.add(1) == 102  # what has gone was of the earlier start
    dist.barrier()
    remote.stop()


@on_remote_ranks(2)
def test_a_ref_is_let_go_of_by_any_thread_and_after_stop(rank: int) -> None:
    if rank == 1:
        stay_until("all are gone")
        return
    refs = [remote.create("p1", Counter) for _ in range(100)]
    threads = [threading.Thread(target=refs.pop) for _ in range(90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    until_alive("p1", 10)
    kept["for ever"] = refs  # they go with the process
    say("all are gone")


@on_remote_ranks(2)
def test_refs_beside_tensors(rank: int) -> None:
    if rank == 1:
        return
    box = remote.create("p1", Box, torch.ones(3))
    assert torch.equal(box.take(), torch.ones(3))
    counter = remote.create("p1", Counter)
    box.put({"tensor": torch.arange(4), "ref": counter, "refs": [counter, counter]})
    content = box.take()
    assert content["ref"] == counter and content["refs"] == [counter, counter]
    assert torch.equal(content["tensor"], torch.arange(4))
    with refused(TypeError, "args[0]"):  # a Ref is no key
        box.put({counter: 1})
