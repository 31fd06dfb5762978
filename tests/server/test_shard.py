"""What the connections of a shard share, without connections."""

import time

import pytest
import torch

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.in_process import captured
from manyhands.server.replication.log import Call
from manyhands.server.shard_host import Shard, WorkersLate
from manyhands.server.store import Go, InvalidCall, WaitForGate
from manyhands.testing.server_suite import expect_waits, started

N = 4


def nothing():
    pass


def opened(spec=None, timeout_s=10.0):
    """A shard with a center of zeros, in which two workers take part."""
    shard = Shard(spec or ServerSpec(rule="add", bound=0), 2, timeout_s)
    center = shard.offer(N, torch.float32, nothing)
    center.buffers[0].zero_()
    shard.take(center, came=True)
    for worker in range(2):
        shard.call(lambda store, worker=worker: store.activate(worker, 0))
    return shard


def test_who_waits_gets_what_anothers_call_released():
    shard, lives = opened(), []
    assert isinstance(shard.call(lambda store: store.tick(0, 1)), WaitForGate)
    with started(lambda: shard.answer(0, lambda: lives.append(1))) as waiting:
        expect_waits(waiting, "an answer before the other worker's tick")
        assert shard.call(lambda store: store.tick(1, 2)) == Go(3)
        assert waiting.result(10) == Go(3)
    assert lives
    shard.close()


def test_what_was_released_for_one_call_answers_no_later_one():
    """As at a new primary: another's tick releases worker 0 before that one has asked there again."""
    shard = opened(ServerSpec(rule="add", bound=1))

    def tick(worker, number):
        return shard.make(Call.TICK, worker, number)[0]

    assert [tick(0, 1), tick(0, 2)] == [Go(0), WaitForGate()]
    assert tick(1, 1) == Go(0)
    assert [tick(0, 2), tick(0, 3)] == [Go(0), WaitForGate()]
    with started(lambda: shard.answer(0, nothing)) as waiting:
        expect_waits(waiting, "an answer before the other worker's tick")
        tick(1, 2)
        assert waiting.result(10) == Go(0)
    shard.close()


def test_the_deadline_counts_from_what_a_worker_did_last():
    shard = opened(timeout_s=0.2)
    shard.call(lambda store: store.tick(0, 0))
    shard._moved = time.monotonic() + 0.2
    with pytest.raises(WorkersLate) as late:
        shard.answer(0, nothing)
    assert late.value.worker == 1
    assert late.value.seconds >= 0.4
    shard.close()


def test_a_second_offer_waits_for_the_first_and_takes_its_place_if_that_fails():
    shard = Shard(ServerSpec(rule="add"), 2, 10.0)
    first = shard.offer(N, torch.float32, nothing)
    with started(lambda: shard.offer(N, torch.float32, nothing)) as waiting:
        expect_waits(waiting, "an offer during another")
        shard.take(first, came=False)
        second = waiting.result(10)
    assert second is not None
    shard.take(second, came=True)
    assert shard.offer(N, torch.float32, nothing) is None
    with pytest.raises(BadInput, match="a center has 4 elements"):
        shard.offer(N + 1, torch.float32, nothing)
    shard.close()


def test_before_a_center_there_is_nothing_to_read():
    shard = Shard(ServerSpec(rule="add"), 2, 10.0)
    with pytest.raises(InvalidCall, match="no center yet"):
        shard.check(N, torch.float32, "a push")
    with pytest.raises(InvalidCall):
        shard.pin(0, pull=True)
    shard.close()


def test_a_worker_that_ends_gives_back_what_it_read_and_holds_nobody_up():
    shard = opened()
    assert shard.pin(1, pull=True)[:2] == (0, 0)
    shard.call(lambda store: store.tick(0, 0))
    shard.end(1, Call.LEAVE)
    assert shard.answer(0, nothing) == Go(0)
    shard.push(0, 1, torch.ones(N), 1.0, 0)
    shard.push(0, 2, torch.ones(N), 1.0, 0)
    shard.call(lambda store: store.tick(0, 0))
    version, slot, _ = shard.pin(0, pull=False)
    assert shard.published.buffers[slot].eq(2 * version).all()
    shard.close()


def test_captured_vectors_are_copies():
    shard = opened(ServerSpec(rule="add"))
    vectors, numbers = shard.call(captured)
    shard.push(0, 1, torch.ones(N), 1.0, 0)
    shard.push(0, 2, torch.ones(N), 1.0, 0)
    assert vectors["center"].eq(0).all()
    assert numbers == {"version": 0}
    shard.close()
