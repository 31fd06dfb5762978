"""Every row of a DataFrame once an epoch, whatever its partitions look like."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from spark_models import line
from torch import nn

import manyhands as mh
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.engines.base import LaunchSpec
from manyhands.engines.spark.engine import Spark
from manyhands.errors import BadInput
from manyhands.spark.dataframe import split
from manyhands.worker import Worker
from tfrecord_files import examples

pytestmark = pytest.mark.slow


def read(frames: tuple[DistributedFrame, ...], batch_size: int, worker: Worker) -> list[list[list[int]]]:
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


def labels(
    engine: Spark, frames: tuple[DistributedFrame, ...], workers: int, batch_size: int = 64
) -> list[list[Counter[int]]]:
    """[frame][epoch] how often all workers together got each label."""
    values = engine.launch(partial(read, frames, batch_size), LaunchSpec(workers=workers, frames=frames, timeout_s=60))
    return [
        [sum((Counter(worker[i][epoch]) for worker in values), Counter()) for epoch in range(2)]
        for i in range(len(frames))
    ]


def framed(table: Any) -> DistributedFrame:
    return mh.spark.frame(table, features=["x"], label="row")


def numbered(spark: Any, counts: list[int]) -> Any:
    """A DataFrame of as many partitions, of so many rows; `row` numbers them all."""

    def rows(index: int, _: Any) -> Any:
        first = sum(counts[:index])
        return iter([(first + i, float(i)) for i in range(counts[index])])

    made = spark.sparkContext.parallelize(range(len(counts)), len(counts)).mapPartitionsWithIndex(rows)
    return spark.createDataFrame(made, "row long, x double")


@pytest.mark.parametrize(("counts", "workers", "batch_size"), [([33], 4, 8), ([3, 0, 1], 4, 4)])
def test_every_row_once_an_epoch(spark: Any, counts: list[int], workers: int, batch_size: int) -> None:
    """CASE 20"""
    (epochs,) = labels(Spark(), (framed(numbered(spark, counts)),), workers, batch_size)
    assert epochs == [Counter(range(sum(counts)))] * 2


def test_files_and_streams_in_one_run(spark: Any, tmp_path: Path) -> None:
    for i, many in enumerate([5, 0, 9, 1]):
        file = examples(*({"x": [0.5], "row": [100 * i + n]} for n in range(many)))
        (tmp_path / f"{i}.tfrecord").write_bytes(file)
    frames = (framed(numbered(spark, [5, 2])), framed(tmp_path), framed(numbered(spark, [3])))
    streamed, read_there, other = labels(Spark(), frames, 3)
    assert streamed == [Counter(range(7))] * 2
    assert read_there == [Counter([*range(5), *range(200, 209), 300])] * 2
    assert other == [Counter(range(3))] * 2


def test_an_indicator_splits_rows(spark: Any) -> None:
    frame = numbered(spark, [3]).selectExpr("row", "x", "row = 1 as judged")
    trains, judges = labels(Spark(), split(frame, framed, indicator="judged"), 2)
    assert (trains, judges) == ([Counter([0, 2])] * 2, [Counter([1])] * 2)


def test_ten_files_on_two_workers_and_partitions_without_rows(spark: Any, tmp_path: Path) -> None:
    counts = [512, *[614] * 8, 572]
    for i in range(10):
        table = spark.range(sum(counts[:i]), sum(counts[: i + 1]), 1, 1).selectExpr("id as row", "id / 2 as x")
        table.write.mode("append").parquet(str(tmp_path / "files"))
    frames = (framed(spark.read.parquet(str(tmp_path / "files"))), framed(numbered(spark, [0, 1, 0, 5, 0])))
    many, few = labels(Spark(memory_mb=0), frames, 2)
    assert many == [Counter(range(sum(counts)))] * 2
    assert few == [Counter(range(6))] * 2


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return (model(inputs).squeeze(1) - targets).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def test_executors_read_the_files_themselves_and_learn_what_local_workers_do(spark: Any, tmp_path: Path) -> None:
    """The files of one host are one table in the order of their names: the same bits as from memory."""
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(10):
        n = np.arange(i * 50, i * 50 + 40 + i)
        pq.write_table(pa.table({"a": n / 500, "b": (n % 7).astype("float32"), "y": n / 100}), folder / f"{i}.parquet")
    rows = pq.read_table(folder).to_pandas()
    assert len(rows) == 445
    local = (torch.tensor(rows[["a", "b"]].to_numpy("float32")), torch.tensor(rows["y"].to_numpy("float32")))
    options: dict[str, Any] = {
        "model": line,
        "loss": loss,
        "optimizer": sgd,
        "batch_size": 32,
        "epochs": 2,
        "workers": 2,
    }
    given = mh.spark.frame(spark.read.parquet(str(folder)), features=["a", "b"], label="y", input="files")
    ours = mh.train(train_data=given, engine=Spark(), **options)
    theirs = mh.train(train_data=local, engine="sim", **options)
    assert ours.rows["total"] == theirs.rows["total"] == 2 * 445
    assert torch.equal(ours.parameters, theirs.parameters)


def test_only_a_read_of_files_is_read_there(spark: Any, tmp_path: Path) -> None:
    numbered(spark, [3, 2]).write.parquet(str(tmp_path / "a b%"))
    table = spark.read.parquet(str(tmp_path / "a b%"))

    def of(table: Any) -> tuple[str, ...]:
        return mh.spark.frame(table, features="x", label="row", input="files").files

    assert of(table) == of(table.select("x", "row")) == of(table.alias("t")) == of(tmp_path / "a b%")
    table.write.csv(str(tmp_path / "csv"), header=True)
    as_csv = spark.read.csv(str(tmp_path / "csv"), header=True, inferSchema=True)
    twice = table.selectExpr("x * 2 as x", "row")
    for changed in (table.filter("x > 1"), twice, table.limit(1), table.union(table), as_csv):
        with pytest.raises(BadInput, match="only reads Parquet files, and the plan of this one has '"):
            of(changed)


def test_an_epoch_shuffles_across_partitions(spark: Any) -> None:
    frame = framed(numbered(spark, [50, 50]))
    values = Spark().launch(partial(read, (frame,), 10), LaunchSpec(workers=2, frames=(frame,), timeout_s=60))
    rows = torch.arange(100)
    for rank, worker in enumerate(values):
        first, second = worker[0]
        assert first != second
        assert set(first) != set(second)  # another half of the rows
        assert len({row // 50 for row in first}) == 2
        here = Feed(open_source((rows.double(), rows)), rank=rank, size=2, batch_size=10)
        assert worker[0] == [[int(x) for part in here.epoch(e) for x in part.batch[1]] for e in range(2)]


def test_rows_that_cannot_be_read_are_named(spark: Any, tmp_path: Path) -> None:
    table = numbered(spark, [4]).selectExpr("row", "if(row = 2, null, x) as x")
    with pytest.raises(BadInput, match="column 'x' has missing values .1.: fill or drop them"):
        labels(Spark(), (framed(table),), 2)
    (tmp_path / "9.tfrecord").write_bytes(examples({"x": [0.5], "row": [1]}) + b"no record at all")
    with pytest.raises(BadInput, match=r"record \d of .*9.tfrecord is damaged"):
        labels(Spark(), (framed(tmp_path),), 2)
