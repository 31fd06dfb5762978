"""data/shards/formats: what each format's files hold, compared with what their own libraries say."""

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
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards.formats import lines as lines_module
from manyhands.data.shards.formats.by_suffix import FORMATS, format_of, shard_file
from manyhands.data.shards.source import shards
from manyhands.data.shards.table import ShardTable
from manyhands.errors import BadInput
from refusals import refused
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
        for start in {1, block.rows - 1} - {0, block.rows}:
            rest = [row for batch in table.read(i, start) for row in batch.to_pylist()]
            assert str(rest) == str(of_block[start:])  # NaN is not equal to itself
        found += of_block
    return found


def batch(path: Any, **options: Any) -> Any:
    """All rows as one batch, in their own order."""
    (part,) = Feed(open_source(shards(path, shuffle=False, **options)), batch_size=1000).epoch(0)
    return part.batch


def arrow_file(path: Path, table: pa.Table, kind: Any = pa.ipc.new_file, rows: int = 3, **options: Any) -> None:
    with kind(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)


def test_formats_by_suffix() -> None:
    for name, kind in {
        "a.parquet": ".parquet",
        "a.PQ": ".parquet",
        "a.feather": ".arrow",
        "x/train.tfrecord-00001-of-00010": ".tfrecord",
        "a.tfrecords.gz": ".tfrecord",
        "a.tar.gz": ".tar",
        "a.tgz": ".tar",
        "a.tsv": ".csv",
        "a.ndjson": ".jsonl",
        "a.text": ".txt",
    }.items():
        assert format_of(name) == kind, name
        assert type(shard_file(name)) is FORMATS[kind][1], name
    for name in ("a.json", "a.csv.gz", "parquet"):
        assert format_of(name) is None, name
        refused("expected .parquet", shard_file, name)


@pytest.mark.parametrize("suffix", BYTES_OF)
def test_blocks_of_all_sizes_hold_the_same_rows(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 1, 30):
        (path,) = write(tmp_path / str(count), suffix, [count])
        whole = rows(path)
        assert len(whole) == count
        for block, piece in [(1, 4), (100, 30), (700, 200), (10**6, 50)]:
            small_blocks(monkeypatch, block, piece)
            assert rows(path) == whole, (count, block)
            many = len(shard_file(path).blocks())
            if suffix in ("csv", "tsv", "jsonl", "txt", "tar", "tfrecord") and count == 30 and block != 700:
                assert (many == 1) == (block == 10**6) or (suffix == "txt" and block == 100), (many, block)


MIXED = {
    "i": ([1, -2, 3], pa.int32()),
    "flag": ([True, False, True], pa.bool_()),
    "half": ([0.5, 1.5, -2.5], pa.float32()),
    "text": (["a", "", "ß"], pa.string()),
    "bytes": ([b"\x00\xff", b"", b"x"], pa.binary()),
    "money": ([Decimal("1.50"), Decimal("-2.25"), Decimal("0.00")], pa.decimal128(9, 2)),
    "fixed": ([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
    "deep": ([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]], pa.list_(pa.list_(pa.float64()))),
    "day": ([datetime.date(2024, 2, i) for i in (27, 28, 29)], pa.date32()),
    "point": ([{"x": 1, "y": None}, {"x": 2, "y": "b"}, {"x": 3, "y": "c"}], None),
}


@pytest.fixture
def mixed() -> pa.Table:
    """A column of each type."""
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in MIXED.items()})


