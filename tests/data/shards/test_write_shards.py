"""data/shards/write.py: what is written is read again; all files, or none."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards import row_shuffle, write
from manyhands.data.shards.arrow_rows import arrow_rows
from manyhands.data.shards.formats import base
from manyhands.data.shards.write import write_shards
from manyhands.errors import BadInput, ManyhandsError

FORMATS = ("parquet", "arrow", "tfrecord", "tar")
COLUMNS = {  # of types that every format keeps
    "cls": pa.array(range(7)),
    "x.npy": pa.array([[i / 4, 2.0] for i in range(7)], pa.list_(pa.float32())),
    "raw": pa.array([bytes([i]) * i for i in range(1, 8)], pa.binary()),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))


def table(path: Any, columns: Any = ()) -> pa.Table:
    rows = arrow_rows(mh.shards(path), columns)
    return pa.Table.from_batches(list(rows.batches), rows.schema)


def batch(path: Any) -> dict[str, Any]:
    """All rows of these files, as they are trained."""
    (part,) = Feed(open_source(mh.shards(path)), batch_size=1000, shuffle=False).epoch(0)
    assert part.batch is not None
    return part.batch


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if "cache" not in path.parts)


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_every_pair_of_formats_keeps_rows_and_types(first: str, second: str, tmp_path: Path) -> None:
    given = pa.table(COLUMNS)
    one = write_shards(given, tmp_path / f"a.{first}")
    two = write_shards(tmp_path / f"a.{first}", tmp_path / f"b.{second}", columns=list(COLUMNS))
    assert (one.rows, two.rows, one.changes, two.changes) == (7, 7, (), ())
    assert two.bytes == os.path.getsize(tmp_path / f"b.{second}")
    found = batch(tmp_path / f"b.{second}")
    assert found["cls"].tolist() == list(range(7))
    assert found["x.npy"].tolist() == given["x.npy"].to_pylist()
    assert list(found["raw"]) == given["raw"].to_pylist()
    assert (str(found["cls"].dtype), str(found["x.npy"].dtype)) == ("torch.int64", "torch.float32")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_tables_keep_every_type(format: str, tmp_path: Path) -> None:
    columns = {
        "s": pa.array(["a", None]),
        "t": pa.array([1, 2], pa.timestamp("us")),
        "n": pa.array([[[1], []], [[2, 3]]], pa.list_(pa.list_(pa.int16()))),
        "d": pa.array([{"a": 1}, {"a": 2}]),
        "f": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float64(), 2)),
        "b": pa.array([True, False]),
    }
    write_shards(pa.table(columns), tmp_path / f"a.{format}")
    assert table(tmp_path / f"a.{format}") == pa.table(columns)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt", "a.npz", "a.npy"])
def test_what_has_other_forms_becomes_parquet(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("v"):
        path.write_text("x,s\n1,a\n2,b\n".replace(",", "\t" if name == "a.tsv" else ","))
    elif name == "a.jsonl":
        path.write_text('{"x": 1, "s": "a"}\n{"x": 2, "s": "b"}\n')
    elif name == "a.txt":
        path.write_text("a\n\nb\n")
    elif name == "a.npz":
        np.savez(path, x=[1, 2], s=["a", "b"])
    else:
        np.save(path, [[1.0], [2.0]])
    write_shards(path, tmp_path / "b.parquet")
    wanted = {"x": [1, 2], "s": ["a", "b"]}
    wanted = {"a.txt": {"text": ["a", "", "b"]}, "a.npy": {"x": [[1.0], [2.0]]}}.get(name, wanted)
    assert pq.read_table(tmp_path / "b.parquet").to_pydict() == wanted


def test_a_tar_has_members_that_webdataset_and_others_read(tmp_path: Path) -> None:
    rows = [
        {
            "__key__": f"n{i}",
            "jpg": b"image",
            "cls": i,
            "caption": "ü",
            "v": np.float32(i) / 2,
            "meta": {"k": [i], "a": "b"},
        }
        for i in range(2)
    ]
    found = write_shards(rows, tmp_path / "a.tar")
    assert found.changes == ("caption: is called caption.txt", "v: is called v.npy", "meta: is called meta.json")
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    assert list(members)[:5] == ["n0.jpg", "n0.cls", "n0.caption.txt", "n0.v.npy", "n0.meta.json"]
    assert members["n1.jpg"] == b"image"
    assert members["n1.cls"] == b"1"
    assert members["n1.caption.txt"] == "ü".encode()
    assert json.loads(members["n1.meta.json"]) == {"k": [1], "a": "b"}
    assert np.load(io.BytesIO(members["n1.v.npy"])) == np.float32(0.5)
    again = table(tmp_path / "a.tar")
    assert again.column_names == ["__key__", "jpg", "cls", "caption.txt", "v.npy", "meta.json"]
    assert again["caption.txt"].to_pylist() == ["ü", "ü"]
    write_shards(tmp_path / "a.tar", tmp_path / "b.tar")  # members as they are
    assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "a.tar").read_bytes()


def test_members_of_any_length_are_padded_to_records(tmp_path: Path) -> None:
    lengths = [0, 1, 511, 512, 513, 1024]
    write_shards([{"raw": bytes(n), "cls": n} for n in lengths], tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert [info.size for info in tar if info.name.endswith("raw")] == lengths
    assert os.path.getsize(tmp_path / "a.tar") == 512 * (2 * 6 + 6 + (0 + 1 + 1 + 1 + 2 + 2) + 2)
    assert table(tmp_path / "a.tar")["cls"].to_pylist() == lengths


def test_rows_of_a_tar_are_numbered_through_all_files(tmp_path: Path) -> None:
    write_shards({"cls": np.arange(5)}, tmp_path / "out", format="tar", rows_per_file=2)
    assert table(tmp_path / "out")["__key__"].to_pylist() == [f"{i:09d}" for i in range(5)]


def test_files_of_a_folder_have_so_many_rows(tmp_path: Path) -> None:
    found = write_shards({"x": np.arange(10)}, tmp_path / "out", rows_per_file=4)
    assert found.files == tuple(str(tmp_path / "out" / f"part-{i:05d}.parquet") for i in range(3))
    assert [pq.read_metadata(file).num_rows for file in found.files] == [4, 4, 2]
    assert table(tmp_path / "out")["x"].to_pylist() == list(range(10))
    exact = write_shards({"x": np.arange(8)}, tmp_path / "exact/", rows_per_file=4)
    assert len(exact.files) == 2


def test_files_of_a_folder_have_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "FILE_BYTES", 800)
    found = write_shards(pa.table({"x": range(1000)}), tmp_path / "out", row_group_bytes=400)
    assert [pq.read_metadata(file).num_rows for file in found.files] == [108] * 9 + [28]  # nine pieces of 12 rows


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_row_groups_are_no_larger_than_asked_for(format: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{format}"
    write_shards(pa.table({"x": range(1000)}), path, row_group_bytes="1KB")
    if format == "parquet":
        metadata = pq.read_metadata(path)
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    else:
        with pa.ipc.open_file(path) as reader:
            rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    assert sum(rows) == 1000
    assert set(rows[:-1]) == {124}  # four pieces of 31 rows, 248 bytes each
    assert table(path)["x"].to_pylist() == list(range(1000))


@pytest.mark.parametrize("format", FORMATS)
def test_shuffled_rows_are_all_there_in_the_order_of_a_seed(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_shuffle, "PART_BYTES", 100)
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_shards({"cls": np.arange(50)}, tmp_path / f"{name}.{format}", shuffle=True, seed=seed)
        orders.append(table(tmp_path / f"{name}.{format}")["cls"].to_pylist())
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(50))
    assert len({*map(tuple, orders), tuple(range(50))}) == 3
    assert left(tmp_path) == [f"{name}.{format}" for name in "abc"]


def test_only_a_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are asked for as they are written: a block of them, and a piece, is held."""
    monkeypatch.setattr(base, "BLOCK_BYTES", 80 * 256)
    most = asked = 0
    written = 0

    def rows() -> Iterator[dict[str, int]]:
        nonlocal asked, most
        for i in range(20_000):
            asked = i + 1
            most = max(most, asked - written)
            yield {"x": i}

    def progress(done: int, total: int) -> None:
        nonlocal written
        written = done
        assert total == done

    write_shards(rows(), tmp_path / "a.parquet", progress=progress)
    assert written == asked == 20_000
    assert most <= 3 * 256


