"""RingGroup in real processes: the conformance suite, its traffic to the byte, means under way, and every way to lose a peer."""

import os
import random
import signal
import time

import pytest
import torch
from harness import forked, values
from meshes import close, mesh, ring
from programs import DIFFERENT, conformance, different, expect_killed, expect_told, killed, overlapping, silent, waits

from manyhands.comm.reducing import naive_mean
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE, expect_same_everywhere, vector, vectors


def on_ring(size, program, *, deadline_s=60, **options):
    """Run `program(group)` on `size` processes that are linked by socket pairs."""
    sockets = mesh(size)

    def run(rank):
        close(sockets, but=rank)
        group = ring(sockets, rank, hosts=[f"host-{peer}" for peer in range(size)], **options)
        try:
            return program(group)
        finally:
            group.close()

    try:
        return forked(size, run, deadline_s, then=lambda: close(sockets))
    finally:
        close(sockets)


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_conformance(size):
    assert values(on_ring(size, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * size


def _million(group):
    group.all_reduce_(torch.ones(1_000_000))
    return group.ledger.as_dict()["all_reduce_"]


def test_traffic_of_a_million_on_four():
    """CASE 8: each worker sends exactly 6,000,000 bytes in 6 messages."""
    assert values(on_ring(4, _million)) == [{"bytes": 6_000_000, "messages": 6}] * 4


def _gathered(group):
    """More than a megabyte of each, which goes round the ring; and how it counts."""
    n = DIRECT_BYTES // 4 + 7
    rows = group.all_gather(torch.arange(n) + 1000.0 * group.rank)
    right = all(torch.equal(rows[rank], torch.arange(n) + 1000.0 * rank) for rank in range(group.size))
    return right, group.ledger.as_dict()["all_gather"], n


@pytest.mark.parametrize("size", [3, 4])
def test_large_tensors_are_gathered_round_the_ring(size):
    for right, counted, n in values(on_ring(size, _gathered)):
        assert right
        assert counted == {"bytes": (size - 1) * 4 * n, "messages": size - 1}


def _seven(group):
    group.mean_(torch.ones(7), 2.0, 5)
    return group.ledger.total_bytes


def test_traffic_of_seven_on_five():
    """CASE 8: 224 bytes over all ranks, weights and bits in headers."""
    assert sum(values(on_ring(5, _seven))) == 224


LARGE = (SWAP_BYTES + DIRECT_BYTES) // 4 + 4321  # float32: on the ring, cut unevenly


def _large(group):
    for dtype, weights in (
        (torch.float32, [1.0 + rank for rank in range(group.size)]),
        (torch.float32, [float(rank % 2) for rank in range(group.size)]),
        (torch.bfloat16, [float((rank + 1) % 2) for rank in range(group.size)]),
    ):
        mine = vector(group.rank, LARGE, dtype)
        if not weights[group.rank]:
            mine.fill_(torch.nan)
        total = group.mean_(mine, weights[group.rank], 1 << group.rank)
        wanted = naive_mean([v.double() for v in vectors(group, LARGE, dtype)], weights).to(dtype)
        assert (total.weight, total.bits) == (sum(weights), (1 << group.size) - 1)
        torch.testing.assert_close(mine, wanted)
        expect_same_everywhere(group, mine, f"mean of {dtype}")
    before = mine.fill_(group.rank).clone()
    assert group.mean_(mine, 0.0).weight == 0
    assert torch.equal(mine, before)
    group.broadcast_(mine, group.size - 1)
    assert bool((mine == group.size - 1).all())
    return True


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_large_tensors_on_the_ring(size):
    assert values(on_ring(size, _large, timeout_s=30)) == [True] * size


def _many(group):
    sizes, order = random.Random(1), random.Random(2)
    handles = []
    for i in range(600):
        n, weights = sizes.randrange(0, 300), [sizes.choice([0.0, 1.0, 2.5]) for _ in range(group.size)]
        mine = vector(group.rank, n, seed=i)
        wanted = naive_mean(vectors(group, n, seed=i), weights) if sum(weights) else mine.clone()
        if order.random() < 0.3:
            handles.append((group.start_mean_(mine, weights[group.rank], 1 << i % 50), mine, wanted, i))
            continue
        assert group.mean_(mine, weights[group.rank], 1 << i % 50).bits == 1 << i % 50
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)
        if order.random() < 0.1:
            assert group.all_gather_json(i) == [i] * group.size
    for handle, mine, wanted, i in handles:
        assert handle.wait().bits == 1 << i % 50
        assert torch.allclose(mine, wanted, rtol=1e-12, atol=1e-12)
    return True


def test_hundreds_of_small_operations_of_random_sizes():
    assert values(on_ring(3, _many, timeout_s=30)) == [True] * 3


def test_a_started_mean_completes_while_the_caller_computes():
    assert values(on_ring(2, overlapping(3_000_000), timeout_s=30)) == [(True, 2.0, 0.5)] * 2


@pytest.mark.parametrize("elements", [1000, 2_000_000])
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_peer_is_named_at_once(size, elements):
    expect_killed(on_ring(size, killed(1, elements), timeout_s=30), 1)


@pytest.mark.slow
def test_a_silent_peer_is_lost_after_the_deadline():
    first, _, third = values(on_ring(3, silent(2.0), timeout_s=0.6))
    for error, seconds in (first, third):
        assert error.rank == 1
        assert "no progress for 0.6 s" in error.why
        assert seconds > 0.5


def _stopped(group, told, tell):
    tensor = torch.ones(3_000_000)
    start = time.monotonic()
    group.mean_(tensor)
    took_s = time.monotonic() - start
    if group.rank == 1:
        me = os.getpid()
        if os.fork() == 0:
            _wake(me, told, tell)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(me, signal.SIGSTOP))
        signal.setitimer(signal.ITIMER_REAL, took_s / 2)
    try:
        while True:
            group.mean_(tensor)
    except PeerLost as error:
        os.write(tell, b".")
        return error.rank