def test_values_of_all_types(tmp_path: Path, mixed: pa.Table) -> None:
    """Also where they come of the host's cache, and of streams, which may be compressed as files are."""
    coded = mixed.append_column("kind", pa.array(["u", "v", "u"]).dictionary_encode())
    pq.write_table(coded, tmp_path / "a.parquet", row_group_size=2)
    arrow_file(tmp_path / "plain.arrow", coded)
    arrow_file(tmp_path / "packed.arrow", coded, compression="lz4")
    for name in ("a.parquet", "plain.arrow", "packed.arrow"):
        found = batch(tmp_path / name)
        (part,) = Feed(open_source(shards(tmp_path / name, shuffle=True)), batch_size=1000, shuffle=False).epoch(0)
        assert str(found) == str(part.batch), name
        assert list(found) == coded.column_names
        for column, kind in [("i", torch.int32), ("flag", torch.bool), ("half", torch.float32), ("fixed", torch.int64)]:
            assert (found[column].dtype, found[column].tolist()) == (kind, MIXED[column][0]), (name, column)
        assert (found["money"].dtype, found["money"].tolist()) == (torch.float64, [1.5, -2.25, 0.0])
        assert found["deep"].tolist() == MIXED["deep"][0]
        for column in ("text", "bytes", "point"):
            assert list(found[column]) == MIXED[column][0], (name, column)
        assert list(found["kind"]) == ["u", "v", "u"]
        assert [str(day) for day in found["day"]] == ["2024-02-27", "2024-02-28", "2024-02-29"]
    for kind in ("zstd", "lz4"):
        arrow_file(tmp_path / "stream.arrow", mixed, pa.ipc.new_stream, 1, compression=kind)
        names = ["text", "i"]
        assert rows(tmp_path / "stream.arrow", names) == mixed.select(names).to_pylist(), kind
    arrow_file(tmp_path / "stream.arrow", coded, pa.ipc.new_stream)
    refused("is a stream whose column 'kind' has a dictionary", batch, tmp_path / "stream.arrow")


def test_values_that_repeat_count_as_they_are_when_they_are_decoded(tmp_path: Path) -> None:
    """Encoded they take next to nothing, and pieces would be that much larger in memory."""
    table = pa.table({"x": [1] * 20_000, "v": [[0.5] * 4] * 20_000, "t": ["a text of 20 letters"] * 20_000})
    pq.write_table(table, tmp_path / "a.parquet")
    (block,) = shard_file(str(tmp_path / "a.parquet")).blocks()
    assert block.bytes < 20_000
    assert 0.5 * table.nbytes < block.memory < 2 * table.nbytes


def test_names_with_dots_are_columns_of_their_own(tmp_path: Path) -> None:
    table = pa.table({"a.b": [1, 2], "c": [{"d": 1}, {"d": 2}], "a": ["x", "y"]})
    pq.write_table(table, tmp_path / "a.parquet")
    for names in (["a.b"], ["a", "a.b"], ["c", "a.b", "a"]):
        assert rows(tmp_path / "a.parquet", names) == table.select(names).to_pylist()


def test_missing_values_and_uneven_lists_name_file_and_column(tmp_path: Path) -> None:
    for suffix, (values, words) in product(
        ("parquet", "arrow", "jsonl"),
        [
            ([1, None], "has missing values"),
            (["a", None], "has missing values"),
            ([[1, 2], [3]], "lists of 1 to 2 values: pad them"),
            ([[1, 2], None], "has missing values"),
            ([[1, None], [2, 3]], "has missing values"),
        ],
    ):
        path, table = tmp_path / f"a.{suffix}", pa.table({"v": values})
        if suffix == "parquet":
            pq.write_table(table, path)
        elif suffix == "arrow":
            arrow_file(path, table)
        else:
            path.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
        for shuffle in (False, True):
            first = Feed(open_source(shards(path, shuffle=shuffle))).epoch(0)
            refused(f"column 'v' of .*{words}", next, first, case=(suffix, values, shuffle))
    (folder := tmp_path / "several").mkdir()
    for i in (1, 2):
        pq.write_table(pa.table({"v": [[1] * i] * 3}), folder / f"{i}.parquet")
    for shuffle in (False, True):
        first = Feed(open_source(shards(folder, shuffle=shuffle))).epoch(0)
        refused(r"column 'v' have different shapes \(\[1\], \[2\]\)", next, first, case=shuffle)


