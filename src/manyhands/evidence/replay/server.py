"""What a replay repeats, from the run's events: who trained which slice, and the version of each pull and push."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.sim.timeline import Future, Timeline
from manyhands.engines.single_process import running_threads
from manyhands.events import Event
from manyhands.server.base import Encoded, Pushed, ServerSpec
from manyhands.server.in_process import HELD, NO_LOAD, Act, Load, StoreClient
from manyhands.server.store import Reply, Store
from manyhands.worker import SoloDriverClient

Versions = list[int]  # of each shard


@dataclass
class Record:
    """One worker's leases, pulls and pushes, in order; the replay removes them from the left."""

    leases: deque[tuple[int, Lease]] = field(default_factory=deque)  # (epoch, lease)
    pulls: deque[Versions] = field(default_factory=deque)
    pushes: deque[Versions | None] = field(default_factory=deque)  # none: the push was dropped
    behind: deque[int] = field(default_factory=deque)  # of pushes that a quorum dropped


class ReplayJournal:
    """All workers' records. steps: the `step` and `closing` events that count, in order for each worker."""

    def __init__(self, workers: int, steps: Iterable[Event], stopped: str = "") -> None:
        self.records = [Record() for _ in range(workers)]
        self.stopped = stopped
        self.pulls: Counter[tuple[int, int]] = Counter()  # {(shard, version): pulls left}
        self.ticks = 0
        for event in steps:
            assert event.rank is not None
            record, values = self.records[event.rank], event.values
            self.ticks += event.type == "step"
            if "lease" in values:
                index, part, handed = values["lease"]
                record.leases.append((values["epoch"], Lease(index=index, part=part, handed=handed)))
            pulls = values.get("pulls", [])
            record.pulls += pulls
            record.pushes += values.get("pushes", [])
            record.behind += values.get("behind", [])
            self.pulls.update((shard, version) for pull in pulls for shard, version in enumerate(pull))

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
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        return self._journal.lease(self._rank, segment)


class Stores:
    """The shards, and the answers that they hold back for workers."""

    def __init__(
        self, spec: ServerSpec, stores: list[Store], journal: ReplayJournal, timeline: Timeline, ordered: bool
    ) -> None:
        """ordered: pulls and pushes wait for the version that the journal says; else the rule's own rounds make the order."""
        self.spec, self.stores = spec, stores
        self.journal, self.timeline, self.ordered = journal, timeline, ordered
        self.answers: dict[tuple[int, int], Reply] = {}  # (shard, worker)
        self._waiting: list[tuple[Callable[[], bool], Future[None]]] = []

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Let other workers run until `ready()`, which depends only on calls of the stores."""
        while not ready():
            cell = self.timeline.cell()
            self._waiting.append((ready, cell))
            self.timeline.wait(cell, "its turn in the journal")

    def wake(self) -> None:
        """After a call: those who waited for it go on."""
        for ready, cell in self._waiting:
            if ready():
                cell.set(None)
        self._waiting = [(ready, cell) for ready, cell in self._waiting if not cell.is_set]

    def call(self, shard: int, operation: Callable[[Store], Any]) -> Any:
        """One call of a store, on one thread as in a shard's own process; what it released is laid out."""
        with running_threads(1):
            result = operation(self.stores[shard])
        for worker, reply in self.stores[shard].released:
            self.answers[shard, worker] = reply
        self.stores[shard].released.clear()
        return result

    def answer(self, shard: int, worker: int) -> Reply:
        self.wait_for(lambda: (shard, worker) in self.answers)
        return self.answers.pop((shard, worker))


class ReplayServer(StoreClient):
    """One worker's."""

    def __init__(self, stores: Stores, rank: int) -> None:
        super().__init__(stores.spec, stores.stores, rank)
        self._all, self._record = stores, stores.journal.records[rank]
        self._is_due: Callable[[int], bool] = _always  # whether a shard's turn for the next call has come

    @override
    def pull(self, into: Tensor) -> None:
        versions = self._record.pulls.popleft() if self._record.pulls else []
        if self._all.ordered:
            self._is_due = lambda shard: self._stores[shard].version == versions[shard]
        super().pull(into)

    @override
    def push(self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0) -> Pushed:
        versions = self._record.pushes.popleft() if self._record.pushes else None
        self._is_due = lambda shard: self._may_push(shard, versions, weight)
        pushed = super().push(update, weight, bits)
        if pushed.applied or not self._record.behind:
            return pushed
        return replace(pushed, behind=self._record.behind.popleft())

    def _may_push(self, shard: int, versions: list[int] | None, weight: float) -> bool:
        """Whether this push is now merged as it was, and nobody has still to see the version before."""
        store, into = self._stores[shard], None if versions is None else versions[shard]
        if not store.policy.may_come(self._sequence, weight, store.version, into):
            return False
        makes_none = into is None or not weight
        return makes_none or not self._all.ordered or self._all.journal.pulls[shard, store.version] == 0

    @override
    def _tick(self, bits: int) -> int:
        return bits if self._all.ordered else super()._tick(bits)  # the journal is what the gate allowed

    @override
    def _ask(self, operation: str, acts: Sequence[Act], load: Load = NO_LOAD) -> list[Any]:
        is_due, self._is_due = self._is_due, _always
        if load.needs_center:
            self._all.wait_for(lambda: all(store.initialized for store in self._stores))
        answers: list[Any] = [None] * self.shards
        left = list(range(self.shards))
        while left:  # every shard, each as soon as its turn has come
            self._all.wait_for(lambda: any(is_due(shard) for shard in left))
            shard = next(one for one in left if is_due(one))
            left.remove(shard)
            answer = self._all.call(shard, acts[shard])
            if operation == "pull":
                self._all.journal.pulls[shard, answer] -= 1
            self._all.wake()
            answers[shard] = self._all.answer(shard, self._worker) if answer is HELD else answer
        return answers


def _always(shard: int) -> bool:
    return True
