"""process_memory.py: what the system says is free."""

from pathlib import Path

from manyhands.process_memory import available


def system(root: Path, limit: str | None = None) -> int | None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:     40 kB\n")
    if limit is not None:
        group = root / "sys/fs/cgroup/jobs/one"
        group.mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text("0::/jobs/one\n")
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("10240\n")
    return available(root)


def test_memory_is_the_kernels_estimate_or_what_a_control_group_has_left(tmp_path: Path) -> None:
    assert available(tmp_path) is None
    assert system(tmp_path) == 40 * 1024
    assert available() is not None
    assert system(tmp_path, "max\n") == 40 * 1024
    assert system(tmp_path, "20480\n") == 10 * 1024
    assert system(tmp_path, "204800\n") == 40 * 1024