def test_rows_that_differ_in_shape_go_to_the_users_code(tmp_path: Path) -> None:
    """Lists of different lengths as arrays, missing values as None, nested ones, whatever lies beside them in a batch."""
    given = [
        {"i": i, "tokens": [i] * (i % 4), "tags": ["a"] * (i % 3), "score": None if i % 5 == 0 else i / 2}
        for i in range(40)
    ]
    given = [{**row, "deep": [row["tokens"], [7]], "box": None if row["i"] == 3 else [1.0, 2.0]} for row in given]
    types = {"tokens": pa.list_(pa.int32()), "deep": pa.list_(pa.list_(pa.int16())), "box": pa.list_(pa.float32(), 2)}
    names = ("i", "tags", "score", *types)
    table = pa.table({name: pa.array([row[name] for row in given], types.get(name)) for name in names})
    (folder := tmp_path / "data").mkdir()
    pq.write_table(table, folder / "a.parquet", row_group_size=7)

    def check(seen: list[dict[str, Any]]) -> None:
        assert sorted(int(row["i"]) for row in seen) == list(range(40))
        for row in seen:
            expected = given[int(row["i"])]
            assert row["tokens"].dtype == np.int32
            assert row["tokens"].tolist() == expected["tokens"]
            assert list(row["tags"]) == expected["tags"]
            assert row["score"] == expected["score"]
            assert [list(one) for one in row["deep"]] == expected["deep"]
            assert (None if row["box"] is None else row["box"].tolist()) == expected["box"]
            row["tokens"] += 1  # a row is the caller's own

    seen: list[dict[str, Any]] = []
    for options in ({"shuffle": False}, {"shuffle": True}, {"counted": False, "shuffle": False}, {}):
        collated = open_source(shards(folder, **options), collate=lambda some: seen.extend(some) or 0)
        assert sum(part.rows for part in Feed(collated, batch_size=6).epoch(0)) == 40
        check(seen)
        seen.clear()
        decoded = shards(folder, decode=lambda row: seen.append(row) or row["i"], threads=1, **options)
        batches = [part.batch for part in Feed(open_source(decoded), batch_size=6).epoch(0)]
        assert sorted(torch.cat(batches).tolist()) == list(range(40)), options
        check(seen)
        seen.clear()
    pq.write_table(pa.table({"v": [[1, 2], [3], None]}), folder / "a.parquet")
    for decode in (dict, lambda row: row["v"]):
        refused("cannot be stacked", next, Feed(open_source(shards(folder, decode=decode))).epoch(0))


def test_features_of_one_value_or_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"
    first.write_bytes(examples({"x": [1, 2]}, {"x": [3, 4]}))
    assert batch(tmp_path)["x"].tolist() == [[1, 2], [3, 4]]
    second.write_bytes(examples({"x": [5]}))
    refused("column 'x' is large_list.* in .*a.tfrecord, and .*b.tfrecord has it as int64", batch, tmp_path)
    small_blocks(monkeypatch, block=1, piece=4)  # each record is a batch of its own
    first.write_bytes(examples({"x": [1, 2]}, {"x": [3]}))
    refused("column 'x' have different shapes", batch, first)
    first.write_bytes(examples({"x": [3]}, {"x": [1, 2]}))
    refused("column 'x' of .*a.tfrecord is large_list.* in some rows, and int64 in others", batch, first)


def test_lines_are_counted_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lines anywhere, with any ends, in pieces of any size: rows of CSV and JSON where they hold anything."""
    draw = random.Random(0)
    for number in range(40):
        values = draw.choices(["1", "", "", '"a"', '"a, b"', '""""', "ß"], k=draw.randint(0, 12))
        end, piece = draw.choice(["\n", "\r\n"]), draw.randint(1, 20)
        small_blocks(monkeypatch, block=2 * piece, piece=piece)
        for suffix, lines in [
            ("csv", ["x", *values]),
            ("jsonl", [json.dumps({"x": value}) if value else draw.choice(["", " \t"]) for value in values]),
            ("txt", values),
        ]:
            text = end.join(lines) + end * (number % 2 and bool(lines))
            (path := tmp_path / f"{number}.{suffix}").write_bytes(text.encode())
            if suffix == "txt":
                split = text.replace("\r\n", "\n").split("\n")
                expected = split[:-1] if split[-1] == "" else split
            elif suffix == "csv":
                expected = [row[0] for row in list(csv.reader(io.StringIO(text)))[1:] if row]
            else:
                expected = [json.loads(line)["x"] for line in text.splitlines() if line.strip()]
            found = [next(iter(row.values())) for row in rows(path)]
            assert [str(value) for value in found] == [str(value) for value in expected], (suffix, text, piece)


