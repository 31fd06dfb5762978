"""What a connection answers, frame by frame; and what a worker believes of a shard."""

import os
import socket
from contextlib import contextmanager

import pytest
import torch
from served import channel_to, hosting

from manyhands.comm.checks import bits_of
from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer, ShardLost
from manyhands.server.protocol import Kind, VectorPlace, about, dtype_of
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame, FrameError, from_json, pack, to_json
from refusals import refused

N = 6
LIKE = about(torch.zeros(N))


@contextmanager
def opened(**spec):
    """A channel to a shard whose center is zero."""
    with hosting(ServerSpec(**spec), 1, memory_from=-1) as host:
        made = Channel(host.pairs[0][0][1], peer="server shard 0", timeout_s=10)
        ask(made, Kind.OFFER, Kind.WANTED, **LIKE)
        ask(made, Kind.GIVE, Kind.DONE, torch.zeros(N))
        ask(made, Kind.ACTIVATE, Kind.DONE)
        yield made
        made.close()


@pytest.fixture
def channel():
    with opened(rule="elastic", options={"alpha": 0.5}) as made:
        yield made


def ask(channel, kind, answer, tensor=None, **fields):
    channel.send(Frame(kind=kind, **fields), tensor)
    frame = channel.receive()
    assert frame.kind == answer, frame
    return frame


def open_memory(channel):
    ask(channel, Kind.MEMORY, Kind.MEMORY, **LIKE)
    for fd in channel.receive_fds(2):
        os.close(fd)


def push(channel):
    """The same push each time."""
    frame = ask(channel, Kind.PUSH, Kind.APPLIED, torch.ones(N), sequence=1, weight=1.0, blob=b"\x05")
    answer = torch.empty(N)
    channel.receive_into(answer)
    return frame, answer


def test_a_push_that_comes_twice_is_applied_once_and_answered_twice(channel):
    first, second = push(channel), push(channel)
    assert first[0] == second[0]
    assert (first[0].a, bits_of(first[0].blob), first[0].sequence) == (1, 5, VectorPlace.BEHIND)
    assert torch.equal(first[1], second[1])
    center = torch.empty(N)
    assert ask(channel, Kind.PEEK, Kind.CENTER, **LIKE).a == 1
    channel.receive_into(center)
    assert torch.equal(center, torch.full((N,), 0.5))


def topk_payload(*places):
    return torch.cat([torch.ones(2).view(torch.uint8), torch.tensor(places, dtype=torch.int32).view(torch.uint8)])


def test_payloads_that_no_codec_made_are_refused_and_end_the_connection():
    """Those of a terabyte before memory is taken for them."""
    for payload, problem in [
        (topk_payload(1, 6), "ascending in range"),
        (topk_payload(4, 1), "ascending in range"),
        (topk_payload(1, 4)[:-1], "16 bytes; 15 bytes arrived"),
        (torch.zeros(4096, dtype=torch.uint8), "16 bytes; 4096 bytes arrived"),
        (torch.ones(4), "got 4 of torch.float32"),
        (None, "16 bytes; 1099511627776 bytes arrived"),
    ]:
        with opened(rule="add", compress="topk:0.3") as topk:
            if payload is None:
                topk._sock.sendall(pack(Frame(kind=Kind.ENCODED, elements=1 << 40, sequence=1, weight=1.0)))
            else:
                topk.send(Frame(kind=Kind.ENCODED, sequence=1, weight=1.0), payload)
            frame = topk.receive()
            assert frame.kind == Kind.REFUSED, problem
            assert problem in from_json(frame.blob)["message"]
            refused("", topk.receive, kind=ChannelClosed, case=problem)


def test_what_a_server_does_not_take(channel):
    """A payload where there is no codec; an update beside an outbox; a vector where none belongs."""
    channel.send(Frame(kind=Kind.ENCODED, sequence=1, weight=1.0), topk_payload(1, 4))
    frame = channel.receive()
    assert frame.kind == Kind.REFUSED
    assert "takes no encoded pushes" in from_json(frame.blob)["message"]
    for kind in (Kind.PUSH, Kind.DEACTIVATE):
        with opened(rule="add") as made:
            if kind == Kind.PUSH:
                open_memory(made)
            made.send(Frame(kind=kind, sequence=1, weight=1.0), torch.ones(N))
            refused("", made.receive, kind=ChannelClosed, case=kind)


def test_a_center_stays_until_it_is_released_or_another_is_read(channel):
    open_memory(channel)
    slots = []
    for sequence in range(1, 4):
        slots.append(ask(channel, Kind.PULL, Kind.CENTER, **LIKE).b)
        channel.send(Frame(kind=Kind.RELEASE))
        ask(channel, Kind.PUSH, Kind.APPLIED, sequence=sequence, weight=1.0)
    assert slots == [0, 1, 0]
    first = ask(channel, Kind.PULL, Kind.CENTER, **LIKE).b
    for sequence in (4, 5):
        ask(channel, Kind.PUSH, Kind.APPLIED, sequence=sequence, weight=1.0)
    assert (first, ask(channel, Kind.PULL, Kind.CENTER, **LIKE).b) == (1, 2)


def test_a_request_says_of_which_vectors_it_speaks():
    assert min(Kind) > 0, "0 is the hellos'"
    assert max(Kind) < 256
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        frame = Frame(kind=Kind.PULL, **about(torch.zeros(7, dtype=dtype)))
        assert (frame.a, dtype_of(frame)) == (7, dtype)
    for wrong in ({"a": -1, "b": 0}, {"a": 7, "b": -1}, {"a": 7, "b": 99}):
        refused("expected a number of elements", dtype_of, Frame(kind=Kind.PULL, **wrong), kind=FrameError)


def test_a_shard_that_answers_nonsense_is_named():
    """Memory for a vector that never comes must not be taken. What else a snapshot cannot say: test_shard.py."""
    snapshot = {"names": ["center"], "numbers": {"version": 1}}
    for kind, said, elements, dtype in [
        (Kind.SNAPSHOT, snapshot, 1 << 37, torch.float32),
        (Kind.SNAPSHOT, snapshot, N - 1, torch.float32),
        (Kind.SNAPSHOT, snapshot, N, torch.int64),
        (Kind.SNAPSHOT, {**snapshot, "names": ["center", *map(str, range(1000))]}, N, torch.float32),
        (Kind.LATE, {"worker": "x", "seconds": 1}, N, torch.float32),
        (Kind.LATE, {"worker": 0, "seconds": None}, N, torch.float32),
    ]:
        its, mine = socket.socketpair()
        shard = Channel(its, peer="worker 0", timeout_s=10)
        client = ServedServer(ServerSpec(rule="add"), [channel_to(0, mine, 10)], hosts=["host-a"], memory_from=-1)
        shard.send(Frame(kind=Kind.DONE))
        client.initialize(torch.zeros(N))
        answers = [Frame(kind=kind, blob=to_json(said)), Frame(kind=Kind.VECTOR, elements=elements, dtype=dtype)]
        its.sendall(b"".join(pack(frame) + frame.blob for frame in answers))
        refused("server shard 0.*expected", client.capture, kind=ShardLost, case=(said, elements, dtype))
        client.close()
        shard.close()


def test_a_shard_that_says_nothing_for_too_long_is_lost():
    its, mine = socket.socketpair()
    client = ServedServer(ServerSpec(rule="add"), [channel_to(0, mine, 0.1)], hosts=["host-a"], memory_from=-1)
    with its:
        words = r"server shard 0, .* did not answer for 0.1 s\. This worker waited 0"
        refused(words, client.pull, torch.zeros(N), kind=PeerLost)
    client.close()
