"""Engine `spark` on a cluster of two executors: what a program may do, errors, clusters that are too small, executors that die."""

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_script import wait_until
from joined_run import lives
from whole_program import Listening, check_everything, everything

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.spark.engine import Spark
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]
PLAN = LaunchSpec(workers=2, timeout_s=60, threads_per_worker=1)


def test_a_program_has_its_group_its_server_and_its_driver() -> None:
    """CASES 21, 28. Threads are the cores of a Spark task."""
    listening, server = Listening(3), ServerSpec(rule="add")
    values = Spark().launch(everything, LaunchSpec(workers=3, timeout_s=60, observer=listening, server=server))
    assert [(rank, size, threads) for rank, _, size, threads in (value["place"] for value in values)] == [
        (rank, 3, 1) for rank in range(3)
    ]
    check_everything(values, listening)


def test_clusters_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small, another one than the session has, busy."""
    monkeypatch.setattr("manyhands.engines.spark.session._SLOTS_S", 0.5)
    with pytest.raises(BadInput, match="5 workers need 5 Spark task slots at once, and the cluster has 4"):
        mh.launch(os.getpid, workers=5, engine="spark")
    with pytest.raises(BadInput, match=r"master=local\[2\] was asked for, and the active .* has local-cluster"):
        mh.launch(os.getpid, workers=2, engine="spark:master=local[2]")
    words = "waited 0 s for the executors; workers that are here: 0 of 2; the cluster may be busy"
    with pytest.raises(ManyhandsError, match=words):
        Spark(wait_s=0.01).launch(lambda worker: None, PLAN)


def test_a_driver_that_executors_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Spark._opened

    def elsewhere(self: Spark, addresses: tuple[str, str], plan: LaunchSpec) -> tuple[Any, Any]:
        listener, stage = opened(self, addresses, plan)
        return listener, replace(stage, address="127.0.0.1:1", reach_s=0.2)

    monkeypatch.setattr(Spark, "_opened", elsewhere)
    with pytest.raises(ManyhandsError, match=r"failed before it began: .*JoinError: no run took this host's workers"):
        Spark().launch(lambda worker: None, PLAN)


def test_another_frameworks_cluster_beside_a_parameter_server(spark: Any) -> None:
    """torch.distributed with a role that never returns. Every row of an RDD reaches one of those who train, in each of two
    epochs."""

    def program(cluster: Any, number: int) -> Any:  # by value: the executors do not have this file
        import threading

        import torch
        import torch.distributed as dist

        if cluster.role == "ps":
            threading.Event().wait(100)
        dist.init_process_group("gloo")
        total = torch.tensor(float(number * (dist.get_rank() + 1)))
        dist.all_reduce(total)
        dist.destroy_process_group()
        labels = [int(label) for _, batch in cluster.rows(8, epochs=2) for label in batch]
        return float(total), cluster.index, labels

    rdd = spark.sparkContext.parallelize([(n, n / 2) for n in range(33)], 3)
    rows = mh.spark.frame(rdd.toDF("row long, x double"), features="x", label="row")
    found = Spark().run(program, 10, workers=2, roles={"ps": 1}, rows=rows)
    assert [value[:2] for value in found["worker"]] == [(30.0, 0), (30.0, 1)]
    assert found["ps"] == [None]
    assert sorted(n for value in found["worker"] for n in value[2]) == sorted([*range(33)] * 2)


@pytest.mark.nightly  # a launch as any other
def test_a_kernel_trains_as_simulated_workers_do() -> None:
    from manyhands.kernels.factors import Factors  # loads numba

    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, 2000), random.integers(0, 40, 2000)
    data: dict[str, Any] = {"users": users, "items": items, "ratings": random.normal(size=2000) + users % 3}
    given: dict[str, Any] = {"kernel": Factors(users=50, items=40, rank=4), "rate": 0.1, "train_data": data}
    task = mh.Task(**given, batch_size=200, epochs=2)
    run, same = (mh.train(task, engine=one, strategy="rotate:blocks=4", workers=2) for one in ("spark", "sim"))
    assert run.rows["total"] == 4000
    assert all(np.array_equal(table, same.model.tables()[name]) for name, table in run.model.tables().items())


@pytest.mark.nightly
def test_stages_train_as_simulated_ones_do() -> None:
    fields: dict[str, Any] = {"workers": 4, "model_parallel": "stages=2", "max_steps": 10}
    found, expected = (mh.train("digits", engine=engine, **fields) for engine in ("spark", "sim"))
    assert len(found.info["stages"]) == 2
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=0, atol=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)
    assert found.rows["total"] == expected.rows["total"]


WIDTH = 1500


def test_a_worker_takes_the_memory_that_was_estimated(spark: Any, tmp_path: Path) -> None:
    rows = spark.range(0, 512, 1, 4)
    table = rows.selectExpr("transform(sequence(1, 64), i -> float(i * id % 7)) as x", "id % 10 as y")
    nn = torch.nn
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        train_data=mh.spark.frame(table, features="x", label="y"),
        batch_size=64,
    )
    there = {"engine": "spark:memory_mb=4", "workers": 2, "strategy": "dynsgd"}
    expected = mh.spark.executor_memory(task, workers_per_executor=2, **there)
    by_name = {part.name: part for part in expected.parts}
    numbers = 65 * WIDTH + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10
    assert numbers * 4 <= by_name["worker: parameters"].bytes <= numbers * 4 + 6 * 128
    assert by_name["rows of a Spark task"].bytes == 4_000_000
    run = mh.train(task, **there, run_dir=tmp_path / "run")
    assert run.rows["total"] == 512
    assert expected.worker_bytes / max(run.memory_of_workers) == pytest.approx(1, abs=0.25)


def _fails(worker: Worker) -> None:
    worker.group.barrier()
    if worker.rank == 1:
        raise KeyError("the label")
    worker.group.barrier()


def test_a_workers_own_traceback() -> None:
    with pytest.raises(WorkerFailed, match="worker 1 on .* failed .*KeyError: 'the label'") as caught:
        Spark().launch(_fails, PLAN)
    assert "in _fails" in caught.value.detail


def _waits(folder: Path, worker: Worker) -> None:
    import time

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


def test_a_killed_executor_is_named_and_the_next_run_works(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4, 60)
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
    wait_until(lambda: not any(map(lives, processes)))
    assert Spark().launch(lambda worker: worker.size, PLAN) == [2, 2]
