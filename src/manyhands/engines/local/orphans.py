"""What descendants of this process leave behind: it comes to this process instead of init, which can end it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

from manyhands.rank_files import settling

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """The kernel makes this process the parent of its descendants' orphans, those in other sessions too."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(but: Collection[int] = ()) -> bool:
    """Kill the living children, adopted ones included; whether there were any. Theirs are adopted next time."""
    found = [pid for pid in _children() if pid not in but and not _settles(pid)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _settles(pid: int) -> bool:
    """Whether it waits for the run's ranks to be gone, to settle their files: it ends by itself then."""
    try:
        return settling.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children() -> list[int]:
    own, found = os.getpid(), []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if entry.name.isdigit():
                state, parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:2]
                found += [int(entry.name)] if int(parent) == own and state != "Z" else []
    return found
