"""A process's own memory for vectors: an arena, one sparse memfd that the other workers of its host map as well.

It belongs to the process and outlives the groups that use it. Nothing has a name, so nothing can be left behind and a
small /dev/shm does not matter. A page costs memory once it is written; the kernel takes everything back when the last
mapping is gone, and what `allocate` gave as soon as nobody holds it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import weakref
from collections import deque

import torch
from torch import Tensor

from manyhands.errors import BadInput, ManyhandsError

PAGE = 4096
_LARGEST = 1 << 40  # bytes an arena: sparse, so that there is room for whatever size is learned later
_SMALLEST = 1 << 26
_ADDRESSES = 1 << 45  # bytes of addresses for all arenas together: x86-64 gives a process 2**47


def create_arena(size: int) -> int:
    """The descriptor of an arena, of which a process will map `size`, its peers' among them.

    It is close-on-exec and the caller's: it is inherited by fork, or passed by SCM_RIGHTS. Raises ManyhandsError where
    the system has no memory to lend.
    """
    length = _largest(size)
    while True:
        try:
            return memory_file("manyhands-arena", length)
        except ManyhandsError:
            if length <= _SMALLEST:
                raise
        length //= 2  # less may do


def memory_file(name: str, length: int) -> int:
    """The descriptor of so many bytes, which read as zeros; ManyhandsError where the system allows fewer."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EFBIG, errno.EINVAL, errno.ENOMEM, errno.ENOSPC):
            raise
        raise ManyhandsError(
            f"cannot reserve {length >> 20} MB of shared memory: {error.strerror}. "
            "Raise the limit on file sizes (ulimit -f) or on memory."
        ) from error
    return fd


def _largest(size: int) -> int:
    """Bytes of an arena, of which one process can map `size`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    room = _ADDRESSES if limit == resource.RLIM_INFINITY else min(_ADDRESSES, limit // 2)
    length = _LARGEST
    while length > _SMALLEST and length * size > room:
        length //= 2
    return length


class Arena:
    """The memory in which this process's vectors lie. Offsets are in bytes from its start.

    It knows nothing of groups: a later one finds what was allocated under an earlier one where it was. Only one thread
    of a process may allocate; any may let go.
    """

    def __init__(self, fd: int) -> None:
        """Map what `create_arena` gave. `fd` stays the caller's, who keeps it for as long as others may come."""
        self.length = os.fstat(fd).st_size
        self.memory: mmap.mmap | None = mapped_arena(fd)
        self._next = 0  # the end of all that was ever given out
        self._free: list[tuple[int, int]] = []  # [start, end) below it, in order, apart from each other
        self._released: deque[tuple[int, int]] = deque()  # not yet among the free: whoever lets go may be any thread
        self._finalizers: dict[int, weakref.finalize[..., memoryview]] = {}  # by offset, the last one of each
        self._base = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()

    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        """Zeros [n], page-aligned. The memory is returned to the system with the last tensor that lies in it."""
        assert self.memory is not None, "the arena was closed"
        if n == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = n * dtype.itemsize
        start, end = self._find(pages(nbytes))
        lent = memoryview(self.memory)[start : start + nbytes]  # every tensor in this memory holds it
        finalizer = weakref.finalize(lent, _give_back, self.memory, start, end, self._released, os.getpid())
        finalizer.atexit = False
        self._finalizers[start] = finalizer
        return torch.frombuffer(lent, dtype=dtype, count=n)

    def keep(self, offset: int) -> None:
        """What `allocate` gave around `offset` stays while any process maps it: nothing reports when peers release it."""
        self._finalizers[max(start for start in self._finalizers if start <= offset)].detach()

    def locate(self, tensor: Tensor) -> int:
        """The offset at which a contiguous `tensor` lies in this arena, or -1."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._next else -1

    def close(self) -> None:
        """Let go of the mapping, which goes with the last tensor that lies in it. Idempotent.

        Nothing is closed explicitly: a tensor holds the mapping but not an export of its buffer, so `mmap.close` would
        take the memory away under it.
        """
        self.memory = None

    def _find(self, length: int) -> tuple[int, int]:
        """[start, end) of so many bytes that nobody uses, zeros; BadInput where there are not so many."""
        self._take_back()
        for i, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[i : i + 1] = [(start + length, end)] if end - start > length else []
                return start, start + length
        start, end = self._next, self._next + length
        if end > self.length:
            raise BadInput(
                f"{length:,} bytes of shared memory are needed, and {self.length - start:,} of {self.length:,} are "
                "free: raise the limit on addresses or file sizes (ulimit -v, ulimit -f), or use fewer workers"
            )
        self._next = end
        return start, end

    def _take_back(self) -> None:
        """Put what was let go of among the free."""
        while self._released:
            self._free.append(self._released.popleft())
        free, self._free = sorted(self._free), []
        for start, end in free:
            if self._free and start == self._free[-1][1]:
                self._free[-1] = (self._free[-1][0], end)
            else:
                self._free.append((start, end))


def _give_back(mapped: mmap.mmap, start: int, end: int, released: deque[tuple[int, int]], owner: int) -> None:
    """No tensor of this process uses these bytes: their pages are returned, and read as zeros when lent again."""
    if os.getpid() == owner:  # a loader's process, forked from the worker, has let go of its own references only
        mapped.madvise(mmap.MADV_REMOVE, start, end - start)
        released.append((start, end))


def pages(nbytes: int) -> int:
    """Bytes of the pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


def mapped_arena(fd: int) -> mmap.mmap:
    """An arena, the own one or a peer's, in this process's addresses."""
    return mapped(fd, os.fstat(fd).st_size, "a worker's shared memory", "fewer workers")


def mapped(fd: int, length: int, what: str, remedy: str, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """The file in this process's addresses; ManyhandsError, saying for what and the remedy, where there are too few."""
    try:
        memory = mmap.mmap(fd, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise ManyhandsError(
            f"cannot map {length >> 20} MB for {what}: {error.strerror}. Raise the limit on address space (ulimit -v), "
            f"or use {remedy}."
        ) from error
    memory.madvise(mmap.MADV_DONTDUMP)  # else a core file would hold all tensors
    return memory
