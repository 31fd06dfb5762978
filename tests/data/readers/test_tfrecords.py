"""data/readers/tfrecords.py and tfrecord_writer.py: records and their checksums, Examples as columns, and what is broken."""

import base64
import gzip
import io
import struct
import sys
import zlib
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from fuzzing import Damage, bounded, survive
from manyhands.data.readers import tfrecord_writer, tfrecords
from manyhands.errors import BadInput
from refusals import refused
from tfrecord_files import _message, example, examples, records

# Of a file that TensorFlow's own writer made of b"foo" and b"bar"
FOO_BAR = base64.b64decode("AwAAAAAAAACwmUkOZm9vYYq+/gMAAAAAAAAAsJlJDmJhckYA5cg=")


def read(file: bytes, names: list[str] | None = None, start: int = 0, stop: int | None = None) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for batch in tfrecords.read(io.BytesIO(file), "a.tfrecord", names, start, stop):
        for name, values in batch.to_pydict().items():
            found.setdefault(name, []).extend(values)
    return found


def count(file: bytes) -> int:
    return tfrecords.count(io.BytesIO(file), "a.tfrecord")


def test_framing_and_checksums_are_those_of_the_format() -> None:
    assert records(b"foo", b"bar") == FOO_BAR
    assert count(FOO_BAR) == 2
    zeros = (0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8  # RFC 3720, B.4: the CRC32C of 32 bytes of zeros
    assert tfrecords.masked_crc(bytes(32)) == zeros % 2**32
    file = records(bytes(0x088B1F))  # a length that looks like gzip is a length
    assert file.startswith(b"\x1f\x8b\x08")
    assert count(file) == 1


def test_features_are_columns() -> None:
    for packed in (True, False):
        file = examples(
            {"x": [0.5, -2.0], "y": [-1], "name": [b"a"], "n": [1, 300, -(2**63)]},
            {"x": [3.5, 4.0], "y": [2**63 - 1], "name": [b""], "n": [0, 2**40, 7]},
            packed=packed,
        )
        wanted = {
            "x": [[0.5, -2.0], [3.5, 4.0]],
            "y": [-1, 2**63 - 1],
            "name": [b"a", b""],
            "n": [[1, 300, -(2**63)], [0, 2**40, 7]],
        }
        assert read(file, ["x", "y", "name", "n"]) == read(file) == wanted, packed
        assert list(read(file, ["y"])) == ["y"]
    assert read(examples({"x": [1]}, {"x": [2, 3]}), ["x"]) == {"x": [[1], [2, 3]]}
    known = example({"x": [7]})
    unknown = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x02hi"  # fields of every wire type
    assert read(records(unknown + known + unknown)) == {"x": [7]}


def test_a_range_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecords, "BATCH_ROWS", 4)
    plain = examples(*({"x": [i]} for i in range(11)))
    for file in (plain, gzip.compress(plain)):
        assert count(file) == 11
        assert read(file) == {"x": list(range(11))}
        assert read(file, ["x"], 3, 9) == {"x": list(range(3, 9))}
        assert read(file, ["x"], 5, 5) == {}
        assert read(file, ["x"], 11) == {}
        assert [batch.num_rows for batch in tfrecords.read(io.BytesIO(file), "a")] == [4, 4, 3]
    file = examples(*({"x": [0.5] * 200} for _ in range(4)))
    assert [batch.num_rows for batch in tfrecords.read(io.BytesIO(file), "a", piece=1000)] == [2, 2]
    for file in (b"", gzip.compress(b"")):
        assert count(file) == 0
        assert read(file) == {}


