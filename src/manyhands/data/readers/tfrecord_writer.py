"""TFRecord files of `tf.train.Example`, written without TensorFlow. The format is described in `tfrecords.py`, which reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.data.readers.tfrecords import masked_crc
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_BYTES, _FLOAT, _INT64 = 1, 2, 3  # fields of Feature
_FIRST, _SECOND = b"\x0a", b"\x12"  # the tags of fields 1 and 2, whose values say how long they are
_SEVEN = np.uint64(7)


def stored_type(kind: pa.DataType) -> pa.DataType | None:
    """The Arrow type as which values of `kind` are read again; None where an Example cannot hold them."""
    import pyarrow as pa

    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = None if _is_list(kind.value_type) else stored_type(kind.value_type)
        return None if inner is None else pa.large_list(inner)
    if types.is_integer(kind) or types.is_boolean(kind):
        return pa.int64()
    if types.is_floating(kind):
        return pa.float32()
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return pa.binary()
    return None


def records(batch: pa.RecordBatch, first: int) -> Iterator[bytes]:
    """A record a row, with its lengths and checksums. first: the number that errors give to the first row.

    Raises BadInput, naming column and row, for a missing value and an empty list, which an Example cannot tell apart,
    and for a whole number that does not fit into 64 bits; and where google-crc32c is missing.
    """
    columns = [_features(name, batch.column(i), first) for i, name in enumerate(batch.schema.names)]
    for features in zip(*columns, strict=True):
        example = _field(_FIRST, b"".join(features))
        length = len(example).to_bytes(8, "little")
        yield b"".join((length, _checksum(length), example, _checksum(example)))


def _checksum(data: bytes) -> bytes:
    return masked_crc(data).to_bytes(4, "little")


def _features(name: str, column: Any, first: int) -> Iterator[bytes]:
    """The entry of each row in the map of features."""
    kind = stored_type(column.type)
    assert kind is not None
    values, counts = column, np.ones(len(column), np.int64)
    if _is_list(column.type):
        _refuse(name, column.is_null(), first, "has no value")
        if hasattr(column.type, "list_size"):
            counts *= column.type.list_size
        else:
            counts = np.asarray(column.value_lengths()).astype(np.int64)
        if len(empty := np.flatnonzero(counts == 0)):
            raise BadInput(
                f"column {name!r} has an empty list in row {first + int(empty[0]):,}, and a TFRecord file cannot hold it: leave the row "
                "out, or write .parquet"
            )
        values, kind = column.flatten(), kind.value_type
    _refuse(name, values.is_null(), first, "has no value", counts)
    key = _field(_FIRST, name.encode())
    for field, payload in _lists(name, values, kind, np.cumsum([0, *counts]), first):
        yield _field(_FIRST, key + _field(_SECOND, _field(bytes([field << 3 | 2]), payload)))


def _lists(name: str, values: Any, kind: pa.DataType, ends: Any, first: int) -> Iterator[tuple[int, bytes]]:
    """(the field of Feature, the bytes of its list) of each row; row i has values[ends[i]:ends[i + 1]]."""
    import pyarrow as pa

    spans = zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    if pa.types.is_binary(kind):
        encoded = [_field(_FIRST, value) for value in values.cast(pa.large_binary()).to_pylist()]
        yield from ((_BYTES, b"".join(encoded[start:stop])) for start, stop in spans)
    elif pa.types.is_floating(kind):
        raw = np.asarray(values.to_numpy(zero_copy_only=False)).astype("<f4").tobytes()
        yield from ((_FLOAT, _field(_FIRST, raw[4 * start : 4 * stop])) for start, stop in spans)
    else:
        numbers = np.asarray(values.to_numpy(zero_copy_only=False))
        if numbers.dtype == np.uint64 and len(large := np.flatnonzero(numbers > np.iinfo(np.int64).max)):
            row = int(np.searchsorted(ends, large[0], side="right")) - 1
            raise BadInput(
                f"column {name!r} has {numbers[large[0]]} in row {first + row:,}, and TFRecord's whole numbers have 64 bits with a sign: "
                "write .parquet"
            )
        raw, places = _varints(numbers.astype(np.int64).view(np.uint64))
        yield from ((_INT64, _field(_FIRST, raw[places[start] : places[stop]])) for start, stop in spans)


def _varints(values: np.ndarray[Any, Any]) -> tuple[bytes, list[int]]:
    """(all numbers encoded, where each begins, and the end): seven bits a byte, the lowest first."""
    parts = (values[:, None] >> (_SEVEN * np.arange(10, dtype=np.uint64))) & np.uint64(127)  # [values, 10]
    lengths = 10 - np.argmax(parts[:, ::-1] != 0, axis=1)
    lengths[values == 0] = 1
    used = np.arange(10) < lengths[:, None]
    more = np.arange(10) < lengths[:, None] - 1
    raw = (parts.astype(np.uint8) | (more.astype(np.uint8) << 7))[used]
    return raw.tobytes(), np.cumsum([0, *lengths]).tolist()


def _field(tag: bytes, data: bytes) -> bytes:
    length, encoded = len(data), bytearray(tag)
    while length >= 128:
        encoded.append(length & 127 | 128)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + data


def _refuse(name: str, missing: Any, first: int, what: str, counts: Any = None) -> None:
    found = np.flatnonzero(np.asarray(missing))
    if len(found):
        row = found[0] if counts is None else np.searchsorted(np.cumsum(counts), found[0], side="right")
        raise BadInput(
            f"column {name!r} {what} in row {first + int(row):,}, and a TFRecord file cannot hold that: fill or drop missing values"
        )


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
