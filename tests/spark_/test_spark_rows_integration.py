"""Every row of a DataFrame once an epoch, whatever its partitions look like."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.frames import Frame
from manyhands.data.sources import open_source
from manyhands.engines.base import Launch
from manyhands.engines.spark.engine import Spark
from manyhands.errors import BadInput
from manyhands.worker import Worker


def read(frames: tuple[Frame, ...], batch_size: int, worker: Worker) -> list[list[list[int]]]:
    """[frame][epoch] the labels that this worker gets."""
    found = []
    for frame in frames:
        feed = Feed(open_source(frame), rank=worker.rank, size=worker.size, batch_size=batch_size)
        found.append(
            [
                [int(x) for part in feed.epoch(epoch) if part.batch is not None for x in part.batch[1].tolist()]
                for epoch in range(2)
            ]
        )
    return found


def labels(engine: Spark, frames: tuple[Frame, ...], workers: int, batch_size: int = 64) -> list[list[Counter[int]]]:
    """[frame][epoch] how often all workers together got each label."""
    values = engine.launch(partial(read, frames, batch_size), Launch(workers=workers, frames=frames, timeout_s=60))
    return [
        [sum((Counter(worker[i][epoch]) for worker in values), Counter()) for epoch in range(2)]
        for i in range(len(frames))
    ]


def framed(table: Any) -> Frame:
    return mh.spark.frame(table, features=["x"], label="row")


def numbered(spark: Any, counts: list[int]) -> Any:
    """A DataFrame of as many partitions, of so many rows; `row` numbers them all."""

    def rows(index: int, _: Any) -> Any:
        first = sum(counts[:index])
        return iter([(first + i, float(i)) for i in range(counts[index])])

    made = spark.sparkContext.parallelize(range(len(counts)), len(counts)).mapPartitionsWithIndex(rows)
    return spark.createDataFrame(made, "row long, x double")


@pytest.mark.parametrize(
    ("counts", "workers", "batch_size"),
    [
        ([33], 4, 8),
        ([0, 1, 0, 5, 0], 2, 64),
        ([3, 0, 1], 4, 4),
        ([8], 2, 4),
    ],
)
def test_every_row_once_an_epoch(spark: Any, counts: list[int], workers: int, batch_size: int) -> None:
    """CASE 20"""
    (epochs,) = labels(Spark(), (framed(numbered(spark, counts)),), workers, batch_size)
    assert epochs == [Counter(range(sum(counts)))] * 2


def test_ten_files_on_two_workers(spark: Any, tmp_path: Path) -> None:
    counts = [5120, *[6144] * 8, 5728]
    for i in range(10):
        table = spark.range(sum(counts[:i]), sum(counts[: i + 1]), 1, 1).selectExpr("id as row", "id / 2 as x")
        table.write.mode("append").parquet(str(tmp_path / "files"))
    files = spark.read.parquet(str(tmp_path / "files"))
    (epochs,) = labels(Spark(memory_mb=0), (framed(files),), 2)
    assert epochs == [Counter(range(60_000))] * 2


def test_several_frames_of_one_run(spark: Any) -> None:
    one, other = numbered(spark, [5, 2]), numbered(spark, [3]).selectExpr("row + 100 as row", "x")
    first, second = labels(Spark(), (framed(one), framed(other)), 2)
    assert first == [Counter(range(7))] * 2
    assert second == [Counter(range(100, 103))] * 2


def test_an_epoch_shuffles_across_partitions(spark: Any) -> None:
    frame = framed(numbered(spark, [50, 50]))
    values = Spark().launch(partial(read, (frame,), 10), Launch(workers=2, frames=(frame,), timeout_s=60))
    for worker in values:
        first, second = worker[0]
        assert first != second
        assert set(first) != set(second)  # another half of the rows
        assert len({row // 50 for row in first}) == 2


def test_missing_values_are_named(spark: Any) -> None:
    table = numbered(spark, [4]).selectExpr("row", "if(row = 2, null, x) as x")
    with pytest.raises(BadInput, match="column 'x' has 1 missing values: fill or drop them"):
        labels(Spark(), (framed(table),), 2)
