"""How much memory a process has, and what glibc's malloc does with what it frees."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_… of malloc.h
_KEEPS_BYTES, _GIVES_BACK_BYTES = 8 << 20, 1 << 20  # what is larger has pages of its own, which go when it is freed
_keeps = False  # whether this process does as `keep_freed_memory` says
_TOP_BYTES = 64 << 20  # so much that is free at the end of the heap stays there


def keep_freed_memory() -> None:
    """What tensors of up to 8 MB leave stays with the process; the next ones would else cost a page fault for each 4 KB.

    glibc moves its thresholds so by itself, once tensors of that size were freed. Settings of the user's own hold.
    """
    global _keeps
    if (mallopt := _mallopt()) is not None:
        _keeps = True
        mallopt(_MMAP_THRESHOLD, _KEEPS_BYTES)
        mallopt(_TRIM_THRESHOLD, _TOP_BYTES)


@contextmanager
def giving_back() -> Iterator[None]:
    """Within, what is freed goes back to the system; afterwards as `keep_freed_memory` has it. In a process for which that
    was not called, it is the user's to say what malloc does."""
    mallopt = _mallopt()
    if not _keeps or mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _GIVES_BACK_BYTES)
    try:
        yield
    finally:
        keep_freed_memory()


def give_back() -> None:
    """What is free now goes back to the system."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def available(root: Path = Path("/")) -> int | None:
    """Bytes that processes may still take, by the kernel's estimate and the memory limit of this control group; None where
    the system does not say. `root` is where /proc and /sys are found, for tests."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        free = 1024 * int(found[1]) if found else None
        with suppress(OSError, ValueError):  # "max" where there is no limit
            group = (root / "proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
            folder = root / "sys/fs/cgroup" / group
            left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
            free = left if free is None else min(free, left)
        return free
    return None


def resident(pid: int | str = "self", name: str = "VmRSS") -> int:
    """A line of /proc/PID/status, in bytes: VmRSS, or VmHWM, the most so far. 0 of a process that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def forget_peak() -> None:
    """From now on `resident(name="VmHWM")` is of what follows, where the kernel lets a process say so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _mallopt() -> Callable[[int, int], Any] | None:
    """None where there is no glibc, or the user has set what it does."""
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
