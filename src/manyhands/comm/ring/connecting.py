"""The channels of a ring: each worker knows all addresses, connects to lower ranks and accepts higher ones."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Any

from manyhands.comm.checks import check_rank
from manyhands.errors import PeerLost
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import Credentials
from manyhands.transport.frame import FrameError
from manyhands.transport.listener import Listener, connect


def connect_all(
    rank: int,
    listener: Listener,
    addresses: Sequence[tuple[str, int]],
    *,
    credentials: Credentials | None,
    token: bytes | None = None,
    hosts: Sequence[str] = (),
    names: Sequence[int] = (),
    purpose: str = "ring",
    generation: int = 0,
    timeout_s: float = 300.0,
) -> dict[int, Channel]:
    """A channel to every other rank, by rank: for `RingGroup`. All ranks call it with the same addresses.

    listener: this rank's, whose address all others know as addresses[rank]; it stays open. credentials, token: its own.
    purpose, generation: a connection that was meant for something else, or for another membership, is refused.
    hosts, names: for messages, as of `RingGroup`. PeerLost names the first rank that was not there within timeout_s.
    """
    check_rank(rank, size := len(addresses), "rank")
    hosts, names = list(hosts) or [host for host, _ in addresses], list(names) or list(range(size))
    called = [f"worker {name} on {host}" for name, host in zip(names, hosts, strict=True)]
    hello = {"purpose": purpose, "rank": rank, "generation": generation}
    channels: dict[int, Channel] = {}
    start, wanted = time.monotonic(), 0

    def left_s() -> float:
        return max(0.01, start + timeout_s - time.monotonic())

    try:
        for wanted in range(rank):
            channels[wanted] = connect(
                addresses[wanted],
                hello,
                credentials=credentials,
                token=token,
                peer=called[wanted],
                generation=generation,
                timeout_s=left_s(),
            )
        while len(channels) < size - 1:
            wanted = next(peer for peer in range(rank + 1, size) if peer not in channels)
            channel, said = listener.accept(lambda said: _peer_of(said, hello, channels, called), left_s())
            channels[said["rank"]] = channel
    except (ChannelTimeout, ChannelClosed) as error:
        raise PeerLost(
            names[wanted],
            hosts[wanted],
            f"connecting the {purpose}",
            0,
            time.monotonic() - start,
            f"could not be connected ({error})",
        ) from error
    finally:
        if len(channels) < size - 1:
            for channel in channels.values():
                channel.close()
    return channels


def _peer_of(said: dict[str, Any], own: dict[str, Any], channels: Container[int], called: Sequence[str]) -> str:
    """The name of who said this hello. FrameError unless it is one of a higher rank for the same, and not here yet."""
    peer, rank, purpose, generation = said.get("rank"), own["rank"], own["purpose"], own["generation"]
    if (said.get("purpose"), said.get("generation")) != (purpose, generation):
        raise FrameError(f"expected a worker for {purpose} of generation {generation}; it said {said}")
    if not isinstance(peer, int) or not rank < peer < len(called) or peer in channels:
        raise FrameError(
            f"expected a worker of rank {rank + 1} to {len(called) - 1} that is not here yet; it said {said}"
        )
    return called[peer]
