"""An arena: offsets, addresses, and what is left when it is closed."""

import gc
import os
import resource

import pytest
import torch

from manyhands.comm.shared_memory.memory import Arena, create_arena
from manyhands.errors import BadInput, ManyhandsError


@pytest.fixture
def fd():
    made = create_arena(2)
    yield made
    os.close(made)


def test_memory_is_sparse(fd):
    assert os.fstat(fd).st_size >= 1 << 26
    assert os.fstat(fd).st_blocks == 0


def test_tensors_are_zeros_on_pages_of_their_own(fd):
    arena = Arena(fd)
    tensors = [arena.allocate(n, torch.uint8) for n in (1, 4096, 4097, 8)]
    assert [arena.locate(tensor) for tensor in tensors] == [0, 4096, 8192, 16384]
    assert not any(tensor.any() for tensor in tensors)
    assert arena.allocate(0, torch.float32).shape == (0,)
    arena.close()


def test_locate_finds_only_what_was_allocated(fd):
    arena, other = Arena(fd), Arena(fd)
    first, tensor = arena.allocate(800, torch.float64), arena.allocate(100, torch.float64)
    assert (arena.locate(first), arena.locate(tensor), arena.locate(tensor[10:])) == (0, 8192, 8272)
    assert arena.locate(torch.zeros(100)) == -1
    assert other.locate(tensor) == -1
    arena.close()
    other.close()


def test_more_than_there_is_is_bad_input(fd):
    arena = Arena(fd)
    with pytest.raises(BadInput, match="are free"):
        arena.allocate(arena.length + 1, torch.uint8)
    arena.close()


def test_tensors_outlive_the_arena_and_take_the_memory_with_them(fd):
    arena = Arena(fd)
    tensor = arena.allocate(1000, torch.float32)
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
        fd = create_arena(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.fstat(fd).st_size == 1 << 30
    os.close(fd)


def test_too_small_a_limit_is_an_error_that_leaves_nothing():
    before = len(os.listdir("/proc/self/fd"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with pytest.raises(ManyhandsError, match="ulimit -f"):
            create_arena(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_workers_still_fit_into_the_addresses():
    fd = create_arena(256)
    assert os.fstat(fd).st_size * 256 <= 1 << 45
    os.close(fd)


def _mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:manyhands" in line for line in file)


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
