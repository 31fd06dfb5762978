"""TFRecord files of `tf.train.Example`, read without TensorFlow: records, then their features as Arrow columns.

A record is, little-endian: its length (8 bytes), the masked CRC32C of these (4), its bytes, their masked CRC32C (4).
Source: "TFRecords Format Details", TensorFlow's guide `python_io`. Its bytes are a protocol buffer
(tensorflow/core/example/*.proto):

    Example { Features features = 1 }       Features { map<string, Feature> feature = 1 }
    Feature { oneof { BytesList bytes_list = 1, FloatList float_list = 2, Int64List int64_list = 3 } }
    …List { repeated value = 1 }, numbers packed or not
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 8192
BATCH_BYTES = 16 << 20

_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_GZIP = b"\x1f\x8b"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_BYTES, _FLOAT, _INT64 = 1, 2, 3  # fields of Feature
_KINDS = {_BYTES: "bytes_list", _FLOAT: "float_list", _INT64: "int64_list"}
_WIRES = {_BYTES: _LENGTH, _FLOAT: _FIXED32, _INT64: _VARINT}  # of a single value
_ENDLESS = re.compile(rb"[\x80-\xff]{10}|[\x80-\xff]\Z")  # a varint of more than 10 bytes, or one that is cut off

Feature = tuple[int, list[bytes]]  # the kind, and the values as they are encoded


def count(file: BinaryIO, what: str) -> int:
    """The number of records in a file, by their lengths; data of an unpacked file is not decoded. Errors as `read`."""
    records = _Records(file, what)
    while records.skip():
        pass
    return records.number


def spans(file: BinaryIO, what: str, size: int) -> list[tuple[int, int, int, int]]:
    """(first record, records, first byte, end) of pieces of neighbouring records, of about `size` bytes each.

    A packed file is one piece, since nothing inside can be found without unpacking what is before it. Errors as `read`.
    """
    records, found = _Records(file, what), list[tuple[int, int, int, int]]()
    number = start = at = 0
    while records.skip():
        at = file.tell()
        if not records.packed and at - start >= size:
            found.append((number, records.number - number, start, at))
            number, start = records.number, at
    return found if records.number == number else [*found, (number, records.number - number, start, at)]


def read(
    file: BinaryIO,
    what: str,
    names: Sequence[str] | None = None,
    start: int = 0,
    stop: int | None = None,
    *,
    first: int = 0,
    piece: int = BATCH_BYTES,
) -> Iterator[pa.RecordBatch]:
    """The records [start, stop) as batches of at most BATCH_ROWS rows, or `piece` bytes and one record.

    file: at its beginning, in binary, seekable; plain or gzip'ed. what: its name in errors. names: the features wanted;
        None: those of the first record. first: the number that errors give to the record at its beginning.
    A feature of one value in all rows of a batch is a number (or bytes) a row, else a list.

    Raises BadInput, naming file and record (the first is record 0), for what is cut off or damaged, no Example, or
    without a wanted feature; and where google-crc32c is missing.
    """
    records = _Records(file, what, first)
    start, stop = start + first, None if stop is None else stop + first
    while records.number < start and records.skip():
        pass
    rows: list[dict[str, Feature]] = []
    held = 0
    while (stop is None or records.number < stop) and (data := records.next()) is not None:
        with records.named():
            row = _example(data)
            names = list(row) if names is None else names
            rows.append(_chosen(row, names, rows[0] if rows else None))
        records.number += 1
        held += len(data)
        if len(rows) == BATCH_ROWS or held >= piece:
            yield _batch(rows, names)
            rows, held = [], 0
    if rows:
        yield _batch(rows, names or [])


class _Broken(ValueError):
    """What is wrong with a record."""


class _Records:
    """The records of one file; `number` is that of the next."""

    def __init__(self, file: BinaryIO, what: str, number: int = 0) -> None:
        self.number = number
        self._what = what
        head = file.read(_HEADER.size)
        file.seek(0)
        self.packed = head.startswith(_GZIP) and not _is_header(head)
        self._file = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if self.packed else file

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say which record it is that is broken."""
        try:
            yield
        except _Broken as error:
            raise BadInput(
                f"record {self.number} of {self._what} {error}. Write the file again, or leave it out"
            ) from error

    def skip(self) -> bool:
        """Whether there was one more, which now is behind."""
        with self.named():
            length = self._length()
            if length is None:
                return False
            if len(self._bytes(_CRC.size, after=length)) < _CRC.size:
                raise _Broken("is cut off")
        self.number += 1
        return True

    def next(self) -> bytes | None:
        """The next one's bytes; None at the end."""
        with self.named():
            length = self._length()
            if length is None:
                return None
            data, crc = self._bytes(length), self._bytes(_CRC.size)
            if len(crc) < _CRC.size:
                raise _Broken("is cut off")
            if _CRC.unpack(crc)[0] != masked_crc(data):
                raise _Broken("is damaged: its checksum differs")
            return data

    def _length(self) -> int | None:
        head = self._bytes(_HEADER.size)
        if not head:
            return None
        if len(head) < _HEADER.size:
            raise _Broken("is cut off")
        if not _is_header(head):
            raise _Broken(
                "is damaged, or the file is not a TFRecord file (the checksum of the record's length is wrong)"
            )
        return int(_HEADER.unpack(head)[0])

    def _bytes(self, many: int, after: int = 0) -> bytes:
        """So many, `after` those that are passed over; fewer at the end of the file."""
        try:
            if after:
                self._file.seek(after, os.SEEK_CUR)
            return self._file.read(many)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _Broken(f"cannot be unpacked ({error})") from error