def test_quotes_and_dividers_of_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    for piece in (1, 7, 10_000):
        small_blocks(monkeypatch, block=20, piece=piece)
        path.write_text('x,y\n1,"one"\n2,"two\nlines"\n3,three\n')
        words = r"a\.csv has a line's end inside a quoted value, after its row \d+"
        refused(words, open_source, shards(path), case=piece)
        path.write_text('x,y\n1,5" pipe\n2,6" pipe\n3,"7"" pipe"\n')  # quotes inside values are none
        assert list(batch(path)["y"]) == ['5" pipe', '6" pipe', '7" pipe'], piece
    for name, text, columns in [
        ("a.tsv", "x\ty, z\n1\ta,b\n", ["x", "y, z"]),
        ("b.csv", "x\ty\n1\ta,b\n", ["x", "y"]),
        ("c.csv", 'x,"y\tz"\n1,"a\tb"\n', ["x", "y\tz"]),
    ]:
        (tmp_path / name).write_text(text)
        assert list(rows(tmp_path / name)[0]) == columns
    path.write_bytes(b'a,b,c\r\n1,"x, ""y""",0.5\r\n\r\n-2,,1e3\r\n\n3,"""",.5')
    columns = {"a": [1, -2, 3], "b": ['x, "y"', "", '"'], "c": [0.5, 1000.0, 0.5]}
    assert rows(path) == [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_types_are_those_of_a_files_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "_GUESSED_BYTES", 20)
    for name, text, found in [
        ("long.csv", f"y\n{'a' * 100}\nb\n", [{"y": "a" * 100}, {"y": "b"}]),  # a line that is longer
        ("blank.csv", "x\n" + "\n" * 100 + "7\n", [{"x": 7}]),
        ("blank.txt", "\n" * 30, [{"text": ""}] * 30),
    ]:
        (tmp_path / name).write_text(text)
        assert rows(tmp_path / name) == found, name
    for suffix, text, words in [
        ("csv", "x\n" + "1\n" * 30 + "1.5\n", r"a\.csv, after its row \d+: .*1\.5"),
        ("jsonl", '{"x": 1}\n' * 30 + '{"x": "a"}\n', r"a\.jsonl, after its row \d+: "),
    ]:
        (tmp_path / f"a.{suffix}").write_text(text)
        refused(words, batch, tmp_path / f"a.{suffix}")


def test_lines_of_any_length(tmp_path: Path) -> None:
    """Also of more than the megabyte that a reader takes at once."""
    text = "a" * 3_000_000
    for name, lines in [
        ("a.csv", f"x,y\n1,{text}\n2,b\n"),
        ("a.jsonl", json.dumps({"y": text}) + '\n{"y": "b"}\n'),
        ("a.txt", f"{text}\nb"),
    ]:
        (tmp_path / name).write_text(lines)
        assert [row.get("y", row.get("text")) for row in rows(tmp_path / name)] == [text, "b"], name


def test_json_lines_of_other_keys_or_forms(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1, "y": [1.5]}\n{"y": [2], "x": 2}\n')
    assert rows(path) == [{"x": 1, "y": [1.5]}, {"x": 2, "y": [2.0]}]
    path.write_text('{"x": 1}\n{"x": 2, "z": 3}\n')
    refused("column 'z' of .* has missing values", batch, path)
    assert batch(path, columns=["x"])["x"].tolist() == [1, 2]
    refused("has no column 'w'", lambda: batch(path, columns=["w"]))
    for text in ('{"x": 1}\n{"x": 2', '{"x": 1}\n[2]\n', '{"x":\n1}\n', "hello\n"):
        path.write_text(text)
        refused(r"a\.jsonl", batch, path, case=text)
    path.write_text('{"x": 1} {"x": 2}\n')
    refused(r"1 lines of .*a\.jsonl hold 2 rows, after its row 0: write one row a line", batch, path)
    (tmp_path / "a.txt").write_bytes(b"ok\n\xff\n")
    refused(r"cannot read .*a\.txt, after its row 0: .*utf-8", batch, tmp_path / "a.txt")


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
    keys = ["train/000", "train/001", "a.b/c__d__e/002", "x__y__/002"]
    expected = [{"__key__": key, "jpg": b"j%d" % i, "seg.png": b"s%d" % i} for i, key in enumerate(keys)]
    assert rows(tmp_path / "a.tar") == expected


