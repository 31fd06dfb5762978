"""Rows that programs of another framework give back, on real processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from driver_script import wait_until

from manyhands.engines.cluster import Cluster
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput


def double(cluster: Cluster, size: int, together: int) -> None:
    """Reads ahead, and emits in batches of its own."""
    held: list[np.ndarray] = []
    for rows in cluster.rows(size, shuffle=False):
        held.append(rows * 2)
        if len(held) == together:
            cluster.emit(np.concatenate(held))
            held.clear()
    if held:
        cluster.emit(np.concatenate(held))


@pytest.mark.parametrize(("workers", "roles"), [(1, {}), (2, {"chief": 1, "evaluator": 1})])
def test_answers_come_in_the_order_of_the_data(local: Local, workers: int, roles: dict[str, int]) -> None:
    def program(cluster: Cluster) -> None:
        if cluster.role != "evaluator":
            double(cluster, 7, 3)

    until = ("chief", "worker", "evaluator")
    found = local.run(program, workers=workers, roles=roles, rows=np.arange(100.0), until=until)
    assert found["rows"].tolist() == list(range(0, 200, 2))
    assert list(found) == (["chief", "worker", "evaluator", "rows"] if roles else ["worker", "rows"])


def test_they_go_into_a_file_though_one_process_answers_last(local: Local, tmp_path: Path, monkeypatch: Any) -> None:
    """A process is not held back: programs may wait for one another, as in a collective."""
    monkeypatch.setattr("manyhands.engines.driver.row_collector.WAITING_BYTES", 1000)
    path, done = tmp_path / "out.parquet", tmp_path / "done"

    def program(cluster: Cluster) -> None:
        if cluster.index == 0:
            wait_until(done.exists)  # until the other one has emitted all
        for rows in cluster.rows(5, shuffle=False):
            cluster.emit({"id": rows, "text": [str(row) for row in rows]})
        done.touch()

    found = local.run(program, workers=2, rows=np.arange(500), output=path)
    assert found["rows"] == path
    table = pq.read_table(path)
    assert table["id"].to_pylist() == list(range(500))
    assert table["text"].to_pylist() == [str(i) for i in range(500)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["done", "out.parquet"]


def test_without_rows_what_is_emitted_comes_as_it_comes(local: Local) -> None:
    found = local.run(lambda cluster: cluster.emit(np.full(3, cluster.index)), workers=2)
    assert sorted(found["rows"].tolist()) == [0, 0, 0, 1, 1, 1]
    assert local.run(lambda cluster: cluster.index, workers=2) == {"worker": [0, 1]}


def test_more_answers_than_rows_are_the_programs_error(local: Local) -> None:
    def program(cluster: Cluster) -> None:
        for rows in cluster.rows(5, shuffle=False):
            cluster.emit(np.concatenate([rows, rows]))

    with pytest.raises(BadInput, match="emit got 10 rows, and 5 are left of those that cluster.rows gave"):
        local.run(program, workers=2, rows=np.arange(20))
