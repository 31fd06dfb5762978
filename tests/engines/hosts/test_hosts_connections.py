"""How long processes of several hosts try to reach each other, with a test in the place of who should answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.comm.ring import links
from manyhands.engines.hosts import network
from manyhands.engines.hosts.network import Network
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local.messages import connect_s, last_resort_s
from manyhands.engines.make_group import Topology, make_group
from manyhands.errors import PeerLost
from manyhands.transport.channel import Channel, ChannelTimeout

NETWORK = Network(hosts=[[0], [1]], names=["alpha", "beta"], listen="127.0.0.1", secret=Secret(token=b"t" * 32))


def place(process_index: int, timeout_s: float) -> Any:
    fields = {"process_index": process_index, "size": 2, "servers": 1, "timeout_s": timeout_s}
    return SimpleNamespace(**fields, network=NETWORK.to_json())


class Meeting:
    """A driver's line where worker 0 and shard 0 bring the address of a port that answers nobody."""

    def __init__(self, shut: list[Any]) -> None:
        self.shut = shut

    def rendezvous(self, name: str, process_indices: Sequence[int], value: Any) -> list[Any]:
        return [self.shut, value]


@pytest.fixture
def meeting() -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as shut:
        yield Meeting(list(shut.getsockname()))


def topology(rank: int, timeout_s: float) -> Topology:
    connect = connect_s(place(rank, timeout_s))
    return Topology(rank=rank, hosts=NETWORK.hosts, names=NETWORK.names, device=torch.device("cpu"), connect_s=connect)


def test_a_shut_port_is_named_before_the_driver_takes_it_for_slow_work(meeting: Any) -> None:
    with pytest.raises(ChannelTimeout, match=r"server shard 0 on alpha at .* within 0\.2 s\. .*its port be reached"):
        network.shard_channel(place(1, timeout_s=0.4), meeting, shard=0)
    with pytest.raises(PeerLost, match=r"worker 0 on alpha could not be connected .* can its port be reached"):
        make_group(topology(1, timeout_s=0.4), meeting.rendezvous, network=NETWORK)


def test_who_connects_gives_up_before_who_waits_and_both_before_the_driver(
    monkeypatch: pytest.MonkeyPatch, meeting: Any
) -> None:
    given: list[float] = []

    def connect_all(*arguments: Any, timeout_s: float, **more: Any) -> Any:
        given.append(timeout_s)
        raise PeerLost(0, "alpha", "connecting", 0, 0.0)

    monkeypatch.setattr(links, "connect_all", connect_all)
    for timeout_s, expected in ((30.0, [18.75, 15.0]), (900.0, [75.0, 60.0])):
        given.clear()
        for rank in (0, 1):
            with pytest.raises(PeerLost):
                make_group(topology(rank, timeout_s), meeting.rendezvous, network=NETWORK)
        assert given == expected


def test_once_connected_a_shard_has_the_time_of_all_channels(monkeypatch: pytest.MonkeyPatch, meeting: Any) -> None:
    given: list[float] = []
    here, there = socket.socketpair()

    def connect(*arguments: Any, timeout_s: float, **more: Any) -> Channel:
        given.append(timeout_s)
        return Channel(here, peer="the shard", timeout_s=timeout_s)

    monkeypatch.setattr(network, "connect", connect)
    channel = network.shard_channel(place(1, timeout_s=30.0), meeting, shard=0)
    assert given == [15.0]
    assert channel.timeout_s == last_resort_s(place(1, timeout_s=30.0))
    channel.close()
    there.close()
