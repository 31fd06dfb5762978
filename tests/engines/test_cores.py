from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.engines import cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_affinity_without_control_groups(tmp_path: Path) -> None:
    assert cores.usable_cores(tmp_path) == 8


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_quota_of_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota}
    assert cores.usable_cores(fake(tmp_path, files)) == expected


def test_the_smallest_quota_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/cpu.max": "600000 100000",
        "sys/fs/cgroup/a/cpu.max": "300000 100000",
        "sys/fs/cgroup/cpu.max": "max 100000",
    }
    assert cores.usable_cores(fake(tmp_path, files)) == 3


def test_a_container_sees_its_quota_at_the_mount(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/not-visible-here\n", "sys/fs/cgroup/cpu.max": "400000 100000"}
    assert cores.usable_cores(fake(tmp_path, files)) == 4


def test_quota_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
        "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000",
        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "50000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert cores.usable_cores(fake(tmp_path, files)) == 5


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert [cores.threads_per_worker(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert cores.threads_per_worker(2, wanted=3) == 3
