"""Addresses in words, and ports that are free."""

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import BadInput
from manyhands.transport.address import bound, format_address, is_loopback, parse_address
from refusals import refused


def test_there_and_back():
    for text, address in [
        ("10.0.0.1:7000", ("10.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (" host.example:65535\n", ("host.example", 65535)),
    ]:
        assert parse_address(text) == address
        assert format_address(address) == text.strip()
    for text in ("", "10.0.0.1", ":7000", "::1:7000", "host:0", "host:65536", "host:x", "[::1]", "a:1:2"):
        refused("host:port", parse_address, text)


@settings(deadline=None)
@given(st.text("0123:[].a-% \n١é", max_size=30))
def test_any_text_is_an_address_or_bad_input(text):
    try:
        host, port = parse_address(text)
    except BadInput:
        return
    assert host
    assert 0 < port < 65536


def test_loopback():
    hosts = {"127.0.0.1": True, "127.9.9.9": True, "::1": True, "localhost": True}
    hosts |= {"0.0.0.0": False, "::": False, "10.0.0.1": False, "a-name": False}
    assert {host: is_loopback(host) for host in hosts} == hosts


def test_the_first_free_port_of_a_range_which_is_free_again_at_once():
    """CASE 22: a connection of the last run that lingers does not keep the port."""
    with bound("127.0.0.1", None) as taken:
        address = taken.getsockname()
        port = address[1]
        refused(f"no port from {port} to {port} is free", bound, "127.0.0.1", (port, port))
        last = min(port + 20, 65535)
        if port < last:
            with bound("127.0.0.1", (port, last)) as other:
                assert port < other.getsockname()[1] <= last
        with socket.create_connection(address), taken.accept()[0] as near:
            near.shutdown(socket.SHUT_RDWR)
    bound("127.0.0.1", (port, port)).close()


def test_what_cannot_be_listened_on():
    for host, ports in [("203.0.113.1", None), ("no host", None), ("127.0.0.1", (0, 5)), ("::1", (9, 8))]:
        refused(r"listen|range", bound, host, ports)
