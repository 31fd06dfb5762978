"""A client's record of its pulls and pushes, the same for every kind of client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.server.store import Applied, Dropped, Held


class PushJournal:
    """Collects until `take`; see `Server.drain_journal` for what the lists mean."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {"pulls": [], "pushes": [], "staleness": [], "behind": []}

    def pulled(self, versions: Sequence[int]) -> None:
        """A pull got these versions, one of each shard."""
        self._lists["pulls"].append(list(versions))

    def pushed(self, replies: Sequence[Applied | Held | Dropped], weight: float, answered: bool = False) -> None:
        """A push got these replies, one of each shard, and an answer or none.

        One of weight 0 has no staleness; where nothing was answered either, it made no version, and is noted as
        dropped.
        """
        if isinstance(first := replies[0], Dropped):
            self._lists["behind"].append(first.behind)
        if any(isinstance(reply, Dropped) for reply in replies) or not (weight or answered):
            self._lists["pushes"].append(None)
            return
        self._lists["pushes"].append([reply.version for reply in replies])
        if weight:
            self._lists["staleness"].append(max(reply.staleness for reply in replies if not isinstance(reply, Dropped)))

    def take(self) -> dict[str, Any]:
        """What was collected since the last time, without empty lists."""
        drained = {name: values for name, values in self._lists.items() if values}
        self._lists = {name: [] for name in self._lists}
        return drained
