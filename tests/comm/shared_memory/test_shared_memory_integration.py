"""SharedMemoryGroup in real processes: the conformance suite, many small operations, and every way to lose a peer."""

import os
import random
import time

import pytest
import torch
from harness import on_shared_memory, values
from programs import DIFFERENT, conformance, different, expect_killed, expect_told, killed, silent, waits

from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.errors import ManyhandsError, PeerLost, Unsupported
from manyhands.testing.group_suite import GROUP_SUITE, vector, vectors
from open_files import open_files


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_conformance(size):
    assert values(on_shared_memory(size, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * size


def _many(group):
    sizes, order = random.Random(1), random.Random(2)
    memory = group.allocate(5000, torch.float64)
    for i in range(2000):
        n, weights = sizes.randrange(0, 300), [sizes.choice([0.0, 1.0, 2.5]) for _ in range(group.size)]
        mine = vector(group.rank, n, seed=i)
        tensor = mine.clone() if order.random() < 0.3 else memory[(start := order.randrange(4000)) : start + n]
        tensor.copy_(mine)
        total = group.mean_(tensor, weights[group.rank], 1 << i % 50)
        assert total.bits == 1 << i % 50
        wanted = naive_mean(vectors(group, n, seed=i), weights) if sum(weights) else mine
        assert torch.allclose(tensor, wanted, rtol=1e-12, atol=1e-12)
        if order.random() < 0.1:
            assert group.all_gather_json(i) == [i] * group.size
    return True


@pytest.mark.slow
def test_thousands_of_small_operations_of_random_sizes():
    assert values(on_shared_memory(4, _many, timeout_s=30)) == [True] * 4


def _share(group):
    group.allocate(5, torch.float32)
    mine = group.allocate(4, torch.float64)
    shared = group.share(mine, 1)
    group.barrier()
    shared[group.rank] = group.rank + 1.0
    group.barrier()
    with pytest.raises(Unsupported, match="only memory from allocate\\(\\)"):
        group.share(torch.zeros(4), 1)
    group.mean_(shared.clone())  # others go on as before
    return shared.tolist(), mine.tolist()


def test_a_ranks_memory_can_be_everybodys():
    outcomes = values(on_shared_memory(3, _share, timeout_s=30))
    assert [shared for shared, _ in outcomes] == [[1.0, 2.0, 3.0, 0.0]] * 3
    assert [mine for _, mine in outcomes] == [[0.0] * 4, [1.0, 2.0, 3.0, 0.0], [0.0] * 4]


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_peer_is_named_at_once(size):
    expect_killed(on_shared_memory(size, killed(1, allocated=True), timeout_s=30), 1, within_s=1)


def test_a_silent_peer_is_lost_after_the_deadline():
    first, _, third = values(on_shared_memory(3, silent(1.2), timeout_s=0.5))
    for error, seconds in (first, third):
        assert error.rank == 1
        assert 0.45 < seconds < 1


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_told_to_all_with_both_sides(what):
    expect_told(on_shared_memory(3, different(what), timeout_s=10), what)


def _sent_wrongly(group):
    if group.rank == 0:
        with pytest.raises(PeerLost, match="gave up"):
            group.send(torch.zeros(10_000_000), 1)
        return ""
    with pytest.raises(ManyhandsError) as caught:
        group.receive_(torch.zeros(5), 0)
    return str(caught.value)


def test_receiving_something_else_than_was_sent():
    text = values(on_shared_memory(2, _sent_wrongly, timeout_s=10))[1]
    assert "expected send of 5 float32" in text
    assert "send of 10000000 float32 came" in text


def _leaves(group):
    group.barrier()
    if group.rank == 1:
        return  # the harness closes the group
    with pytest.raises(PeerLost, match="left the group|is gone"):
        group.barrier()
    return


def test_a_peer_that_left():
    values(on_shared_memory(2, _leaves, timeout_s=10))


def _finishes_alone(group):
    """Point to point goes on after a third rank has ended well."""
    group.barrier()
    if group.rank == 2:
        return True
    time.sleep(0.1)
    for _ in range(3):
        if group.rank == 0:
            group.send(torch.ones(1_000_000), 1)
        else:
            time.sleep(0.02)
            group.receive_(torch.zeros(1_000_000), 0)
    return True


def test_a_rank_that_ended_well_is_no_loss_for_the_others():
    assert values(on_shared_memory(3, _finishes_alone, timeout_s=10)) == [True] * 3


def test_the_one_who_comes_first_has_waited():
    early, late = values(on_shared_memory(2, waits(1, 0.2, allocated=True)))
    assert 0.15 < early < 1
    assert late < 0.1


def test_tensors_and_descriptors_after_close():
    before = open_files()
    group = SharedMemoryGroup(0, 1, SharedMemory.create(1), lifelines=[os.pipe()])
    tensor = group.allocate(1000, torch.float32)
    tensor.fill_(2)
    group.mean_(tensor)
    group.close()
    group.close()
    with pytest.raises(ManyhandsError, match="closed"):
        group.mean_(tensor)
    with pytest.raises(ManyhandsError, match="closed"):
        group.allocate(1, torch.float32)
    assert tensor.sum() == 2000
    del tensor
    assert open_files() <= before
