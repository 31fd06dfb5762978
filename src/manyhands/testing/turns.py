"""Threads that take turns by a list of ranks, so that a test says in which order workers pull and push."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DEADLINE_S = 20.0


class ScriptedTurns:
    """A baton. `order` names whose turn it is, one rank a turn; each `with turns.take(rank):` is one turn of that rank.

    What happens within a turn happens while nobody else has one. Inside a turn nothing may wait for another worker.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._at = list(order), 0
        self._passed = threading.Condition()

    @contextmanager
    def take(self, rank: int) -> Iterator[None]:
        """Wait for this rank's next turn; TimeoutError if it does not come, because the list is wrong or somebody failed."""
        with self._passed:
            if not self._passed.wait_for(lambda: self._whose() == rank, DEADLINE_S):
                raise TimeoutError(
                    f"rank {rank} waited {DEADLINE_S:g} s for its turn; turn {self._at} of {len(self._order)} is {self._whose()}'s: "
                    "each turn that is taken must be in the list"
                )
        try:
            yield
        finally:
            with self._passed:
                self._at += 1
                self._passed.notify_all()

    def _whose(self) -> int | None:
        return self._order[self._at] if self._at < len(self._order) else None
