"""Whether to poll again before sleeping: worth it where the peer runs on another core, a loss on the same one."""

from __future__ import annotations

_SHORT_S = 1e-3  # who slept longer waited for a late peer, which says nothing about spinning
_FAILURES = 3  # in a row, after which spinning pauses
_PAUSE = 64  # waits


class Spinning:
    """most: looks at most before sleeping. In the hands of one thread."""

    def __init__(self, most: int) -> None:
        self._most, self._failures, self._paused = most, 0, 0

    def looks(self) -> int:
        """For the wait that begins: so many looks before sleeping, at least one."""
        if self._paused:
            self._paused -= 1
            return 1
        return self._most

    def found(self) -> None:
        """A look after the first found what it waited for."""
        self._failures = 0

    def slept(self, seconds: float) -> None:
        """No look found it, and it came so long after."""
        if seconds < _SHORT_S and not self._paused:
            self._failures += 1
            if self._failures == _FAILURES:
                self._failures, self._paused = 0, _PAUSE
