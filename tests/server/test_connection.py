"""What a connection answers, frame by frame."""

import os

import pytest
import torch
from served import hosting

from manyhands.server.base import ServerSpec
from manyhands.server.protocol import Kind, Place, about, bits_of
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame

N = 6
LIKE = about(torch.zeros(N))


@pytest.fixture
def channel():
    """To a shard of rule elastic whose center is zero."""
    with hosting(ServerSpec(rule="elastic", options={"alpha": 0.5}), 1, memory_from=-1) as host:
        made = Channel(host.pairs[0][0][1], peer="server shard 0", timeout_s=10)
        ask(made, Kind.OFFER, Kind.WANTED, **LIKE)
        ask(made, Kind.GIVE, Kind.DONE, torch.zeros(N))
        ask(made, Kind.BEGIN, Kind.DONE)
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
    assert (first[0].a, bits_of(first[0].blob), first[0].sequence) == (1, 5, Place.BEHIND)
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


def test_a_vector_where_none_belongs_gets_no_answer(channel):
    channel.send(Frame(kind=Kind.PARK), torch.ones(N))
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
