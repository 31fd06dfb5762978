"""Each simulated worker's DriverClient: leases, stops, events, and faults that a step triggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.engines.base import Observer
from manyhands.engines.sim.compute import ComputeSpeed
from manyhands.engines.sim.timeline import Future, Timeline
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import PeerLost
from manyhands.worker import current


class LeaseServer:
    """The driver's side: hands out the leases, in virtual time."""

    def __init__(self, timeline: Timeline, observer: Observer, lease_s: float, timeout_s: float = 300.0) -> None:
        """lease_s: the cost of asking for a lease. timeout_s: PeerLost after waiting so long for worker 0's warmup."""
        self.timeline, self.observer, self.lease_s, self.timeout_s = timeline, observer, lease_s, timeout_s
        self.leases = Leases()
        self.at_step: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """(rank, step): what happens, inside that worker's own turn, when it begins to compute that step."""
        self._waiting: dict[int, Future[Lease | End]] = {}
        self._moved_at = 0.0  # when somebody last got one

    def lease(self, replica: int, segment: Segment, stop: str, step: int) -> Lease | End:
        if self.lease_s:
            self.timeline.sleep(self.lease_s)
        if stop:
            self.leases.stop(stop)
        answer = self.leases.take(replica, segment)
        for other, released in self.leases.released:
            if other in self._waiting:  # who died meanwhile gets none
                self._waiting[other].set(released)
        self.leases.released.clear()
        if answer is not None:
            self._moved_at = self.timeline.now
            return answer
        return self._wait(replica, step)

    def _wait(self, replica: int, step: int) -> Lease | End:
        """While replica 0 trains alone."""
        cell: Future[Lease | End] = self.timeline.cell()
        self._waiting[replica] = cell
        begun = self.timeline.now

        def look() -> None:
            if cell.is_set or self._waiting.get(replica) is not cell:
                return
            seconds = self.timeline.now - begun
            if self._moved_at + self.timeout_s > self.timeline.now:
                self.timeline.at(self._moved_at + self.timeout_s, look)
            else:
                cell.fail(PeerLost(0, "host0", "lease", step, seconds, f"took no lease for {self.timeout_s:g} s"))

        self.timeline.at(begun + self.timeout_s, look)
        try:
            return self.timeline.wait(cell, "a lease")
        finally:
            if self._waiting.get(replica) is cell:
                del self._waiting[replica]


class SimDriverClient(InProcessDriverClient):
    """One worker's."""

    def __init__(self, lease_server: LeaseServer, rank: int, pace: ComputeSpeed) -> None:
        super().__init__(lease_server.observer, clock=lambda: lease_server.timeline.now, poll_s=0)
        self._lease_server, self._rank, self._pace = lease_server, rank, pace
        self._after_backward: list[Callable[[], None]] = []
        self._backwards = 0  # that this worker is in: one inside of the other with reentrant checkpoints

    @override
    def progress(self, phase: str, step: int) -> None:
        super().progress(phase, step)
        if self._lease_server.at_step and phase == "compute":
            for happen in self._lease_server.at_step.pop((self._rank, step), ()):
                happen()

    @override
    def computed(self, rows: int) -> None:
        # also without rows: a pause of this worker's passes here
        self._lease_server.timeline.work(self._pace.seconds(rows))

    @override
    def after_backward(self, action: Callable[[], None]) -> None:
        """Not inside of autograd's engine, where nobody else could have a turn: see `backward_in_turn`."""
        self._after_backward.append(action)

    def backward(self, plain: Callable[[], None]) -> None:
        """Do a backward, and what waits for its end when the outermost one is over; nothing if that raises."""
        self._backwards += 1
        try:
            plain()
        except BaseException:
            if self._backwards == 1:
                self._after_backward.clear()
            raise
        finally:
            self._backwards -= 1
        while self._after_backward and not self._backwards:
            self._after_backward.pop(0)()

    @override
    def lease(self, segment: Segment, replica: int) -> Lease | End:
        return self._lease_server.lease(replica, segment, self.should_stop(), self.step)


@contextmanager
def backward_in_turn() -> Iterator[None]:
    """Within, what waits for the end of a worker's backward comes when autograd's engine has returned.

    Autograd keeps its place in the thread: a worker that waited inside of it would leave it to the next one's backward.
    """
    plain = torch.autograd.backward

    def backward(*arguments: Any, **options: Any) -> None:
        worker = current()
        if worker is not None and isinstance(worker.driver, SimDriverClient):
            worker.driver.backward(partial(plain, *arguments, **options))
        else:
            plain(*arguments, **options)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain
