"""data/shards/formats: what each format's files hold, compared with what their own libraries say."""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import io
import json
import random
import re
import tarfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards.formats import lines as lines_module
from manyhands.data.shards.formats.by_suffix import FORMATS, format_of, shard_file
from manyhands.data.shards.source import shards
from manyhands.data.shards.table import ShardTable
from manyhands.errors import BadInput
from shard_files import BYTES_OF, small_blocks, table, tar_bytes, write
from tfrecord_files import examples


def rows(path: Path | str, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rows of a file, as they are read block by block."""
    table = ShardTable.of([str(path)], names)
    found: list[dict[str, Any]] = []
    if not table.rows:
        return found
    for i, (_, block) in enumerate(table.blocks):
        assert block.first == len(found)
        of_block = [row for batch in table.read(i) for row in batch.to_pylist()]
        assert len(of_block) == block.rows
        for start in {0, 1, block.rows // 2, block.rows - 1}:
            rest = [row for batch in table.read(i, start) for row in batch.to_pylist()]
            assert str(rest) == str(of_block[start:])  # NaN is not equal to itself
        found += of_block
    return found


def batch(path: Any, **options: Any) -> Any:
    """All rows as one batch, in their own order."""
    (part,) = Feed(open_source(shards(path, shuffle=False, **options)), batch_size=1000).epoch(0)
    return part.batch


def both(path: Any, **options: Any) -> Any:
    """The same, where it is also what comes of the host's cache."""
    plain, (part,) = (
        batch(path, **options),
        Feed(open_source(shards(path, shuffle=True, **options)), batch_size=1000, shuffle=False).epoch(0),
    )
    assert str(plain) == str(part.batch)
    return plain


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.parquet", ".parquet"),
        ("a.PQ", ".parquet"),
        ("a.feather", ".arrow"),
        ("x/train.tfrecord-00001-of-00010", ".tfrecord"),
        ("a.tfrecords.gz", ".tfrecord"),
        ("a.tar.gz", ".tar"),
        ("a.tgz", ".tar"),
        ("a.tsv", ".csv"),
        ("a.ndjson", ".jsonl"),
        ("a.text", ".txt"),
        ("a.json", None),
        ("a.csv.gz", None),
        ("parquet", None),
    ],
)
def test_formats_by_suffix(name: str, kind: str | None) -> None:
    assert format_of(name) == kind
    if kind is not None:
        assert type(shard_file(name)) is FORMATS[kind][1]
    else:
        with pytest.raises(BadInput, match="expected .parquet"):
            shard_file(name)


@pytest.mark.parametrize("count", [0, 1, 60])
@pytest.mark.parametrize("suffix", BYTES_OF)
def test_blocks_and_pieces_of_all_sizes_hold_the_same_rows(
    tmp_path: Path, suffix: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write(tmp_path, suffix, [count])
    whole = rows(path)
    assert len(whole) == count
    for block, piece in [(1, 4), (100, 30), (1000, 200), (10**6, 50)]:
        small_blocks(monkeypatch, block, piece)
        assert rows(path) == whole
        many = len(shard_file(path).blocks())
        if suffix in ("csv", "tsv", "jsonl", "txt", "tar", "tfrecord") and count == 60:
            assert many == 1 if block == 10**6 else many > 1 or block == 1000


# Parquet and Arrow

MIXED = pa.table(
    {
        "i": pa.array([1, -2, 3], pa.int32()),
        "flag": [True, False, True],
        "half": pa.array([0.5, 1.5, -2.5], pa.float32()),
        "text": ["a", "", "ß"],
        "bytes": [b"\x00\xff", b"", b"x"],
        "money": pa.array([Decimal("1.50"), Decimal("-2.25"), Decimal("0.00")], pa.decimal128(9, 2)),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "deep": [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]],
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
        "day": [datetime.date(2024, 2, i) for i in (27, 28, 29)],
        "point": [{"x": 1, "y": None}, {"x": 2, "y": "b"}, {"x": 3, "y": "c"}],
    }
)


