"""Who was turned away: each address is named once in the log, so that a port scanner fills no disk."""

from __future__ import annotations

import logging

from manyhands.units import printable

LOG = logging.getLogger("manyhands")
MOST_NAMED = 1000  # one IPv6 network alone has 2^64 addresses


class RejectedPeers:
    """Names each address once; only one thread uses it."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def name(self, address: str, why: str) -> None:
        """Say in the log who was refused, unless it was said before."""
        if address in self._named or len(self._named) >= MOST_NAMED:
            return
        self._named.add(address)
        more = "" if len(self._named) < MOST_NAMED else f" ({MOST_NAMED} addresses by now: no further one is named)"
        LOG.warning(
            "refused a connection from %s: %s. Others from there are not named%s", address, printable(why, 300), more
        )
