"""How much of its workers' time a run used, where some of them are lost, leave or join. Pure: times are seconds of the run.

Goodput is the share of worker-seconds that were not lost: to absent workers, to pauses in which the others formed a new
group or the whole run started again, and to steps that had to be made again. With s the seconds from the first step to the end, N the workers at the
start: 1 - (absent + paused + repeated) / (N * s).
"""

from __future__ import annotations


class Goodput:
    """Sums of worker-seconds, of a run that begins at `began_s` with so many workers."""

    def __init__(self, workers: int, began_s: float) -> None:
        self._workers, self._began_s = workers, began_s
        self._present, self._since_s = workers, began_s  # how many take part, and since when
        self._formed_s = began_s  # when the members were agreed on last
        self._lost_s: list[float] = []  # since the members were agreed on last
        self._stopped_s: float | None = None  # since then nobody trains, and the run is to start again
        self._absent = self._paused = self._repeated = 0.0
        self._sums = [(began_s, 0.0)]  # (when members were agreed on, what was lost by then)

    def lost(self, at_s: float) -> None:
        """A worker is lost: it takes part no more, and what the others have under way is made again."""
        self._count_absent(at_s, self._present - 1)
        self._lost_s.append(at_s)

    def formed(self, at_s: float, members: int, committed_s: float) -> None:
        """So many workers go on. committed_s: when the newest step was complete that counts."""
        waited = min(self._present, members)  # who was there before, and is there now
        committed_s = max(committed_s, self._formed_s)
        self._formed_s = at_s
        stopped_s = min(self._lost_s, default=committed_s)
        self._repeated += waited * max(0.0, stopped_s - committed_s)
        self._paused += waited * max(0.0, at_s - max(stopped_s, committed_s))
        self._lost_s.clear()
        self._count_absent(at_s, members)
        self._sums.append((at_s, self._lost))

    def stopped(self, at_s: float) -> None:
        """The run cannot go on, and starts again: what its workers had made since its newest checkpoint is made again."""
        self._count_absent(at_s, self._present)
        self._stopped_s = at_s if self._stopped_s is None else self._stopped_s
        self._lost_s.clear()

    def resumed(self, at_s: float, members: int, committed_s: float) -> None:
        """So many workers go on after `stopped`, from a checkpoint whose newest step was complete at committed_s."""
        stopped_s = at_s if self._stopped_s is None else self._stopped_s
        since_s = max(committed_s, self._began_s)
        lost_since = self._lost - next(lost for when_s, lost in reversed(self._sums) if when_s <= since_s)
        self._repeated += max(0.0, self._workers * (stopped_s - since_s) - lost_since)
        self._paused += members * max(0.0, at_s - stopped_s)
        self._formed_s, self._stopped_s, self._since_s = at_s, None, at_s
        self._count_absent(at_s, members)
        self._sums.append((at_s, self._lost))

    def result(self, at_s: float) -> dict[str, float]:
        """{goodput, wall_s, absent_s, paused_s, repeated_s} of a run that ends now; the last three in worker-seconds."""
        self._count_absent(at_s, self._present)
        wall_s = at_s - self._began_s
        used = 1.0 - self._lost / (self._workers * wall_s) if wall_s > 0 else 1.0
        return {
            "goodput": used,
            "wall_s": wall_s,
            "absent_s": self._absent,
            "paused_s": self._paused,
            "repeated_s": self._repeated,
        }

    @property
    def _lost(self) -> float:
        return self._absent + self._paused + self._repeated

    def _count_absent(self, at_s: float, present: int) -> None:
        self._absent += max(0, self._workers - self._present) * max(0.0, at_s - self._since_s)
        self._present, self._since_s = present, max(at_s, self._since_s)
