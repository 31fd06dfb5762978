"""How a worker waits for its peers: it spins briefly, then yields, then sleeps, and it never waits for ever.

What ranks tell each other are counters in shared memory: each has one writer and only grows. Python writes one by a
plain 8-byte store. x86 makes stores visible in program order, so whoever sees a counter also sees what was written
before it; elsewhere `fence` sees to that.
"""

from __future__ import annotations

import copy
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence

from manyhands.comm.shared_memory.counters import CLOSED, OPEN, STATE, SharedCounters
from manyhands.comm.shared_memory.liveness import LivenessPipes
from manyhands.errors import ManyhandsError, PeerLost

_SPINS = 60  # reads of a counter, some 3 µs; on a core that the two share, all of it is lost
_YIELD_S = 1e-3
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3

_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
_lock = threading.Lock()


def fence() -> None:
    """Order all earlier loads and stores before all later ones; nothing to do on x86, where counters need no more.

    A release (end of the first block) followed by an acquire (start of the second) is not reordered on Arm and Power.
    """
    if not _ORDERED_STORES:
        with _lock:
            pass
        with _lock:
            pass


def never_busy(rank: int) -> bool:
    """The default of `busy`: silence is silence."""
    return False


class Waiting:
    """Waits for counters on the board, with a deadline and an eye on whether the peers live.

    timeout_s: without progress of the awaited counter for so long, its rank counts as lost, unless `busy(rank)` says
    that it is known to be at work (a long compile); then it gets as long again.
    """

    def __init__(
        self,
        board: SharedCounters,
        lifelines: LivenessPipes,
        hosts: Sequence[str],
        timeout_s: float,
        busy: Callable[[int], bool] = never_busy,
    ) -> None:
        self._board, self._lifelines, self._hosts = board, lifelines, hosts
        self._timeout_s, self._busy = timeout_s, busy
        self._error: ManyhandsError | None = None
        alone = board.size <= len(os.sched_getaffinity(0))
        self._spins = _SPINS if alone else 1  # more workers than cores: a spin keeps the awaited peer from its core

    def check(self) -> None:
        """Raise the error that made the group unusable, if one did."""
        if self._error is not None:
            raise copy.copy(self._error)

    def fail(self, error: ManyhandsError) -> ManyhandsError:
        """Remember, unless there was one before, the error after which the group is unusable; returns it."""
        self._error = self._error or copy.copy(error)  # a copy, since a raised error holds its frames and their tensors
        return error

    def until(self, rank: int, index: int, target: int, operation: str, step: int) -> None:
        """Return once counter `index` of `rank` is at least `target`.

        Raises PeerLost for any rank that died or gave up, and for `rank` when it left the group or made no progress
        for timeout_s. Other ranks learn of it from the board.
        """
        words = self._board.words[rank]
        for _ in range(self._spins):
            if words[index] >= target:
                break
        else:
            self._slowly(rank, index, target, operation, step)
        fence()

    def _slowly(self, rank: int, index: int, target: int, operation: str, step: int) -> None:
        words = self._board.words[rank]
        start = progress = time.perf_counter()
        seen = words[index]
        no_files = select.poll()  # one of this wait's own: two threads may not share it
        while words[index] < target:
            now = time.perf_counter()
            if now - start < _YIELD_S:
                os.sched_yield()
                no_files.poll(0)  # lets go of the GIL, which sched_yield does not; time.sleep(0) takes 65 µs
                continue
            if words[index] != seen or (now - progress > self._timeout_s and self._busy(rank)):
                seen, progress = words[index], now
            lost = self._lost(rank) or (now - progress > self._timeout_s and (rank, _silent(self._timeout_s)))
            if lost and words[index] < target:  # it may have raised the counter right before it left
                self._board.give_up(lost[0])
                raise self.fail(PeerLost(lost[0], self._hosts[lost[0]], operation, step, now - start, lost[1]))
            time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, (now - start) / 16)))

    def _lost(self, awaited: int) -> tuple[int, str] | None:
        """(rank, why) of a peer without which this rank would wait in vain."""
        states = [words[STATE] for words in self._board.words]
        for rank, state in enumerate(states):
            if state > CLOSED:
                cause = state - CLOSED - 1
                return cause, "gave up" if cause == rank else f"is gone (worker {rank} noticed)"
        if states[awaited] == CLOSED:
            return awaited, "left the group"
        for rank in self._lifelines.gone():
            if self._board.words[rank][STATE] == OPEN:
                return rank, "is gone"
        return None


def _silent(timeout_s: float) -> str:
    return f"showed no progress for {timeout_s:g} s"