@pytest.mark.parametrize("kind", ["parquet", "file", "lz4"])
def test_values_of_all_types(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(MIXED, path, row_group_size=2)
    else:
        path = tmp_path / "a.arrow"
        options = pa.ipc.IpcWriteOptions(compression=None if kind == "file" else kind)
        with pa.ipc.new_file(str(path), MIXED.schema, options=options) as writer:
            writer.write_table(MIXED, max_chunksize=3)
    found = both(path)
    assert list(found) == MIXED.column_names
    assert found["i"].dtype == torch.int32
    assert found["i"].tolist() == [1, -2, 3]
    assert found["flag"].dtype == torch.bool
    assert found["flag"].tolist() == [True, False, True]
    assert found["half"].dtype == torch.float32
    assert list(found["text"]) == ["a", "", "ß"]
    assert list(found["bytes"]) == [b"\x00\xff", b"", b"x"]
    assert found["money"].dtype == torch.float64
    assert found["money"].tolist() == [1.5, -2.25, 0.0]
    assert found["fixed"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found["deep"].shape == (3, 2, 1)
    assert list(found["kind"]) == ["u", "v", "u"]
    assert [str(day) for day in found["day"]] == ["2024-02-27", "2024-02-28", "2024-02-29"]
    assert list(found["point"]) == MIXED.column("point").to_pylist()


def test_a_stream_whose_columns_have_dictionaries_is_refused(tmp_path: Path) -> None:
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), MIXED.schema) as writer:
        writer.write_table(MIXED)
    with pytest.raises(BadInput, match="is a stream whose column 'kind' has a dictionary"):
        batch(tmp_path / "a.arrow")


@pytest.mark.parametrize("kind", ["zstd", "lz4"])
def test_compressed_streams(tmp_path: Path, kind: str) -> None:
    plain = MIXED.drop_columns(["kind"])
    with pa.ipc.new_stream(
        str(tmp_path / "a.arrow"), plain.schema, options=pa.ipc.IpcWriteOptions(compression=kind)
    ) as writer:
        writer.write_table(plain, max_chunksize=1)
    assert rows(tmp_path / "a.arrow", ["text", "i"]) == plain.select(["text", "i"]).to_pylist()


def test_values_that_repeat_count_as_they_are_when_they_are_decoded(tmp_path: Path) -> None:
    """Encoded they take next to nothing, and pieces would be that much larger in memory."""
    table = pa.table({"x": [1] * 100_000, "v": [[0.5] * 4] * 100_000, "t": ["a text of 20 letters"] * 100_000})
    pq.write_table(table, tmp_path / "a.parquet")
    (block,) = shard_file(str(tmp_path / "a.parquet")).blocks()
    assert block.bytes < 100_000
    assert 0.5 * table.nbytes < block.memory < 2 * table.nbytes


