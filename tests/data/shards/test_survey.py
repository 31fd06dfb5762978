"""data/shards/survey.py: facts of small files that a hand can count, and advice where something is wrong."""

import decimal
import gzip
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.shards import survey as module
from manyhands.data.shards.survey import Spread, Survey, survey, told
from refusals import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight files with four row groups of 50 rows each: 1600 rows of a pair of float32 and a whole number."""
    path = tmp_path_factory.mktemp("rows")
    for i in range(8):
        x = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(400, dtype=np.float32) / 4 + i), 2)
        table = pa.table({"x": x, "y": range(200 * i, 200 * i + 200)})
        pq.write_table(table, path / f"{i}.parquet", row_group_size=50)
    return path


def found(paths: Any, **options: Any) -> Survey:
    return survey([paths], **options)


def advised(given: Survey, words: str) -> str:
    """The one line of advice with these words."""
    (line,) = [line for line in given.advice if words in line]
    return line


def columns_of(given: Survey, *without: str) -> list[tuple[Any, ...]]:
    return [(one.name, one.type, one.shape, one.bytes) for one in given.columns if one.name not in without]


def test_files_blocks_and_columns_are_counted(folder: Path) -> None:
    given = found(folder, workers=4)
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert (given.format, given.files, given.bytes, given.rows, given.blocks) == ("Parquet", 8, sum(sizes), 1600, 32)
    assert given.file_bytes == Spread.of(sizes)
    assert given.block_rows == Spread(least=50, median=50, most=50)
    assert columns_of(given) == [("x", "float", "2", 8.0), ("y", "int64", "", 8.0)]
    assert (given.row_stored, given.row_decoded) == (sum(sizes) / 1600, 16.0)
    assert [row["x"] for row in given.first_rows] == ["[0, 0.25]", "[0.5, 0.75]", "[1, 1.25]"]
    assert given.first_rows[2] == {"x": "[1, 1.25]", "y": "2"}
    assert json.loads(given.to_json())["dealt"]["rows"] == [400] * 4
    assert given.advice == ()  # what is right needs no advice
    part = found(folder, columns=["y"], workers=4)  # columns that are not read cost nothing
    assert (columns_of(part), part.row_decoded) == ([("y", "int64", "", 8.0)], 8.0)
    assert part.row_stored < 0.8 * given.row_stored
    assert part.dealt.bytes[0] < 0.8 * given.dealt.bytes[0]


def test_what_is_told_is_what_workers_read(folder: Path) -> None:
    """To the row; and to the byte, but for the block after the last one, which a worker may have begun to read."""
    for workers, batch_size, shuffle in [
        (1, 64, "blocks:16"),
        (4, 64, "blocks:16"),
        (3, 10, "blocks:3"),
        (4, 64, "none"),
        (2, 64, "blocks:1"),
    ]:
        dealt = found(folder, workers=workers, batch_size=batch_size, shuffle=shuffle).dealt
        for rank in range(workers):
            source = mh.shards(folder, shuffle=shuffle != "none" and shuffle).open(None)
            footers = source.counters.bytes
            feed = Feed(source, rank=rank, size=workers, batch_size=batch_size)
            assert sum(part.rows for part in feed.epoch(0)) == dealt.rows[rank], (workers, shuffle)
            largest = max(block.bytes for _, block in source.table.blocks)
            read = source.counters.bytes - footers
            assert dealt.bytes[rank] <= read <= dealt.bytes[rank] + 2 * largest, (workers, shuffle)


def test_how_often_blocks_are_read(folder: Path) -> None:
    """32 equal blocks in 16 lanes: two each. 4 workers have 4 lanes each, 8 blocks."""
    dealt = found(folder, workers=4).dealt
    assert (dealt.rows, dealt.blocks, dealt.amplification) == ((400,) * 4, (8,) * 4, 1.0)
    assert dealt.memory <= 4 * 1600 * 16  # no more than all rows, under way and read ahead
    given = found(folder, workers=4, shuffle="none")
    assert (given.dealt.amplification, given.dealt.blocks) == (4.0, (32,) * 4)
    assert "each of 4 workers has some of any 64 neighbouring rows" in advised(given, "without shuffling")
    dealt = found(folder, workers=4, shuffle="rows").dealt  # in any order they need the host's disk
    assert (dealt.amplification, dealt.rows) == (1.0, (400,) * 4)
    assert dealt.disk == sum(block.memory for _, block in mh.shards(folder).open(None).table.blocks)


def test_uncounted_rows_are_estimated_and_whole_files_are_dealt(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.csv").write_text("x\n" + "1\n" * 100)
    assert found(tmp_path).rows == 400
    given = found(tmp_path, count=False, workers=2)
    assert (given.rows, given.about_rows, given.files, given.advice) == (None, 400, 4, ())
    assert (given.dealt.rows, given.dealt.blocks, given.dealt.bytes) == ((), (2, 2), (404, 404))
    assert given.dealt.amplification == 1.0
    given = found(tmp_path, count=False, workers=5)
    assert (given.dealt.blocks, given.dealt.amplification) == ((4,) * 5, 5.0)
    assert "4 files for 5 workers" in advised(given, "each worker reads all files")
    (tmp_path / "1.csv").write_text("x\n" + "1\n" * 1000)
    given = found(tmp_path, count=False, workers=2)
    assert sum(given.dealt.bytes) == 3 * 202 + 2002
    assert "the largest file has 9.91× the bytes" not in str(given.advice)
    (tmp_path / "1.csv").write_text("x\n" + "1\n" * 2000)
    assert "the largest file has 19.8× the bytes" in advised(found(tmp_path, count=False, workers=2), "whole files")


def test_files_behind_a_url_are_counted_only_where_that_is_asked_for() -> None:
    try:
        mh.write_shards({"cls": np.arange(5)}, "memory://surveyed/a.tar")
        assert found("memory://surveyed/a.tar").rows is None
        assert found("memory://surveyed/a.tar", count=True).rows == 5
        assert found("memory://surveyed/a.tar", shuffle="rows").rows == 5
    finally:
        fsspec.filesystem("memory").rm("surveyed", recursive=True)


def test_uncounted_files_are_dealt_as_they_will_be(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("1\n" * 10 ** (i % 4))
    for workers in (1, 2, 3):
        dealt = found(tmp_path, count=False, workers=workers).dealt
        for rank in range(workers):
            source = mh.shards(tmp_path, counted=False).open(None)
            before = source.counters.bytes
            rows = sum(part.rows for part in Feed(source, rank=rank, size=workers).epoch(0))
            assert (2 * rows, source.counters.bytes - before) == (dealt.bytes[rank], dealt.bytes[rank]), workers


def test_members_of_tars_are_decoded(tmp_path: Path) -> None:
    png = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(np.zeros((4, 5, 3), np.uint8)).save(png, "png")
    row = {"png": png.getvalue(), "cls": 1, "txt": "ab", "v": np.zeros(3, np.float32), "raw": b"123"}
    mh.write_shards([row] * 4, tmp_path / "a.tar")
    given = found(tmp_path / "a.tar")
    assert columns_of(given, "__key__", "raw") == [
        ("png", "uint8", "4×5×3", 60.0),
        ("cls", "int64", "", 8.0),
        ("txt", "string", "", 2.0),
        ("v.npy", "float32", "3", 12.0),
    ]
    values = {"png": "uint8 4×5×3", "cls": "1", "txt": "ab", "v.npy": "[0, 0, 0]", "raw": "3 bytes"}
    assert given.first_rows[1] == {"__key__": "000000001", **values}
    assert "members .txt are texts" in advised(given, "make numbers")
    mh.write_shards([{"png": b"no image"}], tmp_path / "b.tar")
    assert advised(found(tmp_path / "b.tar"), "members .png cannot be decoded")


def test_numpy_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((7, 2, 3)), y=np.arange(7))
    given = found(tmp_path / "a.npz", workers=2, batch_size=4)
    assert (given.format, given.rows, given.row_decoded) == ("npz", 7, 56.0)
    assert [column[:3] for column in columns_of(given)] == [("x", "float64", "2×3"), ("y", "int64", "")]
    assert (given.dealt.rows, given.dealt.memory) == ((3, 4), 7 * 56)  # 2 and 2, then 1 and 2
    np.save(tmp_path / "a.npy", np.zeros(7, np.uint8))
    given = found(tmp_path / "a.npy")
    assert (given.format, given.rows, given.columns[0].type, given.dealt.memory) == ("npy", 7, "uint8", 0)
    refused("has no array 'z'; it has x, y", lambda: found(tmp_path / "a.npz", columns=["z"]))
    np.savez(tmp_path / "b.npz", x=np.zeros(2), y=np.zeros(3))
    refused(r"must have equally many rows.*x: \[2\], y: \[3\]", found, tmp_path / "b.npz")


def test_folders_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]], "s": ["a", "b"]})
    data.save_to_disk(tmp_path / "one")
    given = found(tmp_path / "one")
    assert (given.format, given.rows, given.first_rows[0]) == ("Arrow", 2, {"x": "[1, 2]", "s": "a"})
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    refused("several splits .*train, test.*: name one, .*splits/train", found, tmp_path / "splits")
    assert found(tmp_path / "splits" / "train").rows == 2


def test_bad_input_is_named(folder: Path, tmp_path: Path) -> None:
    """What the command names too stands in its test."""
    words = "shuffle=True draws from all rows by their numbers"
    refused(words, lambda: found(folder, shuffle="rows", count=False))
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    refused("has no rows", found, tmp_path / "a.parquet")


def test_one_row_group_for_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data is better shuffled as a whole; of larger data the command is told that writes row groups, which then is right."""
    path = tmp_path / "a b.parquet"
    pq.write_table(pa.table({"x": np.arange(100_000.0)}), path)
    line = advised(found(path, workers=4), "are to be mixed")
    assert "there is 1 row group, and each is read by several of 4 workers" in line
    assert "shuffle=True" in line
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 100_000)
    command = advised(found(path, workers=4), "are to be mixed").rpartition("manyhands data ")[2]
    assert command == f"'{path}' --to NEW/ --format parquet --row-group-bytes 12KB"  # 800 KB in 64 row groups
    mh.write_shards(path, tmp_path / "new", row_group_bytes="12KB")
    again = found(tmp_path / "new", workers=4)
    assert again.blocks >= 64
    assert again.advice == ()


