"""SharedMemoryGroup in real processes: the conformance suite, many small operations, and every way to lose a peer."""

import os
import random

import programs
import pytest
import torch
from harness import on_shared_memory, values
from programs import DIFFERENT, conformance

from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.errors import ManyhandsError, Unsupported
from manyhands.testing.group_suite import GROUP_SUITE, vector, vectors
from refusals import refused


def test_of_one():
    read, write = os.pipe()
    group = SharedMemoryGroup(0, 1, SharedMemory.create(1), lifelines=[(read, write)])
    conformance(group)
    tensor = group.allocate(1000, torch.float32).fill_(2)
    group.mean_(tensor)
    group.close()
    group.close()
    for call in (lambda: group.mean_(tensor), lambda: group.allocate(1, torch.float32)):
        refused("closed", call, kind=ManyhandsError)
    assert tensor.sum() == 2000
    for end in (read, write):
        refused("Bad file descriptor", os.fstat, end, kind=OSError)


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_conformance(size):
    assert values(on_shared_memory(size, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * size


def _many(group):
    sizes, order = random.Random(1), random.Random(2)
    memory = group.allocate(5000, torch.float64)
    for i in range(300):
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


def _share(group):
    """A rank's memory can be everybody's."""
    group.allocate(5, torch.float32)
    mine = group.allocate(4, torch.float64)
    shared = group.share(mine, 1)
    group.barrier()
    shared[group.rank] = group.rank + 1.0
    group.barrier()
    refused("only memory from allocate\\(\\)", group.share, torch.zeros(4), 1, kind=Unsupported)
    group.mean_(shared.clone())  # others go on as before
    return shared.tolist(), mine.tolist()


def test_of_three():
    work = {"many": _many, "share": _share, "alone": programs.finishes_alone, "sent": programs.sent_wrongly}
    work |= {"waits": programs.waits(1, allocated=True)} | {what: programs.different(what) for what in DIFFERENT}
    found = on_shared_memory(3, work, timeout_s=10)
    assert values(found["many"]) == values(found["alone"]) == [True] * 3
    shared, mine = zip(*values(found["share"]), strict=True)
    assert shared == ([1.0, 2.0, 3.0, 0.0],) * 3
    assert mine == ([0.0] * 4, [1.0, 2.0, 3.0, 0.0], [0.0] * 4)
    sender, receiver, _ = values(found["sent"])
    assert "gave up" in sender
    assert "expected send of 5 float32" in receiver
    assert "send of 10000000 float32 came" in receiver
    early, late, _ = values(found["waits"])
    assert early > max(late, 0.1)
    for what in DIFFERENT:
        programs.expect_told(found[what], what)


def test_a_killed_peer_is_named_at_once():
    programs.expect_killed(on_shared_memory(3, programs.killed(1, allocated=True), timeout_s=30), 1)


def test_a_silent_peer_is_lost_after_the_deadline():
    with programs.silent() as program:
        first, _, third = values(on_shared_memory(3, program, timeout_s=1.0))
    for error in (first, third):
        assert error.rank == 1
    assert "no progress for 1 s" in f"{first} {third}"  # or one has heard it of the other
