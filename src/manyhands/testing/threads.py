"""Workers as threads of one process, for tests: no engine, no files, errors with their own traceback."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from typing_extensions import override

from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.server.base import Server
from manyhands.worker import SoloDriverClient, Worker

T = TypeVar("T")
DEADLINE_S = 20.0
"""Of a turn."""


def together(size: int, program: Callable[[Worker], T], servers: Sequence[Server] = ()) -> list[T]:
    """Run `program` on `size` workers, each a thread. Returns their results in rank order; raises the first error.

    servers: of each worker, in rank order.
    """
    meetings: dict[tuple[int, ...], Meeting] = {(-1, *range(size)): Meeting(size)}
    leases = SharedLeases()

    def run(rank: int) -> T:
        made: Counter[tuple[int, ...]] = Counter()

        def subgroup(ranks: Sequence[int]) -> ThreadGroup:
            made[members := tuple(ranks)] += 1
            meeting = meetings.setdefault((made[members], *members), Meeting(len(members)))
            return ThreadGroup(meeting, members.index(rank))

        try:
            server, group = servers[rank] if servers else None, ThreadGroup(meetings[-1, *range(size)], rank)
            client = ThreadDriverClient(leases)
            return program(Worker(rank=rank, size=size, group=group, subgroup=subgroup, server=server, driver=client))
        except BaseException:
            leases.abort()
            for meeting in list(meetings.values()):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [f.exception() for f in futures]
        for error in sorted((e for e in errors if e), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]


class SharedLeases:
    """What the driver's leases are to workers in processes."""

    def __init__(self) -> None:
        self.leases, self.answers, self.aborted = Leases(), dict[int, Lease | End](), False
        self.changed = threading.Condition()

    def abort(self) -> None:
        """Nobody waits any longer: a worker has failed."""
        with self.changed:
            self.aborted = True
            self.changed.notify_all()


class ThreadDriverClient(SoloDriverClient):
    """No driver, but for leases, which all workers share."""

    def __init__(self, shared: SharedLeases) -> None:
        super().__init__()
        self._shared = shared

    @override
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        shared = self._shared
        with shared.changed:
            answer = shared.leases.take(replica, segment)
            shared.answers.update(shared.leases.released)
            shared.leases.released = []
            shared.changed.notify_all()
            if answer is not None:
                return answer
            if not shared.changed.wait_for(lambda: replica in shared.answers or shared.aborted, DEADLINE_S):
                raise TimeoutError(f"replica {replica} waited {DEADLINE_S:g} s for a lease")
            if shared.aborted:
                raise threading.BrokenBarrierError
            return shared.answers.pop(replica)


class ScriptedTurns:
    """Makes threads run one after the other, in a scripted order.

    `order` has one rank for each turn; `with turns.take(rank):` is one turn of that rank. Turns do not overlap. Code
    within a turn must not wait for another worker.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._at = list(order), 0
        self._passed = threading.Condition()

    @contextmanager
    def take(self, rank: int) -> Iterator[None]:
        """Wait for this rank's next turn. Raises TimeoutError if the list is wrong or another worker failed."""
        with self._passed:
            if not self._passed.wait_for(lambda: self._turn_of() == rank, DEADLINE_S):
                raise TimeoutError(
                    f"rank {rank} waited {DEADLINE_S:g} s for its turn; turn {self._at} of {len(self._order)} is "
                    f"{self._turn_of()}'s: each turn that is taken must be in the list"
                )
        try:
            yield
        finally:
            with self._passed:
                self._at += 1
                self._passed.notify_all()

    def _turn_of(self) -> int | None:
        return self._order[self._at] if self._at < len(self._order) else None