def test_names_with_dots_are_columns_of_their_own(tmp_path: Path) -> None:
    table = pa.table({"a.b": [1, 2], "c": [{"d": 1}, {"d": 2}], "a": ["x", "y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    for names in (["a.b"], ["a", "a.b"], ["c", "a.b", "a"]):
        assert rows(tmp_path / "a.parquet", names) == table.select(names).to_pylist()


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_missing_values_and_uneven_lists_name_file_and_column(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"

    def save(values: list[Any]) -> None:
        table = pa.table({"v": values})
        if suffix == "parquet":
            pq.write_table(table, path)
        elif suffix == "arrow":
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        else:
            path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))

    for values, message in [
        ([1, None], "has missing values"),
        (["a", None], "has missing values"),
        ([[1, 2], [3]], "lists of 1 to 2 values: pad them"),
        ([[1, 2], None], "has missing values"),
        ([[1, None], [2, 3]], "has missing values"),
    ]:
        save(values)
        for shuffle in (False, True):
            with pytest.raises(BadInput, match=rf"column 'v' of .*a\.{suffix} .*{message}|column 'v' of .*{message}"):
                next(Feed(open_source(shards(path, shuffle=shuffle))).epoch(0))


def test_lists_that_differ_from_file_to_file_name_the_column(tmp_path: Path) -> None:
    for i in (1, 2):
        pq.write_table(pa.table({"v": [[1] * i] * 3}), tmp_path / f"{i}.parquet")
    for shuffle in (False, True):
        with pytest.raises(BadInput, match=r"column 'v' have different shapes \(\[1\], \[2\]\)"):
            next(Feed(open_source(shards(tmp_path, shuffle=shuffle))).epoch(0))


@pytest.mark.parametrize("options", [{"shuffle": False}, {"shuffle": True}, {"counted": False, "shuffle": False}, {}])
def test_rows_that_differ_in_shape_go_to_the_users_code(tmp_path: Path, options: dict[str, Any]) -> None:
    """Lists of different lengths as arrays, missing values as None, nested ones, whatever lies beside them in a batch."""
    rows = [
        {"i": i, "tokens": [i] * (i % 4), "tags": ["a"] * (i % 3), "score": None if i % 5 == 0 else i / 2}
        for i in range(40)
    ]
    rows = [{**row, "deep": [row["tokens"], [7]], "box": None if row["i"] == 3 else [1.0, 2.0]} for row in rows]
    types = {"tokens": pa.list_(pa.int32()), "deep": pa.list_(pa.list_(pa.int16())), "box": pa.list_(pa.float32(), 2)}
    table = pa.table(
        {name: pa.array([row[name] for row in rows], types.get(name)) for name in ("i", "tags", "score", *types)}
    )
    (folder := tmp_path / "data").mkdir()
    pq.write_table(table, folder / "a.parquet", row_group_size=7)
    found = []

    def collate(some: list[dict[str, Any]]) -> torch.Tensor:
        found.extend(some)
        return torch.zeros(len(some))

    def check(seen: list[dict[str, Any]]) -> None:
        assert sorted(int(row["i"]) for row in seen) == list(range(40))
        for row in seen:
            expected = rows[int(row["i"])]
            assert row["tokens"].dtype == np.int32
            assert row["tokens"].tolist() == expected["tokens"]
            assert list(row["tags"]) == expected["tags"]
            assert row["score"] == expected["score"]
            assert [list(one) for one in row["deep"]] == expected["deep"]
            assert (None if row["box"] is None else row["box"].tolist()) == expected["box"]
            row["tokens"] += 1  # a row is the caller's own

    for _ in Feed(open_source(shards(folder, **options), collate=collate), batch_size=6).epoch(0):
        pass
    check(found)
    seen = []
    decoded = shards(folder, decode=lambda row: seen.append(row) or row["i"], threads=1, **options)
    batches = [part.batch for part in Feed(open_source(decoded), batch_size=6).epoch(0)]
    assert sorted(torch.cat(batches).tolist()) == list(range(40))
    check(seen)


def test_rows_that_cannot_be_stacked_say_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [[1, 2], [3], None]}), tmp_path / "a.parquet")
    for decode, message in ((dict, "cannot be stacked"), (lambda row: row["v"], "cannot be stacked")):
        with pytest.raises(BadInput, match=message):
            next(Feed(open_source(shards(tmp_path, decode=decode))).epoch(0))


# TFRecord


def test_features_of_one_value_are_lists_where_the_first_record_has_several(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(examples({"x": [1, 2]}, {"x": [3, 4]}))
    assert batch(tmp_path)["x"].tolist() == [[1, 2], [3, 4]]
    (tmp_path / "b.tfrecord").write_bytes(examples({"x": [5]}))
    with pytest.raises(BadInput, match=r"column 'x' is large_list.* in .*a.tfrecord, and .*b.tfrecord has it as int64"):
        batch(tmp_path)


def test_a_batch_whose_records_have_one_value_is_a_list_where_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, block=1, piece=4)  # each record is a batch of its own
    (tmp_path / "a.tfrecord").write_bytes(examples({"x": [1, 2]}, {"x": [3]}))
    with pytest.raises(BadInput, match="column 'x' have different shapes"):
        batch(tmp_path)
    (tmp_path / "a.tfrecord").write_bytes(examples({"x": [3]}, {"x": [1, 2]}))
    with pytest.raises(BadInput, match="column 'x' of .*a.tfrecord is large_list.* in some rows, and int64 in others"):
        batch(tmp_path)


# Lines