def _is_header(head: bytes) -> bool:
    return len(head) == _HEADER.size and _HEADER.unpack(head)[1] == masked_crc(head[:8])


def masked_crc(data: bytes) -> int:
    """The CRC32C as TFRecord files have it, so that the checksum of data that holds checksums is none of them."""
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise BadInput(f"TFRecord files need google-crc32c ({error}): pip install 'manyhands[tfrecord]'") from error
    return cast(Callable[[bytes], int], google_crc32c.value)


def _example(data: bytes) -> dict[str, bytes]:
    """An Example's features in order, still encoded. The last of equal names counts, as in protocol buffers."""
    found: dict[str, bytes] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            parts = {number: inner for number, wire, inner in _fields(entry) if wire == _LENGTH}
            try:
                found[parts.get(1, b"").decode()] = parts.get(2, b"")
            except UnicodeDecodeError as error:
                raise _Broken(f"is not a tf.train.Example: the name of a feature is not UTF-8 ({error})") from error
    return found


def _feature(data: bytes) -> Feature:
    kind, values = 0, list[bytes]()
    for number, wire, inner in _fields(data):
        if number in _KINDS and wire == _LENGTH:
            values = values if number == kind else []
            kind = number
            values += [value for n, w, value in _fields(inner) if n == 1 and w in (_LENGTH, _WIRES[kind])]
    if kind == _FLOAT and any(len(value) % 4 for value in values):
        raise _Broken("is not a tf.train.Example: a float_list is cut off")
    if kind == _INT64 and any(_ENDLESS.search(value) for value in values):
        raise _Broken("is not a tf.train.Example: an int64_list is cut off")
    return kind, values


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    return (inner for number, wire, inner in _fields(data) if number == wanted and wire == _LENGTH)


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, wire type, bytes of the value) of each field of a message, whether it is known or not."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _LENGTH:
            length, at = _varint(data, at)
            end = at + length
        elif wire == _VARINT:
            _, end = _varint(data, at)
        elif wire in _FIXED_BYTES:
            end = at + _FIXED_BYTES[wire]
        else:
            raise _Broken(f"is not a tf.train.Example: a field has the wire type {wire}")
        if end > len(data):
            raise _Broken("is not a tf.train.Example: a field is cut off")
        yield tag >> 3, wire, data[at:end]
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends: seven bits a byte, the lowest first."""
    if at < len(data) and data[at] < 128:  # what most are
        return data[at], at + 1
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1
    raise _Broken("is not a tf.train.Example: a number is cut off")


def _chosen(row: dict[str, bytes], names: Sequence[str], first: dict[str, Feature] | None) -> dict[str, Feature]:
    """The features wanted, which must have values, of the kinds that they have in the batch's first row."""
    if not names:
        raise _Broken("has no features")
    chosen = {}
    for name in names:
        if name not in row:
            raise _Broken(f"has no feature {name!r}; it has {', '.join(row) or 'none'}")
        chosen[name] = kind, values = _feature(row[name])
        if not any(values) and (kind != _BYTES or not values):
            raise _Broken(f"has no values in feature {name!r}")
        if first is not None and kind != first[name][0]:
            raise _Broken(f"has {name!r} as {_KINDS[kind]}, and earlier records have it as {_KINDS[first[name][0]]}")
    return chosen


def _batch(rows: list[dict[str, Feature]], names: Sequence[str]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [_column(rows[0][name][0], [row[name][1] for row in rows]) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=list(names))


def _column(kind: int, rows: list[list[bytes]]) -> pa.Array:
    """[rows], or a list a row where not all have one value."""
    import pyarrow as pa

    values: Any
    if kind == _BYTES:
        values, counts = pa.array(chain.from_iterable(rows), pa.binary()), [len(row) for row in rows]
    else:
        packed = [b"".join(row) for row in rows]
        if kind == _FLOAT:
            values, counts = np.frombuffer(b"".join(packed), "<f4"), [len(row) // 4 for row in packed]
        else:
            values, counts = _int64s(packed)
    ends = np.cumsum([0, *counts])
    if ends[-1] == len(rows) and all(n == 1 for n in counts):
        return pa.array(values)
    return pa.LargeListArray.from_arrays(ends, values)


def _int64s(packed: list[bytes]) -> tuple[Any, list[int]]:
    """All varints of all rows at once: a byte below 128 ends one."""
    raw = np.frombuffer(b"".join(packed), np.uint8)
    ends = np.flatnonzero(raw < 128) + 1
    starts = np.concatenate([[0], ends[:-1]])
    place = np.arange(len(raw)) - np.repeat(starts, ends - starts)
    values = np.bitwise_or.reduceat((raw & 127).astype(np.uint64) << (7 * place).astype(np.uint64), starts)
    ends_of_rows = np.searchsorted(ends, np.cumsum([len(row) for row in packed]), side="right")
    return values.view(np.int64), np.diff(ends_of_rows, prepend=0).tolist()
