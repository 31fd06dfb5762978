"""data/readers/tfrecords.py: records and their checksums, Examples as columns, and what is broken."""

from __future__ import annotations

import base64
import gzip
import io
import sys
from typing import Any

import pytest

from manyhands.data.readers import tfrecords
from manyhands.errors import BadInput
from tfrecord_files import example, examples, records

# Of a file that TensorFlow's own writer made of b"foo" and b"bar"
FOO_BAR = base64.b64decode("AwAAAAAAAACwmUkOZm9vYYq+/gMAAAAAAAAAsJlJDmJhckYA5cg=")


def read(file: bytes, names: list[str] | None = None, start: int = 0, stop: int | None = None) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for batch in tfrecords.read(io.BytesIO(file), "a.tfrecord", names, start, stop):
        for name, values in batch.to_pydict().items():
            found.setdefault(name, []).extend(values)
    return found


def test_framing_and_checksums_are_those_of_the_format() -> None:
    assert records(b"foo", b"bar") == FOO_BAR
    assert tfrecords.count(io.BytesIO(FOO_BAR), "a") == 2
    zeros = (0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8  # RFC 3720, B.4: the CRC32C of 32 bytes of zeros
    assert tfrecords.masked_crc(bytes(32)) == zeros % 2**32


@pytest.mark.parametrize("packed", [True, False])
def test_features_are_columns(packed: bool) -> None:
    file = examples(
        {"x": [0.5, -2.0], "y": [-1], "name": [b"a"], "n": [1, 300, -(2**63)]},
        {"x": [3.5, 4.0], "y": [2**63 - 1], "name": [b""], "n": [0, 2**40, 7]},
        packed=packed,
    )
    assert read(file, ["x", "y", "name", "n"]) == {
        "x": [[0.5, -2.0], [3.5, 4.0]],
        "y": [-1, 2**63 - 1],
        "name": [b"a", b""],
        "n": [[1, 300, -(2**63)], [0, 2**40, 7]],
    }
    assert set(read(file)) == {"x", "y", "name", "n"}
    assert list(read(file, ["y"])) == ["y"]


def test_lists_of_other_lengths_stay_lists() -> None:
    assert read(examples({"x": [1]}, {"x": [2, 3]}), ["x"]) == {"x": [[1], [2, 3]]}


@pytest.mark.parametrize("packed", [False, True])
def test_a_range_of_records(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecords, "BATCH_ROWS", 4)
    plain = examples(*({"x": [i]} for i in range(11)))
    file = gzip.compress(plain) if packed else plain
    assert tfrecords.count(io.BytesIO(file), "a") == 11
    assert read(file) == {"x": list(range(11))}
    assert read(file, ["x"], 3, 9) == {"x": list(range(3, 9))}
    assert read(file, ["x"], 5, 5) == {}
    assert read(file, ["x"], 11) == {}
    batches = list(tfrecords.read(io.BytesIO(file), "a"))
    assert [batch.num_rows for batch in batches] == [4, 4, 3]


def test_a_batch_holds_so_many_bytes() -> None:
    file = examples(*({"x": [0.5] * 200} for _ in range(4)))
    assert [batch.num_rows for batch in tfrecords.read(io.BytesIO(file), "a", piece=1000)] == [2, 2]


def test_a_file_without_records() -> None:
    for file in (b"", gzip.compress(b"")):
        assert tfrecords.count(io.BytesIO(file), "a") == 0
        assert read(file) == {}


def test_a_length_that_looks_like_gzip_is_a_length() -> None:
    file = records(bytes(0x088B1F))
    assert file.startswith(b"\x1f\x8b\x08")
    assert tfrecords.count(io.BytesIO(file), "a") == 1


def test_fields_that_nobody_knows_are_passed_over() -> None:
    known = example({"x": [7]})
    unknown = (
        b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x02hi"
    )  # fields 2 to 5, of every wire type
    assert read(records(unknown + known + unknown)) == {"x": [7]}


def test_a_file_that_is_cut_off_names_its_record() -> None:
    whole = examples({"x": [1]}, {"x": [2]})
    half = len(whole) // 2
    for end in range(half + 1, len(whole)):
        with pytest.raises(BadInput, match="record 1 of a.tfrecord is cut off"):
            read(whole[:end])
        with pytest.raises(BadInput, match="record 1 of a.tfrecord is cut off"):
            tfrecords.count(io.BytesIO(whole[:end]), "a.tfrecord")
    with pytest.raises(BadInput, match="of a.tfrecord cannot be unpacked"):
        read(gzip.compress(whole)[:-9])


def test_every_byte_is_checked() -> None:
    whole = examples({"x": [1]}, {"x": [2]})
    half = len(whole) // 2
    for i in range(half, len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 4
        with pytest.raises(BadInput, match="record 1 of a.tfrecord is damaged"):
            read(bytes(broken))


def test_every_cut_of_an_example_is_found() -> None:
    whole = example({"x": [1, 2, -3], "y": [0.5, 1.5]})
    for end in range(1, len(whole)):
        with pytest.raises(BadInput, match="record 1 of a.tfrecord"):
            read(examples({"x": [1]}) + records(whole[:end]), ["x"])


@pytest.mark.parametrize(
    ("file", "why"),
    [
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
    ],
)
def test_what_is_no_example_is_named(file: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        read(file)


def test_without_the_library_of_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecords._crc32c.cache_clear()
    with pytest.raises(BadInput, match=r"pip install 'manyhands\[tfrecord\]'"):
        read(FOO_BAR)