def test_csv_is_what_pythons_reader_says(tmp_path: Path) -> None:
    text = 'a,b,c\r\n1,"x, ""y""",0.5\r\n\r\n-2,,1e3\r\n\n3,"""",.5'
    (tmp_path / "a.csv").write_bytes(text.encode())
    expected = list(csv.DictReader(io.StringIO(text)))
    found = rows(tmp_path / "a.csv")
    assert [(str(row["a"]), row["b"], row["c"]) for row in found] == [
        (row["a"], row["b"], float(row["c"])) for row in expected
    ]
    assert batch(tmp_path / "a.csv")["a"].dtype == torch.int64


@settings(deadline=None, max_examples=80)
@given(
    values=st.lists(st.sampled_from(["1", "", '"a"', '"a, b"', '""""', "ß"]), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    piece=st.integers(1, 20),
)
def test_lines_are_counted_as_they_are_read(tmp_path_factory, values, end, last, piece):  # type: ignore[no-untyped-def]
    """Empty lines anywhere, with any ends, in pieces of any size: rows of CSV and JSON where they hold anything."""
    folder = tmp_path_factory.mktemp("lines")
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, block=2 * piece, piece=piece)
        for suffix, lines in [
            ("csv", ["x", *values]),
            ("jsonl", [json.dumps({"x": value}) if value else "" for value in values]),
            ("jsonl", [json.dumps({"x": value}) if value else " \t" for value in values]),
            ("txt", values),
        ]:
            text = end.join(lines) + end * (last and bool(lines))
            (folder / f"a.{suffix}").write_bytes(text.encode())
            if suffix == "txt":
                split = text.replace("\r\n", "\n").split("\n")
                expected = split[:-1] if split[-1] == "" else split
            elif suffix == "csv":
                expected = [row[0] for row in list(csv.reader(io.StringIO(text)))[1:] if row]
            else:
                expected = [json.loads(line)["x"] for line in text.splitlines() if line.strip()]
            found = [next(iter(row.values())) for row in rows(folder / f"a.{suffix}")]
            assert [str(value) for value in found] == [str(value) for value in expected]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_quoted_line_end_is_refused_by_its_file_before_training(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, block=20, piece=piece)
    (tmp_path / "a.csv").write_text('x,y\n1,"one"\n2,"two\nlines"\n3,three\n')
    with pytest.raises(BadInput, match=r"a\.csv has a line's end inside a quoted value, after its row \d+"):
        open_source(shards(tmp_path))
    (tmp_path / "a.csv").write_text('x,y\n1,5" pipe\n2,6" pipe\n3,"7"" pipe"\n')  # quotes inside values are none
    assert list(batch(tmp_path)["y"]) == ['5" pipe', '6" pipe', '7" pipe']


def test_columns_are_divided_as_suffix_and_header_say(tmp_path: Path) -> None:
    for name, text, columns in [
        ("a.tsv", "x\ty, z\n1\ta,b\n", ["x", "y, z"]),
        ("b.csv", "x\ty\n1\ta,b\n", ["x", "y"]),
        ("c.csv", 'x,"y\tz"\n1,"a\tb"\n', ["x", "y\tz"]),
    ]:
        (tmp_path / name).write_text(text)
        assert list(rows(tmp_path / name)[0]) == columns


def test_types_are_those_of_a_files_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_GUESSED_BYTES", 20)
    (tmp_path / "long.csv").write_text(f"x,y\n{'1' * 15},{'a' * 100}\n2,b\n")  # a line that is longer
    assert [row["y"] for row in rows(tmp_path / "long.csv")] == ["a" * 100, "b"]
    (tmp_path / "blank.csv").write_text("x\n" + "\n" * 100 + "7\n")
    assert rows(tmp_path / "blank.csv") == [{"x": 7}]
    (tmp_path / "blank.txt").write_text("\n" * 30)
    assert rows(tmp_path / "blank.txt") == [{"text": ""}] * 30
    for suffix, text, message in [
        ("csv", "x\n" + "1\n" * 30 + "1.5\n", r"a\.csv, after its row \d+: .*1\.5"),
        ("jsonl", '{"x": 1}\n' * 30 + '{"x": "a"}\n', r"a\.jsonl, after its row \d+: "),
    ]:
        (tmp_path / f"a.{suffix}").write_text(text)
        with pytest.raises(BadInput, match=message):
            batch(tmp_path / f"a.{suffix}")


