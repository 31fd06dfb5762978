"""Arenas, the table that members of a group share, and waiting for counters: with several ranks in one process."""

import gc
import itertools
import os
import resource
import select
from contextlib import contextmanager

import pytest
import torch

from manyhands.comm.shared_memory import synchronisation as sync
from manyhands.comm.shared_memory import table
from manyhands.comm.shared_memory.memory import Arena, create_arena
from manyhands.errors import ManyhandsError
from refusals import refused


@contextmanager
def largest_file(size):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture
def fd():
    made = create_arena(2)
    yield made
    os.close(made)


def test_tensors_are_zeros_on_pages_of_their_own_in_sparse_memory(fd):
    assert os.fstat(fd).st_size >= 1 << 26
    assert os.fstat(fd).st_blocks == 0
    arena = Arena(fd)
    tensors = [arena.allocate(n, torch.uint8) for n in (1, 4096, 4097, 8)]
    assert [arena.locate(tensor) for tensor in tensors] == [0, 4096, 8192, 16384]
    assert not any(tensor.any() for tensor in tensors)
    assert arena.allocate(0, torch.float32).shape == (0,)
    refused("are free", arena.allocate, arena.length + 1, torch.uint8)
    arena.close()


def test_locate_finds_only_what_was_allocated(fd):
    arena, other = Arena(fd), Arena(fd)
    first, tensor = arena.allocate(800, torch.float64), arena.allocate(100, torch.float64)
    assert (arena.locate(first), arena.locate(tensor), arena.locate(tensor[10:])) == (0, 8192, 8272)
    assert arena.locate(torch.zeros(100)) == -1
    assert other.locate(tensor) == -1
    arena.close()
    other.close()


def test_tensors_outlive_the_arena_and_take_the_memory_with_them(fd):
    arena = Arena(fd)
    place = mapped(tensor := arena.allocate(1000, torch.float32).fill_(3))
    arena.close()
    arena.close()
    assert tensor.sum() == 3000
    assert place == mapped(tensor)
    address = tensor.data_ptr()
    del tensor, arena
    gc.collect()
    assert not mapped(address)


def mapped(place):
    """The line of /proc/self/maps in which a tensor or an address lies, if it is an arena's."""
    address = place if isinstance(place, int) else place.data_ptr()
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if low <= address < high and "memfd:manyhands" in line:
                return line.split()[0]
    return ""


def test_a_limit_on_file_sizes_gives_less_memory_or_an_error_and_many_workers_still_fit_into_the_addresses(monkeypatch):
    with largest_file(1 << 30):
        fd = create_arena(2)
    assert os.fstat(fd).st_size == 1 << 30
    os.close(fd)
    made, create = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *given: made.append(create(*given)) or made[-1])
    with largest_file(1 << 20), pytest.raises(ManyhandsError, match="ulimit -f"):
        create_arena(2)
    refused("Bad file descriptor", os.fstat, made[0], kind=OSError)  # nothing is left
    fd = create_arena(256)
    assert os.fstat(fd).st_size * 256 <= 1 << 45
    os.close(fd)


# -- giving back -----------------------------------------------------------------------------------------------------


def test_what_nobody_holds_goes_back_to_the_system(fd):
    """Pages and all; a view, or a parameter that is one, keeps it."""
    arena = Arena(fd)
    kept, tensor = arena.allocate(10, torch.float32), arena.allocate(1 << 18, torch.float32).fill_(1)
    before = os.fstat(fd).st_blocks
    parameter = torch.nn.Parameter(tensor[100:200])
    del tensor
    assert os.fstat(fd).st_blocks == before
    assert parameter.sum() == 100
    del parameter
    assert os.fstat(fd).st_blocks <= before - (1 << 20) // 512
    kept.fill_(2)
    arena.close()
    assert kept.sum() == 20


def test_it_is_lent_again_and_holds_zeros(fd):
    arena = Arena(fd)
    for _ in range(100):
        parts = [arena.allocate(n, torch.float64) for n in (5000, 1, 3000)]
        assert not any(part.any() for part in parts)
        for part in parts:
            part.fill_(3)
        places = [arena.locate(part) for part in parts]
        assert sorted(places) == [0, 10 * 4096, 11 * 4096]
        del parts[1], part, parts
    assert arena.locate(arena.allocate(8001, torch.float64)) == 0  # what lies side by side is one again
    arena.close()


