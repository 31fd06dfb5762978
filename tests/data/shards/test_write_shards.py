"""data/shards/write.py and row_shuffle.py: what is written is read again; all files, or none."""

import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
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
from manyhands.data.shards.row_shuffle import shuffled
from manyhands.data.shards.write import write_shards
from manyhands.errors import ManyhandsError
from refusals import refused

FORMATS = ("parquet", "arrow", "tfrecord", "tar")


def table(path: Any, columns: Any = ()) -> pa.Table:
    rows = arrow_rows(mh.shards(path), columns)
    return pa.Table.from_batches(list(rows.batches), rows.schema)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if "cache" not in path.parts)


@pytest.mark.parametrize("first", FORMATS)
def test_every_pair_of_formats_keeps_rows_and_types(first: str, tmp_path: Path) -> None:
    x = pa.array([[i / 4, 2.0] for i in range(7)], pa.list_(pa.float32()))
    raw = pa.array([bytes([i]) * i for i in range(1, 8)], pa.binary())
    given = pa.table({"cls": pa.array(range(7)), "x.npy": x, "raw": raw})  # of types that every format keeps
    one = write_shards(given, tmp_path / f"a.{first}")
    assert (one.rows, one.changes) == (7, ())
    for second in FORMATS:
        path = tmp_path / f"b.{second}"
        two = write_shards(tmp_path / f"a.{first}", path, columns=given.column_names)
        assert (two.rows, two.changes, two.bytes) == (7, (), os.path.getsize(path)), second
        (part,) = Feed(open_source(mh.shards(path)), batch_size=1000, shuffle=False).epoch(0)
        found = part.batch
        assert found["cls"].tolist() == list(range(7)), second
        assert found["x.npy"].tolist() == x.to_pylist(), second
        assert list(found["raw"]) == raw.to_pylist(), second
        assert (str(found["cls"].dtype), str(found["x.npy"].dtype)) == ("torch.int64", "torch.float32"), second


def test_tables_keep_every_type(tmp_path: Path) -> None:
    columns = {
        "s": pa.array(["a", None]),
        "t": pa.array([1, 2], pa.timestamp("us")),
        "n": pa.array([[[1], []], [[2, 3]]], pa.list_(pa.list_(pa.int16()))),
        "d": pa.array([{"a": 1}, {"a": 2}]),
        "f": pa.array([[1.0, 2.0]] * 2, pa.list_(pa.float64(), 2)),
        "b": pa.array([True, False]),
    }
    for format in ("parquet", "arrow"):
        write_shards(pa.table(columns), tmp_path / f"a.{format}")
        assert table(tmp_path / f"a.{format}") == pa.table(columns), format


def test_a_tar_has_members_that_webdataset_and_others_read(tmp_path: Path) -> None:
    rows = [
        {"__key__": f"n{i}", "jpg": b"image", "cls": i, "caption": "ü", "v": np.float32(i) / 2, "meta": {"k": [i]}}
        for i in range(2)
    ]
    found = write_shards(rows, tmp_path / "a.tar")
    assert found.changes == ("caption: is called caption.txt", "v: is called v.npy", "meta: is called meta.json")
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = {info.name: tar.extractfile(info).read() for info in tar}
    assert list(members)[:5] == ["n0.jpg", "n0.cls", "n0.caption.txt", "n0.v.npy", "n0.meta.json"]
    assert [members[f"n1.{name}"] for name in ("jpg", "cls", "caption.txt")] == [b"image", b"1", "ü".encode()]
    assert json.loads(members["n1.meta.json"]) == {"k": [1]}
    assert np.load(io.BytesIO(members["n1.v.npy"])) == np.float32(0.5)
    again = table(tmp_path / "a.tar")
    assert again.column_names == ["__key__", "jpg", "cls", "caption.txt", "v.npy", "meta.json"]
    assert again["caption.txt"].to_pylist() == ["ü", "ü"]
    write_shards(tmp_path / "a.tar", tmp_path / "b.tar")  # members as they are
    assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "a.tar").read_bytes()
    lengths = [0, 1, 511, 512, 513, 1024]  # members of any length are padded to records
    write_shards([{"raw": bytes(n), "cls": n} for n in lengths], tmp_path / "c.tar")
    with tarfile.open(tmp_path / "c.tar") as tar:
        assert [info.size for info in tar if info.name.endswith("raw")] == lengths
    assert os.path.getsize(tmp_path / "c.tar") == 512 * (2 * 6 + 6 + (0 + 1 + 1 + 1 + 2 + 2) + 2)
    assert table(tmp_path / "c.tar")["cls"].to_pylist() == lengths
    write_shards({"cls": np.arange(5)}, tmp_path / "out", format="tar", rows_per_file=2)
    assert table(tmp_path / "out")["__key__"].to_pylist() == [f"{i:09d}" for i in range(5)]  # through all files


