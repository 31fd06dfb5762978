"""Rows from workers of another host: they come over the connection of its agent, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from joined_run import Run, joined_by

import manyhands as mh
import plain
from manyhands.engines.cluster import Cluster
from manyhands.engines.hosts.engine import Hosts

pytestmark = pytest.mark.usefixtures("credentials")


def test_predictions_of_two_hosts_are_one_processes(tmp_path: Path) -> None:
    x = plain.rows(203)[0]
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = plain.mlp().eval()
    with torch.no_grad():
        wanted = torch.cat([model(batch) for batch in x.split(8)])
    run = Run(Hosts(local_workers=1), joined_by(1))
    data = {"x": x, "id": [f"row {i}" for i in range(203)]}
    found = run.during(
        lambda: mh.predict(
            model, data, function=lambda m, b: m(b["x"]), keep=("id",), workers=2, engine=run.engine, batch_size=8
        )
    )
    assert torch.equal(found["prediction"], wanted)
    assert list(found["id"]) == data["id"]


@pytest.mark.slow
def test_a_program_of_another_framework_gives_rows_back(tmp_path: Path) -> None:
    def program(cluster: Cluster) -> int:
        for rows in cluster.rows(7, shuffle=False):
            cluster.emit(rows * 2)
        return cluster.index

    run = Run(Hosts(local_workers=1), joined_by(1))
    found = run.during(lambda: run.engine.run(program, workers=2, rows=np.arange(50.0)))
    assert found["worker"] == [0, 1]
    assert np.array_equal(found["rows"], np.arange(50.0) * 2)