def test_a_forked_process_that_lets_go_takes_nothing_away(fd):
    """A loader's process has copies of all references."""
    arena = Arena(fd)
    tensors = [arena.allocate(1000, torch.float32).fill_(5)]
    child = os.fork()
    if not child:
        tensors.clear()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensors[0].sum() == 5000
    arena.close()


# -- the table of a group ----------------------------------------------------------------------------------------------


@pytest.fixture
def fds():
    made = table.SharedMemory.create(2)
    yield made
    for fd in made:
        os.close(fd)


def test_the_parts_of_a_table_lie_apart_and_on_pages_of_sparse_memory(fds):
    for size in (1, 2, 5):
        layout = table.TableLayout(size)
        parts = [(0, 0)]
        for rank in range(size):
            region = layout.region(rank)
            assert layout.counters <= layout.headers < region.stop - region.start
            parts += [(region.start, region.stop), (layout.scratch(rank), layout.scratch(rank) + table.SCRATCH)]
            slots = [layout.mail(rank, target, chunk) for target in range(size) for chunk in range(table.RING)]
            parts += [(place, place + table.PAGE + table.MAIL) for place in slots]
            assert layout.mail(rank, 0, table.RING) == layout.mail(rank, 0, 0)
        assert all(start % table.PAGE == 0 for start, _ in parts), size
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(parts)), size
        assert parts[-1][1] == layout.length, size
    assert os.fstat(fds[0]).st_size == table.TableLayout(2).length
    assert os.fstat(fds[0]).st_blocks == 0


def test_all_ranks_see_the_same_at_a_place(fds):
    arenas = [Arena(fd) for fd in fds[1:]]
    first, second = (table.GroupMemory(rank, arena, fds) for rank, arena in enumerate(arenas))
    tensor = arenas[0].allocate(100, torch.float32).fill_(7)
    assert second.view(0, arenas[0].locate(tensor), 100, torch.float32).tolist() == [7.0] * 100
    assert not second.view(1, 0, 100, torch.float32).any()
    assert first.view(0, 0, 1, torch.uint8).data_ptr() == tensor.data_ptr()  # its arena is mapped once
    place = table.IN_TABLE + first.layout.scratch(0)
    first.view(0, place, 3, torch.float64).fill_(5)
    assert second.view(0, place, 3, torch.float64).tolist() == [5.0] * 3
    assert first.view(0, 0, 0, torch.float32).shape == (0,)


def test_what_cannot_be_made_leaves_nothing(monkeypatch):
    made, create = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *given: made.append(create(*given)) or made[-1])
    for limit in (1 << 20, 1 << 25):  # too small for a table; for a table of two ranks large enough, not for an arena
        with largest_file(limit), pytest.raises(ManyhandsError, match="ulimit -f"):
            table.SharedMemory.create(2)
    for fd in made:
        refused("Bad file descriptor", os.fstat, fd, kind=OSError)


def test_arenas_of_several_lengths(fds):
    """A member that came from a larger group has less."""
    small, made = create_arena(256), table.create_table(2)
    memory = table.GroupMemory(0, Arena(fds[1]), [made, fds[1], small])
    assert memory.view(1, os.fstat(small).st_size - 8, 1, torch.float64).item() == 0
    for fd in (small, made):
        os.close(fd)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_forked_child_does_not_hold_the_lifeline():
    read, write = os.pipe()
    lifelines = sync.LivenessPipes(0, [(os.dup(read), write)])
    stay, leave = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(leave)
        os.read(stay, 1)
        os._exit(0)
    lifelines.close()
    ready, _, _ = select.select([read], [], [], 5)
    for fd in (stay, leave, read):
        os.close(fd)
    os.waitpid(pid, 0)
    assert ready  # end of file, though the child lived


def test_the_fence_of_other_processors_is_no_deadlock(monkeypatch):
    monkeypatch.setattr(sync, "_ORDERED_STORES", False)
    sync.fence()
    sync.fence()
