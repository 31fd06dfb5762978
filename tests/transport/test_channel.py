"""Channels: frames there and back on every sort of socket, deadlines, ends, garbage."""

import os
import select
import socket
import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from socket_pairs import SORTS, aside, channels, raw, tls_pair

from manyhands.errors import BadInput
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import DTYPES, MAX_BLOB_BYTES, Frame, FrameError, bytes_of, pack

FRAME = Frame(kind=9, generation=2, sequence=3, weight=0.5, a=-4, b=5, blob=b"bits")


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_type(sort, dtype):
    sent = (torch.arange(12) % 5).to(dtype).view(3, 4)
    into = torch.zeros_like(sent)
    with channels(sort) as (near, far):
        near.send(FRAME, sent)
        frame = far.expect(9, into, sequence=3, a=-4)
        assert (frame.blob, frame.weight, frame.dtype, frame.elements) == (b"bits", 0.5, dtype, 12)
        assert torch.equal(into, sent)
        assert near.sent_bytes == sent.nbytes


@pytest.mark.parametrize("sort", SORTS)
def test_nothing_something_and_nothing(sort):
    with channels(sort) as (near, far):
        near.send(Frame(kind=1), torch.zeros(0))
        near.send(Frame(kind=2, blob=b"x" * 20_000), torch.ones(10_000))
        near.send(Frame(kind=3))
        far.expect(1, torch.zeros(0))
        into = torch.zeros(10_000)
        assert len(far.expect(2, into).blob) == 20_000
        assert into.eq(1).all()
        assert far.receive() == Frame(kind=3)


def test_in_parts_and_as_bare_memory():
    sent, into = torch.arange(10.0), torch.zeros(10)
    with channels() as (near, far):
        near.send(Frame(kind=1, dtype=torch.float32, elements=10), bytes_of(sent))
        assert far.receive().elements == 10
        far.receive_into(into[:4])
        with pytest.raises(BadInput, match="24 bytes"):
            far.receive()
        far.receive_into(bytes_of(into[4:]))
        assert torch.equal(into, sent)
        near.send(Frame(kind=1), into)
        far.expect(1, bytes_of(into))


def test_what_is_given_must_be_what_is_announced():
    with channels() as (near, _), pytest.raises(BadInput, match="announces 40 bytes"):
        near.send(Frame(kind=1, dtype=torch.float32, elements=10))


@pytest.mark.parametrize(
    ("expected", "fields"),
    [(torch.zeros(3), {}), (torch.zeros(2).int(), {}), (None, {}), (torch.zeros(2), {"sequence": 1})],
)
def test_another_frame_than_expected(expected, fields):
    with channels() as (near, far):
        near.send(Frame(kind=1), torch.ones(2))
        with pytest.raises(FrameError, match="expected kind 1"):
            far.expect(1, expected, **fields)
        assert expected is None or not expected.any()
        with pytest.raises(ChannelClosed):
            far.receive()


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2).int()])
def test_another_tensor_than_announced(tensor):
    with channels() as (near, far):
        near.send(Frame(kind=1), torch.ones(2))
        far.receive()
        with pytest.raises(FrameError):
            far.receive_into(tensor)


def test_an_older_generation_is_refused():
    with raw(generation=3) as (near, far):
        far.sendall(pack(Frame(kind=1, generation=3)) + pack(Frame(kind=1, generation=2)))
        assert near.receive().generation == 3
        with pytest.raises(FrameError, match="generation 3 or later"):
            near.receive()
        assert far.recv(1) == b""


def test_frames_carry_the_channels_generation():
    with channels(generation=4) as (near, far):
        near.send(Frame(kind=1))
        near.send(Frame(kind=1, generation=5))
        assert [far.receive().generation for _ in range(2)] == [4, 5]


# -- garbage -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400), right=st.integers(0, 8))
def test_any_bytes_are_a_frame_or_an_error_and_take_no_memory(data, right):
    """Whatever comes: FrameError, or ChannelClosed at its end, and never more memory than a blob may have."""
    beginning = pack(Frame(kind=1, blob=b"b"))[: right * 8]
    with raw() as (channel, far):
        far.sendall(beginning + data)
        far.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        try:
            while True:
                frame = channel.receive()
                channel.receive_into(torch.empty(0, dtype=frame.dtype))
                if frame.elements:
                    channel.receive_into(torch.zeros(min(frame.elements, 50), dtype=frame.dtype))
                if frame.tensor_bytes > 50 * frame.dtype.itemsize:
                    break  # more than this test takes; nothing was read of it
        except (FrameError, ChannelClosed):
            pass
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < MAX_BLOB_BYTES + 100_000


@pytest.mark.parametrize("length", [1, 63, 64, 66])
def test_a_truncated_frame(length):
    with raw() as (channel, far):
        far.sendall(pack(Frame(kind=1, blob=b"bits"))[:length] + b"b" * (length - 64))
        far.close()
        with pytest.raises(ChannelClosed, match="ended"):
            channel.receive()


def test_a_truncated_tensor():
    with raw() as (channel, far):
        far.sendall(pack(Frame(kind=1, dtype=torch.float32, elements=4)) + bytes(15))
        far.close()
        with pytest.raises(ChannelClosed, match="ended"):
            channel.expect(1, torch.zeros(4))


