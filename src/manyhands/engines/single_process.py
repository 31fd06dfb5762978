"""A run of one worker in the calling process, where a breakpoint works; and the connection to a driver in this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from typing_extensions import override

from manyhands import units
from manyhands.comm.group import Group
from manyhands.comm.solo import SoloGroup
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.cores import threads_per_worker
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed, traceback_of
from manyhands.events import Event
from manyhands.worker import DriverClient, Worker, as_current

T = TypeVar("T")

_POLL_S = 0.1


def run_here(program: Callable[[Worker], T], spec: LaunchSpec) -> T:
    """The program's value. Errors as `Engine.launch` says; the original one is the cause."""
    driver = InProcessDriverClient(spec.observer)
    worker = Worker(
        host=socket.gethostname(),
        device=pick_device(spec.device, 0),
        group=SoloGroup(),
        driver=driver,
        threads=threads_in_callers_process(1, spec.threads_per_worker),
    )
    with as_current(worker), running_threads(worker.threads), ExitStack() as stack:
        if spec.server is not None:
            from manyhands.server.in_process import InProcessServers

            servers = InProcessServers(spec.server, workers=1, shards=spec.shards, timeout_s=spec.timeout_s)
            (worker.server,) = servers.clients
            stack.callback(worker.server.close)
        return run_as(worker, program, driver)


def run_as(worker: Worker, program: Callable[[Worker], T], driver: InProcessDriverClient) -> T:
    """Run the program; manyhands' own errors and the observer's pass, any other becomes `WorkerFailed`."""
    try:
        return program(worker)
    except ManyhandsError:
        raise
    except Exception as error:
        if error is driver.observers_error:
            raise
        raise WorkerFailed(
            f"worker {worker.rank} on {worker.host} failed in phase {driver.phase} at step {driver.step}: {type(error).__name__}: {error}",
            rank=worker.rank,
            host=worker.host,
            phase=driver.phase,
            step=driver.step,
            detail=traceback_of(error),
            error=type(error).__name__,
        ) from error


def threads_in_callers_process(workers_here: int, wanted: int | None) -> int:
    """As wanted; else, for a host's only worker, the process's own number, so that results equal a plain loop's."""
    return wanted or (torch.get_num_threads() if workers_here == 1 else threads_per_worker(workers_here))


@contextmanager
def running_threads(count: int) -> Iterator[None]:
    """Within, torch computes with so many threads; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto`, `own`, `cuda`: this worker's own GPU where there are any (shared in turn if there are too few), else the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted in ("auto", "own") and not count):
        return torch.device("cpu")
    if not count:
        raise BadInput(f"device {wanted} was asked for, and torch sees no GPU here: give device auto or cpu")
    own = torch.device(wanted if ":" in wanted else f"cuda:{local_rank % count}")
    if own.index >= count:
        raise BadInput(
            f"device {wanted} was asked for, and torch sees {units.count(count, 'GPU')} here: give cuda:{count - 1} at most, or cuda"
        )
    return own


class InProcessDriverClient(DriverClient):
    """Of one worker alone, or of rank 0 under another launcher; calls the observer directly.

    Nobody watches for a hang: a debugger may hold this worker as long as it likes.

    poll_s: so long it is not asked again whether to stop; 0 where a stop shall be obeyed at the very next tick.
    """

    def __init__(
        self, observer: Observer, clock: Callable[[], float] = time.monotonic, poll_s: float = _POLL_S
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._poll_s = poll_s
        self._asked_at = -poll_s
        self._reason = ""
        self._leases = Leases()
        self.observers_error: Exception | None = None  # what the observer (a user's callback, a full disk) raised
        self.phase, self.step = "start", 0

    @override
    def progress(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step

    @override
    def emit(self, event: Event) -> None:
        with self._observing():
            self._observer.event(event)

    def emit_own(self, event: Event) -> None:
        with self._observing():
            self._observer.own_event(event)

    @override
    def ask(self, event: Event) -> dict[str, Any]:
        with self._observing():
            return self._observer.answer(event)

    @override
    def deliver(self, piece: RowPiece) -> None:
        with self._observing():
            self._observer.take_rows(piece)

    @override
    def collect(self, group: Group) -> None:
        """Nothing to do: every event arrived when it was emitted."""

    @override
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End | None:
        """For one replica: it gets every slice."""
        if reason := self.should_stop():
            self._leases.stop(reason)
        answer = self._leases.take(replica, segment)
        assert answer is not None  # there is nobody to wait for
        return answer

    @override
    def should_stop(self) -> str:
        """Asks the observer every `poll_s`, not at every tick."""
        if not self._reason and self._clock() - self._asked_at >= self._poll_s:
            self._asked_at = self._clock()
            with self._observing():
                self._reason = self._observer.stopping()
        return self._reason

    @contextmanager
    def _observing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.observers_error = error
            raise
