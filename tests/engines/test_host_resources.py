"""Cores and descriptors: what a host has, and what several workers share of it."""

import resource
from pathlib import Path
from typing import Any

import pytest

from manyhands.engines import cores, descriptors
from manyhands.errors import BadInput


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


IN = "sys/fs/cgroup"
QUOTAS: dict[str, tuple[dict[str, str], int]] = {  # of the control group /a/b: a folder's cpu.max, and the usable cores
    "no limit": ({"a/b": "max 100000"}, 8),
    "two": ({"a/b": "200000 100000"}, 2),
    "one and a half": ({"a/b": "150000 100000"}, 1),
    "a half": ({"a/b": "50000 100000"}, 1),
    "the smallest above": ({"a/b": "600000 100000", "a": "300000 100000", ".": "max 100000"}, 3),
    "a container's, at the mount": ({".": "400000 100000"}, 4),
}


def test_a_quota_limits_the_usable_cores(tmp_path: Path) -> None:
    for name, (limits, expected) in QUOTAS.items():
        files = {f"{IN}/{folder}/cpu.max": limit for folder, limit in limits.items()}
        root = fake(tmp_path / name, {"proc/self/cgroup": "0::/a/b\n", **files})
        assert cores.usable_cores(root) == expected, name
    assert cores.usable_cores(tmp_path) == 8  # affinity alone
    version_1 = {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
        f"{IN}/cpu/x/cpu.cfs_quota_us": "250000",
        f"{IN}/cpu/x/cpu.cfs_period_us": "50000",
        f"{IN}/cpu/cpu.cfs_quota_us": "-1",
        f"{IN}/cpu/cpu.cfs_period_us": "100000",
    }
    assert cores.usable_cores(fake(tmp_path / "version 1", version_1)) == 5


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    assert [cores.threads_per_worker(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert cores.threads_per_worker(2, wanted=3) == 3


def output(
    threads: int, host: str = "alpha", cores: str = "ff", quota: float | None = None, **more: str
) -> dict[str, Any]:
    facts = {"machine": "boot 1", "group": f"0::/ {host}"} | more
    return {"host": host, "threads": threads, "cores": cores, "quota": quota, **facts}


def test_workers_of_one_machine_share_its_cores_whatever_their_hosts_are_called() -> None:
    found = cores.shared([output(4), output(4, host="beta"), output(8, host="gamma", machine="boot 2"), output(1)])
    assert found == [
        {"host": "alpha, beta", "workers": 3, "threads": 9, "cores": 8},
        {"host": "gamma", "workers": 1, "threads": 8, "cores": 8},
    ]
    pinned = [cores.shared([output(1, cores="1"), output(1, cores=mask)])[0]["cores"] for mask in ("2", "1")]
    assert pinned == [2, 1]  # apart they share nothing


def test_a_quota_is_shared_by_those_in_its_group_alone() -> None:
    """Two joins in one container of two cores; and two containers of two cores each on a machine of eight."""
    one, two = cores.shared([output(2, quota=2.5), output(2, quota=2.5)])
    assert (one["threads"], one["cores"], two["cores"]) == (4, 2, 8)
    found = cores.shared([output(2, quota=2.0), output(2, host="beta", quota=2.0)])
    assert all(one["threads"] <= one["cores"] for one in found)


def test_a_report_is_of_this_process(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", f"{IN}/a/cpu.max": "150000 100000", "proc/sys/kernel/random/boot_id": "b"}
    own = cores.report(3, fake(tmp_path, files))
    assert (own["threads"], own["cores"], own["quota"], own["machine"]) == (3, "ff", 1.5, "b")
    assert [(one["host"], one["threads"], one["cores"]) for one in cores.shared([own])] == [
        (own["host"], 3, quota) for quota in (1, 8)
    ]


class Limits:
    """The system's limit of descriptors, for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now, self.history = (soft, hard), [soft]
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: self.set(pair))

    def set(self, pair: tuple[int, int]) -> None:
        self.now = pair
        self.history.append(pair[0])


def test_the_limit_is_raised_where_it_must_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = Limits(monkeypatch, 1024, 4096)
    with descriptors.room_for_descriptors(4):
        assert enough.history == [1024]
    with descriptors.room_for_descriptors(2000):
        assert 2064 <= enough.now[0] <= 4096
    assert enough.now == (1024, 4096)
    none = Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with descriptors.room_for_descriptors(2000):
        assert len(none.history) == 1
    Limits(monkeypatch, 1024, 1024)
    with pytest.raises(BadInput, match="the limit is 1024: raise it"), descriptors.room_for_descriptors(2000):
        pass
    system = Limits(monkeypatch, 256, 4096)
    descriptors.raise_limit_of_descriptors()
    assert system.now == (4096, 4096)