def test_lines_of_any_length(tmp_path: Path) -> None:
    """Also of more than the megabyte that a reader takes at once."""
    text = "a" * 3_000_000
    (tmp_path / "a.csv").write_text(f"x,y\n1,{text}\n2,b\n")
    assert [row["y"] for row in rows(tmp_path / "a.csv")] == [text, "b"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"y": text}) + '\n{"y": "b"}\n')
    assert [row["y"] for row in rows(tmp_path / "a.jsonl")] == [text, "b"]
    (tmp_path / "a.txt").write_text(f"{text}\nb")
    assert [row["text"] for row in rows(tmp_path / "a.txt")] == [text, "b"]


def test_json_lines_of_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1, "y": [1.5]}\n{"y": [2], "x": 2}\n')
    assert rows(path) == [{"x": 1, "y": [1.5]}, {"x": 2, "y": [2.0]}]
    path.write_text('{"x": 1}\n{"x": 2, "z": 3}\n')
    with pytest.raises(BadInput, match="column 'z' of .* has missing values"):
        batch(path)
    assert batch(path, columns=["x"])["x"].tolist() == [1, 2]
    with pytest.raises(BadInput, match="has no column 'w'"):
        batch(path, columns=["w"])
    for text in ('{"x": 1}\n{"x": 2', '{"x": 1}\n[2]\n', '{"x":\n1}\n', "hello\n"):
        path.write_text(text)
        with pytest.raises(BadInput, match=r"a\.jsonl"):
            batch(path)


def test_more_than_one_object_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1} {"x": 2}\n')
    with pytest.raises(BadInput, match=r"1 lines of .*a\.jsonl hold 2 rows, after its row 0: write one row a line"):
        batch(tmp_path)


def test_text_that_is_not_utf8_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    with pytest.raises(BadInput, match=r"cannot read .*a\.txt, after its row 0: .*utf-8"):
        batch(tmp_path)


# Tar


def test_rows_are_neighbours_of_one_name_as_webdataset_says(tmp_path: Path) -> None:
    members = {
        "./__meta__/info.json": b"{}",
        "train/000.jpg": b"j0",
        "train/000.seg.PNG": b"s0",
        "train/__notes__": b"",
        "train/001.jpg": b"j1",
        "README": b"no row",
        "train/001.seg.png": b"s1",
        "train/.hidden.jpg": b"no row",
        "a.b/c__d__e/002.jpg": b"j2",
        "a.b/c__d__e/002.seg.png": b"s2",
        "x__y__/002.jpg": b"j3",
        "x__y__/002.seg.png": b"s3",
    }
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    assert rows(tmp_path / "a.tar") == [
        {"__key__": "train/000", "jpg": b"j0", "seg.png": b"s0"},
        {"__key__": "train/001", "jpg": b"j1", "seg.png": b"s1"},
        {"__key__": "a.b/c__d__e/002", "jpg": b"j2", "seg.png": b"s2"},
        {"__key__": "x__y__/002", "jpg": b"j3", "seg.png": b"s3"},
    ]