def test_damage_names_its_record() -> None:
    """Every cut, every flipped byte, and every cut of an Example."""
    whole = examples({"x": [1]}, {"x": [2]})
    half = len(whole) // 2
    for end in range(half + 1, len(whole)):
        refused("record 1 of a.tfrecord is cut off", read, whole[:end])
        refused("record 1 of a.tfrecord is cut off", count, whole[:end])
    refused("of a.tfrecord cannot be unpacked", read, gzip.compress(whole)[:-9])
    for i in range(half, len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 4
        refused("record 1 of a.tfrecord is damaged", read, bytes(broken))
    whole = example({"x": [1, 2, -3], "y": [0.5, 1.5]})
    for end in range(1, len(whole)):
        refused("record 1 of a.tfrecord", read, examples({"x": [1]}) + records(whole[:end]), ["x"])


def test_what_is_no_example_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, why in [
        (records(b"\x0b"), "has the wire type 3"),
        (records(b"foo"), "is not a tf.train.Example"),
        (records(b"\xff" * 11), "a number is cut off"),
        (records(b"\x0a\x0d\x0a\x0b\x0a\x01x\x12\x06\x1a\x04\x0a\x02\x01\xff"), "an int64_list is cut off"),
        (records(b"\x0a\x0e\x0a\x0c\x0a\x01x\x12\x07\x12\x05\x0a\x03\x01\x02\x03"), "a float_list is cut off"),
        (records(b"\x0a\x05\x0a\x03\x0a\x01\xff"), "not UTF-8"),
        (records(b"\x0a\x05\x0a\x03\x0a\x01x"), "has no values in feature 'x'"),
        (records(b""), "has no features"),
        (examples({"x": [1]}, {"y": [1]}), "record 1 of a.tfrecord has no feature 'x'; it has y"),
        (examples({"x": [1]}, {"x": [1.0]}), "has 'x' as float_list, and earlier records have it as int64_list"),
    ]:
        refused(why, read, file)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecords._crc32c.cache_clear()
    refused(r"pip install 'manyhands\[tfrecord\]'", read, FOO_BAR)


ROWS = [{"x": [1.5, 2.5], "y": [-1], "name": [b"one"]}, {"x": [3.0, 4.0], "y": [1 << 62], "name": [b"two"]}]


def test_files_that_are_cut_turned_and_spliced_are_rows_or_an_error(inputs: int) -> None:
    file = examples(*ROWS)
    valid = [file, file + file, records(b"", b"\x0a\x00"), gzip.compress(file), zlib.compress(file)]
    messages = {packed: [example(row, packed) for row in ROWS] for packed in (True, False)}
    damage = Damage(1)

    def drawn(number: int) -> bytes:
        if number % 2:
            return damage.of_bytes(*valid)
        made = messages[number % 4 == 0]  # damage that no checksum tells: made before the file was written
        return records(*(damage.of_bytes(one) if damage.random() < 0.7 else one for one in made))

    def read_and_count(data: bytes) -> None:
        assert sum(batch.num_rows for batch in tfrecords.read(io.BytesIO(data), "the file")) == count(data)

    with bounded(256):
        taken, refusals = survive(read_and_count, map(drawn, range(inputs)), BadInput)
    assert min(taken, refusals) > inputs // 20


EDGES = [0, 1, -1, 127, 128, 300, 2**31, 2**63 - 1, -(2**63)]


def written(columns: dict[str, Any]) -> bytes:
    return b"".join(tfrecord_writer.records(pa.RecordBatch.from_pydict(columns), 0))


def read_again(columns: dict[str, Any]) -> pa.RecordBatch:
    (batch,) = tfrecords.read(io.BytesIO(written(columns)), "a.tfrecord", list(columns))
    return batch


def test_protobuf_reads_every_feature() -> None:
    """Also of lists whose bytes take more than one byte to count; one Example has the bytes of protobuf."""
    assert written({"x": [5]}) == examples({"x": [5]})
    assert written({"x": pa.array([[0.5, -2.0]], pa.list_(pa.float32()))}) == examples({"x": [0.5, -2.0]})
    assert written({"x": [b"ab"]}) == examples({"x": [b"ab"]})
    file = written({"n": [list(range(-200, 200))], "s": ["ü" * 100], "f": pa.array([1.5], pa.float16())})
    (length,) = struct.unpack("<Q", file[:8])
    example = _message(True)()
    example.ParseFromString(file[12 : 12 + length])
    feature = example.features.feature
    assert list(feature["n"].int64_list.value) == list(range(-200, 200))
    assert list(feature["s"].bytes_list.value) == [("ü" * 100).encode()]
    assert list(feature["f"].float_list.value) == [1.5]
    assert len(file) == 8 + 4 + length + 4
    crc = google_crc32c.value(file[:8])
    assert file[8:12] == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def test_types_are_read_again_as_stored_type_says() -> None:
    for column, again in [
        (pa.array(EDGES), EDGES),
        (pa.array([EDGES, EDGES[::-1]]), [EDGES, EDGES[::-1]]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([3, 4], pa.uint8()), [3, 4]),
        (pa.array([0.1, 2.0]), [float(np.float32(0.1)), 2.0]),
        (pa.array(["a", ""]), [b"a", b""]),
        (pa.array([[1], [2, 3]]), [[1], [2, 3]]),
        (pa.array([["a"], ["b", "c"]]), [[b"a"], [b"b", b"c"]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), [[1, 2], [3, 4]]),
    ]:
        batch = read_again({"x": column})
        assert batch.to_pydict() == {"x": again}, column.type
        assert batch.schema.field("x").type == tfrecord_writer.stored_type(column.type)
    kinds = [pa.list_(pa.list_(pa.float32())), pa.struct([("a", pa.int64())]), pa.timestamp("s"), pa.null()]
    for kind in [*kinds, pa.decimal128(5, 2), pa.map_(pa.string(), pa.int64())]:
        assert tfrecord_writer.stored_type(kind) is None, kind


def test_a_slice_writes_its_own_rows() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [[1], [2, 3], [4, 5, 6], [7]], "y": [[b"a"], [b"b"], [b"c"], [b"d"]]})
    file = b"".join(tfrecord_writer.records(batch.slice(1, 2), 1))
    (found,) = tfrecords.read(io.BytesIO(file), "a", ["x", "y"])
    assert found.to_pydict() == {"x": [[2, 3], [4, 5, 6]], "y": [b"b", b"c"]}


def test_rows_that_cannot_be_written_are_named() -> None:
    for column, words in [
        (pa.array([1, None]), "column 'x' has no value in row 11"),
        (pa.array([[1], None]), "column 'x' has no value in row 11"),
        (pa.array([[1, 2], [3, None]]), "column 'x' has no value in row 11"),
        (pa.array([[1], []]), "column 'x' has an empty list in row 11"),
        (pa.array([1, 2**63], pa.uint64()), "column 'x' has 9223372036854775808 in row 11"),
        (pa.array([[1, 2], [2**63]], pa.list_(pa.uint64())), "in row 11"),
    ]:
        batch = pa.RecordBatch.from_pydict({"x": column})
        refused(words, lambda batch: list(tfrecord_writer.records(batch, 10)), batch, case=column)
