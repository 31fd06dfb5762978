"""Published versions stay as they are while somebody reads them, and nobody can take the memory away."""

import mmap
import os

import pytest
import torch

from manyhands.errors import ManyhandsError
from manyhands.server.versioned_buffer import BufferReader, VersionedBuffer, make_outbox, map_outbox
from manyhands.transport.frame import FrameError
from open_files import open_files

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


def test_every_reader_may_hold_another_version_and_there_is_still_room(published):
    first = published.buffers[0]
    published.pin(0, first)
    second = published.free(first)
    published.pin(1, second)
    third = published.free(second)
    assert len({buffer.data_ptr() for buffer in (first, second, third, published.free(third))}) == 4
    published.unpin(0)
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
    with pytest.raises(PermissionError):
        mmap.mmap(published.fd, published.stride)
    with pytest.raises(PermissionError):
        os.ftruncate(published.fd, 0)
    outbox = make_outbox(N, torch.float32)
    with pytest.raises(PermissionError):
        os.ftruncate(outbox, 0)
    os.close(outbox)


def test_an_outbox_is_written_and_read_by_both(published):
    fd = make_outbox(N, torch.float64)
    mine, its = map_outbox(fd, N, torch.float64), map_outbox(fd, N, torch.float64)
    os.close(fd)
    mine.fill_(1.5)
    assert its.eq(1.5).all()
    its.fill_(2.5)
    assert mine.eq(2.5).all()


def test_a_worker_refuses_memory_that_is_not_what_was_announced(published):
    with pytest.raises(FrameError, match="expected .* bytes of memory"):
        BufferReader(published.fd, published.slots + 1, published.stride, N, torch.float32)
    for slots, stride in [(published.slots, 4096), (0, published.stride), (-2, -published.stride), (1 << 62, 1)]:
        with pytest.raises(FrameError, match="expected slots of"):
            BufferReader(published.fd, slots, stride, N, torch.float32)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    with pytest.raises(FrameError, match="sealed"):
        map_outbox(unsealed, N, torch.float32)
    os.close(unsealed)
    with open("/proc/self/status") as other, pytest.raises(FrameError, match="another descriptor"):
        map_outbox(other.fileno(), N, torch.float32)
    window = BufferReader(published.fd, published.slots, published.stride, N, torch.float32)
    for slot in (-1, published.slots):
        with pytest.raises(FrameError, match="expected a slot"):
            window.slot(slot)


@pytest.mark.parametrize(("n", "readers"), [(1 << 62, 1), (1 << 37, 1000)])
def test_a_center_that_no_process_can_map_is_refused(n, readers):
    with pytest.raises(ManyhandsError, match="more shards"):
        VersionedBuffer(n, torch.float32, readers)


def test_an_empty_shard_has_memory_too():
    published = VersionedBuffer(0, torch.float32, readers=1)
    window = BufferReader(published.fd, published.slots, published.stride, 0, torch.float32)
    assert window.slot(published.pin(0, published.free(published.buffers[0]))).numel() == 0
    published.close()


def test_nothing_is_left_open():
    before = open_files()
    published = VersionedBuffer(N, torch.float32, readers=2)
    window = BufferReader(published.fd, published.slots, published.stride, N, torch.float32)
    published.close()
    published.close()
    del published, window
    assert open_files() <= before