def test_files_of_a_folder_have_so_many_rows_or_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    found = write_shards(
        {"x": np.arange(10)}, tmp_path / "out", rows_per_file=4, progress=lambda *_: seen.append(left(tmp_path))
    )
    assert found.files == tuple(str(tmp_path / "out" / f"part-{i:05d}.parquet") for i in range(3))
    assert seen == [[*(f".part-{i:05d}.parquet.part" for i in range(3)), "out"]]  # under way they are no files of it
    assert len(left(tmp_path)) == 4
    assert [pq.read_metadata(file).num_rows for file in found.files] == [4, 4, 2]
    assert table(tmp_path / "out")["x"].to_pylist() == list(range(10))
    assert len(write_shards({"x": np.arange(8)}, tmp_path / "exact/", rows_per_file=4).files) == 2
    monkeypatch.setattr(write, "FILE_BYTES", 800)
    found = write_shards(pa.table({"x": range(1000)}), tmp_path / "bytes", row_group_bytes=400)
    assert [pq.read_metadata(file).num_rows for file in found.files] == [108] * 9 + [28]  # nine pieces of 12 rows


def test_row_groups_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    for format in ("parquet", "arrow"):
        path = tmp_path / f"a.{format}"
        write_shards(pa.table({"x": range(1000)}), path, row_group_bytes="1KB")
        if format == "parquet":
            metadata = pq.read_metadata(path)
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        else:
            with pa.ipc.open_file(path) as reader:
                rows = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        assert sum(rows) == 1000, format
        assert set(rows[:-1]) == {124}, format  # four pieces of 31 rows, 248 bytes each
        assert table(path)["x"].to_pylist() == list(range(1000)), format


def test_shuffled_rows_are_all_there_in_the_order_of_a_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_shards({"cls": np.arange(50)}, tmp_path / f"{name}.parquet", shuffle=True, seed=seed)
    orders = [table(tmp_path / f"{name}.parquet")["cls"].to_pylist() for name in "abc"]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(50)) not in orders


