from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.join import Join
from manyhands.engines.hosts.network import Network, ports_of
from manyhands.engines.hosts.secret import Secret
from manyhands.errors import BadInput

NETWORK = Network(
    hosts=[[0, 1], [2]], names=["alpha", "beta"], listen="10.0.0.1", ports=(7000, 7100), secret=Secret(token=b"t" * 32)
)


def test_who_is_where() -> None:
    assert NETWORK.host_names == ["alpha", "alpha", "beta"]


def test_others_are_told_the_advertised_address() -> None:
    """Of published ports: the container listens on an address of its own, under the same number."""
    with closing(replace(NETWORK, listen="127.0.0.1", ports=None).listener(1.0)) as listener:
        own, port = listener.address
        assert NETWORK.address_of(listener) == [own, port]
        assert replace(NETWORK, advertise="10.0.0.9").address_of(listener) == ["10.0.0.9", port]


@pytest.mark.parametrize("host", ["10.0.0.9", "node-1.example", "2001:db8::1"])
def test_addresses_that_can_be_advertised(host: str) -> None:
    assert Hosts(listen="0.0.0.0", advertise=host).advertise == Join(address="a:1", workers=1, advertise=host).advertise


@pytest.mark.parametrize("host", ["10.0.0.9:7000", "http://node", "[2001:db8::1]", "0.0.0.0", "::", "two words", 5])
def test_what_is_no_hosts_address_is_not_advertised(host: str) -> None:
    with pytest.raises(BadInput, match="without a port"):
        Hosts(listen="0.0.0.0", advertise=host)
    with pytest.raises(BadInput, match="without a port"):
        Join(address="a:1", workers=1, advertise=host)


def test_where_only_this_machine_is_let_in_nothing_else_is_advertised() -> None:
    with pytest.raises(BadInput, match=r"also give --listen 0\.0\.0\.0"):
        Hosts(advertise="10.0.0.9")
    assert Hosts(advertise="localhost").listen == "127.0.0.1"


def test_there_and_back_as_json(tmp_path: Path) -> None:
    assert Network.from_json(json.loads(json.dumps(NETWORK.to_json()))) == NETWORK
    secret = Secret.create(tmp_path / "run.pem", tls=True)
    assert Secret.from_json(json.loads(json.dumps(secret.to_json()))) == secret


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    for secret in (Secret.create(tmp_path / "a", tls=True), Secret(token=b"t" * 32)):
        assert "PRIVATE" not in repr(secret)
        assert "tttt" not in repr(secret)
    assert "token" not in repr(NETWORK)
    assert b"t".hex() * 4 not in repr(NETWORK)


@pytest.mark.parametrize(("text", "ports"), [("", None), ("7000", (7000, 7000)), ("7000-7100", (7000, 7100))])
def test_ports(text: str, ports: tuple[int, int] | None) -> None:
    assert ports_of(text) == ports
