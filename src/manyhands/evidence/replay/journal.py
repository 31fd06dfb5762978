"""The order of a run, from its events: who trained which slice, and the versions of each pull and push."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from typing_extensions import override

from manyhands.data.leases import End, Lease, Segment
from manyhands.events import Event
from manyhands.worker import SoloDriverClient

Versions = list[int]  # of each shard


@dataclass
class Record:
    """One worker's leases, pulls and pushes, in order; the replay removes them from the left."""

    leases: deque[tuple[int, Lease]] = field(default_factory=deque)
    """(epoch, lease)"""
    pulls: deque[Versions] = field(default_factory=deque)
    pushes: deque[Versions | None] = field(default_factory=deque)
    """None: the push was dropped."""
    behind: deque[int] = field(default_factory=deque)
    """Of pushes that a quorum dropped."""


class ReplayJournal:
    """All workers' records. steps: the `step` and `closing` events that count, in order for each worker."""

    def __init__(self, workers: int, steps: Iterable[Event], stopped: str = "") -> None:
        self.records = [Record() for _ in range(workers)]
        self.stopped = stopped
        self.pulls: Counter[tuple[int, int]] = Counter()  # {(shard, version): pulls left}
        self.ticks = 0
        for event in steps:
            assert event.rank is not None
            self._add(self.records[event.rank], event)

    def _add(self, record: Record, event: Event) -> None:
        values = event.values
        self.ticks += event.type == "step"
        if "lease" in values:
            index, part, handed = values["lease"]
            record.leases.append((values["epoch"], Lease(index=index, part=part, handed=handed)))
        record.pulls += values.get("pulls", [])
        record.pushes += values.get("pushes", [])
        record.behind += values.get("behind", [])
        self.pulls.update((shard, version) for pull in values.get("pulls", []) for shard, version in enumerate(pull))

    def lease(self, rank: int, segment: Segment) -> Lease | End:
        """The worker's next lease, if it is in this segment."""
        leases = self.records[rank].leases
        if leases:
            epoch, lease = leases[0]
            if epoch == segment.epoch and segment.first <= lease.index < segment.until:
                leases.popleft()
                return lease
        over = not any(record.leases for record in self.records)
        left = [[segment.until, segment.until]] * segment.parts
        return End(reason=self.stopped if over else "", left=left)


class ReplayClient(SoloDriverClient):
    """The driver client of a worker in a replay: answers with the recorded leases, and counts ticks."""

    def __init__(self, journal: ReplayJournal, rank: int, count: Callable[[], None]) -> None:
        super().__init__()
        self._journal, self._rank, self._count = journal, rank, count

    @override
    def emit(self, event: Event) -> None:
        if event.type == "step":
            self._count()

    @override
    def lease(self, segment: Segment) -> Lease | End:
        return self._journal.lease(self._rank, segment)
