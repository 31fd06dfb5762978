"""Who trains which slice, where every worker goes at its own pace: slices of global batches are leased, each exactly
once.

Each global batch has `parts` slices; part p of all batches is a queue. A replica (one worker, or the workers that hold
a model together) takes its own queue from the front; when that is empty, it takes from the back of the queue that has
most left, so that at an epoch's end nobody waits for rows of a straggler that nobody has begun; unless its part of the
rows is fixed, where it waits for the others. Pure: no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of an epoch between two meetings of all workers; JSON by `vars`. All workers ask with the same one.

    A resumed epoch keeps its `parts`, whatever the number of replicas is now: replica r of `size` owns the queues p
    with p % size == r, and reads the one that is furthest behind first. One without a queue takes from the others'.
    """

    epoch: int
    first: int  # global batches [first, until) of the epoch
    until: int
    parts: int  # slices of a global batch
    size: int = 0  # replicas; 0: as many as parts
    left: list[list[int]] | None = None  # by part, [front, back) of what is not handed out yet; None: all
    rank0_warmup_ticks: int = 0  # so many leases replica 0 gets before the others get their first
    fixed: bool = False  # each replica gets slices of its own queues alone

    def __post_init__(self) -> None:
        assert 0 <= self.first <= self.until, f"expected 0 <= first <= until, got {self}"
        assert self.parts >= 1, f"expected at least one part, got {self}"
        assert min(self.size, self.rank0_warmup_ticks) >= 0, (
            f"expected size and rank0_warmup_ticks of at least 0, got {self}"
        )
        left = [[self.first, self.until]] * self.parts if self.left is None else self.left
        fits = len(left) == self.parts and all(self.first <= front <= back <= self.until for front, back in left)
        assert fits, (
            f"left must hold [front, back) in [{self.first}, {self.until}] for each of {self.parts} parts, got {self.left}"
        )

    @property
    def slices(self) -> int:
        """All there are, handed out or not."""
        return (self.until - self.first) * self.parts

    def owner(self, part: int) -> int:
        """The replica that reads this queue from the front."""
        return part % (self.size or self.parts)

    def is_part_of(self, other: Segment | None) -> bool:
        """Whether it is the same stretch, whatever the number of replicas is now."""
        return other is not None and {**vars(self), "size": 0} == {**vars(other), "size": 0}


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One slice, handed out once."""

    index: int  # of the global batch in the epoch
    part: int
    handed: int  # slices of the segment handed out before this one, those before a resume counted
    again: bool = False  # it was a lost worker's


@dataclass(frozen=True, kw_only=True)
class End:
    """No more in this segment."""

    reason: str  # "" where all slices are out, else why the run is to stop
    left: list[list[int]]  # by part, [front, back) of what nobody will get: a resumed run's Segment takes it as it is
    partial: list[list[int]] = field(default_factory=list)
    """[epoch, index, part, parts] of all slices so far that only some of several shards have: their worker was lost."""


@dataclass(frozen=True)
class _Request:
    replica: int
    holder: int | None
    push: int

    @property
    def asker(self) -> int:
        return self.replica if self.holder is None else self.holder


class Leases:
    """The one who hands them out. A new segment begins with the first who asks for it.

    Where workers may be lost, each asks as a holder, and says which of its pushes will carry the slice. What no shard
    has when it is lost is handed out again, before anything else and before any End.
    """

    released: list[tuple[int, Lease | End]]
    """(replica, or holder, answer) for those who wait; whoever calls takes and clears it."""

    def __init__(self) -> None:
        self.released = []
        self.partial: list[list[int]] = []  # see `End`: nobody gets them again
        self._segment: Segment | None = None
        self._queues: list[list[int]] = []  # by part: [front, back)
        self._handed = 0
        self._requested = 0  # by replica 0, in this segment
        self._waiting: list[_Request] = []
        self._reason = ""
        self._held: dict[int, list[tuple[int, Lease]]] = {}  # by holder: (push, lease) of which no answer is known
        self._asked: dict[int, int] = {}  # by holder: the push of its newest request
        self._lost: set[int] = set()  # holders of which it is not known yet what the shards have
        self._again: list[Lease] = []

    def take(self, replica: int, segment: Segment, holder: int | None = None, push: int = 1) -> Lease | End | None:
        """The next slice for a replica, or the end; None: it waits, and `released` will have its answer.

        The caller looks into `released` after each call: it may hold the answers of others.
        holder: the worker that may be lost. push: the number of its push that will carry the slice; of those before
        but the last it has the answers.
        """
        if not segment.is_part_of(self._segment):
            self._begin(segment)
        self._segment = segment
        self._requested += replica == 0
        if holder is not None:
            self._asked[holder] = push
            self._held[holder] = [(number, lease) for number, lease in self._held.get(holder, ()) if number >= push - 1]
        request = _Request(replica, holder, push)
        assert request.asker not in [one.asker for one in self._waiting], f"{request} came before the last was answered"
        answer = None if self._has_to_wait(replica) else self._next(request)
        if answer is None:
            self._waiting.append(request)
        self._release()
        return answer

    def to_json(self) -> dict[str, Any]:
        """What another process needs to go on handing out, without those who wait; `of` reads it. Not with holders."""
        assert not self._held, "what holders have is known to one process alone"
        segment = None if self._segment is None else vars(self._segment)
        return {
            "segment": segment,
            "queues": self._queues,
            "handed": self._handed,
            "requested": self._requested,
            "reason": self._reason,
        }

    @classmethod
    def of(cls, values: dict[str, Any]) -> Leases:
        """What `to_json` wrote; {}: nobody has asked yet."""
        leases = cls()
        if values:
            leases._segment = None if values["segment"] is None else Segment(**values["segment"])
            leases._queues, leases._handed = values["queues"], values["handed"]
            leases._requested, leases._reason = values["requested"], values["reason"]
        return leases

    def stop(self, reason: str) -> None:
        """From now on everybody gets an End with the first reason, also those who wait."""
        assert reason, "a stop needs a reason"
        self._reason = self._reason or reason
        self._release()

    def send_away(self) -> list[int]:
        """Whoever waits for replica 0, which trains alone, waits no longer and gets nothing: members change."""
        away = [request for request in self._waiting if self._has_to_wait(request.replica)]
        self._waiting = [request for request in self._waiting if request not in away]
        return [request.asker for request in away]

    def holds(self, holder: int) -> bool:
        """Whether it ever got a slice."""
        return holder in self._held

    def lose(self, holder: int) -> None:
        """It is lost, and `recover` will follow: nobody gets an End before."""
        self._waiting = [one for one in self._waiting if one.holder != holder]
        self._lost.add(holder)

    def recover(self, holder: int, applied: list[int]) -> None:
        """What is known of a lost holder. applied: by shard, the number of its last push there. What no shard has is
        handed out again; what only some have is `partial`.

        [], where there are no shards: a push is done when its holder asks for the next lease.
        """
        held, asked = self._held.pop(holder, []), self._asked.pop(holder, 0)
        applied = applied or [asked - 1]
        again = [lease for number, lease in held if number > max(applied)]
        self._again += again
        if self._segment is not None and self._requested <= self._segment.rank0_warmup_ticks:
            self._requested -= len(again)  # replica 0 has yet to train them alone
        for lease in [lease for number, lease in held if min(applied) < number <= max(applied)]:
            assert self._segment is not None
            self.partial.append([self._segment.epoch, lease.index, lease.part, self._segment.parts])
        self._lost.discard(holder)
        self._release()

    def _begin(self, segment: Segment) -> None:
        waiting = [one.asker for one in self._waiting]
        assert not waiting, f"replicas {waiting} still wait for leases of {self._segment}"
        if self._segment is not None and self._segment.epoch != segment.epoch:
            assert not self._again, f"{len(self._again)} slices of epoch {self._segment.epoch} are left"
            self._held = {holder: [] for holder in self._held}
        self._segment, self._requested = segment, 0
        left = [[segment.first, segment.until]] * segment.parts if segment.left is None else segment.left
        self._queues = [list(queue) for queue in left]
        self._handed = segment.slices - sum(map(_length, self._queues))

    def _has_to_wait(self, replica: int) -> bool:
        """For replica 0, which trains alone."""
        assert self._segment is not None
        warmup = self._segment.rank0_warmup_ticks
        over = self._requested > warmup or bool(self._reason) or self._handed == self._segment.slices
        over = over or (self._segment.fixed and not self._own(0))
        return replica != 0 and warmup > 0 and not over

    def _release(self) -> None:
        for request in [*self._waiting]:
            if not self._has_to_wait(request.replica) and (answer := self._next(request)) is not None:
                self._waiting.remove(request)
                self.released.append((request.asker, answer))

    def _next(self, request: _Request) -> Lease | End | None:
        assert self._segment is not None
        if self._again:
            lease = replace(self._again.pop(0), handed=max(0, self._handed - 1), again=True)
        elif self._reason or self._handed == self._segment.slices:
            if self._lost:
                return None
            return End(reason=self._reason, left=[list(queue) for queue in self._queues], partial=[*self.partial])
        elif self._segment.fixed and not self._own(request.replica):
            return None  # until the others have theirs
        else:
            lease = self._new(request.replica)
        if request.holder is not None:
            self._held[request.holder].append((request.push, lease))
        return lease

    def _own(self, replica: int) -> list[int]:
        """Its queues in which something is left."""
        assert self._segment is not None
        parts = range(replica, self._segment.parts, self._segment.size or self._segment.parts)
        return [part for part in parts if _length(self._queues[part])]

    def _new(self, replica: int) -> Lease:
        assert self._segment is not None
        if own := self._own(replica):
            part = min(own, key=lambda p: self._queues[p][0])  # the furthest behind first
            self._queues[part][0] += 1
            index = self._queues[part][0] - 1
        else:  # the back of the queue that has most left: what its owner would come to last
            part = max(range(len(self._queues)), key=lambda p: _length(self._queues[p]))
            self._queues[part][1] -= 1
            index = self._queues[part][1]
        self._handed += 1
        return Lease(index=index, part=part, handed=self._handed - 1)


def _length(queue: list[int]) -> int:
    return queue[1] - queue[0]


def to_json(answer: Lease | End) -> dict[str, Any]:
    """A JSON object, for the line between a worker and the driver."""
    return {name: value for name, value in vars(answer).items() if name not in ("again", "partial") or value}


def from_json(values: dict[str, Any]) -> Lease | End:
    """What `to_json` wrote."""
    return Lease(**values) if "index" in values else End(**values)


def foreseen(segment: Segment, replica: int) -> Iterator[Lease]:
    """The leases of a replica's own queues in the order in which it gets them, without those that others take."""
    leases, rank0_warmup_ticks = Leases(), replace(segment, rank0_warmup_ticks=0)
    while isinstance(lease := leases.take(replica, rank0_warmup_ticks), Lease) and segment.owner(lease.part) == replica:
        yield lease
