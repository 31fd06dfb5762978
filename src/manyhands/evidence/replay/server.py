"""What a replay repeats, from the run's events: who trained which slice, and the version of each pull and push."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import override

from manyhands.comm.mailbox import Mailbox
from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.timeline import Future, Timeline
from manyhands.engines.single_process import running_threads
from manyhands.events import Event
from manyhands.server.base import Encoded, Exchanged, Pushed, ServerSpec
from manyhands.server.client import OpenExchange
from manyhands.server.in_process import HELD, NO_LOAD, Act, Load, StoreClient, answers_to_push
from manyhands.server.store import Reply, Store
from manyhands.worker import SoloDriverClient

Versions = list[int]  # of each shard
IsDue = Callable[[int], bool]
"""Whether a shard's turn for a call has come."""


class ShardCalls(NamedTuple):
    """One call of every shard."""

    operation: str
    acts: Sequence[Act]
    is_due: IsDue


@dataclass
class Record:
    """One worker's leases, pulls and pushes, in order; the replay removes them from the left."""

    leases: deque[tuple[int, Lease]] = field(default_factory=deque)  # (epoch, lease)
    pulls: deque[Versions] = field(default_factory=deque)
    pushes: deque[Versions | None] = field(default_factory=deque)  # none: the push was dropped
    behind: deque[int] = field(default_factory=deque)  # of pushes that a quorum dropped
    taken: deque[list[int]] = field(default_factory=deque)  # messages of each worker, after each look into the mailbox


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
            record.taken += values.get("taken", [])
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
    """The shards, and the answers that they hold back for workers; and what workers have posted to one another."""

    def __init__(
        self, spec: ServerSpec | None, stores: list[Store], journal: ReplayJournal, timeline: Timeline, ordered: bool
    ) -> None:
        """spec: None without shards. ordered: pulls and pushes wait for the version that the journal says; else the rule's
        own rounds make the order."""
        self.spec, self.stores = spec, stores
        self.posted: list[list[Tensor]] = [[] for _ in journal.records]  # by worker
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
        assert stores.spec is not None
        super().__init__(stores.spec, stores.stores, rank)
        self._all, self._record = stores, stores.journal.records[rank]
        self._is_due: IsDue = _always  # whether a shard's turn for the next call has come

    @override
    def pull(self, into: Tensor) -> None:
        self._is_due = self._next_pull()
        super().pull(into)

    @override
    def push(
        self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0, *, since: Sequence[int] = ()
    ) -> Pushed:
        self._is_due = self._next_push(weight, self._sequence)
        pushed = super().push(update, weight, bits, since=since)
        if pushed.applied or not self._record.behind:
            return pushed
        return replace(pushed, behind=self._record.behind.popleft())

    @override
    def _begin(self, exchange: OpenExchange, bits: int | None) -> Callable[[], Exchanged]:
        """As the shards did: each makes the pull when its turn comes, whether or not the others have had the push."""
        stages: list[ShardCalls] = []
        if exchange.update is not None:
            is_due = self._next_push(exchange.weight, self._sequence)
            self._sequence += 1
            acts, _ = self._acts_to_push(exchange.update, self._sequence, exchange.weight, 0, exchange.since)
            stages.append(ShardCalls("push", acts, is_due))
        if exchange.into is not None:
            stages.append(ShardCalls("pull", self._acts_to_read("pull", exchange.into)[0], self._next_pull()))
        answers = self._make(stages)
        if bits is not None:
            self._tick(bits)
        pushed = None if exchange.update is None else answers_to_push(answers.pop(0))
        return lambda: self._exchanged(exchange, pushed, None if exchange.into is None else answers[0])

    def _next_pull(self) -> IsDue:
        versions = self._record.pulls.popleft() if self._record.pulls else []
        if not self._all.ordered:
            return _always
        return lambda shard: self._stores[shard].version == versions[shard]

    def _next_push(self, weight: float, number: int) -> IsDue:
        versions = self._record.pushes.popleft() if self._record.pushes else None
        return lambda shard: self._may_push(shard, versions, weight, number)

    def _may_push(self, shard: int, versions: list[int] | None, weight: float, number: int) -> bool:
        """Whether this push is now merged as it was, and nobody has still to see the version before."""
        store, into = self._stores[shard], None if versions is None else versions[shard]
        if not store.policy.may_come(number, weight, store.version, into):
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
        return self._make([ShardCalls(operation, acts, is_due)])[0]

    def _make(self, stages: Sequence[ShardCalls]) -> list[list[Any]]:
        """The stages of every shard, one after the other, each as soon as its turn has come; their answers by stage."""
        answers: list[list[Any]] = [[None] * self.shards for _ in stages]
        at = [0] * self.shards  # by shard, which stage comes next

        def due() -> int | None:
            left = (shard for shard in range(self.shards) if at[shard] < len(stages))
            return next((shard for shard in left if stages[at[shard]].is_due(shard)), None)

        while any(stage < len(stages) for stage in at):
            self._all.wait_for(lambda: due() is not None)
            shard = due()
            assert shard is not None
            stage, number = stages[at[shard]], at[shard]
            at[shard] += 1
            answer = self._all.call(shard, stage.acts[shard])
            if stage.operation == "pull":
                self._all.journal.pulls[shard, answer] -= 1
            self._all.wake()
            answers[number][shard] = self._all.answer(shard, self._worker) if answer is HELD else answer
        return answers


class ReplayGroup(SimGroup):
    """One worker's group; its mailbox gives what the journal says."""

    def __init__(self, meeting: SimRendezvous, stores: Stores, rank: int) -> None:
        super().__init__(meeting, rank)
        self._all = stores

    @override
    def open_mailbox(self, longest: int) -> ReplayMailbox:
        return ReplayMailbox(self, self._all)


class ReplayMailbox(Mailbox):
    """A look into it takes what it took in the run, and waits until that is posted."""

    def __init__(self, group: ReplayGroup, stores: Stores) -> None:
        super().__init__(group)
        self._all, self._record = stores, stores.journal.records[group.rank]

    @override
    def take(self, until: Sequence[int] | None = None) -> list[list[Tensor]]:
        return super().take(self._record.taken.popleft() if until is None else until)

    @override
    def _send(self, payload: Tensor) -> None:
        self._all.posted[self.rank].append(payload.clone())
        self._all.wake()

    @override
    def _collect(self) -> None:
        pass

    @override
    def _wait_for(self, peer: int, count: int) -> float:
        posted, wanted = self._all.posted[peer], self.taken[peer] + count
        self._all.wait_for(lambda: len(posted) >= wanted)
        self._inbox[peer].extend(posted[self.taken[peer] + len(self._inbox[peer]) : wanted])
        return 0.0


def _always(shard: int) -> bool:
    return True
