"""Ring groups over socket pairs, for tests: made before a fork, or given to threads."""

import socket
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from manyhands.comm.ring.group import RingGroup
from manyhands.transport.channel import Channel

Mesh = list[dict[int, socket.socket]]
"""By rank: its socket to each peer."""


def mesh(size: int) -> Mesh:
    sockets: Mesh = [{} for _ in range(size)]
    for low, high in combinations(range(size), 2):
        sockets[low][high], sockets[high][low] = socket.socketpair()
    return sockets


def channels_of(sockets: Mesh, rank: int) -> dict[int, Channel]:
    """One rank's, which takes its sockets."""
    return {peer: Channel(sock, peer=f"worker {peer}", timeout_s=10.0) for peer, sock in sorted(sockets[rank].items())}


def ring(sockets: Mesh, rank: int, **options: Any) -> RingGroup:
    return RingGroup(rank, len(sockets), channels_of(sockets, rank), **options)


def close(sockets: Sequence[dict[int, socket.socket]], but: int = -1) -> None:
    """Close all sockets but one rank's."""
    for rank, own in enumerate(sockets):
        for sock in own.values() if rank != but else ():
            sock.close()
