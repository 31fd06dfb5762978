"""data/readers/shared_files.py: which files a table has, and every row of them read by one reader."""

from __future__ import annotations

import gzip
import sys
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.data.readers.shared_files import count, dealt, find, read, together, types_of
from manyhands.data.shards import find as find_module
from manyhands.data.shards.formats import base
from manyhands.errors import BadInput
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
@pytest.mark.parametrize("sizes", [[33], [0, 5, 0, 20, 1, 0], [3] * 7, [0, 1], [2, 0, 0]])
@pytest.mark.parametrize("parts", [1, 2, 4, 9])
def test_every_row_is_read_once_in_even_parts(memory: str, suffix: str, sizes: list[int], parts: int) -> None:
    for i, size in enumerate(sizes):
        WRITERS[suffix](f"{memory}/{i:03}.{suffix}", range(sum(sizes[:i]), sum(sizes[:i]) + size))
    found = parts_of(find([memory]), parts, ["x", "v"])
    assert sorted(row for part in found for row in part) == [(i, [float(i), -float(i)]) for i in range(sum(sizes))]
    assert [row for part in found for row in part] == sorted(
        row for part in found for row in part
    )  # in the files' order
    assert max(len(part) for part in found) - min(len(part) for part in found) <= 1


def test_parts_are_dealt_by_rows() -> None:
    assert dealt([4, 0, 3, 5], 0, 3) == [(0, 0, 4)]
    assert dealt([4, 0, 3, 5], 1, 3) == [(2, 0, 3), (3, 0, 1)]
    assert dealt([4, 0, 3, 5], 2, 3) == [(3, 1, 5)]
    assert dealt([1], 0, 2) == []
    assert dealt([], 0, 2) == []


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


def test_a_host_stays_in_the_url() -> None:
    class Hdfs:
        def unstrip_protocol(self, file: str) -> str:
            return f"hdfs://{file}"

    url = find_module._url(Hdfs(), "hdfs://name:8020/data/", "/data", "/data/a.parquet")
    assert url == "hdfs://name:8020/data/a.parquet"


def test_shards_as_tensorflow_names_them(memory: str) -> None:
    tfrecord(f"{memory}/train.tfrecord-00000-of-00002", range(2))
    tfrecord(f"{memory}/train.tfrecord-00001-of-00002", range(2, 5))
    assert parts_of(find([memory]), 1, ["x"]) == [[(0,), (1,), (2,), (3,), (4,)]]


def test_types_are_those_of_the_first_file_that_has_any(memory: str) -> None:
    tfrecord(f"{memory}/t/0.tfrecord", range(0))
    tfrecord(f"{memory}/t/1.tfrecord", range(2))
    assert {name: str(kind) for name, kind in types_of(find([f"{memory}/t"])).items()} == {
        "x": "int64",
        "v": "large_list<item: float>",
    }
    parquet(f"{memory}/p.parquet", range(0))
    assert types_of(find([f"{memory}/p.parquet"]))["x"] == pa.int64()
    with pytest.raises(BadInput, match="the data files have no rows"):
        types_of([f"{memory}/t/0.tfrecord"])


def test_decimals_are_doubles(memory: str) -> None:
    with fsspec.open(f"{memory}/a.parquet", "wb") as file:
        pq.write_table(pa.table({"x": [Decimal("1.50"), Decimal("-2.25")]}), file)
    assert parts_of(find([memory]), 1, ["x"]) == [[(1.5,), (-2.25,)]]


def test_what_cannot_be_found_is_refused(memory: str) -> None:
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
        with pytest.raises(BadInput, match=message):
            find([f"{memory}/{path}" for path in paths])


LOGS = {
    "Delta": ("_delta_log/0.json", "a.parquet", "day=1/b.parquet", "0f/c.parquet"),
    "Iceberg": ("metadata/v2.metadata.json", "data/a.parquet", "data/day=1/b.parquet", "data/0f/c.parquet"),
    "Hudi": (".hoodie/1.commit", "a.parquet", "day=1/.hoodie_partition_metadata", "day=1/b.parquet"),
    "stream": ("_spark_metadata/0", "a.parquet", "day=1/b.parquet"),
}


@pytest.mark.parametrize("kind", LOGS)
def test_files_that_only_a_log_tells_from_stale_ones_are_refused(memory: str, kind: str) -> None:
    for name in LOGS[kind]:
        with fsspec.open(f"{memory}/tables/one/{name}", "wb") as file:
            file.write(b"")
    files = [name for name in LOGS[kind] if name.endswith(".parquet")]
    plain = "tables/one/data" if kind == "Iceberg" else "tables/one"
    for path in ["tables", "tables/one", plain, f"{plain}/day=1", f"{plain}/*.parquet", f"{plain}/day=*/*.parquet"]:
        with pytest.raises(BadInput, match=f"{kind}.*rows"):
            find([f"{memory}/{path}"])
    assert len(find([f"{memory}/tables/one/{name}" for name in files])) == len(
        files
    )  # by name: whoever reads the log may


@pytest.mark.parametrize("beside", ["metadata/notes.json", "data/b.parquet", "delta_log/0.json", "_SUCCESS"])
def test_a_folder_without_such_a_log_is_read(memory: str, beside: str) -> None:
    for name in ("day=1/a.parquet", beside):
        with fsspec.open(f"{memory}/{name}", "wb") as file:
            file.write(b"")
    assert len(find([memory])) == 1 + beside.endswith(".parquet")
    assert len(find([f"{memory}/day=*/*.parquet"])) == 1


def test_storage_that_nobody_knows_or_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="cannot be opened: Protocol not known: nosuch"):
        find(["nosuch://a/b.parquet"])
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(BadInput, match=r"s3://a/b.parquet needs a package that is not installed: .*pip install s3fs"):
        find(["s3://a/b.parquet"])


def test_a_host_without_the_files_is_named(memory: str) -> None:
    for suffix in ("parquet", "tfrecord"):
        gone = f"{memory}/gone.{suffix}"
        with pytest.raises(BadInput, match=r"gone.* does not exist on .*, and all hosts must see it"):
            count([gone], 0, 1)
        with pytest.raises(BadInput, match="all hosts must see it"):
            list(read([gone], [3], ["x"], 0, 1))


@pytest.mark.parametrize("suffix", ["parquet", "tfrecord"])
def test_a_file_that_changed_since_it_was_counted(memory: str, suffix: str) -> None:
    WRITERS[suffix](f"{memory}/a.{suffix}", range(5))
    with pytest.raises(BadInput, match="rows when counted: 6"):
        list(read(find([memory]), [6], ["x"], 0, 1))


def test_broken_files_and_missing_columns_are_named(memory: str) -> None:
    with fsspec.open(f"{memory}/broken.parquet", "wb") as file:
        file.write(b"no such format")
    with pytest.raises(BadInput, match="cannot read .*broken.parquet as Parquet"):
        count([f"{memory}/broken.parquet"], 0, 1)
    parquet(f"{memory}/a.parquet", range(5))
    with pytest.raises(BadInput, match=r"a.parquet has no column 'z'; it has x, v, unused"):
        list(read([f"{memory}/a.parquet"], [5], ["z"], 0, 1))
