"""Arenas in real processes: one group after another on the same memory, with other members, also after a death."""

import gc
import os
import signal
import weakref

import pytest
import torch
from harness import on_arenas, values

from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory.group import SharedMemoryGroup, create_arena, create_table
from manyhands.comm.shared_memory.synchronisation import DONE, READY
from manyhands.comm.shared_memory.table import IN_TABLE, SCRATCH
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.testing.group_suite import GROUP_SUITE, vector
from refusals import refused

N = 100_000


def nothing_was_copied(group):
    """No rank has staged anything, and all have worked on each other's tensors."""
    counters, layout = group._board.words, group._memory.layout
    scratch = [
        group._memory.view(rank, IN_TABLE + layout.scratch(rank), SCRATCH, torch.uint8) for rank in range(group.size)
    ]
    return (
        all(words[READY] == 0 for words in counters)
        and all(words[DONE] > 0 for words in counters)
        and not any(part.any() for part in scratch)
    )


def mean_in_place(group, tensor, wanted):
    """A mean of what lies in the arena already; it stays where it was."""
    place = tensor.data_ptr()
    group.mean_(tensor)
    assert torch.allclose(tensor, wanted, rtol=1e-12, atol=1e-12)
    assert tensor.data_ptr() == place
    group.barrier()
    assert nothing_was_copied(group)


def whose_death_ends(group):
    """Barriers until a process is lost."""
    try:
        while True:
            group.barrier()
    except PeerLost as error:
        return error.rank


def mean_of(processes):
    return naive_mean([vector(process, N) for process in processes], [1.0] * len(processes))


# -- one group after another -----------------------------------------------------------------------------------------


def _regrouped(member):
    first = member.join(0)
    mine = first.allocate(N, torch.float64).copy_(vector(member.process, N))
    kept = mine.data_ptr()
    mean_in_place(first, mine, mean_of([0, 1, 2]))
    mine.copy_(vector(member.process, N))
    first.barrier()
    first.close()
    assert torch.equal(mine, vector(member.process, N))
    for generation, members in enumerate(member.generations[1:], 1):
        if member.process in members:
            group = member.join(generation)
            assert (group.rank, group.size) == (members.index(member.process), len(members))
            assert mine.data_ptr() == kept
            mean_in_place(group, mine, mean_of(members))
            later = group.allocate(10, torch.float64).fill_(group.rank)  # beside what was there
            group.mean_(later)
            assert later.tolist() == [(group.size - 1) / 2] * 10
            assert torch.allclose(mine, mean_of(members), rtol=1e-12, atol=1e-12)
            if group.size == 2:
                for name, check in GROUP_SUITE.items():
                    if name not in ("bits", "lost"):  # which say nothing of memory, and take long
                        check(group)
            group.barrier()
            mine.copy_(vector(member.process, N))
            group.close()
    return torch.equal(mine, vector(member.process, N))


def test_a_later_group_finds_the_tensors_where_they_were():
    """Fewer members in another order, which keep all promises of groups, then all in yet another."""
    assert values(on_arenas([[0, 1, 2], [2, 0], [1, 2, 0]], _regrouped)) == [True] * 3


# -- after a death ---------------------------------------------------------------------------------------------------


def _survives(member):
    """Process 1 dies after it has arrived at means: the others are inside the first, the second and third wait."""
    group = member.join(0)
    steady = group.allocate(N, torch.float64).copy_(vector(member.process, N))
    torn = [group.allocate(N, torch.float64).fill_(member.process) for _ in range(3)]
    torn[2] = torch.ones(N)  # from elsewhere
    handles = [group.start_mean_(tensor) for tensor in torn]
    if member.process == 1:
        group._waiting.until(0, DONE, 1, "mean_", 0)  # the others are past the arrival
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as lost:
        handles[0].wait()
    assert lost.value.rank == 1
    del lost
    group.close()
    for handle in handles:
        refused("worker 1", handle.wait, kind=PeerLost)
    held = [weakref.ref(tensor) for tensor in torn]
    before = os.fstat(member.fds[member.process]).st_blocks
    torn.clear()
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 3
    returned = before - os.fstat(member.fds[member.process]).st_blocks
    assert returned * 512 >= 2 * N * 8
    again = member.join(1)
    assert torch.equal(steady, vector(member.process, N))
    mean_in_place(again, steady, mean_of([3, 0, 2]))
    fresh = again.allocate(N, torch.float64)
    assert not fresh.any()
    again.barrier()
    again.close()
    return True


