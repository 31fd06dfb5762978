"""Threads of which one runs at a time: a thread runs until it waits, then the lowest rank that can continue runs.

So a program of many workers runs in one process with one random state a worker, and always in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from manyhands import rng
from manyhands.comm.threads import Meeting
from manyhands.errors import ManyhandsError

T = TypeVar("T")


class ReplayDeadlock(ManyhandsError):
    """All workers wait for each other: the recorded order is impossible for this program."""


class _Ended(BaseException):
    """Ends a thread after another one raised."""


class ThreadTurns:
    """Runs one function a worker, and switches between them in `wait_for`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running: int | None = None
        self._failed = False
        self._thread = threading.local()

    def run(self, programs: list[Callable[[], T]]) -> list[T]:
        """Returns the programs' results. The first error ends all of them and is raised."""
        self._waiting = {rank: lambda: True for rank in range(len(programs))}
        self._running, self._failed = None, False
        with rng.kept(), ThreadPoolExecutor(len(programs)) as pool:
            futures = [pool.submit(self._run_program, rank, program) for rank, program in enumerate(programs)]
            with self._changed:
                self._start_next()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _Ended):
                raise error
        return [future.result() for future in futures]

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Let others run until `ready()`, which depends only on what they do. Raises ReplayDeadlock if none can continue."""
        if not ready():
            state = rng.capture()
            self._yield_turn(self._thread.rank, ready)
            rng.restore(*state)

    def _run_program(self, rank: int, program: Callable[[], T]) -> T:
        self._thread.rank = rank
        with self._changed:
            self._await_turn(rank)
        try:
            return program()
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._changed:
                self._running = None
                self._start_next()

    def _yield_turn(self, rank: int, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting[rank], self._running = ready, None
            self._start_next()
            self._await_turn(rank)

    def _await_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._running == rank or self._failed)
        if self._failed:
            self._waiting.pop(rank, None)
            raise _Ended

    def _start_next(self) -> None:
        """Choose the next thread; the caller holds the lock."""
        chosen = next((rank for rank in sorted(self._waiting) if self._waiting[rank]()), None)
        if chosen is None and self._waiting and not self._failed:
            self._failed = True
            self._changed.notify_all()
            raise ReplayDeadlock(
                f"workers {sorted(self._waiting)} wait for each other: the journal does not fit this program"
            )
        if chosen is not None:
            del self._waiting[chosen]
            self._running = chosen
        self._changed.notify_all()


class InTurns(Meeting):
    """A rendezvous of workers that take turns: each gives a value and gets all values."""

    def __init__(self, size: int, turns: ThreadTurns) -> None:
        super().__init__(size)
        self._turns = turns
        self._swaps = [0] * size
        self._values: dict[int, dict[int, Any]] = {}

    @override
    def swap(self, rank: int, value: Any, operation: str = "") -> list[Any]:
        self._swaps[rank] += 1
        number = self._swaps[rank]
        values = self._values.setdefault(number, {})
        values[rank] = value
        self._turns.wait_for(lambda: len(values) == self.size)
        if min(self._swaps) >= number:
            self._values.pop(number, None)
        return [values[r] for r in range(self.size)]