def test_members_are_those_of_pythons_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of any length in every kind of tar, also where a block begins with such a row: its name stands before its header."""
    draw = random.Random(0)
    for number in range(40):
        kind, piece = draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]), draw.randint(4, 3000)
        sizes = [draw.choice((0, 512, draw.randint(0, 1500))) for _ in range(draw.randint(1, 8))]
        more = [] if kind == tarfile.USTAR_FORMAT else ["directory/" * 30, "ä/"]
        folders = draw.choices(["", "a/", "directory/" * 14, *more], k=8)
        members = {f"{folders[i]}{i}.bin": bytes([i]) * size for i, size in enumerate(sizes)}
        (path := tmp_path / f"{number}.tar").write_bytes(tar_bytes(members, format=kind))
        small_blocks(monkeypatch, block=piece, piece=piece)
        with tarfile.open(path) as archive:
            wanted = {one.name: archive.extractfile(one).read() for one in archive}
        assert {row["__key__"] + ".bin": row["bin"] for row in rows(path)} == wanted, (kind, piece, sizes)


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.txt")
            info.type, info.linkname, info.size = kind, "a.txt", 0 if kind != tarfile.LNKTYPE else 5000
            archive.addfile(info)
        for name in ("a.txt", "b.txt"):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 1, {"comment": "ß", "mtime": "1.5"}
            archive.addfile(info, io.BytesIO(name[:1].encode()))
    (tmp_path / "a.tar").write_bytes(made.getvalue())
    assert [row["txt"] for row in rows(tmp_path / "a.tar")] == [b"a", b"b"]


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
        first, *_, last = shard_file(str(tmp_path / "a.tar")).blocks()
        assert (first.rows, first.bytes) == (1, begin + -(-huge // 512) * 512)
        assert (last.first, last.rows) == (1, 1)
        (tmp_path / "a.tar").unlink()


def npy(array: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


def test_members_become_what_their_suffix_says(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for i in range(2):
        members |= {f"{i}.cls": b"%d\n" % i, f"{i}.txt": "ß".encode(), f"{i}.json": b'{"k": [1]}'}
        members |= {f"{i}.x.npy": npy(np.arange(6.0).reshape(2, 3)), f"{i}.bin": b"\x00", f"{i}.class": b"-1"}
    (path := tmp_path / "a.tar").write_bytes(tar_bytes(members))
    found = batch(path)
    assert (found["cls"].tolist(), found["class"].tolist()) == ([0, 1], [-1, -1])
    assert torch.equal(found["x.npy"], torch.arange(6, dtype=torch.float64).reshape(1, 2, 3).repeat(2, 1, 1))
    for name, values in [
        ("txt", ["ß"] * 2),
        ("json", [{"k": [1]}] * 2),
        ("bin", [b"\x00"] * 2),
        ("__key__", ["0", "1"]),
    ]:
        assert found[name] == values
    # decode gets the members as they are, pickled ones, too: what becomes of them is the user's
    path.write_bytes(tar_bytes({"0.pkl": b"p0", "1.pkl": b"p1"}))
    assert batch(path, decode=lambda row: (row["__key__"], row["pkl"])) == [("0", "1"), (b"p0", b"p1")]
    path.write_bytes(tar_bytes({f"{i}.npy": npy(np.zeros(i)) for i in (1, 2)}))
    refused(r"rows of column 'npy' have different shapes \(\[1\], \[2\]\)", batch, path)
    source = open_source(shards(path), collate=lambda rows: torch.tensor([len(row["npy"]) for row in rows]))
    assert sorted(next(Feed(source).epoch(0)).batch.tolist()) == [1, 2]


def test_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    def encoded(array: Any, suffix: str = "png") -> bytes:
        made = io.BytesIO()
        image.fromarray(array).save(made, suffix)
        return made.getvalue()

    colours = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    alpha = np.concatenate([colours, np.full((2, 4, 1), 255, np.uint8)], 2)
    depth = np.array([[0, 1000], [40_000, 65_535]], np.uint16)
    grey = np.full((8, 8, 3), 77, np.uint8)
    members = {"0.png": encoded(colours), "0.a.png": encoded(alpha), "0.g.png": encoded(colours[:, :, 0])}
    members |= {"0.d.png": encoded(depth), "0.jpg": encoded(grey, "jpeg")}
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    found = batch(tmp_path)
    assert found["png"].dtype == torch.uint8
    assert found["png"][0].tolist() == found["a.png"][0].tolist() == colours.tolist()
    assert found["g.png"][0].tolist() == colours[:, :, 0].tolist()
    assert found["d.png"][0].tolist() == depth.tolist()  # not cut to 8 bits
    assert found["jpg"][0].tolist() == grey.tolist()


def test_members_that_are_missing_or_not_what_their_suffix_says(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes({"0.txt": b"a", "0.cls": b"1", "1.txt": b"b"}))
    refused(r"'1' in .*a\.tar has no member \.cls, and other rows have one \(it has txt\)", batch, path)
    assert batch(path, columns="txt")["txt"] == ["a", "b"]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("0.txt"))
    path.write_bytes(made.getvalue())
    refused(r"0\.txt stands twice in a row of .*a\.tar", batch, path)
    for name, data, words in [
        ("0.cls", b"one", r"a member \.cls cannot be decoded"),
        ("0.json", b"{", r"a member \.json cannot be decoded"),
        ("0.txt", b"\xff", r"a member \.txt cannot be decoded"),
        ("0.npy", npy(np.array([{}], object)), r"a member \.npy cannot be decoded"),
        ("0.npy", b"", r"a member \.npy cannot be decoded"),
        ("0.png", b"no image", r"a member \.png cannot be decoded"),
        ("0.cls", b"9" * 30, r"column 'cls' holds numbers .* 64 bits"),
        ("0.pkl", b"", r"members \.pkl may hold pickled objects, which are never loaded"),
        ("0.x.pth", b"", r"members \.x\.pth may hold pickled objects"),
    ]:
        path.write_bytes(tar_bytes({name: data}))
        refused(words, batch, path)


def rows_or_none(path: Path) -> list[dict[str, Any]] | None:
    """None: an error that names the file."""
    with contextlib.suppress(BadInput):
        return rows(path)
    refused(re.escape(path.name), rows, path)
    return None


@pytest.mark.parametrize("suffix", [*BYTES_OF, "checked.parquet"])
def test_files_that_are_cut_or_have_flipped_bits_are_rows_or_an_error_that_names_them(
    tmp_path: Path, suffix: str
) -> None:
    """Of a file that ends too early, nothing is read, but for formats of which every beginning is a file.

    Where bits are flipped, formats with checksums give the rows or an error; headers of tars have one, too. Not in a
    footer of Parquet, which has none: there, pyarrow itself may end the process.
    """
    path = tmp_path / f"a.{suffix}"
    if suffix == "checked.parquet":
        pq.write_table(table(range(30)), path, write_page_checksum=True)
    else:
        path.write_bytes(BYTES_OF[suffix](range(30)))
    data, whole, drawn = path.read_bytes(), rows(path), random.Random(0)
    in_lines = suffix in ("csv", "tsv", "jsonl", "txt")
    for cut in sorted({*drawn.sample(range(len(data)), 25), len(data) - 1, len(data) // 2}):
        path.write_bytes(data[:cut])
        found = rows_or_none(path)
        if found is not None:
            assert suffix not in ("parquet", "checked.parquet", "arrow"), cut
            if suffix in ("tar", "tar.gz"):  # behind the rows and the mark of the end
                assert found == whole, cut
            else:
                assert found[: len(found) - in_lines] == whole[: max(0, len(found) - in_lines)], cut
    footer = 8 + int.from_bytes(data[-8:-4], "little") if "parquet" in suffix else 0
    errors = 0
    for _ in range(0 if in_lines else 40):
        at = drawn.randrange(len(data) - footer)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :])
        found = rows_or_none(path)
        errors += found is None
        if found is not None and suffix in ("tfrecord", "tfrecord.gz", "tar.gz", "checked.parquet"):
            assert found == whole, at
        if found is not None and suffix == "tar":
            assert [row["__key__"] for row in found] == [row["__key__"] for row in whole], at
    assert errors > 2 or in_lines


def test_damaged_headers_of_tars_are_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    keys = [b"0 path=a\n", b"x", b"99 path=a\n", b"5 a=", b"-3 path=a\n", b"12 size=abc\n", b"12 size=-99\n", b" " * 9]
    for bad in keys:
        info = tarfile.TarInfo("h")
        info.type, info.size = tarfile.XHDTYPE, len(bad)
        path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bad.ljust(512, b"\x00") + tar_bytes({"a.txt": b"x"}))
        refused(r"cannot read .*a\.tar as tar: the header at byte [\d,]+ is damaged", rows, path, case=bad)
    header = bytearray(tar_bytes({"a.txt": b"x"}))
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512, as binary
    header[148:156] = b"%06o\x00 " % (256 + sum(header[:148]) + sum(header[156:512]))
    path.write_bytes(bytes(header))
    refused("is damaged", rows, path)
    data = tar_bytes({"a.txt": b"x", "b.txt": b"y"})[:1024]  # between two rows: the mark of the end alone is missing
    path.write_bytes(data)
    refused("cut off at byte 1,024, where the mark of its end is missing", rows, path)
    path.with_suffix(".tar.gz").write_bytes(gzip.compress(data))
    refused("the mark of its end is missing", rows, path.with_suffix(".tar.gz"))
