"""SIGTERM asks a run to stop where it can be resumed, instead of ending it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTED = "preempted"  # the reason to stop after SIGTERM


@contextmanager
def sigterm_to(stop: Callable[[str], None]) -> Iterator[None]:
    """Within, SIGTERM calls stop(PREEMPTED). Python takes signals in the main thread alone: elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop(PREEMPTED)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
