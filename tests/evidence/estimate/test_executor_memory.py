"""The memory of an executor, by hand: vectors of a known length, and what grows with the number of workers."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.spool import SpoolColumn
from manyhands.errors import BadInput
from manyhands.evidence.estimate import executor_memory as module
from manyhands.evidence.estimate.executor_memory import ExecutorMemory, MeasuredWorker, executor_memory, parts_of
from manyhands.evidence.estimate.table import memory_text
from manyhands.replica.flat_vector import FlatVector, nbytes, tensors_in
from manyhands.strategies import strategy_of
from manyhands.strategies.base import State

MB = 1 << 20
SIZES = {"base": 200, "data": 1, "parameters": 4, "gradients": 4, "optimizer": 8, "strategy": 4, "peers": 6}
SIZES |= {"peak": 237, "fork_server": 150, "shards": 220, "center": 4}
MEASURED = MeasuredWorker(**{name: size * MB for name, size in SIZES.items()})


def parts(**asked: Any) -> dict[str, int]:
    """Of an executor in MiB, by name."""
    given = {"workers": 8, "here": 4, "servers": 0, "spark_task": 100 * MB, "rows": 0, **asked}
    return {part.name: part.total // MB for part in parts_of(MEASURED, **given)}


def test_each_part_is_there_once_and_grows_with_the_number_of_workers() -> None:
    found = parts(rows=16 * MB)
    assert found.pop("margin") == sum(total for name, total in found.items() if not name.startswith("JVM")) // 10
    assert found == {
        "worker: Python and PyTorch": 800,
        "worker: parameters": 16,
        "worker: gradients": 16,
        "worker: optimizer": 32,
        "worker: strategy": 16,
        "worker: others' shared memory": 36,
        "worker: others' payloads": 0,
        "worker: activations, batches, checkpoint": 40,
        "worker: rows that came with the program": 4,
        "the program": 1,
        "fork server": 150,
        "Spark task": 400,
        "rows of a Spark task": 64,
        "JVM beyond its heap": 384,
    }
    for here, megabytes in ((1, 0), (2, 12), (4, 36), (6, 60)):
        assert parts(here=here)["worker: others' shared memory"] == megabytes
    assert "server shards" not in parts()
    assert parts(servers=1, workers=2)["server shards"] == 220
    assert parts(servers=1, workers=8)["server shards"] == 220 + 6 * 4  # it receives from each worker apart
    assert parts(payload=2 * MB)["worker: others' payloads"] == 4 * (8 - 2) * 2
    assert parts(heap_mb=8192)["JVM beyond its heap"] == 819


def memory(**fields: Any) -> ExecutorMemory:
    found = tuple(parts_of(MEASURED, workers=7, here=2, servers=1, spark_task=100 * MB, rows=0))
    given = {"task": "wide", "strategy": "dynsgd", "workers": 7, "workers_per_executor": 2, "heap_mb": 1024}
    return ExecutorMemory(**({"parts": found} | given | fields))


def test_settings_text_and_a_whole_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory()
    total = sum(part.total for part in found.parts)
    assert (found.overhead_mb - 1) * MB < total <= found.overhead_mb * MB
    assert found.settings == {
        "spark.executor.instances": "4",
        "spark.executor.cores": "2",
        "spark.task.cpus": "1",
        "spark.executor.memory": "1024m",
        "spark.executor.memoryOverhead": f"{found.overhead_mb}m",
    }
    shown = memory_text(found)
    assert all(f"--conf {name}={value}" in shown for name, value in found.settings.items())
    assert all(part.name in shown for part in found.parts)
    assert json.loads(found.to_json())["settings"] == found.settings
    assert MEASURED.rest == (237 - 200 - 27) * MB
    alike = parts_of(MEASURED, workers=2, here=2, servers=0, spark_task=0, rows=0)  # on as many as were measured
    assert memory(parts=tuple(alike)).worker_bytes == MEASURED.peak
    assert replace(MEASURED, peak=0).rest == 0
    asked: list[Any] = []
    monkeypatch.setattr(module, "measure", lambda *given: asked.append(given) or MEASURED)
    monkeypatch.setattr(module, "_spark_task", lambda: 100 * MB)
    found = executor_memory(task(), workers=2, strategy="dynsgd", servers=2, engine="spark:memory_mb=7")
    assert (found.workers_per_executor, found.executors, asked[0][2:]) == (2, 1, (2, 2))
    by_name = {part.name: part for part in found.parts}
    assert by_name["rows of a Spark task"].bytes == 0
    assert "server shards" in by_name
    frame = DistributedFrame(key="k", columns=(), table=SimpleNamespace())
    found = executor_memory(task(train_data=frame), workers=6, engine="spark:memory_mb=7")
    assert {part.name: part for part in found.parts}["rows of a Spark task"].bytes == 7_000_000
    assert (found.workers_per_executor, found.executors) == (4, 2)


def test_tensors_of_states_are_found_and_counted_once() -> None:
    @dataclass(kw_only=True)
    class Vectors(State):
        center: FlatVector
        memory: list[FlatVector]

    vector = torch.zeros(1000)
    state = Vectors(center=FlatVector([torch.zeros(5)]), memory=[FlatVector([vector])])
    held = [{"exp_avg": vector, "step": torch.tensor(1.0)}, (FlatVector([vector]), 3, None), state]
    assert nbytes(tensors_in(held)) == 4000 + 4 + 20
    assert nbytes(tensors_in(held), without=[vector]) == 24
    assert nbytes([vector[:500], vector[500:], vector[:500]]) == 4000


class Table:
    """What `sample` asks of a DataFrame."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def select(self, *names: str) -> "Table":
        return self

    def limit(self, rows: int) -> "Table":
        return Table(min(rows, self.rows))

    def toPandas(self) -> Any:
        import pandas

        return pandas.DataFrame({"x": [[1.0, 2.0]] * self.rows, "y": list(range(self.rows))})


