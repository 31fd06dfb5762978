"""Addresses in words: "10.0.0.1:7000", "[::1]:7000", "host:7000"."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from manyhands.errors import BadInput

_ADDRESS = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_BACKLOG = 128


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port"; an IPv6 address stands in brackets. BadInput for anything else."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise BadInput(f"an address must be host:port, such as 10.0.0.1:7000 or [::1]:7000; got {text!r}")
    return match["six"] or match["host"], int(match["port"])


def format_address(address: tuple[str, int]) -> str:
    """What `parse_address` reads."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, can be reached from this machine alone. What other names mean may change."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def bound(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A TCP socket that listens on any free port, or the first free one of (first, last). BadInput without one."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise BadInput(f"cannot listen on {host!r}: {error.strerror}; give one of this machine's addresses") from error
    first, last = ports or (0, 0)
    if ports is not None and not 0 < first <= last < 1 << 16:
        raise BadInput(f"a range of ports must be FIRST-LAST within 1-65535; got {first}-{last}")
    for port in range(first, last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's connections may linger on it
        try:
            sock.bind((place[0], port, *place[2:]))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise BadInput(
                    f"cannot listen on {host!r}: {error.strerror}; give one of this machine's addresses"
                ) from error
        else:
            return sock
    raise BadInput(f"no port from {first} to {last} is free on {host}: give a wider range, or none for any free port")
