"""data/readers/shared_files.py: which files a table has, and every row of them read by one reader."""

import gzip
import sys
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.data.readers.shared_files import count, find, read, together, types_of
from manyhands.data.shards import find as find_module
from manyhands.data.shards.formats import base
from refusals import refused
from tfrecord_files import examples


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder on storage that is no file system of this machine."""
    folder = f"memory://{uuid.uuid4().hex}"
    yield folder
    fs = fsspec.filesystem("memory")
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def parquet(path: str, numbers: range, row_group: int = 7) -> None:
    table = pa.table(
        {"x": list(numbers), "v": [[float(i), -float(i)] for i in numbers], "unused": ["a"] * len(numbers)}
    )
    table = table.cast(pa.schema([("x", pa.int64()), ("v", pa.list_(pa.float64())), ("unused", pa.string())]))
    with fsspec.open(path, "wb") as file:
        pq.write_table(table, file, row_group_size=row_group)


def tfrecord(path: str, numbers: range) -> None:
    plain = examples(*({"x": [i], "v": [float(i), -float(i)]} for i in numbers))
    with fsspec.open(path, "wb") as file:
        file.write(gzip.compress(plain) if path.endswith(".gz") else plain)


WRITERS = {"parquet": parquet, "tfrecord": tfrecord, "tfrecord.gz": tfrecord}


def parts_of(files: tuple[str, ...], parts: int, names: list[str]) -> list[list[Any]]:
    """What each of so many readers reads, as rows."""
    rows = together([count(files, part, parts) for part in range(parts)])
    return [
        [tuple(row.values()) for batch in read(files, rows, names, part, parts) for row in batch.to_pylist()]
        for part in range(parts)
    ]


@pytest.mark.parametrize("suffix", sorted(WRITERS))
def test_every_row_is_read_once_in_even_parts(memory: str, suffix: str) -> None:
    for number, sizes in enumerate(([33], [0, 5, 0, 20, 1, 0], [3] * 7, [0, 1], [2, 0, 0])):
        for i, size in enumerate(sizes):
            first = sum(sizes[:i])
            WRITERS[suffix](f"{memory}/{number}/{i:03}.{suffix}", range(first, first + size))
        for parts in (1, 2, 4, 9):
            found = parts_of(find([f"{memory}/{number}"]), parts, ["x", "v"])
            rows = [row for part in found for row in part]
            assert rows == [(i, [float(i), -float(i)]) for i in range(sum(sizes))], (sizes, parts)  # in their order
            assert max(map(len, found)) - min(map(len, found)) <= 1, (sizes, parts)


def test_files_are_counted_once_by_all_readers_together(memory: str) -> None:
    for i in range(5):
        parquet(f"{memory}/{i}.parquet", range(i))
    files = find([memory])
    counts = [count(files, part, 3) for part in range(3)]
    assert counts == [[0, 3], [1, 4], [2]]
    assert together(counts) == [0, 1, 2, 3, 4]


def test_only_named_columns_are_read_in_batches_of_bounded_size(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(f"{memory}/a.parquet", range(1000), row_group=500)
    monkeypatch.setattr(base, "PIECE_BYTES", 2000)
    files = find([memory])
    batches = list(read(files, [1000], ["x"], 0, 1))
    assert {tuple(batch.schema.names) for batch in batches} == {("x",)}
    assert max(batch.num_rows for batch in batches) < 500
    assert sum(batch.num_rows for batch in batches) == 1000


def test_files_globs_and_folders_in_the_order_given(memory: str) -> None:
    for name in ("b", "a", "d/z", "d/e/y"):
        parquet(f"{memory}/{name}.parquet", range(1))
    for name in ("_SUCCESS", ".hidden.parquet.crc", "d/.hidden.parquet", "d/_temporary/x.parquet", "d/readme.md"):
        with fsspec.open(f"{memory}/{name}", "wb") as file:
            file.write(b"no table")
    names = [file.removeprefix(memory) for file in find([f"{memory}/d/", f"{memory}/*.parquet"])]
    assert names == ["/d/e/y.parquet", "/d/z.parquet", "/a.parquet", "/b.parquet"]


def test_local_paths_become_urls_that_mean_the_same_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(str(tmp_path / "a [1].parquet"), range(3))
    monkeypatch.chdir(tmp_path)
    for path in ("a [1].parquet", tmp_path, "*.parquet", f"file://{tmp_path}/a [1].parquet"):
        assert find([path]) == (f"file://{tmp_path}/a [1].parquet",)
    assert parts_of(find([tmp_path]), 1, ["x"]) == [[(0,), (1,), (2,)]]
    fs = SimpleNamespace(unstrip_protocol=lambda file: f"hdfs://{file}")
    url = find_module._url(fs, "hdfs://name:8020/data/", "/data", "/data/a.parquet")
    assert url == "hdfs://name:8020/data/a.parquet"  # a host stays in the URL


def test_types_are_those_of_the_first_file_that_has_any(memory: str) -> None:
    tfrecord(f"{memory}/t/train.tfrecord-00000-of-00002", range(0))  # as TensorFlow names them
    tfrecord(f"{memory}/t/train.tfrecord-00001-of-00002", range(2, 5))
    assert parts_of(find([f"{memory}/t"]), 1, ["x"]) == [[(2,), (3,), (4,)]]
    types = {name: str(kind) for name, kind in types_of(find([f"{memory}/t"])).items()}
    assert types == {"x": "int64", "v": "large_list<item: float>"}
    parquet(f"{memory}/p.parquet", range(0))
    assert types_of(find([f"{memory}/p.parquet"]))["x"] == pa.int64()
    refused("the data files have no rows", types_of, [f"{memory}/t/train.tfrecord-00000-of-00002"])
    with fsspec.open(f"{memory}/decimals.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [Decimal("1.50"), Decimal("-2.25")]}), file)
    assert parts_of(find([f"{memory}/decimals.parquet"]), 1, ["x"]) == [[(1.5,), (-2.25,)]]


def test_what_cannot_be_found_is_refused(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.parquet", "a.tfrecord", "text.csv", "no/table.md"):
        with fsspec.open(f"{memory}/{name}", "wb") as file:
            file.write(b"")
    for paths, message in [
        (["missing.parquet"], "no file or folder '.*missing.parquet'"),
        (["*.orc"], "no file or folder"),
        (["text.csv"], "cannot read .*text.csv': expected .parquet"),
        (["no"], "holds no .parquet or .tfrecord file"),
        (["a.parquet", "a.tfrecord"], "mixes .parquet and .tfrecord files"),
        (["a.parquet", "*.parquet"], "a.parquet is named twice"),
    ]:
        refused(message, find, [f"{memory}/{path}" for path in paths])
    refused("cannot be opened: Protocol not known: nosuch.*s3://", find, ["nosuch://a/b.parquet"])
    refused("hf://a/.* (cannot be opened|needs a package).*", find, ["hf://a/*.parquet"])
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused("s3://a/b.parquet needs a package that is not installed: .*pip install s3fs", find, ["s3://a/b.parquet"])


LOGS = {
    "Delta": ("_delta_log/0.json", "a.parquet", "day=1/b.parquet", "0f/c.parquet"),
    "Iceberg": ("metadata/v2.metadata.json", "data/a.parquet", "data/day=1/b.parquet", "data/0f/c.parquet"),
    "Hudi": (".hoodie/1.commit", "a.parquet", "day=1/.hoodie_partition_metadata", "day=1/b.parquet"),
    "stream": ("_spark_metadata/0", "a.parquet", "day=1/b.parquet"),
}


def test_files_that_only_a_log_tells_from_stale_ones_are_refused(memory: str) -> None:
    for number, (kind, names) in enumerate(LOGS.items()):
        table = f"{memory}/{number}/one"
        for name in names:
            with fsspec.open(f"{table}/{name}", "wb") as file:
                file.write(b"")
        files = [f"{table}/{name}" for name in names if name.endswith(".parquet")]
        plain = f"{table}/data" if kind == "Iceberg" else table
        below = ("", "/day=1", "/*.parquet", "/day=*/*.parquet")
        for path in [f"{memory}/{number}", table, *(plain + one for one in below)]:
            refused(f"{kind}.*rows", find, [path])
        assert len(find(files)) == len(files), kind  # by name: whoever reads the log may
    for beside in ["metadata/notes.json", "data/b.parquet", "delta_log/0.json", "_SUCCESS"]:  # no such log
        folder = f"{memory}/{beside.replace('/', '-')}"
        for name in ("day=1/a.parquet", beside):
            with fsspec.open(f"{folder}/{name}", "wb") as file:
                file.write(b"")
        assert len(find([folder])) == 1 + beside.endswith(".parquet"), beside
        assert len(find([f"{folder}/day=*/*.parquet"])) == 1, beside


def test_files_that_are_gone_changed_or_broken_are_named(memory: str) -> None:
    for suffix in ("parquet", "tfrecord"):
        gone = f"{memory}/gone.{suffix}"
        refused(r"gone.* does not exist on .*, and all hosts must see it", count, [gone], 0, 1)
        refused("all hosts must see it", lambda file: list(read([file], [3], ["x"], 0, 1)), gone)
        WRITERS[suffix](f"{memory}/a.{suffix}", range(5))
        refused("rows when counted: 6", lambda file: list(read([file], [6], ["x"], 0, 1)), f"{memory}/a.{suffix}")
    with fsspec.open(f"{memory}/broken.parquet", "wb") as file:
        file.write(b"no such format")
    refused("cannot read .*broken.parquet as Parquet", count, [f"{memory}/broken.parquet"], 0, 1)
    words = "a.parquet has no column 'z'; it has x, v, unused"
    refused(words, lambda: list(read([f"{memory}/a.parquet"], [5], ["z"], 0, 1)))
