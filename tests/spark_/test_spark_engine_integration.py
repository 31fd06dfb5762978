"""Engine `spark` on a cluster of two executors: the conformance suite, errors, clusters that are too small, executors that die."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.spark.engine import Spark
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed
from manyhands.testing.engine_suite import ENGINE_SUITE
from manyhands.worker import Worker

PLAN = LaunchSpec(workers=2, timeout_s=60, threads_per_worker=1)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("check", [check for check in ENGINE_SUITE if check != "nothing_left"])
def test_spark_passes(check: str) -> None:
    """CASES 21, 28"""
    ENGINE_SUITE[check](Spark())


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_threads_are_the_cores_of_a_spark_task() -> None:
    assert Spark().launch(lambda worker: worker.threads, LaunchSpec(workers=2, timeout_s=60)) == [1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_launch_from_a_notebook() -> None:
    def rank(add: int) -> int:
        return mh.worker().rank + add

    assert mh.launch(rank, 5, workers=3, engine="spark") == [5, 6, 7]


@pytest.mark.slow
def test_too_few_slots(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engines.spark.session._SLOTS_S", 0.5)
    with pytest.raises(BadInput, match="5 workers need 5 Spark task slots at once, and the cluster has 4"):
        mh.launch(os.getpid, workers=5, engine="spark")


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_another_master_than_the_session_has() -> None:
    with pytest.raises(
        BadInput, match=r"master=local\[2\] was asked for, and the active Spark session has local-cluster"
    ):
        mh.launch(os.getpid, workers=2, engine="spark:master=local[2]")


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_cluster_that_is_busy_is_not_waited_for_for_ever() -> None:
    with pytest.raises(
        ManyhandsError, match="waited 0 s for the executors; workers that are here: 0 of 2; the cluster may be busy"
    ):
        Spark(wait_s=0.01).launch(lambda worker: None, PLAN)


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_driver_that_executors_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Spark._opened

    def elsewhere(self: Spark, addresses: tuple[str, str], plan: LaunchSpec) -> tuple[Any, Any]:
        listener, stage = opened(self, addresses, plan)
        return listener, replace(stage, address="127.0.0.1:1", reach_s=0.2)

    monkeypatch.setattr(Spark, "_opened", elsewhere)
    with pytest.raises(ManyhandsError, match=r"failed before it began: .*JoinError: no run took this host's workers"):
        Spark().launch(lambda worker: None, PLAN)


def _fails(worker: Worker) -> None:
    worker.group.barrier()
    if worker.rank == 1:
        raise KeyError("the label")
    worker.group.barrier()


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_a_workers_own_traceback() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 on .* failed .*KeyError: 'the label'") as caught:
        Spark().launch(_fails, PLAN)
    assert "in _fails" in caught.value.detail
    assert Spark().launch(lambda worker: worker.rank, PLAN) == [0, 1]


def _waits(folder: Path, worker: Worker) -> None:
    (folder / f"{worker.rank}.{os.getppid()}.{os.getpid()}").touch()
    while True:
        worker.group.barrier()
        time.sleep(0.01)


def _executors() -> list[int]:
    """JVMs of executors that this process's cluster has."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            parents = _ancestors(int(pid))
        except OSError:
            continue
        if b"CoarseGrainedExecutorBackend" in line and os.getpid() in parents:
            found.append(int(pid))
    return found


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.add(pid)
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_executor_is_named_and_the_next_run_works(spark: Any, tmp_path: Path) -> None:
    import threading

    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        killed.append(_executors()[0])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerFailed, match="driver lost|was lost|ended") as caught:
        Spark().launch(partial(_waits, tmp_path), LaunchSpec(workers=4, timeout_s=60, threads_per_worker=1))
    thread.join()
    assert killed
    assert caught.value.host
    processes = [int(path.name.split(".")[i]) for path in tmp_path.iterdir() for i in (1, 2)]
    deadline = time.monotonic() + 20
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in processes if _alive(pid)]
    assert Spark().launch(lambda worker: worker.size, PLAN) == [2, 2]
