"""Memory that a server shard shares with workers on its host: versions of its center, and each worker's outbox.

A memfd travels by descriptor (SCM_RIGHTS): nothing has a name, nothing can be left behind. The server makes and seals
it, so that no worker can shorten it under the server's feet, nor write into a center.

A published version is never changed. The next one is written into a slot that nobody reads, so a read is never torn.
There are two slots more than readers: the newest version, one to write, and at worst another for each reader, so that
a push never waits for a reader. Slots that were never needed take no memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

from manyhands.comm.shared_memory.memory import mapped
from manyhands.errors import BadInput, ManyhandsError
from manyhands.transport.frame import MAX_TENSOR_BYTES, FrameError

_F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1: who maps it from now on only reads; Python names it from 3.13 on
_MAP_NORESERVE = 0x4000


class VersionedBuffer:
    """The server's side: slots of [n] for versions of the center. Calls stand behind the server's lock."""

    def __init__(self, n: int, dtype: torch.dtype, readers: int) -> None:
        if n * dtype.itemsize > MAX_TENSOR_BYTES:
            raise BadInput(
                f"a shard can hold at most {MAX_TENSOR_BYTES:,} bytes; got {n:,} elements of {dtype}: use more shards"
            )
        self.n, self.dtype, self.slots = n, dtype, readers + 2
        self.stride = _pages(n * dtype.itemsize)
        self.fd = _memory("center", self.slots * self.stride)
        try:
            memory = _mapped(self.fd, self.slots * self.stride)
        except ManyhandsError:
            self.close()
            raise
        with suppress(OSError):  # Linux before 5.1: workers only read it all the same
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        self.buffers = _slots(memory, self.slots, self.stride, n, dtype)
        self._index = {buffer.data_ptr(): index for index, buffer in enumerate(self.buffers)}
        self._pins: dict[int, int] = {}  # reader: the slot it reads

    def pin(self, reader: int, center: Tensor) -> int:
        """The slot of `center`, which stays as it is until the reader's `unpin`."""
        self._pins[reader] = self._index[center.data_ptr()]
        return self._pins[reader]

    def unpin(self, reader: int) -> None:
        """Whatever this reader read is not read any more. Idempotent."""
        self._pins.pop(reader, None)

    def free(self, center: Tensor) -> Tensor:
        """[n] memory for the version after `center`: the first slot that holds neither that nor what somebody reads."""
        taken = {*self._pins.values(), self._index[center.data_ptr()]}
        return self.buffers[next(index for index in range(self.slots) if index not in taken)]

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as a tensor in it, here and in every worker. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BufferReader:
    """A worker's side of `VersionedBuffer`: reads slots."""

    def __init__(self, fd: int, slots: int, stride: int, n: int, dtype: torch.dtype) -> None:
        """`fd` stays the caller's. FrameError where the memory is not what was announced."""
        if slots < 1 or stride != _pages(n * dtype.itemsize):
            raise FrameError(f"expected slots of {_pages(n * dtype.itemsize)} bytes; got {slots} of {stride}")
        length = slots * stride
        _check(fd, length)
        # Private, since a tensor of memory that cannot be written makes torch warn; what nobody writes is never copied.
        memory = _mapped(fd, length, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self._buffers = _slots(memory, slots, stride, n, dtype)

    def slot(self, index: int) -> Tensor:
        """[n], to be read until it is released, never written."""
        if not 0 <= index < len(self._buffers):
            raise FrameError(f"expected a slot in range({len(self._buffers)}); got {index}")
        return self._buffers[index]


def make_outbox(n: int, dtype: torch.dtype) -> int:
    """The descriptor of memory for [n], which a worker and its server both write. The caller's to close."""
    return _memory("outbox", _pages(n * dtype.itemsize))


def map_outbox(fd: int, n: int, dtype: torch.dtype) -> Tensor:
    """[n] what `make_outbox` made, here. `fd` stays the caller's."""
    length = _pages(n * dtype.itemsize)
    _check(fd, length)
    return _slots(_mapped(fd, length), 1, length, n, dtype)[0]


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _memory(name: str, length: int) -> int:
    """The descriptor of so many bytes, whose number is fixed for good."""
    fd = os.memfd_create(f"manyhands-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
    except OSError as error:
        os.close(fd)
        raise ManyhandsError(
            f"cannot reserve {length >> 20} MB of shared memory for a server's {name}: {error.strerror}. "
            "Raise the limit on file sizes (ulimit -f), or use more shards (servers=, --servers)."
        ) from error
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _mapped(fd: int, length: int, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    return mapped(fd, length, "a server's vectors", "more shards", flags)


def _check(fd: int, length: int) -> None:
    """FrameError unless this is memory of at least `length` bytes that nobody can shorten."""
    size = os.fstat(fd).st_size
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise FrameError("expected a sealed memory; got another descriptor") from error
    if size < length or not seals & fcntl.F_SEAL_SHRINK:
        raise FrameError(f"expected {length} bytes of memory sealed against shrinking; got {size}, seals {seals:#x}")


def _slots(memory: mmap.mmap, slots: int, stride: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    if n == 0:
        return [torch.empty(0, dtype=dtype) for _ in range(slots)]
    return [torch.frombuffer(memory, dtype=dtype, count=n, offset=index * stride) for index in range(slots)]