def test_only_a_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are asked for as they are written: a block of them, and a piece, is held."""
    monkeypatch.setattr(base, "BLOCK_BYTES", 80 * 256)
    most = asked = written = 0

    def rows() -> Iterator[dict[str, int]]:
        nonlocal asked, most
        for i in range(5_000):
            asked = i + 1
            most = max(most, asked - written)
            yield {"x": i}

    def progress(done: int, total: int) -> None:
        nonlocal written
        written = done
        assert total == done

    write_shards(rows(), tmp_path / "a.parquet", progress=progress)
    assert written == asked == 5_000
    assert most <= 3 * 256


def test_a_store_of_fsspec_is_written_to() -> None:
    try:
        found = write_shards({"x": np.arange(5)}, "memory://written/out", rows_per_file=3)
        assert found.files == ("memory:///written/out/part-00000.parquet", "memory:///written/out/part-00001.parquet")
        assert table("memory://written/out")["x"].to_pylist() == list(range(5))
        assert len(fsspec.filesystem("memory").ls("/written/out")) == 2
    finally:
        fsspec.filesystem("memory").rm("written", recursive=True)


def test_tfrecord_says_what_changes(tmp_path: Path) -> None:
    columns = {"x": np.zeros((2, 2)), "s": np.array(["a", "b"]), "y": np.zeros(2, np.int32), "z": np.zeros(2, np.int64)}
    assert write_shards(columns, tmp_path / "a.tfrecord").changes == (
        "x: fixed_size_list<item: double>[2] becomes large_list<item: float>",
        "s: string becomes binary",
        "y: int32 becomes int64",
    )


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "there.parquet").write_text("kept")
    for path, options, words in [
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
    ]:
        refused(
            words, lambda path, options: write_shards({"x": np.arange(5)}, tmp_path / path, **options), path, options
        )
        assert left(tmp_path) == ["full", "there.parquet"], words


def test_what_a_format_cannot_hold_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """Types at once, and values when they are met."""
    times = pa.array([0, 1], pa.timestamp("s"))
    for format, columns, words in [
        ("tfrecord", {"m": [[[0.0]]]}, "column 'm' is .*, and a TFRecord file holds"),
        ("tfrecord", {"d": [{"a": 1}, {"a": 2}]}, "column 'd' is struct"),
        ("tfrecord", {"t": times}, "column 't' is timestamp"),
        ("tar", {"t": times}, "column 't' is timestamp.*, and a tar holds"),
        ("tar", {"a/b": [1, 2]}, "column 'a/b' cannot be a suffix"),
        ("tar", {"Raw": [b"", b""], "raw": [b"", b""]}, "columns 'Raw' and 'raw' would both be members .raw"),
        ("tar", {"__key__": ["a", "b"]}, "a tar needs a column beside __key__"),
        ("parquet", {"s": pa.array([{}, {}], pa.struct([]))}, "column 's' is struct<>, which Parquet cannot hold"),
        ("tfrecord", {"x": [1] * 300 + [None]}, "column 'x' has no value in row 300"),
        ("tar", {"x": [1] * 300 + [None]}, "column 'x' has no value in row 300"),
        ("tar", {"__key__": ["a", "b", "b"], "cls": [1, 2, 3]}, "the __key__ of row 2, 'b', is that of the row before"),
        ("tar", {"__key__": ["a", "b.c"], "cls": [1, 2]}, "the __key__ of row 1, 'b.c', cannot be a member's name"),
        ("tar", {"x": [[[1, 2], [3]]]}, "column 'x' holds lists of 1 to 2 values"),
    ]:
        for name in ("there", "out"):  # a folder that was there stays
            (tmp_path / "there").mkdir(exist_ok=True)
            save = partial(write_shards, format=format, rows_per_file=3)
            refused(words, save, pa.table(columns), tmp_path / name, case=words)
            assert left(tmp_path) == ["there"], words


def test_an_error_in_the_data_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Iterator[int]:
        yield from range(1000)
        raise RuntimeError("the user's own")

    for shuffle in (False, True):
        with pytest.raises(RuntimeError, match="the user's own"):
            write_shards(rows(), tmp_path / "out", rows_per_file=100, shuffle=shuffle)
        assert left(tmp_path) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_named_and_leaves_nothing(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a row is written, and when the second of three files gets its name."""
    from fsspec.implementations.local import LocalFileSystem

    moved: list[str] = []
    move = LocalFileSystem.mv

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def second_fails(self: Any, source: str, target: str) -> None:
        moved.append(target)
        full() if len(moved) == 2 else move(self, source, target)

    for owner, name, fails in [(write.WRITERS[f".{format}"], "write", full), (LocalFileSystem, "mv", second_fails)]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            words = "could not be written .No space left on device., and what was written"
            with pytest.raises(ManyhandsError, match=words):
                write_shards({"cls": np.arange(10)}, tmp_path / "out", format=format, rows_per_file=4, shuffle=True)
        assert left(tmp_path) == [], name
    assert len(moved) == 2


# -- row_shuffle.py: every row once, in an order that a seed gives, of which none is likelier ----------------------------


def order(rows: int, seed: int, memory: int | None, folder: Path, at_once: int = 10) -> list[int]:
    table = pa.table({"x": range(rows)})
    batches = table.to_batches(max_chunksize=at_once)
    return [x for batch in shuffled(batches, table.schema, seed, memory, folder) for x in batch["x"].to_pylist()]


def test_each_row_once_in_an_order_of_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shuffle, "PART_BYTES", 200)  # four files of 800 bytes
    for memory in (None, 0, 800):
        found = order(100, 3, memory, tmp_path)
        assert sorted(found) == list(range(100)), memory
        assert found != list(range(100)), memory
        assert found == order(100, 3, memory, tmp_path), memory
        assert found != order(100, 4, memory, tmp_path), memory
        assert list(tmp_path.iterdir()) == [], memory


def test_every_order_is_as_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows in two files: chi-squared of 5 degrees of freedom is below 20.5 in 999 of 1000 cases."""
    monkeypatch.setattr(row_shuffle, "PART_BYTES", 12)
    times = Counter(tuple(order(3, seed, 24, tmp_path, at_once=2)) for seed in range(180))
    assert len(times) == 6
    assert sum((many - 30) ** 2 / 30 for many in times.values()) < 20.5


def test_pieces_are_small_and_closing_it_early_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 80)
    table = pa.table({"x": range(100)})
    sizes = [batch.num_rows for batch in shuffled(table.to_batches(), table.schema, 0, 800, tmp_path)]
    assert sizes == [10] * 10
    batches = shuffled(table.to_batches(), table.schema, 0, None, tmp_path)
    next(batches)
    assert len(list(tmp_path.iterdir())) == 1
    batches.close()
    assert list(tmp_path.iterdir()) == []
