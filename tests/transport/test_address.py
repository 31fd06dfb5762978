"""Addresses in words, and ports that are free."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import BadInput
from manyhands.transport.address import bound, format_address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (" host.example:65535\n", ("host.example", 65535)),
    ],
)
def test_there_and_back(text, address):
    assert parse_address(text) == address
    assert format_address(address) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", ":7000", "::1:7000", "host:0", "host:65536", "host:x", "[::1]", "a:1:2"]
)
def test_what_is_no_address(text):
    with pytest.raises(BadInput, match="host:port"):
        parse_address(text)


@given(st.text("0123:[].a-% \n١é", max_size=30))
def test_any_text_is_an_address_or_bad_input(text):
    try:
        host, port = parse_address(text)
    except BadInput:
        return
    assert host
    assert 0 < port < 65536


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost", True),
        ("a-name", False),
    ],
)
def test_loopback(host, answer):
    assert is_loopback(host) is answer


def test_the_first_free_port_of_a_range():
    with bound("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"no port from {port} to {port} is free"):
            bound("127.0.0.1", (port, port))
        last = min(port + 20, 65535)
        if port < last:
            with bound("127.0.0.1", (port, last)) as other:
                assert port < other.getsockname()[1] <= last


def test_a_port_is_free_again_at_once():
    """CASE 22: a connection of the last run that lingers does not keep the port."""
    with bound("127.0.0.1", None) as first:
        address = first.getsockname()
        with socket.create_connection(address), first.accept()[0] as near:
            near.shutdown(socket.SHUT_RDWR)
    bound("127.0.0.1", (address[1], address[1])).close()


@pytest.mark.parametrize(
    ("host", "ports"), [("203.0.113.1", None), ("no host", None), ("127.0.0.1", (0, 5)), ("::1", (9, 8))]
)
def test_what_cannot_be_listened_on(host, ports):
    with pytest.raises(BadInput, match=r"listen|range"):
        bound(host, ports)
