"""Work that goes on while the caller computes: a thread beside it, which does one piece after another."""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from manyhands.errors import ManyhandsError

_LOOK_S = 1.0  # so often a waiting caller looks whether the thread still lives


T = TypeVar("T")


class Started(Generic[T]):
    def __init__(self, work: Callable[[], T], thread: threading.Thread) -> None:
        self._work, self._thread = work, thread
        self._over = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> T:
        """What the work gave, or raises what it raised."""
        self.wait_over()
        if self._error is not None:
            raise copy.copy(self._error)
        return cast(T, self._value)

    def wait_over(self) -> None:
        """Return when it is done, well or not: it has its own deadlines."""
        while not self._over.wait(_LOOK_S):
            if not self._thread.is_alive() and not self.over:
                raise ManyhandsError(
                    "the thread that did this beside the caller has ended; its own error is in the log"
                )

    def run(self) -> None:
        try:
            self._value = self._work()
        except (ManyhandsError, RuntimeError, ValueError, OSError) as error:  # torch's own are RuntimeErrors
            self._error = error
        finally:
            self._over.set()


class Background:
    """What is started is done in that order. The thread begins with the first; between two, what it uses is the caller's.

    Whoever uses that otherwise calls `drain` first: it is never in the hands of two threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Started[Any] | None] = queue.SimpleQueue()
        self._under_way: deque[Started[Any]] = deque()

    @property
    def busy(self) -> bool:
        while self._under_way and self._under_way[0].over:
            self._under_way.popleft()
        return bool(self._under_way)

    def start(self, work: Callable[[], T]) -> Started[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        started = Started(work, self._thread)
        self._under_way.append(started)
        self._queue.put(started)
        return started

    def drain(self) -> None:
        """Return when nothing is under way. An error of what was is its handle's."""
        while self.busy:
            self._under_way[0].wait_over()

    def close(self, timeout_s: float) -> bool:
        """End the thread, behind what is under way; whether it ended within timeout_s. Idempotent."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (started := self._queue.get()) is not None:
            started.run()
