"""Each simulated worker's DriverClient: leases, stops, events, and the places where faults befall it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.engines.base import Observer
from manyhands.engines.fault_injector import FaultInjector
from manyhands.engines.sim.compute import ComputeSpeed
from manyhands.engines.sim.timeline import Future, Timeline
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import PeerLost
from manyhands.events import Event
from manyhands.worker import LastPushes, current


class LeaseServer:
    """The driver's side: hands out the leases, in virtual time."""

    def __init__(self, timeline: Timeline, observer: Observer, lease_s: float, timeout_s: float = 300.0) -> None:
        """lease_s: the cost of asking for a lease. timeout_s: PeerLost after waiting so long for worker 0's warmup."""
        self.timeline, self.observer, self.lease_s, self.timeout_s = timeline, observer, lease_s, timeout_s
        self.leases = Leases()
        self.waits: Callable[[], None] = lambda: None  # called when a worker begins to wait
        self._waiting: dict[int, Future[Lease | End | None]] = {}  # by replica, or holder
        self._moved_at = 0.0  # when somebody last got one

    def lease(
        self, replica: int, segment: Segment, stop: str, step: int, holder: int, push: int | None = None
    ) -> Lease | End | None:
        """push: where workers may be lost, the number of the push of this holder that will carry the slice."""
        if self.lease_s:
            self.timeline.sleep(self.lease_s)
        if stop:
            self.leases.stop(stop)
        if push is None:
            answer = self.leases.take(replica, segment)
        else:
            answer = self.leases.take(replica, segment, holder=holder, push=push)
        self._release()
        if answer is not None:
            self._moved_at = self.timeline.now
            return answer
        return self._wait(replica if push is None else holder, step)

    def lose(self, holder: int) -> bool:
        """It is lost, or has left; whether it ever had a slice. Then `recover` is to follow."""
        if not self.leases.holds(holder):
            return False
        self.leases.lose(holder)
        return True

    def recover(self, holder: int, applied: list[int]) -> None:
        """Nothing of this holder enters any more. applied: by shard, the number of its last push there."""
        self.leases.recover(holder, applied)
        self._release()

    def send_away(self, asker: int) -> None:
        """Whoever waits for replica 0 gets nothing: members change."""
        if asker in self._waiting:
            self._waiting[asker].set(None)

    def _release(self) -> None:
        for other, released in self.leases.released:
            if other in self._waiting:  # who died meanwhile gets none
                self._waiting[other].set(released)
        self.leases.released.clear()

    def _wait(self, asker: int, step: int) -> Lease | End | None:
        """While replica 0 trains alone, or it is not known yet what the server has of a lost worker."""
        cell: Future[Lease | End | None] = self.timeline.cell()
        self._waiting[asker] = cell
        self.waits()
        begun = self.timeline.now

        def look() -> None:
            if cell.is_set or self._waiting.get(asker) is not cell:
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
            if self._waiting.get(asker) is cell:
                del self._waiting[asker]


class SimDriverClient(InProcessDriverClient):
    """One worker's."""

    def __init__(self, lease_server: LeaseServer, rank: int, pace: ComputeSpeed) -> None:
        super().__init__(lease_server.observer, clock=lambda: lease_server.timeline.now, poll_s=0)
        self._lease_server, self._rank, self._pace = lease_server, rank, pace
        self._after_backward: list[Callable[[], None]] = []
        self.emitted: Callable[[Event], None] = lambda event: None  # called after each event of this worker's
        self.begun: Callable[[int], None] = lambda step: None  # called as it begins to compute a step
        self.lost_pushes: Callable[[int], dict[int, LastPushes]] = lambda generation: {}
        self.injector: FaultInjector | None = None  # of faults that this worker is to have
        self.interrupt = -1  # the generation whose members are to form the next one
        self.broke = -1  # the newest generation of which the driver said that a member is lost
        self._backwards = 0  # that this worker is in: one inside of the other with reentrant checkpoints

    @override
    def progress(self, phase: str, step: int) -> None:
        super().progress(phase, step)
        if phase == "compute":
            self.begun(step)
        if self.injector is not None:
            self.injector.reach(phase, step)

    @override
    def emit(self, event: Event) -> None:
        super().emit(event)
        self.emitted(event)

    @override
    def interrupted(self, generation: int) -> bool:
        return self.interrupt == generation

    @override
    def broken(self, generation: int) -> bool:
        return self.broke == generation

    @override
    def pushes_of_lost(self, generation: int) -> dict[int, LastPushes]:
        return self.lost_pushes(generation)

    @override
    def computed(self, rows: int) -> None:
        # also without rows: a pause of this worker's passes here
        self._lease_server.timeline.work(self._pace.seconds(rows))

    @override
    def begin_passes(self, rows: int, stage: int, sizes: Sequence[int]) -> Callable[[bool, float], None]:
        forward_s, back_s = self._pace.passes(rows, stage, sizes)

        def passed(forward: bool, share: float) -> None:
            self._lease_server.timeline.work((forward_s if forward else back_s) * share)

        return passed

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
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End | None:
        return self._lease_server.lease(replica, segment, self.should_stop(), self.step, self._rank, push)


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