# -- deadlines and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", SORTS)
def test_silence_ends_and_the_channel_goes_on(sort):
    with channels(sort, timeout_s=0.05) as (near, far):
        start = time.monotonic()
        with pytest.raises(ChannelTimeout, match=r"near transferred nothing for 0\.05 s"):
            far.receive()
        assert 0.04 < time.monotonic() - start < 2
        near.send(Frame(kind=1), torch.ones(2))
        assert far.receive().kind == 1
        far.receive_into(torch.zeros(2))


@pytest.mark.parametrize("sort", SORTS)
def test_another_timeout_holds_from_the_next_wait_on(sort):
    with channels(sort, timeout_s=60) as (_, far):
        far.set_timeout(0.05)
        start = time.monotonic()
        with pytest.raises(ChannelTimeout, match=r"transferred nothing for 0\.05 s"):
            far.receive()
        assert time.monotonic() - start < 5


def test_silence_in_the_middle_closes():
    with raw(timeout_s=0.05) as (channel, far):
        far.sendall(b"MHn")
        with pytest.raises(ChannelTimeout):
            channel.receive()
        with pytest.raises(ChannelClosed, match="closed here"):
            channel.receive()


@pytest.mark.parametrize("sort", SORTS)
def test_a_peer_that_does_not_read(sort):
    with channels(sort, timeout_s=0.05) as (near, _):
        with pytest.raises(ChannelTimeout, match="receiving a message"):
            near.send(Frame(kind=1), torch.zeros(8_000_000))
        with pytest.raises(ChannelClosed):
            near.send(Frame(kind=1))


@pytest.mark.parametrize("sort", SORTS)
def test_a_peer_that_is_gone(sort):
    with channels(sort) as (near, far):
        far.close()
        with pytest.raises(ChannelClosed, match="connection to far ended"):
            near.receive()
        with pytest.raises(ChannelClosed):
            near.send(Frame(kind=1), torch.zeros(8_000_000))


@pytest.mark.parametrize("sort", SORTS)
def test_closing_wakes_who_receives_and_who_sends(sort):
    with channels(sort, timeout_s=60) as (near, _):
        waiting = [aside(near.receive), aside(lambda: near.send(Frame(kind=1), torch.zeros(8_000_000)))]
        select.select([], [], [], 0.02)  # either way it must end; most often they wait by now
        near.close()
        for one in waiting:
            with pytest.raises(ChannelClosed, match="closed here"):
                one.result(5)
        assert near.fileno() == -1
        assert near._sock.fileno() == -1  # the last to leave gave it back
        near.close()


@pytest.mark.parametrize("sort", SORTS)
def test_both_ways_at_once(sort):
    """50 MB each way between two ends that both send before they read: neither waits for the other."""
    size = 12_500_000
    with channels(sort, timeout_s=20) as ends:
        into = [torch.zeros(size) for _ in ends]
        sending = [
            aside(lambda end=end, i=i: end.send(Frame(kind=1), torch.full((size,), i + 1.0)))
            for i, end in enumerate(ends)
        ]
        receiving = [aside(lambda end=end, i=i: end.expect(1, into[i])) for i, end in enumerate(ends)]
        for one in sending + receiving:
            one.result(30)
        assert into[0].eq(2).all()
        assert into[1].eq(1).all()


@pytest.mark.parametrize("sort", SORTS)
def test_readable_sees_what_no_descriptor_shows(sort):
    with channels(sort) as (near, far):
        assert not far.readable(0)
        near.send(Frame(kind=1), torch.zeros(2))
        near.send(Frame(kind=2))
        assert far.readable(5)
        far.expect(1, torch.zeros(2))
        assert far.readable(5)
        far.receive()
        near.close()
        assert far.readable(5)


def test_tls_reads_what_came_in_one_record():
    """Two frames in one record: the second lies decrypted in OpenSSL, and the descriptor is silent."""
    near, far = tls_pair()
    channel = Channel(far, peer="near", timeout_s=5)
    with near:
        near.sendall(pack(Frame(kind=1)) + pack(Frame(kind=2)))
        channel.receive()
        assert not select.select([channel.fileno()], [], [], 0)[0]
        assert channel.readable(0)
        assert channel.receive().kind == 2
    channel.close()


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_descriptors_travel_between_frames():
    with channels() as (near, far):
        read, write = os.pipe()
        near.send(Frame(kind=1))
        near.send_fds([read, write])
        near.send(Frame(kind=2))
        assert far.receive().kind == 1
        other_read, other_write = far.receive_fds(2)
        assert far.receive().kind == 2
        assert not os.get_inheritable(other_read)
        os.write(other_write, b"x")
        assert os.read(read, 1) == b"x"
        for fd in (read, write, other_read, other_write):
            os.close(fd)


@pytest.mark.parametrize(("sent", "asked"), [(3, 2), (1, 2), (0, 1)])
def test_another_number_of_descriptors_is_an_error_and_leaves_none_open(sent, asked):
    with channels() as (near, far):
        if sent:
            near.send_fds([0] * sent)
        else:
            near.send(Frame(kind=1))
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(FrameError, match=f"{asked} descriptors"):
            far.receive_fds(asked)
        assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_descriptors_need_a_unix_socket():
    with channels("tcp") as (near, _), pytest.raises(BadInput, match="Unix socket"):
        near.send_fds([0])
    with channels() as (near, _), pytest.raises(BadInput, match="got 0"):
        near.receive_fds(0)