def test_survivors_of_a_death_in_mid_operation_go_on_with_their_tensors():
    outcomes = on_arenas([[0, 1, 2, 3], [3, 0, 2]], _survives)
    assert outcomes.pop(1).status == signal.SIGKILL
    assert values(outcomes) == [True] * 3


def _dies_idle(member):
    """A process with a fresh arena comes for the dead one, whose rank goes to another; it dies, too."""
    tensor = None
    if member.process != 3:
        group = member.join(0)
        tensor = group.allocate(N, torch.float64).copy_(vector(member.process, N))
        group.barrier()
        if member.process == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        assert whose_death_ends(group) == 0
        group.close()
    again = member.join(1)
    if tensor is None:
        tensor = again.allocate(N, torch.float64).copy_(vector(3, N))
    mean_in_place(again, tensor, mean_of([1, 2, 3]))
    if member.process == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    assert whose_death_ends(again) == 3
    again.close()
    return True


def test_a_replacement_among_survivors():
    outcomes = on_arenas([[0, 1, 2], [1, 2, 3]], _dies_idle)
    assert [outcomes[process].status for process in (0, 3)] == [signal.SIGKILL] * 2
    assert values(outcomes[1:3]) == [True] * 2


# -- in one process --------------------------------------------------------------------------------------------------


def _alone(member):
    """One group after another: every descriptor is closed, and every mapping but the arena's."""
    fd, arena = member.fds[0], member.arena
    first = member.join(0)
    kept, tensor = (first.allocate(N, torch.float64).fill_(1) for _ in range(2))
    first.close()
    refused("closed", first.allocate, 1, torch.float32, kind=ManyhandsError)
    maps, files = mappings(), os.listdir("/proc/self/fd")
    second = member.join(1)
    assert mappings() == maps + 1  # the table: the own arena is not mapped again
    second.mean_(tensor)
    before, place = os.fstat(fd).st_blocks, tensor.data_ptr()
    del tensor
    assert (before - os.fstat(fd).st_blocks) * 512 >= N * 8, "given back under another group"
    again = second.allocate(N, torch.float64)
    assert again.data_ptr() == place
    assert not again.any()
    second.close()
    second.close()
    assert len(os.listdir("/proc/self/fd")) < len(files)  # the second group's table, and its lifeline
    assert mappings() == maps
    assert kept.sum() == N
    assert arena.allocate(10, torch.float32).shape == (10,)
    return True


def test_groups_of_one():
    assert values(on_arenas([[0], [0]], _alone)) == [True]


def test_means_under_way_end_with_their_group():
    """They fail, and hold nothing."""
    group = SharedMemoryGroup(0, 2, [create_table(2), create_arena(2), create_arena(2)])
    tensors, lost = [torch.ones(5, dtype=torch.bfloat16) for _ in range(3)], torch.zeros(5)
    handles = [group.start_mean_(tensor, lost=lost) for tensor in tensors]
    held = [weakref.ref(tensor) for tensor in [*tensors, lost]]
    tensors.clear()
    del lost
    group.close()
    gc.collect()
    assert [tensor() for tensor in held] == [None] * 4
    for handle in handles:
        refused("closed", handle.wait, kind=ManyhandsError)


def mappings():
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:manyhands" in line for line in file)