def test_a_store_of_fsspec_is_written_to(tmp_path: Path) -> None:
    try:
        found = write_shards({"x": np.arange(5)}, "memory://written/out", rows_per_file=3)
        assert found.files == ("memory:///written/out/part-00000.parquet", "memory:///written/out/part-00001.parquet")
        assert table("memory://written/out")["x"].to_pylist() == list(range(5))
        assert len(fsspec.filesystem("memory").ls("/written/out")) == 2
    finally:
        fsspec.filesystem("memory").rm("written", recursive=True)


# -- what is refused, and what is left then -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("a.xyz", {}, "cannot write .*a.xyz': give a file .parquet, .arrow, .tfrecord or .tar, or a folder"),
        ("a.csv", {}, "cannot write .*a.csv'"),
        ("a.tar.gz", {}, "cannot write .*a.tar.gz'"),
        ("a.parquet", {"format": "tar"}, "would be a .parquet file, and format is 'tar'"),
        ("a.parquet", {"rows_per_file": 2}, "rows_per_file makes several files.*format='parquet'"),
        ("out", {"format": "csv"}, "format must be one of parquet, arrow, tfrecord, tar, not 'csv'"),
        ("out", {"rows_per_file": 0}, "rows_per_file must be a whole number of at least 1"),
        ("out", {"format": "tar", "row_group_bytes": "1MB"}, ".tar files have no row groups"),
        ("out", {"row_group_bytes": "5 parrots"}, "row_group_bytes must be a size"),
        ("out", {"row_group_bytes": 0}, "row_group_bytes must be a size"),
        ("no/out", {}, "in a folder that does not exist"),
        ("full", {}, "the folder .*full' is not empty"),
        ("full/there.parquet", {}, "exists already, and nothing is overwritten"),
        ("out", {"columns": ["z"]}, "has no column 'z'"),
    ],
)
def test_bad_input_writes_nothing(path: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "there.parquet").write_text("kept")
    with pytest.raises(BadInput, match=message):
        write_shards({"x": np.arange(5)}, tmp_path / path, **options)
    assert left(tmp_path) == ["full", "there.parquet"]


