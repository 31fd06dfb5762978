"""Who is where and how they are reached; the run's secret; how long processes of several hosts try to reach each other."""

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyhands.comm.ring import links
from manyhands.engines.hosts import network
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.join import Join
from manyhands.engines.hosts.network import Network, ports_of
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local.messages import connect_s, last_resort_s
from manyhands.engines.make_group import Topology, make_group
from manyhands.errors import BadInput, PeerLost
from manyhands.transport.channel import Channel, ChannelTimeout
from refusals import all_refused

NETWORK = Network(
    hosts=[[0, 1], [2]], names=["alpha", "beta"], listen="10.0.0.1", ports=(7000, 7100), secret=Secret(token=b"t" * 32)
)


def test_who_is_where_and_the_way_there_and_back_as_json(tmp_path: Path) -> None:
    assert NETWORK.host_names == ["alpha", "alpha", "beta"]
    assert Network.from_json(json.loads(json.dumps(NETWORK.to_json()))) == NETWORK
    secret = Secret.create(tmp_path / "run.pem", tls=True)
    assert Secret.from_json(json.loads(json.dumps(secret.to_json()))) == secret
    assert [ports_of(text) for text in ("", "7000", "7000-7100")] == [None, (7000, 7000), (7000, 7100)]


def test_others_are_told_the_advertised_address() -> None:
    """Of published ports: the container listens on an address of its own, under the same number."""
    with closing(replace(NETWORK, listen="127.0.0.1", ports=None).listener(1.0)) as listener:
        own, port = listener.address
        assert NETWORK.address_of(listener) == [own, port]
        assert replace(NETWORK, advertise="10.0.0.9").address_of(listener) == ["10.0.0.9", port]


def test_what_can_be_advertised() -> None:
    for host in ("10.0.0.9", "node-1.example", "2001:db8::1"):
        assert Hosts(listen="0.0.0.0", advertise=host).advertise == host
        assert Join(address="a:1", workers=1, advertise=host).advertise == host
    no_hosts = ("10.0.0.9:7000", "http://node", "[2001:db8::1]", "0.0.0.0", "::", "two words", 5)
    cases = [(host, "without a port") for host in no_hosts]
    all_refused(lambda host: Hosts(listen="0.0.0.0", advertise=host), cases)
    all_refused(lambda host: Join(address="a:1", workers=1, advertise=host), cases)
    with pytest.raises(BadInput, match=r"also give --listen 0\.0\.0\.0"):  # where only this machine is let in
        Hosts(advertise="10.0.0.9")
    assert Hosts(advertise="localhost").listen == "127.0.0.1"


def test_a_file_holds_a_runs_secret_which_is_never_shown(tmp_path: Path) -> None:
    """Both ends derive the same token; one made for TLS will do without, not the other way round."""
    path = tmp_path / "run.pem"
    made = Secret.create(path, tls=False)
    assert made == Secret.load(path, tls=False)
    assert made.credentials is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pem"]
    with pytest.raises(BadInput, match="does not hold a private key"):
        Secret.load(path, tls=True)
    with_key = Secret.create(tmp_path / "tls.pem", tls=True)
    assert Secret.load(tmp_path / "tls.pem", tls=False).token is not None
    for shown in (repr(with_key), repr(NETWORK.secret), repr(NETWORK)):
        assert not any(word in shown for word in ("PRIVATE", "tttt", "token", b"t".hex() * 4))


def test_files_that_are_none(tmp_path: Path) -> None:
    """A short one; and where the folder is missing, the file that was asked for is named."""
    path = tmp_path / "run.pem"
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(BadInput, match="too short for a run's secret .5 bytes, and at least 32"):
        Secret.load(path, tls=False)
    for tls in (True, False):
        with pytest.raises(BadInput, match=r"cannot write .* to .*/not there/run\.pem: .* Make the folder first"):
            Secret.create(tmp_path / "not there" / "run.pem", tls=tls)


TWO_HOSTS = Network(hosts=[[0], [1]], names=["alpha", "beta"], listen="127.0.0.1", secret=Secret(token=b"t" * 32))


def place(process_index: int, timeout_s: float) -> Any:
    fields = {"process_index": process_index, "size": 2, "servers": 1, "timeout_s": timeout_s}
    return SimpleNamespace(**fields, network=TWO_HOSTS.to_json())


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
    return Topology(
        rank=rank, hosts=TWO_HOSTS.hosts, names=TWO_HOSTS.names, device=torch.device("cpu"), connect_s=connect
    )


def test_a_shut_port_is_named_before_the_driver_takes_it_for_slow_work(meeting: Any) -> None:
    with pytest.raises(ChannelTimeout, match=r"server shard 0 on alpha at .* within 0\.2 s\. .*its port be reached"):
        network.shard_channel(place(1, timeout_s=0.4), meeting, shard=0)
    with pytest.raises(PeerLost, match=r"worker 0 on alpha could not be connected .* can its port be reached"):
        make_group(topology(1, timeout_s=0.4), meeting.rendezvous, network=TWO_HOSTS)


def test_who_connects_gives_up_before_who_waits_and_both_before_the_driver(
    monkeypatch: pytest.MonkeyPatch, meeting: Any
) -> None:
    """Once connected, a shard has the time of all channels."""
    given: list[float] = []
    here, there = socket.socketpair()

    def connect(*arguments: Any, timeout_s: float, **more: Any) -> Channel:
        given.append(timeout_s)
        return Channel(here, peer="the shard", timeout_s=timeout_s)

    def connect_all(*arguments: Any, timeout_s: float, **more: Any) -> Any:
        given.append(timeout_s)
        raise PeerLost(0, "alpha", "connecting", 0, 0.0)

    monkeypatch.setattr(network, "connect", connect)
    monkeypatch.setattr(links, "connect_all", connect_all)
    for timeout_s in (30.0, 900.0):
        for rank in (0, 1):
            with pytest.raises(PeerLost):
                make_group(topology(rank, timeout_s), meeting.rendezvous, network=TWO_HOSTS)
    with closing(network.shard_channel(place(1, timeout_s=30.0), meeting, shard=0)) as channel, there:
        assert channel.timeout_s == last_resort_s(place(1, timeout_s=30.0))
    assert given == [18.75, 15.0, 75.0, 60.0, 15.0]
