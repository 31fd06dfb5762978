"""How many cores this process may really use: the least of its affinity and of every CPU quota above it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A container with `--cpus 2` on a machine of 64 cores answers 2, where `os.cpu_count()` says 64.

    `root` is where /proc and /sys are found, for tests.
    """
    known = hasattr(os, "sched_getaffinity")  # macOS has no affinity
    own = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, math.floor(min([float(own), *_quotas(root)])))


def threads_per_worker(workers_here: int, wanted: int | None = None) -> int:
    """Threads for each of this host's workers, so that together they do not exceed the cores."""
    return wanted or max(1, usable_cores() // workers_here)


def _quotas(root: Path) -> Iterator[float]:
    """Cores allowed by each control group that holds this process, versions 1 and 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upwards(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup/cpu", path, _quota_v1)


def _upwards(mount: Path, path: str, quota: Callable[[Path], float | None]) -> Iterator[float]:
    """Quotas of a group and of all groups above it. Inside a container the path may not exist: then only the mount counts."""
    group = mount / path.lstrip("/")
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(mount):
            return
        if (cores := quota(folder)) is not None:
            yield cores


def _quota_v2(group: Path) -> float | None:
    words = (_read(group / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return None if quota is None or period is None or int(quota) <= 0 else int(quota) / int(period)


def _read(path: Path) -> str | None:
    """The file's text, or None where this kernel or container does not have it."""
    try:
        return path.read_text()
    except OSError:
        return None