def test_a_sample_of_a_dataframe_and_of_files_of_which_one_is_too_short(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    columns = SpoolColumn("features", ("x",), "float32"), SpoolColumn("label", ("y",), "int64")
    frame = DistributedFrame(key="k", columns=columns, table=Table(10))
    x, y = module.sample(frame, 3)
    assert (x.shape, x.dtype, y.tolist(), y.dtype) == ((3, 2), torch.float32, [0, 1, 2], torch.int64)
    with pytest.raises(BadInput, match="no rows"):
        module.sample(replace(frame, table=Table(0)), 3)
    for name, numbers in {"a": [], "b": [1, 2], "c": [3, 4, 5]}.items():
        pq.write_table(pa.table({"x": pa.array(numbers, pa.float32())}), tmp_path / f"{name}.parquet")
    files = tuple(str(tmp_path / f"{name}.parquet") for name in "abc")
    frame = DistributedFrame(key="k", columns=(SpoolColumn("features", ("x",), "float32"),), files=files)
    assert module.sample(frame, 4).flatten().tolist() == [1, 2, 3, 4]


def task(**fields: Any) -> mh.Task:
    given = {"batch_size": 8, "train_data": torch.ones(64, 1000), **fields}
    return mh.Task(
        name="square",
        model=lambda: nn.Linear(1000, 1000, bias=False),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        **given,
    )


def test_what_cannot_be_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, nothing_starts: None
) -> None:
    frame = DistributedFrame(key="k", columns=(), table=Table(100))
    for given, options, message in (
        (task(), {"workers": 0}, "workers must be a whole number"),
        (task(), {"workers": 1.5}, "workers must be a whole number"),
        (task(), {"engine": "hosts"}, "give engine='spark'"),
        (task(), {"heap_mb": 0}, "heap_mb must be a whole number"),
        (task(), {"strategy": "hogwild"}, "must be on one machine"),
        (task(), {"strategy": "solo"}, "workers=8"),
        (task(), {"strategy": "allreduce:compress=threshold:0.001"}, "their memory cannot be estimated"),
        (task(train_data=frame), {"workers": 100}, "some of the 100 workers without a row"),
    ):
        with pytest.raises((BadInput, mh.Unsupported), match=message):
            executor_memory(given, **({"workers": 8} | options))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install 'manyhands\[spark\]'"):
        executor_memory(task(), workers=2)


@pytest.mark.slow
def test_vectors_of_real_workers_are_counted() -> None:
    """Adam keeps two vectors and a step. All are resident, and not much else is."""
    vector = 4 * 1000 * 1000
    measured = module.measure(task(), strategy_of("dynsgd"), workers=4)
    assert (measured.parameters, measured.gradients, measured.center) == (vector, vector, vector)
    assert measured.optimizer == 2 * vector + 4
    assert measured.strategy == vector
    held = measured.parameters + measured.gradients + measured.optimizer + measured.strategy
    assert measured.peak > measured.base + held
    assert measured.peak < measured.base + 100 * vector  # a checkpoint is copied twice while it is written
    assert measured.base > 50e6
    assert measured.shards >= measured.center
