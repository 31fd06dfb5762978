"""What the members of a group share: where the parts of a table lie, places in it and in arenas."""

import itertools
import os
import resource

import pytest
import torch

from manyhands.comm.shared_memory.memory import Arena, create_arena
from manyhands.comm.shared_memory.table import (
    IN_TABLE,
    MAIL,
    PAGE,
    RING,
    SCRATCH,
    GroupMemory,
    SharedMemory,
    TableLayout,
)
from manyhands.comm.shared_memory.table import create_table as new_table
from manyhands.errors import ManyhandsError


@pytest.fixture
def fds():
    made = SharedMemory.create(2)
    yield made
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_parts_of_a_table_lie_apart_and_on_pages(size):
    layout = TableLayout(size)
    parts = [(0, 0)]
    for rank in range(size):
        region = layout.region(rank)
        assert layout.counters <= layout.headers < region.stop - region.start
        parts += [(region.start, region.stop), (layout.scratch(rank), layout.scratch(rank) + SCRATCH)]
        slots = [layout.mail(rank, target, chunk) for target in range(size) for chunk in range(RING)]
        parts += [(place, place + PAGE + MAIL) for place in slots]
        assert layout.mail(rank, 0, RING) == layout.mail(rank, 0, 0)
    assert all(start % PAGE == 0 for start, _ in parts)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(parts))
    assert parts[-1][1] == layout.length


def test_a_table_is_sparse_and_as_long_as_its_layout(fds):
    assert os.fstat(fds[0]).st_size == TableLayout(2).length
    assert os.fstat(fds[0]).st_blocks == 0


def test_all_ranks_see_the_same_at_a_place(fds):
    arenas = [Arena(fd) for fd in fds[1:]]
    first, second = (GroupMemory(rank, arena, fds) for rank, arena in enumerate(arenas))
    tensor = arenas[0].allocate(100, torch.float32).fill_(7)
    assert second.view(0, arenas[0].locate(tensor), 100, torch.float32).tolist() == [7.0] * 100
    assert not second.view(1, 0, 100, torch.float32).any()
    assert first.view(0, 0, 1, torch.uint8).data_ptr() == tensor.data_ptr()  # its arena is mapped once
    place = IN_TABLE + first.layout.scratch(0)
    first.view(0, place, 3, torch.float64).fill_(5)
    assert second.view(0, place, 3, torch.float64).tolist() == [5.0] * 3
    assert first.view(0, 0, 0, torch.float32).shape == (0,)


def test_ranks_that_let_go_at_different_times(fds):
    """Each rank's arena is its own: where the others' tensors lie says their header."""
    first, second = Arena(fds[1]), Arena(fds[2])
    early, late = (arena.allocate(1000, torch.float32) for arena in (first, second))
    del early
    assert first.locate(first.allocate(1000, torch.float32)) == 0
    assert second.locate(second.allocate(1000, torch.float32)) == 4096
    del late


def test_views_outlive_the_group(fds):
    arena = Arena(fds[1])
    memory = GroupMemory(0, arena, fds)
    tensor = arena.allocate(10, torch.float32).fill_(3)
    peers = memory.view(1, 0, 10, torch.float32).fill_(4)
    memory.close()
    memory.close()
    assert (tensor.sum(), peers.sum(), arena.allocate(10, torch.float32).sum()) == (30, 40, 0)


def test_what_cannot_be_made_leaves_nothing(monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1 << 20, 1 << 25):  # too small for a table; for a table of two ranks large enough, not for an arena
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
        try:
            with pytest.raises(ManyhandsError, match="ulimit -f"):
                SharedMemory.create(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(os.listdir("/proc/self/fd")) == before


def test_arenas_of_several_lengths(fds):
    """A member that came from a larger group has less."""
    small, table = create_arena(256), new_table(2)
    memory = GroupMemory(0, Arena(fds[1]), [table, fds[1], small])
    assert memory.view(1, os.fstat(small).st_size - 8, 1, torch.float64).item() == 0
    for fd in (small, table):
        os.close(fd)
