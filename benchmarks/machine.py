"""What the benchmarks share: the machine they ran on, and sizes as people write them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

UNITS = {"KB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}


def facts() -> dict[str, int | str]:
    """Of this machine and its versions; printed too."""
    found: dict[str, int | str] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def bytes_of(size: str) -> int:
    """4KB, 1.5MB, 1000."""
    for unit, factor in UNITS.items():
        if size.upper().endswith(unit):
            return int(float(size[: -len(unit)]) * factor)
    return int(size)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
