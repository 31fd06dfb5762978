"""How many cores this process may really use: the least of its affinity and of every CPU quota above it."""

from __future__ import annotations

import math
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A container with `--cpus 2` on a machine of 64 cores answers 2, where `os.cpu_count()` says 64.

    `root` is where /proc and /sys are found, for tests.
    """
    return _whole([float(len(_affinity())), *_quotas(root)])


def _affinity() -> set[int]:
    known = hasattr(os, "sched_getaffinity")  # macOS has none
    return os.sched_getaffinity(0) if known else set(range(os.cpu_count() or 1))


def _whole(cores: Iterable[float]) -> int:
    return max(1, math.floor(min(cores)))


def threads_per_worker(workers_here: int, wanted: int | None = None) -> int:
    """Threads for each of this host's workers, so that together they do not exceed the cores."""
    return wanted or max(1, usable_cores() // workers_here)


# -- cores that several workers share -----------------------------------------------------------------------------------


def report(threads: int, root: Path = Path("/")) -> dict[str, Any]:
    """What a worker of so many threads says of the cores that it may use, as JSON: `shared` puts them together."""
    mask = sum(1 << core for core in _affinity())
    return {
        "host": "".join(filter(str.isprintable, platform.node())),
        "threads": threads,
        "cores": f"{mask:x}",
        "quota": min(_quotas(root), default=None),
        "machine": _read(root / "proc/sys/kernel/random/boot_id") or platform.node(),
        "group": f"{_read(root / 'proc/self/cgroup')} {platform.node()}",
    }


def shared(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{host, workers, threads, cores}] of each machine and each control group with a quota, the most crowded first.

    reports: what `report` gave on each worker. Hosts that joined from one machine share its cores: they are one here.
    """
    machines: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in reports:
        machines[one["machine"]].append(one)
        if one["quota"] is not None:
            groups[f"{one['machine']} {one['group']}"].append(one)
    found = [
        *(_together(members, []) for members in machines.values()),
        *(_together(members, [one["quota"] for one in members]) for members in groups.values()),
    ]
    return sorted(found, key=lambda one: -one["threads"] / one["cores"])


def _together(members: Sequence[Mapping[str, Any]], quotas: Sequence[float]) -> dict[str, Any]:
    mask = reduce(or_, (int(one["cores"], 16) for one in members))
    return {
        "host": ", ".join(dict.fromkeys(one["host"] for one in members)),
        "workers": len(members),
        "threads": sum(one["threads"] for one in members),
        "cores": _whole([float(mask.bit_count()), *quotas]),
    }


def _quotas(root: Path) -> Iterator[float]:
    """Cores allowed by each control group that holds this process, versions 1 and 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _upwards(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            yield from _upwards(root / "sys/fs/cgroup/cpu", path, _quota_v1)


def _upwards(mount: Path, path: str, quota: Callable[[Path], float | None]) -> Iterator[float]:
    """Quotas of a group and its parents. In a container the path may not exist; then only the mount counts."""
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
