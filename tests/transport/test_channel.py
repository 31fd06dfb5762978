"""Channels: frames there and back on every sort of socket, deadlines, ends, garbage."""

import os
import select
from functools import partial

import pytest
import torch
from socket_pairs import SORTS, aside, channels, raw, tls_pair

from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import DTYPES, Frame, FrameError, bytes_of, pack
from refusals import refused

FRAME = Frame(kind=9, generation=2, sequence=3, weight=0.5, a=-4, b=5, blob=b"bits")


@pytest.mark.parametrize("sort", SORTS)
def test_a_tensor_of_every_type_nothing_and_something(sort):
    with channels(sort) as (near, far):
        for number, dtype in enumerate(DTYPES):
            sent, before = (torch.arange(12) % 5).to(dtype).view(3, 4), near.sent_bytes
            into = torch.zeros_like(sent)
            near.send(FRAME, sent)
            frame = far.expect(9, into, sequence=3, a=-4)
            assert (frame.blob, frame.weight, frame.dtype, frame.elements) == (b"bits", 0.5, dtype, 12)
            assert torch.equal(into, sent), dtype
            assert near.sent_bytes - before == sent.nbytes, (number, dtype)
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
        refused("24 bytes", far.receive)
        far.receive_into(bytes_of(into[4:]))
        assert torch.equal(into, sent)
        near.send(Frame(kind=1), into)
        far.expect(1, bytes_of(into))


def test_what_is_given_must_be_what_is_announced_and_expected():
    with channels() as (near, _):
        refused("announces 40 bytes", near.send, Frame(kind=1, dtype=torch.float32, elements=10))
    for expected, sequence in [(torch.zeros(3), 0), (torch.zeros(2).int(), 0), (None, 0), (torch.zeros(2), 1)]:
        with channels() as (near, far):
            near.send(Frame(kind=1), torch.ones(2))
            expect = partial(far.expect, sequence=sequence)
            refused("expected kind 1", expect, 1, expected, kind=FrameError)
            assert expected is None or not expected.any()
            refused("", far.receive, kind=ChannelClosed)
    for tensor in (torch.zeros(3), torch.zeros(2).int()):
        with channels() as (near, far):
            near.send(Frame(kind=1), torch.ones(2))
            far.receive()
            refused("", far.receive_into, tensor, kind=FrameError)


def test_an_older_generation_is_refused():
    with raw(generation=3) as (near, far):
        far.sendall(pack(Frame(kind=1, generation=3)) + pack(Frame(kind=1, generation=2)))
        assert near.receive().generation == 3
        refused("generation 3 or later", near.receive, kind=FrameError)
        assert far.recv(1) == b""


def test_frames_carry_the_channels_generation():
    with channels(generation=4) as (near, far):
        near.send(Frame(kind=1))
        near.send(Frame(kind=1, generation=5))
        assert [far.receive().generation for _ in range(2)] == [4, 5]


def test_what_is_truncated():
    header = pack(Frame(kind=1, blob=b"bits"))
    tensor = pack(Frame(kind=1, dtype=torch.float32, elements=4)) + bytes(15)
    for said in (header[:1], header[:63], header, header + b"bb", tensor):
        with raw() as (channel, far):
            far.sendall(said)
            far.close()
            refused("ended", channel.expect, 1, torch.zeros(4), kind=ChannelClosed, case=len(said))


# -- deadlines and ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", SORTS)
def test_silence_ends_and_the_channel_goes_on(sort):
    """Another timeout holds from the next wait on; a peer that does not read ends the channel."""
    with channels(sort, timeout_s=60) as (near, far):
        for timeout_s in (0.05, 1e-9):  # the kernel's 0 would be for ever
            far.set_timeout(timeout_s)
            refused("near transferred nothing for ", far.receive, kind=ChannelTimeout)
        far.set_timeout(5)
        near.send(Frame(kind=1), torch.ones(2))
        assert far.receive().kind == 1
        far.receive_into(torch.zeros(2))
        near.set_timeout(0.05)
        refused("receiving a message", near.send, Frame(kind=1), torch.zeros(8_000_000), kind=ChannelTimeout)
        refused("", near.send, Frame(kind=1), kind=ChannelClosed)


def test_silence_in_the_middle_closes():
    with raw(timeout_s=0.05) as (channel, far):
        far.sendall(b"MHn")
        refused("", channel.receive, kind=ChannelTimeout)
        refused("closed here", channel.receive, kind=ChannelClosed)


@pytest.mark.parametrize("sort", SORTS)
def test_a_peer_that_is_gone(sort):
    with channels(sort) as (near, far):
        far.close()
        refused("connection to far ended", near.receive, kind=ChannelClosed)
        refused("", near.send, Frame(kind=1), torch.zeros(8_000_000), kind=ChannelClosed)


@pytest.mark.parametrize("sort", SORTS)
def test_closing_wakes_who_receives_and_who_sends(sort):
    with channels(sort, timeout_s=60) as (near, _):
        waiting = [aside(near.receive), aside(lambda: near.send(Frame(kind=1), torch.zeros(8_000_000)))]
        select.select([], [], [], 0.02)  # either way it must end; most often they wait by now
        near.close()
        for one in waiting:
            refused("closed here", one.result, 5, kind=ChannelClosed)
        assert near.fileno() == -1
        assert near._sock.fileno() == -1  # the last to leave gave it back
        near.close()


@pytest.mark.parametrize("sort", SORTS)
def test_both_ways_at_once(sort):
    """12 MB each way between two ends that both send before they read: neither waits for the other."""
    size = 3_000_000
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


def test_another_number_of_descriptors_is_an_error_and_leaves_none_open():
    for sent, asked in [(3, 2), (1, 2), (0, 1)]:
        read, write = os.pipe()
        with channels() as (near, far):
            near.send_fds([write] * sent) if sent else near.send(Frame(kind=1))
            os.close(write)
            refused(f"{asked} descriptors", far.receive_fds, asked, kind=FrameError)
        assert select.select([read], [], [], 5)[0], (sent, asked)
        assert os.read(read, 1) == b"", "no other holds its end"
        os.close(read)


def test_descriptors_need_a_unix_socket():
    with channels("tcp") as (near, _):
        refused("Unix socket", near.send_fds, [0])
    with channels() as (near, _):
        refused("got 0", near.receive_fds, 0)