LONG = "/".join(["directory"] * 30)


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("small", [False, True])
def test_names_of_any_length_in_every_kind_of_tar(
    tmp_path: Path, kind: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block begins with such a row: its name stands before its header."""
    if small:
        small_blocks(monkeypatch, block=1, piece=4)
    folders = ["short", "directory/" * 14 + "sub"] + ([] if kind == tarfile.USTAR_FORMAT else [LONG, "größe"])
    members = {f"{folder}/{i:03}.txt": b"%d" % i for i in range(5) for folder in folders}
    (tmp_path / "a.tar").write_bytes(tar_bytes(members, format=kind))
    assert [(row["__key__"] + ".txt", row["txt"]) for row in rows(tmp_path / "a.tar")] == list(members.items())


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, kind in [
            ("d.x", tarfile.DIRTYPE),
            ("l.txt", tarfile.SYMTYPE),
            ("h.txt", tarfile.LNKTYPE),
            ("f.txt", tarfile.FIFOTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "a.txt", 0 if kind != tarfile.LNKTYPE else 5000
            archive.addfile(info)
        for name in ("a.txt", "b.txt"):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 1, {"comment": "ß", "mtime": "1.5"}
            archive.addfile(info, io.BytesIO(name[:1].encode()))
    (tmp_path / "a.tar").write_bytes(made.getvalue())
    assert [row["txt"] for row in rows(tmp_path / "a.tar")] == [b"a", b"b"]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kind=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), piece=st.integers(4, 3000))
def test_members_are_those_of_pythons_library(tmp_path_factory, data, kind, piece):  # type: ignore[no-untyped-def]
    sizes = data.draw(st.lists(st.integers(0, 1500), min_size=1, max_size=8))
    folders = st.sampled_from(["", "a/", LONG + "/", "ä/"])
    members = {f"{data.draw(folders)}{i}.bin": bytes([i]) * size for i, size in enumerate(sizes)}
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    path.write_bytes(tar_bytes(members, format=kind))
    with pytest.MonkeyPatch.context() as patch, tarfile.open(path) as archive:
        small_blocks(patch, block=piece, piece=piece)
        found = {row["__key__"] + ".bin": row["bin"] for row in rows(path)}
        assert found == {one.name: archive.extractfile(one).read() for one in archive}  # type: ignore[union-attr]


def test_members_of_more_than_8_gb(tmp_path: Path) -> None:
    """Their size is binary, in GNU's and in pax' way. The file has a hole in place of the data."""
    huge = (8 << 30) + 5
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("a.bin")
        info.size = huge
        with open(tmp_path / "a.tar", "wb") as file:
            file.write(info.tobuf(kind))
            begin = file.tell()
            file.seek(-(-huge // 512) * 512, 1)
            file.write(tar_bytes({"b.bin": b"x"}))
        first = shard_file(str(tmp_path / "a.tar")).blocks()[0]
        last = shard_file(str(tmp_path / "a.tar")).blocks()[-1]
        assert (first.rows, first.bytes) == (1, begin + -(-huge // 512) * 512)
        assert (last.first, last.rows) == (1, 1)
        (tmp_path / "a.tar").unlink()


def test_rows_with_other_members_name_row_and_member(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes({"0.txt": b"a", "0.cls": b"1", "1.txt": b"b"}))
    with pytest.raises(BadInput, match=r"'1' in .*a\.tar has no member \.cls, and other rows have one \(it has txt\)"):
        batch(tmp_path)
    assert batch(tmp_path, columns="txt")["txt"] == ["a", "b"]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("0.txt"))
    (tmp_path / "a.tar").write_bytes(made.getvalue())
    with pytest.raises(BadInput, match=r"0\.txt stands twice in a row of .*a\.tar"):
        batch(tmp_path)


def test_members_become_what_their_suffix_says(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(6.0).reshape(2, 3))
    members: dict[str, bytes] = {}
    for i in range(2):
        members |= {f"{i}.cls": b"%d\n" % i, f"{i}.txt": "ß".encode(), f"{i}.json": b'{"k": [1]}'}
        members |= {f"{i}.x.npy": array.getvalue(), f"{i}.bin": b"\x00", f"{i}.class": b"-1"}
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    found = batch(tmp_path)
    assert found["cls"].tolist() == [0, 1]
    assert found["class"].tolist() == [-1, -1]
    assert found["txt"] == ["ß", "ß"]
    assert found["json"] == [{"k": [1]}] * 2
    assert torch.equal(found["x.npy"], torch.arange(6, dtype=torch.float64).reshape(1, 2, 3).repeat(2, 1, 1))
    assert found["bin"] == [b"\x00"] * 2
    assert found["__key__"] == ["0", "1"]


def test_images(tmp_path: Path) -> None:
    from PIL import Image as image

    def encoded(array: Any, suffix: str) -> bytes:
        made = io.BytesIO()
        image.fromarray(array).save(made, suffix)
        return made.getvalue()

    colours = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    alpha = np.concatenate([colours, np.full((2, 4, 1), 255, np.uint8)], 2)
    depth = np.array([[0, 1000], [40_000, 65_535]], np.uint16)
    members = {
        "0.png": encoded(colours, "png"),
        "0.a.png": encoded(alpha, "png"),
        "0.g.png": encoded(colours[:, :, 0], "png"),
        "0.d.png": encoded(depth, "png"),
        "0.jpg": encoded(np.full((8, 8, 3), 77, np.uint8), "jpeg"),
    }
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    found = batch(tmp_path)
    assert found["png"].dtype == torch.uint8
    assert found["png"][0].tolist() == found["a.png"][0].tolist() == colours.tolist()
    assert found["g.png"][0].tolist() == colours[:, :, 0].tolist()
    assert found["d.png"][0].tolist() == depth.tolist()  # not cut to 8 bits
    assert found["jpg"][0].tolist() == np.full((8, 8, 3), 77).tolist()


def test_members_that_are_not_what_their_suffix_says(tmp_path: Path) -> None:
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], object))
    for name, data, message in [
        ("0.cls", b"one", r"a member \.cls cannot be decoded"),
        ("0.json", b"{", r"a member \.json cannot be decoded"),
        ("0.txt", b"\xff", r"a member \.txt cannot be decoded"),
        ("0.npy", pickled.getvalue(), r"a member \.npy cannot be decoded"),
        ("0.npy", b"", r"a member \.npy cannot be decoded"),
        ("0.png", b"no image", r"a member \.png cannot be decoded"),
        ("0.cls", b"9" * 30, r"column 'cls' holds numbers .* 64 bits"),
        ("0.pkl", b"", r"members \.pkl may hold pickled objects, which are never loaded"),
        ("0.x.pth", b"", r"members \.x\.pth may hold pickled objects"),
    ]:
        (tmp_path / "a.tar").write_bytes(tar_bytes({name: data}))
        with pytest.raises(BadInput, match=message):
            batch(tmp_path)


def test_arrays_of_different_shapes_ask_for_collate(tmp_path: Path) -> None:
    members = {}
    for i in (1, 2):
        made = io.BytesIO()
        np.save(made, np.zeros(i))
        members[f"{i}.npy"] = made.getvalue()
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    with pytest.raises(BadInput, match=r"rows of column 'npy' have different shapes \(\[1\], \[2\]\)"):
        batch(tmp_path)
    source = open_source(shards(tmp_path), collate=lambda rows: torch.tensor([len(row["npy"]) for row in rows]))
    assert sorted(next(Feed(source).epoch(0)).batch.tolist()) == [1, 2]


def test_decode_gets_the_members_as_they_are(tmp_path: Path) -> None:
    """Pickled ones, too: what becomes of them is the user's."""
    (tmp_path / "a.tar").write_bytes(tar_bytes({"0.pkl": b"p0", "1.pkl": b"p1"}))
    assert batch(tmp_path, decode=lambda row: (row["__key__"], row["pkl"])) == [("0", "1"), (b"p0", b"p1")]


# Damage


def rows_or_none(path: Path) -> list[dict[str, Any]] | None:
    """None: an error that names the file."""
    with contextlib.suppress(BadInput):
        return rows(path)
    with pytest.raises(BadInput, match=re.escape(path.name)):
        rows(path)
    return None


@pytest.mark.parametrize("suffix", BYTES_OF)
def test_every_cut_names_the_file_or_leaves_whole_lines(tmp_path: Path, suffix: str) -> None:
    """Of a file that ends too early, nothing is read, but for formats of which every beginning is a file."""
    data, path = BYTES_OF[suffix](range(30)), tmp_path / f"a.{suffix}"
    path.write_bytes(data)
    whole = rows(path)
    drawn = random.Random(0)
    for cut in sorted({*drawn.sample(range(len(data)), 40), len(data) - 1, len(data) // 2}):
        path.write_bytes(data[:cut])
        found = rows_or_none(path)
        if found is not None:
            assert suffix not in ("parquet", "arrow")
            if suffix in ("tar", "tar.gz"):  # behind the rows and the mark of the end
                assert found == whole
            elif suffix in ("csv", "tsv", "jsonl", "txt"):
                assert found[: len(found) - 1] == whole[: max(0, len(found) - 1)]
            else:
                assert found == whole[: len(found)]


FLIPPED = ["tfrecord", "tfrecord.gz", "tar.gz", "parquet", "checked.parquet", "arrow", "stream.arrow", "tar"]


@pytest.mark.parametrize("suffix", FLIPPED)
def test_flipped_bits_never_end_in_anything_but_rows_or_an_error(tmp_path: Path, suffix: str) -> None:
    """Formats with checksums give the rows or an error that names the file; headers of tars have one, too.

    Not in a footer of Parquet, which has none: there, pyarrow itself may end the process.
    """
    path = tmp_path / f"a.{suffix}"
    if suffix == "checked.parquet":
        pq.write_table(table(range(12)), path, write_page_checksum=True)
        data = path.read_bytes()
    else:
        data = BYTES_OF[suffix](range(12))
        path.write_bytes(data)
    whole = rows(path)
    drawn = random.Random(1)
    footer = 8 + int.from_bytes(data[-8:-4], "little") if "parquet" in suffix else 0
    errors = 0
    for _ in range(150):
        at = drawn.randrange(len(data) - footer)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :])
        found = rows_or_none(path)
        errors += found is None
        if found is not None and suffix in ("tfrecord", "tfrecord.gz", "tar.gz", "checked.parquet"):
            assert found == whole
        if found is not None and suffix == "tar":
            assert [row["__key__"] for row in found] == [row["__key__"] for row in whole]
    assert errors > 5


@pytest.mark.parametrize(
    "bad", [b"0 path=a\n", b"x", b"99 path=a\n", b"5 a=", b"-3 path=a\n", b"12 size=abc\n", b"12 size=-99\n", b" " * 9]
)
def test_damaged_values_of_pax_are_an_error_and_no_endless_loop(tmp_path: Path, bad: bytes) -> None:
    info = tarfile.TarInfo("h")
    info.type, info.size = tarfile.XHDTYPE, len(bad)
    data = info.tobuf(tarfile.USTAR_FORMAT) + bad.ljust(512, b"\x00") + tar_bytes({"a.txt": b"x"})
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(BadInput, match=r"cannot read .*a\.tar as tar: the header at byte [\d,]+ is damaged"):
        rows(tmp_path / "a.tar")


def test_a_negative_size_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    header = bytearray(tar_bytes({"a.txt": b"x"}))
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512, as binary
    header[148:156] = b"%06o\x00 " % (256 + sum(header[:148]) + sum(header[156:512]))
    (tmp_path / "a.tar").write_bytes(bytes(header))
    with pytest.raises(BadInput, match="is damaged"):
        rows(tmp_path / "a.tar")


def test_a_tar_without_the_mark_of_its_end_is_cut_off(tmp_path: Path) -> None:
    """Between two rows: nothing else would tell that rows are missing."""
    data = tar_bytes({"a.txt": b"x", "b.txt": b"y"})
    (tmp_path / "a.tar").write_bytes(data[:1024])
    with pytest.raises(BadInput, match="cut off at byte 1,024, where the mark of its end is missing"):
        rows(tmp_path / "a.tar")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data[:1024]))
    with pytest.raises(BadInput, match="the mark of its end is missing"):
        rows(tmp_path / "a.tar.gz")


def test_files_that_are_none_of_their_format(tmp_path: Path) -> None:
    for name, message in [
        ("a.parquet", "cannot read .*a.parquet as Parquet"),
        ("a.arrow", "cannot read .*a.arrow as Arrow"),
        ("a.tfrecord", "record 0 of .*a.tfrecord is damaged"),
        ("a.tar", "cannot read .*a.tar as tar: the header at byte 0"),
        ("a.tar.gz", "cannot read .*a.tar.gz as tar: it cannot be unpacked"),
        ("a.jsonl", "cannot read .*a.jsonl"),
    ]:
        (tmp_path / name).write_bytes(b"this is no such file. " * 100)
        with pytest.raises(BadInput, match=message):
            open_source(shards(tmp_path / name))
