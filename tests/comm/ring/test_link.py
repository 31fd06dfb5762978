"""A link: frames go out and come in piece by piece, nothing blocks, and the last notice is found behind anything."""

import os
import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.comm.ring.link import ARRIVE, CHUNK, GAVE_UP, LEFT, WAITING, Link, LinkEnded, notice
from manyhands.transport.frame import HEADER_BYTES, Frame, FrameError, from_json, pack


@pytest.fixture
def pair():
    ends = socket.socketpair()
    links = [Link(1 - rank, end) for rank, end in enumerate(ends)]
    yield links
    for link in links:
        link.close()


def _pull(link, size):
    into = bytearray(size)
    got = 0
    while got < size:
        got += link.pull(memoryview(into)[got:])
    return bytes(into)


def test_a_frame_its_text_and_its_tensor(pair):
    here, there = pair
    assert there.header() is None
    here.enqueue(Frame(kind=ARRIVE, sequence=7, elements=8, weight=2.5, a=-1, b=3), memoryview(b"data"), b"text")
    assert here.full
    assert here.push()
    assert not here.full
    frame = there.header()
    assert (frame.kind, frame.sequence, frame.weight, frame.a, frame.b) == (ARRIVE, 7, 2.5, -1, 3)
    assert _pull(there, 8) == b"textdata"
    assert there.pull(memoryview(bytearray(1))) == 0
    assert here.enqueued == here.sent == HEADER_BYTES + 8


def test_more_than_the_sockets_hold_leaves_as_the_peer_reads(pair):
    here, there = pair
    data = os.urandom(3_000_000)
    here.enqueue(Frame(kind=CHUNK, elements=len(data)), memoryview(data))
    here.push()
    assert here.full
    assert there.header().elements == len(data)
    into, got = bytearray(len(data)), 0
    while got < len(data):
        got += there.pull(memoryview(into)[got:])
        here.push()
    assert bytes(into) == data
    assert not here.full


def test_a_header_that_comes_byte_by_byte(pair):
    here, there = pair
    for byte in pack(Frame(kind=CHUNK, elements=3)):
        assert there.header() is None
        here._sock.send(bytes([byte]))
    here._sock.send(b"abc")
    assert there.header().elements == 3
    assert _pull(there, 3) == b"abc"


def test_many_frames_at_once(pair):
    """Headers straddle what is read ahead."""
    here, there = pair
    payloads = [bytes([number % 251]) * 31 for number in range(500)]
    for number, payload in enumerate(payloads):
        here.enqueue(Frame(kind=CHUNK, sequence=number, elements=len(payload)), memoryview(payload))
    for number, payload in enumerate(payloads):
        here.push()
        frame = there.header()
        assert (frame.sequence, frame.elements) == (number, len(payload))
        assert _pull(there, len(payload)) == payload


def test_a_notice(pair):
    here, there = pair
    here.enqueue(notice(GAVE_UP, {"text": "x" * 5000, "rank": 3}))
    here.push()
    frame = there.header()
    assert frame.kind == GAVE_UP
    output = from_json(frame.blob)
    assert output["rank"] == 3
    assert set(output["text"]) == {"x"}


@pytest.mark.parametrize("before", [0, 5, 70_000])
def test_the_last_notice_is_found_behind_anything_and_nothing_is_lost(pair, before):
    here, there = pair
    here.enqueue(Frame(kind=CHUNK, elements=before), memoryview(b"z" * before))
    here.enqueue(notice(WAITING, {"for": 2}))
    here.push()
    assert there.last_notice() == (WAITING, {"for": 2})
    here.enqueue(notice(LEFT, {}))
    here.push()
    here.end_sending()
    assert there.last_notice() == (LEFT, {})
    assert there.header().elements == before
    assert _pull(there, before) == b"z" * before
    for kind, fields in [(WAITING, {"for": 2}), (LEFT, {})]:
        frame = there.header()
        assert (frame.kind, from_json(frame.blob)) == (kind, fields)
    with pytest.raises(LinkEnded):
        there.header()


def test_data_is_no_notice(pair):
    here, there = pair
    here.enqueue(Frame(kind=CHUNK, elements=2000), memoryview(b"z" * 2000))
    here.push()
    assert there.last_notice() == (0, {})


def test_a_blob_where_none_belongs(pair):
    here, there = pair
    here.enqueue(Frame(kind=CHUNK, blob=b"surprise"))
    here.push()
    with pytest.raises(FrameError, match="blob of 8 bytes"):
        there.header()


@given(st.binary(min_size=HEADER_BYTES, max_size=3000))
def test_rubbish_is_a_frame_error_or_nothing(data):
    ends = socket.socketpair()
    link = Link(0, ends[0])
    ends[1].sendall(data)
    ends[1].close()
    try:
        while link.header() is not None:
            pass
    except (FrameError, LinkEnded):
        pass
    finally:
        link.close()


def test_a_connection_that_was_reset_before_is_an_ended_link():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    there.close()
    assert select.select([here], [], [], 5)[0]
    link = Link(1, here)
    with pytest.raises(LinkEnded):
        link.header()
    link.close()


def test_the_end_and_a_broken_pipe(pair):
    here, there = pair
    here.close()
    with pytest.raises(LinkEnded):
        there.pull(memoryview(bytearray(1)))
    there.enqueue(Frame(kind=CHUNK))
    with pytest.raises(LinkEnded):
        there.push()
    there.end_sending()
    there.shut()
