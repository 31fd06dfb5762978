"""Places in a model's own forward at which a stage may begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_running = threading.local()


def cut(x: T) -> T:
    """Return `x`, a tensor or a structure of them, and mark a place where a stage may begin.

    For a forward whose modules leave no such place. Where a model has marks, `cut="auto"` takes no others, if they are
    enough; the n-th mark in the body of a module is called `module.cutN`. Outside of a run with stages it does nothing.
    """
    marked: Callable[[Any], Any] | None = getattr(_running, "marked", None)
    return x if marked is None else marked(x)


@contextmanager
def noted(marked: Callable[[Any], Any]) -> Iterator[None]:
    """Within, this thread's `cut` calls it, and returns what it returns."""
    before = getattr(_running, "marked", None)
    _running.marked = marked
    try:
        yield
    finally:
        _running.marked = before
