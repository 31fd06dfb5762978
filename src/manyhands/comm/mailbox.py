"""The contract of a mailbox: what one worker of a group posts to all others, which take it when they want to.

A group's collectives need all ranks at once; this needs nobody: a worker posts and goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class MailboxOwner(Protocol):
    """What a mailbox needs of its `Group`."""

    rank: int
    size: int
    ledger: Any  # Ledger
    waited_s: float
    step: int


class Mailbox(ABC):
    """One worker's, of a group's `size`. The messages of each peer come in its order, all of them.

    Only the thread that uses the group may use it. A wait ends as the group's do: PeerLost where a peer is gone, or
    silent for timeout_s. It is closed with the group, which counts what it sends ("post") and how long it waited.
    """

    def __init__(self, group: MailboxOwner) -> None:
        self.rank, self.size, self.posted = group.rank, group.size, 0
        self.taken = [0] * group.size  # by rank, so many messages; none of this one's own
        self._group = group
        self._inbox: list[deque[Tensor]] = [deque() for _ in range(group.size)]  # came, and is not taken

    def post(self, payload: Tensor) -> None:
        """uint8 [n] to all others; it is copied. Does not wait: what nobody takes yet is kept."""
        self._send(payload)
        self.posted += 1
        if self.size > 1:
            self._group.ledger.add("post", payload.nbytes * (self.size - 1), messages=self.size - 1)

    def take(self, until: Sequence[int] | None = None) -> list[list[Tensor]]:
        """By rank, what has come and was not taken, uint8 each.

        until: wait, and go on to where `taken` is just that. All ranks do, each up to what the others have posted.
        """
        counts = self._counts(until)
        found = [[box.popleft() for _ in range(count)] for box, count in zip(self._inbox, counts, strict=True)]
        self.taken = [before + count for before, count in zip(self.taken, counts, strict=True)]
        return found

    def peek(self, until: Sequence[int] | None = None) -> list[list[Tensor]]:
        """What `take` would give, which stays."""
        counts = self._counts(until)
        return [list(box)[:count] for box, count in zip(self._inbox, counts, strict=True)]

    def close(self) -> None:  # noqa: B027
        """Give connections back; idempotent."""

    def _counts(self, until: Sequence[int] | None) -> list[int]:
        """By rank, so many of those that are in the inbox by now."""
        self._collect()
        if until is None:
            return [len(box) for box in self._inbox]
        counts = []
        for peer, (wanted, taken) in enumerate(zip(until, self.taken, strict=True)):
            counts.append(max(0, wanted - taken) if peer != self.rank else 0)
            if len(self._inbox[peer]) < counts[-1]:
                self._group.waited_s += self._wait_for(peer, counts[-1])
        self._finish_sending()
        return counts

    @abstractmethod
    def _send(self, payload: Tensor) -> None:
        """Post it."""

    @abstractmethod
    def _collect(self) -> None:
        """Put what has come into the inbox; does not wait."""

    def _finish_sending(self) -> None:  # noqa: B027
        """Return once all that was posted has left this worker: it may not look into the mailbox again for long."""

    @abstractmethod
    def _wait_for(self, peer: int, count: int) -> float:
        """Return once so many of a peer's are in the inbox; the seconds that took."""


class SoloMailbox(Mailbox):
    """Of one worker, which has no peers."""

    def _send(self, payload: Tensor) -> None:
        pass

    def _collect(self) -> None:
        pass

    def _wait_for(self, peer: int, count: int) -> float:
        raise AssertionError("one worker waits for nobody")
