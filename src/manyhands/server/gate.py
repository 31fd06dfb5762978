"""The gate of stale-synchronous parallel: who may begin the next tick. Pure: no clock, no thread.

More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, Ho et al., 2013. A worker that has
finished c ticks may begin its next only when the slowest that takes part has finished c - bound. So the gap of finished
ticks never exceeds bound + 1. Inactive and lost workers hold nobody up.
"""

from __future__ import annotations

from typing import Any


class Gate:
    """Finished ticks of the workers that take part, and those who wait."""

    def __init__(self, workers: int, bound: int | None) -> None:
        self._bound = bound
        self._finished = [0] * workers
        self._active = [False] * workers
        self._waiting: dict[int, int] = {}  # worker: the bits it came with
        self._bits = 0  # bound 0: of all who finished the open tick

    @property
    def active(self) -> list[int]:
        """The workers that take part, in rank order."""
        return [worker for worker, active in enumerate(self._active) if active]

    @property
    def slowest(self) -> int | None:
        """The fewest finished ticks of those who take part; None without any."""
        return min((self._finished[worker] for worker in self.active), default=None)

    def finished(self, worker: int) -> int:
        """How many ticks a worker has finished."""
        return self._finished[worker]

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker has finished a tick and may not begin its next yet."""
        return worker in self._waiting

    def activate(self, worker: int) -> None:
        """Count this worker, with as many finished ticks as the slowest: it holds nobody up for what it missed."""
        if not self._active[worker]:
            self._finished[worker] = self.slowest or 0
            self._active[worker] = True

    def tick(self, worker: int, bits: int) -> None:
        """A tick is finished; the worker is in `opened` as soon as it may begin the next."""
        self._finished[worker] += 1
        self._waiting[worker] = bits
        self._bits |= bits

    def deactivate(self, worker: int) -> None:
        """Do not count this worker any more, nor let it through."""
        self._active[worker] = False
        self._waiting.pop(worker, None)
        if not any(self._active):
            self._bits = 0  # of a tick that nobody will complete

    def image(self) -> dict[str, Any]:
        """All that it knows, as JSON."""
        waiting = sorted(self._waiting.items())
        return {"finished": self._finished, "active": self._active, "waiting": waiting, "bits": self._bits}

    def take_image(self, image: dict[str, Any]) -> None:
        """Go on from what `image` gave."""
        self._finished, self._active = list(image["finished"]), list(image["active"])
        self._waiting, self._bits = dict(image["waiting"]), image["bits"]

    def opened(self) -> list[tuple[int, int]]:
        """Take out (worker, bits) of all that may go on now: at bound 0 the OR of everybody's bits, else its own."""
        slowest = self.slowest
        going = [worker for worker in sorted(self._waiting) if self._may_go(worker, slowest)]
        answers = [(worker, self._bits if self._bound == 0 else self._waiting.pop(worker)) for worker in going]
        if self._bound == 0 and going:
            self._waiting.clear()
            self._bits = 0
        return answers

    def _may_go(self, worker: int, slowest: int | None) -> bool:
        assert slowest is not None  # whoever waits takes part
        return self._bound is None or slowest >= self._finished[worker] - self._bound