def _wake(stopped, told, tell):
    """When the three others have given up."""
    os.close(tell)
    heard = b""
    while len(heard) < 3 and (piece := os.read(told, 3)):
        heard += piece
    if os.getppid() == stopped:
        os.kill(stopped, signal.SIGCONT)
    os._exit(0)


def test_a_peer_that_stops_in_the_middle_is_named_by_all():
    told, tell = os.pipe()
    try:
        outcomes = on_ring(4, lambda group: _stopped(group, told, tell), timeout_s=1.0)
    finally:
        os.close(told)
        os.close(tell)
    assert [outcomes[rank].value for rank in (0, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_told_to_all_with_both_sides(what):
    expect_told(on_ring(3, different(what), timeout_s=10), what)


def _sent_wrongly(group):
    send, receive = lambda: group.send(torch.zeros(10_000_000), 1), lambda: group.receive_(torch.zeros(5), 0)
    with pytest.raises(ManyhandsError) as caught:
        (receive if group.rank else send)()
    return str(caught.value)


def test_receiving_something_else_than_was_sent():
    for text in values(on_ring(2, _sent_wrongly, timeout_s=10)):
        assert "expected send of 5 float32" in text
        assert "send of 10000000 float32 came" in text


def _finishes_alone(group):
    """Point to point goes on after a third rank has ended well."""
    group.barrier()
    if group.rank == 2:
        return True
    for i in range(3):
        tensor = torch.full((1_000_000,), float(i))
        if group.rank == 0:
            group.send(tensor, 1)
        else:
            group.receive_(tensor.zero_(), 0)
            assert tensor[-1] == i
    if group.rank == 0:
        with pytest.raises(PeerLost, match="left the group"):
            group.barrier()
    return True


def test_a_rank_that_ended_well_is_no_loss_until_it_is_needed():
    assert values(on_ring(3, _finishes_alone, timeout_s=10)) == [True] * 3


def test_the_one_who_comes_first_has_waited():
    early, late = values(on_ring(2, waits(1, 1.5)))
    assert early > 1.0
    assert late < 0.7


def _abandons(group):
    if group.rank == 0:
        group.abandon(PeerLost(7, "host-7", "mean_", 3, 1.0))
        return 7, "host-7"
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    assert "worker 0 noticed" in str(caught.value)
    return caught.value.rank, caught.value.host


def test_a_reason_of_ones_own_reaches_the_peers():
    assert values(on_ring(3, _abandons)) == [(7, "host-7")] * 3
