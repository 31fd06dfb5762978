"""Code whose writes are meant as they are: manyhands' own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    depth = 0


_here = _Depth()


@contextmanager
def as_given() -> Iterator[None]:
    """Within, this thread's writes go where they say, on every rank: each writes parts of one checkpoint, say."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def pause(seconds: float) -> None:
    """Sleep, and leave `as_given` meanwhile: a signal handler of the script's runs now, and may save something."""
    depth, _here.depth = _here.depth, 0
    try:
        time.sleep(seconds)
    finally:
        _here.depth = depth


def is_as_given() -> bool:
    """Whether this thread is inside `as_given`."""
    return _here.depth > 0