def test_files_and_blocks_of_bad_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(module, "_LARGE_BLOCK", 8000)
    monkeypatch.setattr(module, "_MANY_FILES", 20)
    for name in ("uneven", "tiny"):
        (tmp_path / name).mkdir()
    for i in range(20):
        (tmp_path / "tiny" / f"{i}.txt").write_text("a\n")
    for i in range(19):
        with pa.ipc.new_file(tmp_path / "uneven" / f"{i}.arrow", pa.schema([("x", pa.int64())])) as writer:
            writer.write_table(pa.table({"x": range(2000 if i == 7 else 20)}))
    given = found(tmp_path / "uneven")
    assert "the largest record batch is 16.0 KB when decoded" in advised(given, "few large lumps")
    assert "a worker holds a whole one" in advised(given, "few large lumps")
    assert "the largest record batch has 100× the bytes of the median one" in advised(given, "of the median one")
    assert "20 files, half of them of 2 B or less" in advised(found(tmp_path / "tiny"), "costs more than reading")
    mh.write_shards({"x": np.arange(3)}, tmp_path / "a.tfrecord")
    (tmp_path / "b.tfrecord.gz").write_bytes(gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    assert "1 file packed with gzip" in advised(found(tmp_path / "b.tfrecord.gz", workers=2), "packed")


def test_options_that_are_told_read_less(folder: Path) -> None:
    """14 workers and 16 lanes: most lanes have two workers. And what is advised has been tried."""
    for workers, batch_size, shuffle in [(14, 64, "blocks:16"), (12, 64, "blocks:24"), (4, 16, "blocks:3")]:
        given = found(folder, workers=workers, batch_size=batch_size, shuffle=shuffle)
        assert given.dealt.amplification > 1.5
        line = advised(given, "several read the same")
        said = re.search(r"--shuffle (blocks:\d+)(?: --batch-size (\d+))? reads (.*)×", line)
        assert said is not None, line
        better = found(folder, workers=workers, batch_size=int(said[2] or batch_size), shuffle=said[1]).dealt
        assert better.amplification < 0.8 * given.dealt.amplification, line
        assert better.amplification == pytest.approx(float(said[3]), abs=0.006), line


def test_memory_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available", lambda: 100 << 10)
    given = found(folder, workers=4)
    assert given.dealt.fits is False
    assert "102.4 KB are free here: shuffle fewer blocks" in advised(given, "4 workers need about")
    monkeypatch.setattr(module, "available", lambda: None)
    unknown = found(folder, workers=4).dealt
    assert unknown.fits is None
    assert replace(unknown, available=4 * unknown.memory).fits is True


def test_types_that_train_poorly(tmp_path: Path) -> None:
    for column, words in [
        (pa.array([decimal.Decimal("1.25")] * 3), "column x holds decimals, which are read as double"),
        (pa.array(["a", "b", "c"]), "column x holds texts: make numbers of them"),
        (pa.array([1, None, None]), "column x has missing values (2 of the first 3)"),
        (pa.array([[1], [1, 2], [1]]), "column x holds lists of different lengths"),
        (pa.array([{"a": 1}] * 3), "column x holds struct<a: int64>, which becomes no tensor"),
        (pa.array([1, 2, 3], pa.timestamp("s")), "column x holds timestamp[ms], which becomes no tensor"),
    ]:
        pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
        given = found(tmp_path / "a.parquet", shuffle="rows")
        assert words in advised(given, "column x")
        if pa.types.is_list(column.type):
            assert given.columns[0].shape == "1…2"


def test_values_in_a_few_words() -> None:
    for value, words in [
        (b"123", "3 bytes"),
        (np.zeros((2, 3)), "float64 2×3"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, …]"),
        (np.array([0.12345]), "[0.1235]"),
        ("a\x1b", "a?"),
        (None, "None"),
        ({"a": 1}, "{'a': 1}"),
        ([[0.5], []], "[[0.5], []]"),
    ]:
        assert told(value) == words


def test_memory_is_that_of_lanes_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 row groups of 8 MB, in pieces: of 4 lanes, two pieces each and what an open row group holds."""
    monkeypatch.setattr(module, "_held_by_open", lambda table, share: 1 << 20)
    schema, rows = pa.schema([("x", pa.float64())]), pa.table({"x": np.zeros((8 << 20) // 8)})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema, use_dictionary=False) as writer:
        for _ in range(16):
            writer.write_table(rows)
    dealt = found(tmp_path / "a.parquet", workers=4).dealt
    lanes = 4 * (2 * module.PIECE_BYTES + (1 << 20))
    assert dealt.memory == pytest.approx(lanes + 2 * module.GROUP_BYTES + module.AHEAD_BYTES, rel=0.01)
