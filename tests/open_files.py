"""Which descriptors this process has open, for tests of what a library leaves."""

from __future__ import annotations

import gc
import os


def open_files() -> set[str]:
    """Their numbers. What earlier tests left for the garbage collector is closed first.

    A test compares by `<=`: threads of earlier tests may close theirs meanwhile.
    """
    gc.collect()
    return set(os.listdir("/proc/self/fd"))
