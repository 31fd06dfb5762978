"""SharedMemoryGroup in real processes: the conformance suite, many small operations, and every way to lose a peer."""

import os

import programs
import pytest
import torch
from harness import on_shared_memory, values
from programs import conformance

from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.errors import ManyhandsError, Unsupported
from manyhands.testing.group_suite import GROUP_SUITE
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
    work = {"share": _share, "waits": programs.waits(1, allocated=True)}
    found = on_shared_memory(3, programs.OF_THREE | work, timeout_s=10)
    programs.expect_three(found)
    shared, mine = zip(*values(found["share"]), strict=True)
    assert shared == ([1.0, 2.0, 3.0, 0.0],) * 3
    assert mine == ([0.0] * 4, [1.0, 2.0, 3.0, 0.0], [0.0] * 4)
    assert "gave up" in values(found["sent"])[0]
    early, late, _ = values(found["waits"])
    assert early > max(late, 0.1)


def test_a_killed_peer_is_named_at_once():
    programs.expect_killed(on_shared_memory(3, programs.killed(1, allocated=True), timeout_s=30), 1)


def test_a_silent_peer_is_lost_after_the_deadline():
    with programs.silent() as program:
        first, _, third = values(on_shared_memory(3, program, timeout_s=1.0))
    for error in (first, third):
        assert error.rank == 1
    assert "no progress for 1 s" in f"{first} {third}"  # or one has heard it of the other
