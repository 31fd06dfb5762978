"""SIGTERM asks a run to stop where it can be resumed, instead of ending it; also while a command or a worker starts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from manyhands.errors import Preempted

PREEMPTED = "preempted"  # the reason to stop after SIGTERM

_came = False  # SIGTERM, when nobody could stop for it yet


@contextmanager
def sigterm_to(stop: Callable[[str], None]) -> Iterator[None]:
    """Within, SIGTERM calls stop(PREEMPTED), at once if it came while this command started. Elsewhere than in the main
    thread, where alone Python takes signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        stop(PREEMPTED)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        if _came:
            stop(PREEMPTED)
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# -- at the start of a command ---------------------------------------------------------------------------------------


def end_by_sigterm() -> None:
    """From now on SIGTERM ends this command with exit code 75, outside of `sigterm_to`; a library that is being
    imported may swallow the exception, then the run that follows stops at its start."""
    signal.signal(signal.SIGTERM, _end)


def leave_sigterm_to_the_system() -> None:
    """Where SIGTERM ended this command, it ends the process at once, as in `python script.py`; also while a library
    waits for other processes, where no handler of Python's is called."""
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    _note(number, frame)
    sys.stderr.write("manyhands: asked to end (SIGTERM) while no run was under way\n")
    raise SystemExit(Preempted.exit_code)


# -- at the start of a worker ----------------------------------------------------------------------------------------


def note_sigterm() -> None:
    """From now on SIGTERM does nothing but that `sigterm_came` says so. What came while it was blocked comes now."""
    signal.signal(signal.SIGTERM, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def sigterm_came() -> bool:
    """Whether it came before somebody else had a handler for it."""
    return _came


def _note(number: int, frame: FrameType | None) -> None:
    global _came
    _came = True