@pytest.mark.parametrize(
    ("format", "columns", "message"),
    [
        ("tfrecord", {"m": np.zeros((2, 3, 4))}, "column 'm' is .*, and a TFRecord file holds"),
        ("tfrecord", {"d": [{"a": 1}, {"a": 2}]}, "column 'd' is struct"),
        ("tfrecord", {"t": np.array(["2024-01-01"] * 2, "M8[s]")}, "column 't' is timestamp"),
        ("tar", {"t": np.array(["2024-01-01"] * 2, "M8[s]")}, "column 't' is timestamp.*, and a tar holds"),
        ("tar", {"a/b": [1, 2]}, "column 'a/b' cannot be a suffix"),
        ("tar", {"Raw": [b"", b""], "raw": [b"", b""]}, "columns 'Raw' and 'raw' would both be members .raw"),
        ("tar", {"__key__": ["a", "b"]}, "a tar needs a column beside __key__"),
        ("parquet", {"s": pa.array([{}, {}], pa.struct([]))}, "column 's' is struct<>, which Parquet cannot hold"),
    ],
)
def test_columns_that_a_format_cannot_hold_are_named(
    format: str, columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = pa.table(
        {
            name: arrow_rows({name: values}).batches.send(None)[0] if isinstance(values, np.ndarray) else values
            for name, values in columns.items()
        }
    )
    with pytest.raises(BadInput, match=message):
        write_shards(rows, tmp_path / "out", format=format)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("format", "columns", "message"),
    [
        ("tfrecord", {"x": [1] * 300 + [None]}, "column 'x' has no value in row 300"),
        ("tar", {"x": [1] * 300 + [None]}, "column 'x' has no value in row 300"),
        ("tar", {"__key__": ["a", "b", "b"], "cls": [1, 2, 3]}, "the __key__ of row 2, 'b', is that of the row before"),
        ("tar", {"__key__": ["a", "b.c"], "cls": [1, 2]}, "the __key__ of row 1, 'b.c', cannot be a member's name"),
        ("tar", {"x": [[[1, 2], [3]]]}, "column 'x' holds lists of 1 to 2 values"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_rows_that_a_format_cannot_hold_leave_nothing(
    format: str, columns: dict[str, Any], message: str, there: bool, tmp_path: Path
) -> None:
    if there:
        (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match=message):
        write_shards(pa.table(columns), tmp_path / "out", format=format, rows_per_file=3)
    assert left(tmp_path) == (["out"] if there else [])


def test_files_under_way_are_none_of_the_folder(tmp_path: Path) -> None:
    """Who reads the folder meanwhile finds no rows, not some."""
    seen: list[list[str]] = []
    write_shards(
        {"x": np.arange(10)}, tmp_path / "out", rows_per_file=4, progress=lambda done, all: seen.append(left(tmp_path))
    )
    assert seen == [[*(f".part-{i:05d}.parquet.part" for i in range(3)), "out"]]
    assert len(left(tmp_path)) == 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_error_in_the_data_leaves_nothing(shuffle: bool, tmp_path: Path) -> None:
    def rows() -> Iterator[int]:
        yield from range(1000)
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        write_shards(rows(), tmp_path / "out", rows_per_file=100, shuffle=shuffle)
    assert left(tmp_path) == []


@pytest.mark.parametrize("fails", ["write", "mv"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_named_and_leaves_nothing(
    fails: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    moved: list[str] = []
    if fails == "mv":
        from fsspec.implementations.local import LocalFileSystem

        move = LocalFileSystem.mv

        def second_fails(self: Any, source: str, target: str) -> None:
            moved.append(target)
            full() if len(moved) == 2 else move(self, source, target)

        monkeypatch.setattr(LocalFileSystem, "mv", second_fails)
    else:
        monkeypatch.setattr(write.WRITERS[f".{format}"], "write", full)
    with pytest.raises(ManyhandsError, match="could not be written .No space left on device., and what was written"):
        write_shards({"cls": np.arange(10)}, tmp_path / "out", format=format, rows_per_file=4, shuffle=True)
    assert left(tmp_path) == []
    assert len(moved) == (2 if fails == "mv" else 0)


def test_tfrecord_says_what_changes(tmp_path: Path) -> None:
    columns = {"x": np.zeros((2, 2)), "s": np.array(["a", "b"]), "y": np.zeros(2, np.int32), "z": np.zeros(2, np.int64)}
    found = write_shards(columns, tmp_path / "a.tfrecord")
    assert found.changes == (
        "x: fixed_size_list<item: double>[2] becomes large_list<item: float>",
        "s: string becomes binary",
        "y: int32 becomes int64",
    )
