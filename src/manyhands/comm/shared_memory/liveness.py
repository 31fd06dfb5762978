"""Notices that a peer's process is gone, however it ended: the kernel closes what only that process held."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence


class LivenessPipes:
    """One pipe a rank: all peers hold its read end, the rank alone its write end; when it dies, the read ends hang up.

    pipes: (read end, write end) by rank, -1 for an end that this process does not have. They belong to this object
    from now on; the write ends of peers and the own read end, inherited by a fork, are closed at once.
    Instead of a read end any descriptor will do on which poll() reports an event once the rank is gone (a socket, a
    pidfd).
    """

    def __init__(self, rank: int, pipes: Sequence[tuple[int, int]]) -> None:
        self._ranks = {read: peer for peer, (read, _) in enumerate(pipes) if peer != rank and read >= 0}
        self._own = pipes[rank][1] if pipes else -1
        for peer, (read, write) in enumerate(pipes):
            _close(read if peer == rank else write)
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)
        _leave_to_parent(self)

    def gone(self) -> list[int]:
        """The ranks whose process has ended."""
        return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Close all descriptors: to the peers it looks as if this process had ended. Idempotent."""
        for fd in [self._own, *self._ranks]:
            _close(fd)
        self._own, self._ranks, self._poll = -1, {}, select.poll()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _leave_to_parent(lifelines: LivenessPipes) -> None:
    """A process that the worker forks (to load data, say) must not keep it alive in the eyes of its peers."""
    reference = weakref.ref(lifelines)

    def close_in_child() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=close_in_child)
