"""Descriptors: a run of many workers needs more than the 1,024 (or fewer) that a shell allows at first."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.errors import BadInput

_SPARE = 64  # for whatever the caller opens meanwhile


@contextmanager
def room_for_descriptors(count: int) -> Iterator[None]:
    """Within, this process may open `count` more; afterwards its limit is what it was.

    Raises BadInput where the hard limit forbids it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        yield
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"this many workers need {needed} open files, and the limit is {hard}: raise it (ulimit -Hn), or use fewer "
            "workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def raise_limit_of_descriptors() -> None:
    """As many as the system lets this process have: for a process that is all ours."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
