"""data/readers/tfrecord_writer.py: what it writes is what protobuf's own library and the reader read."""

from __future__ import annotations

import io
import struct
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from manyhands.data.readers import tfrecord_writer, tfrecords
from manyhands.errors import BadInput
from tfrecord_files import _message, examples

EDGES = [0, 1, -1, 127, 128, 300, 2**31, 2**63 - 1, -(2**63)]


def written(columns: dict[str, Any]) -> bytes:
    return b"".join(tfrecord_writer.records(pa.RecordBatch.from_pydict(columns), 0))


def read_again(columns: dict[str, Any]) -> dict[str, list[Any]]:
    (batch,) = tfrecords.read(io.BytesIO(written(columns)), "a.tfrecord", list(columns))
    return batch.to_pydict()


def test_one_example_is_the_bytes_of_protobuf() -> None:
    assert written({"x": [5]}) == examples({"x": [5]})
    assert written({"x": pa.array([[0.5, -2.0]], pa.list_(pa.float32()))}) == examples({"x": [0.5, -2.0]})
    assert written({"x": [b"ab"]}) == examples({"x": [b"ab"]})


def test_protobuf_reads_every_feature() -> None:
    """Also of lists whose bytes take more than one byte to count."""
    file = written({"n": [list(range(-200, 200))], "s": ["ü" * 100], "f": pa.array([1.5], pa.float16())})
    (length,) = struct.unpack("<Q", file[:8])
    example = _message(True)()
    example.ParseFromString(file[12 : 12 + length])
    feature = example.features.feature
    assert list(feature["n"].int64_list.value) == list(range(-200, 200))
    assert list(feature["s"].bytes_list.value) == [("ü" * 100).encode()]
    assert list(feature["f"].float_list.value) == [1.5]
    assert len(file) == 8 + 4 + length + 4


def test_whole_numbers_at_their_limits() -> None:
    assert read_again({"n": EDGES}) == {"n": EDGES}
    assert read_again({"n": [EDGES, EDGES[::-1]]}) == {"n": [EDGES, EDGES[::-1]]}


def test_checksums_are_those_of_the_format() -> None:
    file = written({"n": [1, 2, 3]})
    crc = google_crc32c.value(file[:8])
    assert file[8:12] == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


@pytest.mark.parametrize(
    ("column", "again"),
    [
        (pa.array([True, False]), [1, 0]),
        (pa.array([3, 4], pa.uint8()), [3, 4]),
        (pa.array([0.1, 2.0]), [float(np.float32(0.1)), 2.0]),
        (pa.array(["a", ""]), [b"a", b""]),
        (pa.array([[1], [2, 3]]), [[1], [2, 3]]),
        (pa.array([["a"], ["b", "c"]]), [[b"a"], [b"b", b"c"]]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), [[1, 2], [3, 4]]),
    ],
    ids=str,
)
def test_types_are_read_again_as_stored_type_says(column: pa.Array, again: list[Any]) -> None:
    assert read_again({"x": column}) == {"x": again}
    stored = tfrecord_writer.stored_type(column.type)
    (batch,) = tfrecords.read(io.BytesIO(written({"x": column})), "a", ["x"])
    assert batch.schema.field("x").type == stored


def test_a_slice_writes_its_own_rows() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [[1], [2, 3], [4, 5, 6], [7]], "y": [[b"a"], [b"b"], [b"c"], [b"d"]]})
    file = b"".join(tfrecord_writer.records(batch.slice(1, 2), 1))
    (found,) = tfrecords.read(io.BytesIO(file), "a", ["x", "y"])
    assert found.to_pydict() == {"x": [[2, 3], [4, 5, 6]], "y": [b"b", b"c"]}


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.float32())),
        pa.struct([("a", pa.int64())]),
        pa.timestamp("s"),
        pa.decimal128(5, 2),
        pa.map_(pa.string(), pa.int64()),
        pa.null(),
    ],
    ids=str,
)
def test_what_an_example_cannot_hold_has_no_type(kind: pa.DataType) -> None:
    assert tfrecord_writer.stored_type(kind) is None


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), "column 'x' has no value in row 11"),
        (pa.array([[1], None]), "column 'x' has no value in row 11"),
        (pa.array([[1, 2], [3, None]]), "column 'x' has no value in row 11"),
        (pa.array([[1], []]), "column 'x' has an empty list in row 11"),
        (pa.array([1, 2**63], pa.uint64()), "column 'x' has 9223372036854775808 in row 11"),
        (pa.array([[1, 2], [2**63]], pa.list_(pa.uint64())), "in row 11"),
    ],
)
def test_rows_that_cannot_be_written_are_named(column: pa.Array, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        list(tfrecord_writer.records(pa.RecordBatch.from_pydict({"x": column}), 10))
