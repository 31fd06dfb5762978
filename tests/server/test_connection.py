"""What a connection answers, frame by frame."""

import os

import pytest
import torch
from served import hosting

from manyhands.comm.checks import bits_of
from manyhands.server.base import ServerSpec
from manyhands.server.protocol import Kind, VectorPlace, about
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame, from_json, pack

N = 6
LIKE = about(torch.zeros(N))


@pytest.fixture
def channel():
    """To a shard of rule elastic whose center is zero."""
    with hosting(ServerSpec(rule="elastic", options={"alpha": 0.5}), 1, memory_from=-1) as host:
        made = Channel(host.pairs[0][0][1], peer="server shard 0", timeout_s=10)
        ask(made, Kind.OFFER, Kind.WANTED, **LIKE)
        ask(made, Kind.GIVE, Kind.DONE, torch.zeros(N))
        ask(made, Kind.ACTIVATE, Kind.DONE)
        yield made
        made.close()


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


def test_a_worker_with_an_outbox_sends_no_updates_through_the_socket(channel):
    open_memory(channel)
    channel.send(Frame(kind=Kind.PUSH, sequence=1, weight=1.0), torch.ones(N))
    with pytest.raises(ChannelClosed):
        channel.receive()


@pytest.fixture
def topk():
    """To a shard that takes pushes of codec topk, whose center is zero."""
    with hosting(ServerSpec(rule="add", compress="topk:0.3"), 1, memory_from=-1) as host:
        made = Channel(host.pairs[0][0][1], peer="server shard 0", timeout_s=10)
        ask(made, Kind.OFFER, Kind.WANTED, **LIKE)
        ask(made, Kind.GIVE, Kind.DONE, torch.zeros(N))
        ask(made, Kind.ACTIVATE, Kind.DONE)
        yield made
        made.close()


def topk_payload(*places):
    return torch.cat([torch.ones(2).view(torch.uint8), torch.tensor(places, dtype=torch.int32).view(torch.uint8)])


def test_an_encoded_push_is_decoded_with_and_without_shared_memory(topk):
    for sequence in (1, 2):
        ask(topk, Kind.ENCODED, Kind.APPLIED, topk_payload(1, 4), sequence=sequence, weight=1.0)
        center = torch.empty(N)
        if sequence == 1:
            ask(topk, Kind.PEEK, Kind.CENTER, **LIKE)
            topk.receive_into(center)
            assert center.tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
            open_memory(topk)
    assert ask(topk, Kind.PEEK, Kind.CENTER, **LIKE).a == 2


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (topk_payload(1, 6), "ascending in range"),
        (topk_payload(4, 1), "ascending in range"),
        (topk_payload(1, 4)[:-1], "16 bytes; 15 bytes arrived"),
        (torch.zeros(4096, dtype=torch.uint8), "16 bytes; 4096 bytes arrived"),
        (torch.ones(4), "got 4 of torch.float32"),
    ],
    ids=["outside", "order", "short", "huge", "floats"],
)
def test_payloads_that_no_codec_made_are_refused_and_end_the_connection(topk, payload, problem):
    topk.send(Frame(kind=Kind.ENCODED, sequence=1, weight=1.0), payload)
    frame = topk.receive()
    assert frame.kind == Kind.REFUSED
    assert problem in from_json(frame.blob)["message"]
    with pytest.raises(ChannelClosed):
        topk.receive()


def test_a_payload_of_a_terabyte_is_refused_before_memory_is_taken_for_it(topk):
    frame = Frame(kind=Kind.ENCODED, elements=1 << 40, sequence=1, weight=1.0)
    topk.detach().sendall(pack(frame))
    assert topk.receive().kind == Kind.REFUSED


def test_a_server_without_a_codec_takes_no_payload(channel):
    channel.send(Frame(kind=Kind.ENCODED, sequence=1, weight=1.0), topk_payload(1, 4))
    frame = channel.receive()
    assert frame.kind == Kind.REFUSED
    assert "takes no encoded pushes" in from_json(frame.blob)["message"]


def test_a_vector_where_none_belongs_gets_no_answer(channel):
    channel.send(Frame(kind=Kind.DEACTIVATE), torch.ones(N))
    with pytest.raises(ChannelClosed):
        channel.receive()


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
