"""The estimated memory of a worker beside the one that a run in real executors measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh

WIDTH = 1500


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "dynsgd"])
def test_a_worker_takes_what_was_estimated(spark: Any, strategy: str, tmp_path: Path) -> None:
    table = spark.range(0, 512, 1, 4).selectExpr(
        "transform(sequence(1, 64), i -> float(i * id % 7)) as x", "id % 10 as y"
    )
    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        train_data=mh.spark.frame(table, features="x", label="y"),
        batch_size=64,
    )
    there = {"engine": "spark:memory_mb=4", "workers": 2, "strategy": strategy}
    expected = mh.spark.executor_memory(task, workers_per_executor=2, **there)
    by_name = {part.name: part for part in expected.parts}
    numbers = 65 * WIDTH + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10
    assert numbers * 4 <= by_name["worker: parameters"].bytes <= numbers * 4 + 6 * 128
    assert by_name["rows of a Spark task"].bytes == 4_000_000
    run = mh.train(task, **there, run_dir=tmp_path / "run")
    assert run.rows["total"] == 512
    assert expected.worker_bytes / max(run.memory_of_workers) == pytest.approx(1, abs=0.25)
