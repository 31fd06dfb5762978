"""Connecting a ring over TCP, with TLS and without: all with all, whoever comes first; the wrong ones are refused."""

import time

import pytest
import torch
from threads import in_threads

from manyhands.comm.ring.connecting import connect_all
from manyhands.comm.ring.group import RingGroup
from manyhands.errors import PeerLost
from manyhands.testing.group_suite import GROUP_SUITE
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import Listener, connect

TOKEN = b"t" * 32


@pytest.fixture(scope="module")
def credentials():
    return Credentials.create()


def _listeners(size, **secret):
    return [Listener(**secret) for _ in range(size)]


def _groups(size, secret, run):
    listeners = _listeners(size, **secret)
    addresses = [listener.address for listener in listeners]

    def one(rank):
        group = RingGroup(rank, size, connect_all(rank, listeners[rank], addresses, timeout_s=20, **secret))
        listeners[rank].close()
        try:
            return run(group)
        finally:
            group.close()

    return in_threads(size, one)


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_are_linked_with_all(size, tls, credentials):
    secret = {"credentials": credentials} if tls else {"credentials": None, "token": TOKEN}

    def run(group):
        for name in ("place", "mean_sizes", "bits", "handles", "broadcast", "point_to_point", "ledger"):
            GROUP_SUITE[name](group)
        return True

    assert _groups(size, secret, run) == [True] * size


def test_large_tensors_through_tls(credentials):
    def run(group):
        mine = torch.full((3_000_001,), float(group.rank + 1))
        group.mean_(mine, 1.0 + group.rank)
        group.barrier()
        return mine.unique().tolist()

    first, second = _groups(2, {"credentials": credentials}, run)
    assert first == second
    assert first == pytest.approx([5 / 3])


def test_a_rank_that_does_not_come_is_named():
    listeners = _listeners(3, credentials=None, token=TOKEN)
    addresses = [listener.address for listener in listeners]
    start = time.monotonic()

    def one(rank):
        with pytest.raises(PeerLost, match=r"worker 12 on c could not be connected.*connecting the ring"):
            connect_all(
                rank,
                listeners[rank],
                addresses,
                credentials=None,
                token=TOKEN,
                hosts="abc",
                names=[10, 11, 12],
                timeout_s=0.5,
            )

    in_threads(2, one)
    assert time.monotonic() - start < 10
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"purpose": "server", "rank": 1, "generation": 0},
        {"purpose": "ring", "rank": 0, "generation": 0},
        {"purpose": "ring", "rank": 2, "generation": 0},
        {"purpose": "ring", "rank": "1", "generation": 0},
        {"purpose": "ring", "rank": 1, "generation": 1},
        {},
    ],
)
def test_who_does_not_belong_is_refused_and_the_others_come(hello):
    listeners = _listeners(2, credentials=None, token=TOKEN)
    addresses = [listener.address for listener in listeners]

    def one(rank):
        if rank == 1:
            with pytest.raises(ChannelClosed, match="expected a worker"):
                connect(addresses[0], hello, credentials=None, token=TOKEN, peer="worker 0", timeout_s=10)
        channels = connect_all(rank, listeners[rank], addresses, credentials=None, token=TOKEN, timeout_s=10)
        for channel in channels.values():
            channel.close()
        return list(channels)

    assert in_threads(2, one) == [[1], [0]]
    for listener in listeners:
        listener.close()
