"""Memory in memfds: offsets, addresses, and what is left when it is closed."""

import gc
import os
import resource

import pytest
import torch

from manyhands.comm.shared_memory.memory import Arena, SharedMemory
from manyhands.errors import BadInput, ManyhandsError


@pytest.fixture
def memory():
    fds = SharedMemory.create(2)
    yield fds
    for fd in fds:
        os.close(fd)


def test_two_arenas_of_one_memory_see_the_same(memory):
    first, second = Arena(0, memory), Arena(1, memory)
    offset = first.reserve(400)
    first.view(0, offset, 100, torch.float32).fill_(7)
    assert second.view(0, offset, 100, torch.float32).tolist() == [7.0] * 100
    assert not second.view(1, offset, 100, torch.float32).any()
    first.close()
    second.close()


def test_memory_is_sparse(memory):
    assert os.fstat(memory[0]).st_size >= 1 << 26
    assert os.fstat(memory[0]).st_blocks == 0


def test_reserved_ranges_are_aligned_and_apart(memory):
    arena = Arena(0, memory)
    offsets = [arena.reserve(nbytes) for nbytes in (1, 4096, 4097, 0, 8)]
    assert offsets == [0, 4096, 8192, 16384, 16384]
    arena.close()


def test_locate_finds_only_what_was_reserved(memory):
    arena = Arena(0, memory)
    offset = arena.reserve(800)
    tensor = arena.view(0, offset, 100, torch.float64)
    assert arena.locate(tensor) == offset
    assert arena.locate(tensor[10:]) == offset + 80
    assert arena.locate(torch.zeros(100)) == -1
    assert arena.locate(arena.view(1, offset, 100, torch.float64)) == -1
    arena.close()


def test_more_than_there_is_is_bad_input(memory):
    arena = Arena(0, memory)
    with pytest.raises(BadInput, match="are free"):
        arena.reserve(arena.length + 1)
    arena.close()


def test_tensors_outlive_the_arena_and_take_the_memory_with_them(memory):
    arena = Arena(0, memory)
    tensor = arena.view(0, arena.reserve(4000), 1000, torch.float32)
    tensor.fill_(3)
    arena.close()
    arena.close()
    assert tensor.sum() == 3000
    gc.collect()  # of other tests
    mapped = _mappings()
    del tensor
    gc.collect()
    assert _mappings() == mapped - 1


def test_a_limit_on_file_sizes_gives_less_memory():
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, old[1]))
    try:
        fds = SharedMemory.create(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert {os.fstat(fd).st_size for fd in fds} == {1 << 30}
    for fd in fds:
        os.close(fd)


def test_too_small_a_limit_is_an_error_that_leaves_nothing():
    before = len(os.listdir("/proc/self/fd"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(ManyhandsError, match="ulimit -f"):
            SharedMemory.create(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_workers_still_fit_into_the_addresses():
    fds = SharedMemory.create(256)
    assert os.fstat(fds[0]).st_size * 256 <= 1 << 45
    for fd in fds:
        os.close(fd)


def _mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:manyhands" in line for line in file)


# -- giving back -----------------------------------------------------------------------------------------------------


def test_what_nobody_holds_goes_back_to_the_system(memory):
    """Pages and all; a view, or a parameter that is one, keeps it."""
    arena = Arena(0, memory)
    kept, tensor = arena.allocate(10, torch.float32), arena.allocate(1 << 18, torch.float32).fill_(1)
    before = os.fstat(memory[0]).st_blocks
    parameter = torch.nn.Parameter(tensor[100:200])
    del tensor
    assert os.fstat(memory[0]).st_blocks == before
    assert parameter.sum() == 100
    del parameter
    assert os.fstat(memory[0]).st_blocks <= before - (1 << 20) // 512
    kept.fill_(2)
    arena.close()
    assert kept.sum() == 20


def test_it_is_lent_again_and_holds_zeros(memory):
    arena = Arena(0, memory)
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


def test_what_is_reserved_stays(memory):
    arena = Arena(0, memory)
    first, lent, second = arena.reserve(1), arena.allocate(1, torch.uint8), arena.reserve(1)
    del lent
    assert [first, arena.reserve(1), second, arena.reserve(1)] == [0, 4096, 8192, 12288]
    arena.close()


def test_a_forked_process_that_lets_go_takes_nothing_away(memory):
    """A loader's process has copies of all references."""
    arena = Arena(0, memory)
    tensors = [arena.allocate(1000, torch.float32).fill_(5)]
    child = os.fork()
    if not child:
        tensors.clear()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tensors[0].sum() == 5000
    arena.close()


def test_ranks_that_let_go_at_different_times(memory):
    """Each rank's memory is its own: where the others' tensors lie says their header."""
    first, second = Arena(0, memory), Arena(1, memory)
    early = first.allocate(1000, torch.float32)
    late = second.allocate(1000, torch.float32)
    del early
    assert (first.locate(first.allocate(1000, torch.float32)), second.locate(second.allocate(1000, torch.float32))) == (
        0,
        4096,
    )
    del late
    first.close()
    second.close()
