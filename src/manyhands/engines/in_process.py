"""The connection to the driver where the driver is this process: one worker alone, or rank 0 under another launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.engines.base import Observer
from manyhands.events import Event
from manyhands.worker import DriverClient

_POLL_S = 0.1


class InProcessDriverClient(DriverClient):
    """Calls the observer directly. Nobody watches for a hang: a debugger may hold this worker as long as it likes.

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
        """See `Observer.own_event`."""
        with self._observing():
            self._observer.own_event(event)

    @override
    def ask(self, event: Event) -> dict[str, Any]:
        with self._observing():
            return self._observer.answer(event)

    @override
    def collect(self, group: Group) -> None:
        """Nothing to do: every event arrived when it was emitted."""

    @override
    def lease(self, segment: Segment) -> Lease | End:
        """For one worker: it gets every slice."""
        if reason := self.should_stop():
            self._leases.stop(reason)
        answer = self._leases.take(0, segment)
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
