"""Published versions stay as they are while somebody reads them, and nobody can take the memory away."""

import mmap
import os

import pytest
import torch

from manyhands.errors import ManyhandsError
from manyhands.server.versioned_buffer import BufferReader, VersionedBuffer, make_outbox, map_outbox
from manyhands.transport.frame import FrameError
from refusals import refused

N = 5000


@pytest.fixture
def published():
    made = VersionedBuffer(N, torch.float32, readers=2)
    yield made
    made.close()


def test_the_next_version_is_written_where_nobody_reads(published):
    center = published.buffers[0]
    read = {reader: published.pin(reader, center) for reader in (0, 1)}
    for reader in (1, 0, 0, 1, 1):
        slots = {published.buffers[slot].data_ptr() for slot in read.values()}
        new = published.free(center)
        assert new.data_ptr() not in slots | {center.data_ptr()}
        center = new
        read[reader] = published.pin(reader, center)
    published.unpin(0)
    published.unpin(0)
    first = published.buffers[0]  # every reader may hold another version, and there is still room
    published.pin(0, first)
    second = published.free(first)
    published.pin(1, second)
    third = published.free(second)
    assert len({buffer.data_ptr() for buffer in (first, second, third, published.free(third))}) == 4
    published.unpin(0)
    assert published.free(third).data_ptr() == first.data_ptr()


def test_a_window_shows_what_is_written_and_cannot_change_it(published):
    window = BufferReader(published.fd, published.slots, published.stride, N, torch.float32)
    published.buffers[1].fill_(3.0)
    assert window.slot(1).eq(3.0).all()
    published.buffers[1].fill_(4.0)
    assert window.slot(1).eq(4.0).all()
    window.slot(1).fill_(5.0)  # a reader that does what it must not
    assert published.buffers[1].eq(4.0).all()


def test_no_reader_can_map_it_for_writing_nor_shorten_it(published):
    refused("", mmap.mmap, published.fd, published.stride, kind=PermissionError)
    refused("", os.ftruncate, published.fd, 0, kind=PermissionError)
    outbox = make_outbox(N, torch.float32)
    refused("", os.ftruncate, outbox, 0, kind=PermissionError)
    os.close(outbox)


def test_a_worker_refuses_memory_that_is_not_what_was_announced(published):
    with pytest.raises(FrameError, match="expected .* bytes of memory"):
        BufferReader(published.fd, published.slots + 1, published.stride, N, torch.float32)
    for slots, stride in [(published.slots, 4096), (0, published.stride), (-2, -published.stride), (1 << 62, 1)]:
        refused("expected slots of", BufferReader, published.fd, slots, stride, N, torch.float32, kind=FrameError)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    refused("sealed", map_outbox, unsealed, N, torch.float32, kind=FrameError)
    os.close(unsealed)
    with open("/proc/self/status") as other, pytest.raises(FrameError, match="another descriptor"):
        map_outbox(other.fileno(), N, torch.float32)
    window = BufferReader(published.fd, published.slots, published.stride, N, torch.float32)
    for slot in (-1, published.slots):
        refused("expected a slot", window.slot, slot, kind=FrameError)


def test_a_center_that_no_process_can_map_is_refused_and_an_empty_shard_has_memory_too():
    for n, readers in [(1 << 62, 1), (1 << 37, 1000)]:
        refused("more shards", VersionedBuffer, n, torch.float32, readers, kind=ManyhandsError)
    published = VersionedBuffer(0, torch.float32, readers=1)
    window = BufferReader(published.fd, published.slots, published.stride, 0, torch.float32)
    assert window.slot(published.pin(0, published.free(published.buffers[0]))).numel() == 0
    published.close()


def test_nothing_is_left_open(monkeypatch):
    made, create = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *given: made.append(create(*given)) or made[-1])
    published = VersionedBuffer(N, torch.float32, readers=2)
    made.append(published.fd)
    BufferReader(published.fd, published.slots, published.stride, N, torch.float32)
    published.close()
    published.close()
    for fd in made:
        refused("Bad file descriptor", os.fstat, fd, kind=OSError)
