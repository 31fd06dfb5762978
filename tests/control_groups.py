"""Control groups of this machine with a CPU quota, version 1 or 2."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(cores: float) -> Iterator[Path]:
    """A control group that may use so many cores; removed again. OSError where none can be made."""
    group = _folder() / f"manyhands-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            period = int((group / "cpu.cfs_period_us").read_text())
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * period)))
        else:
            (group / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
        yield group
    finally:
        os.rmdir(group)


def _folder() -> Path:
    """Where this process's control groups for CPU are: version 1's, else version 2's."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return Path("/sys/fs/cgroup/cpu") / path.lstrip("/")
        if controllers == "":
            unified = Path("/sys/fs/cgroup") / path.lstrip("/")
    return unified
