"""Memory that the workers of one host share: one sparse memfd per rank, mapped by all of them.

Nothing has a name, so nothing can be left behind and a small /dev/shm does not matter. A page costs memory once it is
written; the kernel takes everything back when the last mapping is gone, and what `allocate` gave as soon as nobody
holds it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.errors import BadInput, ManyhandsError

_LARGEST = 1 << 40  # bytes a rank: sparse, so that peers have room for whatever size is learned later
_SMALLEST = 1 << 26
_ADDRESSES = 1 << 45  # bytes of addresses for all ranks together: x86-64 gives a process 2**47
_ALIGN = 4096


class SharedMemory:
    """What an engine makes before it starts the workers."""

    @staticmethod
    def create(size: int) -> list[int]:
        """One memfd per rank, for `SharedMemoryGroup` on all `size` workers (inherited by fork, or passed by
        SCM_RIGHTS).

        The descriptors are close-on-exec and the caller's: it closes them once the workers have theirs.
        Raises ManyhandsError where the system has no memory to lend.
        """
        fds: list[int] = []
        try:
            for rank in range(size):
                fds.append(os.memfd_create(f"manyhands-{rank}", os.MFD_CLOEXEC))
            length = _largest(size)
            while True:
                try:
                    for fd in fds:
                        os.ftruncate(fd, length)
                    return fds
                except OSError as error:
                    if error.errno not in (errno.EFBIG, errno.EINVAL, errno.ENOMEM, errno.ENOSPC):
                        raise
                    if length <= _SMALLEST:
                        raise ManyhandsError(
                            f"cannot reserve shared memory ({size} × {length >> 20} MB): {error.strerror}. "
                            "Raise the limit on file sizes (ulimit -f) or on memory."
                        ) from error
                length //= 2  # less may do
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


def _largest(size: int) -> int:
    """Bytes a rank that `size` ranks can map into one process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    room = _ADDRESSES if limit == resource.RLIM_INFINITY else min(_ADDRESSES, limit // 2)
    length = _LARGEST
    while length > _SMALLEST and length * size > room:
        length //= 2
    return length


class Arena:
    """All ranks' memory, as one of them sees it. Offsets are in bytes from the start of a rank's own memory.

    Tensors made by `view` keep their mapping alive: they stay valid after `close`.
    """

    def __init__(self, rank: int, fds: Sequence[int]) -> None:
        """Map every descriptor; they stay the caller's and may be closed afterwards."""
        self.rank = rank
        self.length = min(os.fstat(fd).st_size for fd in fds)
        self.maps = [mapped(fd, self.length, "a worker's shared memory", "fewer workers") for fd in fds]
        self._next = 0  # the end of all that was ever given out
        self._free: list[tuple[int, int]] = []  # [start, end) below it, in order, apart from each other
        self._released: deque[tuple[int, int]] = deque()  # not yet among the free: whoever lets go may be any thread
        self._finalizers: dict[int, weakref.finalize[..., memoryview]] = {}  # by offset, the last one of each
        first = self.view(rank, 0, 1, torch.uint8)
        self._base = first.data_ptr()

    def reserve(self, nbytes: int) -> int:
        """The offset of `nbytes` more bytes, zero and page-aligned, for as long as the arena lasts.

        The same on all ranks that ask in the same order, as long as nothing that was allocated was let go of.
        """
        length = -(-nbytes // _ALIGN) * _ALIGN
        self._take_back()
        for i, (start, end) in enumerate(self._free):
            if length and end - start >= length:
                self._free[i : i + 1] = [(start + length, end)] if end - start > length else []
                return start
        offset, end = self._next, self._next + length
        if end > self.length:
            raise BadInput(
                f"{nbytes:,} bytes of shared memory are needed, and {self.length - offset:,} of {self.length:,} are "
                "free: raise the limit on addresses or file sizes (ulimit -v, ulimit -f), or use fewer workers"
            )
        self._next = end
        return offset

    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        """Zeros [n] in this rank's own memory, which is returned to the system with the last tensor that uses it."""
        if n == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = n * dtype.itemsize
        start = self.reserve(nbytes)
        end = start + -(-nbytes // _ALIGN) * _ALIGN
        mapped = self.maps[self.rank]
        lent = memoryview(mapped)[start : start + nbytes]  # every tensor in this memory holds it
        finalizer = weakref.finalize(lent, _give_back, mapped, start, end, self._released, os.getpid())
        finalizer.atexit = False
        self._finalizers[start] = finalizer
        return torch.frombuffer(lent, dtype=dtype, count=n)

    def keep(self, offset: int) -> None:
        """What `allocate` gave around `offset` stays while any process maps it: nothing reports when peers release it."""
        self._finalizers[max(start for start in self._finalizers if start <= offset)].detach()

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

    def view(self, rank: int, offset: int, n: int, dtype: torch.dtype) -> Tensor:
        """[n] elements of `rank`'s memory from `offset` on."""
        if n == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.maps[rank], dtype=dtype, count=n, offset=offset)

    def locate(self, tensor: Tensor) -> int:
        """The offset at which a contiguous `tensor` lies in this rank's own memory, or -1."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._next else -1

    def close(self) -> None:
        """Let go of the mappings; each is unmapped with the last tensor that lies in it. Idempotent.

        Nothing is closed explicitly: a tensor holds the mapping but not an export of its buffer, so `mmap.close` would
        take the memory away under it.
        """
        self.maps = []


def _give_back(mapped: mmap.mmap, start: int, end: int, released: deque[tuple[int, int]], owner: int) -> None:
    """No tensor of this process uses these bytes: their pages are returned, and read as zeros when lent again."""
    if os.getpid() == owner:  # a loader's process, forked from the worker, has let go of its own references only
        mapped.madvise(mmap.MADV_REMOVE, start, end - start)
        released.append((start, end))


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
