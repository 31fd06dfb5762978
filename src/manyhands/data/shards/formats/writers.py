"""How rows are written in each format: Parquet and Arrow in blocks, TFRecord as Examples, tar in webdataset's layout."""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np
from typing_extensions import override

from manyhands.data.readers import tfrecord_writer
from manyhands.data.readers.tables import arrow_array
from manyhands.data.readers.tfrecords import masked_crc
from manyhands.data.shards.decode import DECODERS
from manyhands.data.shards.formats.tar import KEY, row_of
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

Encoder = Callable[[Any], list[bytes]]  # the values of a column -> the members


@dataclass
class ShardWriter(ABC):
    """Writes the rows of one file, which `close` completes."""

    in_blocks: ClassVar[bool] = False
    """Whether the format has row groups, whose size the user can choose."""
    file: BinaryIO
    schema: pa.Schema
    block_bytes: int

    @staticmethod
    @abstractmethod
    def changes(schema: pa.Schema) -> list[str]:
        """What will be read otherwise than it is: `x: double becomes float`. BadInput, naming the column, for what the
        format cannot hold."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch, first: int) -> None:
        """first: the number of the first row among all rows that are written."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file's contents."""

    def abandon(self) -> None:
        """Close a file that is not completed, whatever it says."""
        with suppress(OSError):
            self.file.close()


@dataclass
class _Blocks(ShardWriter):
    """Rows are held until they are a block."""

    in_blocks = True
    _writer: Any = field(init=False)  # Arrow's
    _held: list[pa.RecordBatch] = field(default_factory=list)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._writer = self._open()

    @override
    def write(self, batch: pa.RecordBatch, first: int) -> None:
        if self._held and self._bytes + batch.nbytes > self.block_bytes:
            self._flush()
        self._held.append(batch)
        self._bytes += batch.nbytes

    @override
    def close(self) -> None:
        if self._held:
            self._flush()
        self._writer.close()

    @override
    def abandon(self) -> None:
        import pyarrow as pa

        with suppress(
            OSError, pa.ArrowException
        ):  # a writer that is dropped writes its end, or complains that it cannot
            self._writer.close()
        super().abandon()

    def _flush(self) -> None:
        import pyarrow as pa

        self._write_block(pa.Table.from_batches(self._held))
        self._held, self._bytes = [], 0

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _write_block(self, rows: pa.Table) -> None: ...


class ParquetWriter(_Blocks):
    @override
    def _open(self) -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetWriter(self.file, self.schema)

    @staticmethod
    @override
    def changes(schema: pa.Schema) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for column in schema:
            try:
                pq.write_table(pa.schema([column]).empty_table(), pa.BufferOutputStream())
            except pa.ArrowException as error:
                raise BadInput(
                    f"column {column.name!r} is {column.type}, which Parquet cannot hold: {error}"
                ) from error
        return []

    @override
    def _write_block(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=rows.num_rows)


class ArrowWriter(_Blocks):
    @override
    def _open(self) -> Any:
        import pyarrow as pa

        return pa.ipc.new_file(self.file, self.schema)

    @staticmethod
    @override
    def changes(schema: pa.Schema) -> list[str]:
        return []

    @override
    def _write_block(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.combine_chunks(), max_chunksize=rows.num_rows)


class TFRecordWriter(ShardWriter):
    @staticmethod
    @override
    def changes(schema: pa.Schema) -> list[str]:
        masked_crc(b"")  # whether its package is here
        changed = []
        for column in schema:
            stored = tfrecord_writer.stored_type(column.type)
            if stored is None:
                raise BadInput(
                    f"column {column.name!r} is {column.type}, and a TFRecord file holds whole numbers, float32, bytes, and flat lists of "
                    "one of these: leave it out with columns=, or write .parquet"
                )
            if not _reads_alike(column.type, stored):
                changed.append(f"{column.name}: {column.type} becomes {stored}")
        return changed

    @override
    def write(self, batch: pa.RecordBatch, first: int) -> None:
        self.file.writelines(tfrecord_writer.records(batch, first))

    @override
    def close(self) -> None:
        return


def _reads_alike(kind: Any, stored: Any) -> bool:
    """Whether two types differ at most in how lists are stored, not in what is in them."""
    import pyarrow as pa

    inner, other = getattr(kind, "value_type", kind), getattr(stored, "value_type", stored)
    return bool(inner == other or (pa.types.is_large_binary(inner) and pa.types.is_binary(other)))


@dataclass
class TarWriter(ShardWriter):
    """A member a value: texts as `.txt`, numbers and lists of numbers as `.npy`, others as `.json`; bytes as they are, also
    whole numbers under names that stand for them, such as `cls`. Rows without a column `__key__` are numbered."""

    _members: dict[str, tuple[str, Encoder]] = field(init=False)
    _last: str = ""  # key

    def __post_init__(self) -> None:
        self._members = tar_members(self.schema)

    @staticmethod
    @override
    def changes(schema: pa.Schema) -> list[str]:
        import pyarrow as pa

        members = tar_members(schema)
        renamed = [f"{column}: is called {name}" for column, (name, _) in members.items() if name != column]
        return renamed + [
            f"{column.name}: {column.type} becomes int64"
            for column in schema
            if column.name in members and _is_number(column.name, column.type) and column.type != pa.int64()
        ]

    @override
    def write(self, batch: pa.RecordBatch, first: int) -> None:
        names = batch.schema.names
        for name, column in zip(names, batch.columns, strict=True):
            if column.null_count:
                row = first + int(np.flatnonzero(np.asarray(column.is_null()))[0])
                raise BadInput(
                    f"column {name!r} has no value in row {row:,}, and every row of a tar must have all members: fill or drop missing values"
                )
        numbers = (f"{first + i:09d}" for i in range(batch.num_rows))
        keys = batch.column(KEY).to_pylist() if KEY in names else numbers
        members = [encode(batch.column(name)) for name, (_, encode) in self._members.items()]
        suffixes = [name for name, _ in self._members.values()]
        for number, (key, *values) in enumerate(zip(keys, *members, strict=True), first):
            self._check(key, number)
            for suffix, data in zip(suffixes, values, strict=True):
                info = tarfile.TarInfo(f"{key}.{suffix}")
                info.size, info.mode = len(data), 0o644
                self.file.write(info.tobuf(tarfile.GNU_FORMAT))
                self.file.write(data + bytes(-len(data) % tarfile.BLOCKSIZE))

    @override
    def close(self) -> None:
        self.file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _check(self, key: str, row: int) -> None:
        if key == self._last or row_of(f"{key}.x") != (key, "x"):
            why = "is that of the row before" if key == self._last else "cannot be a member's name before its first dot"
            raise BadInput(
                f"the {KEY} of row {row:,}, {key!r}, {why}: make the keys different, without dots, or leave {KEY} out, and rows are numbered"
            )
        self._last = key


def tar_members(schema: pa.Schema) -> dict[str, tuple[str, Encoder]]:
    """{column: (the suffix of its members, what makes them)}. BadInput, naming the column, for what cannot be one."""
    found: dict[str, tuple[str, Encoder]] = {}
    for column in schema:
        if column.name == KEY:
            continue
        suffix, encode = _encoder(column.name, column.type)
        name = column.name.lower()
        member = name if suffix in ("", name.rpartition(".")[2]) else f"{name}.{suffix}"
        if row_of(f"0.{member}") != ("0", member):
            raise BadInput(
                f"column {column.name!r} cannot be a suffix of members of a tar: rename it, or write .parquet"
            )
        if taken := [other for other, (theirs, _) in found.items() if theirs == member]:
            raise BadInput(
                f"columns {taken[0]!r} and {column.name!r} would both be members .{member}: rename one of them"
            )
        found[column.name] = member, encode
    if not found:
        raise BadInput("a tar needs a column beside __key__: give one, or write .parquet")
    return found


def _encoder(name: str, kind: pa.DataType) -> tuple[str, Encoder]:
    """(the suffix by which such values are decoded, "" for bytes, and how they are encoded)"""
    import pyarrow as pa

    types, suffix = pa.types, name.lower().rpartition(".")[2]
    decoder = DECODERS.get(suffix)
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "", lambda column: column.to_pylist()
    if types.is_string(kind) or types.is_large_string(kind):
        known = decoder in (bytes.decode, json.loads)
        return suffix if known else "txt", lambda column: [value.encode() for value in column.to_pylist()]
    if _is_number(name, kind):
        return suffix, lambda column: [b"%d" % value for value in column.to_pylist()]
    if _is_of_numbers(kind):
        return "npy", lambda column: [_npy(name, column.slice(i, 1)) for i in range(len(column))]
    if _is_json(kind):
        return "json", lambda column: [json.dumps(value).encode() for value in column.to_pylist()]
    raise BadInput(
        f"column {name!r} is {kind}, and a tar holds bytes, texts, numbers, and what JSON can say: leave it out with columns=, or write .parquet"
    )


def _npy(name: str, row: Any) -> bytes:
    """One value, with the shape that its lists have."""
    file = io.BytesIO()
    np.save(file, np.asarray(arrow_array(row, f"column {name!r}")[0]), allow_pickle=False)
    return file.getvalue()


def _is_number(name: str, kind: Any) -> bool:
    """Whether members of this name are whole numbers in digits."""
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) and DECODERS.get(name.lower().rpartition(".")[2]) is int)


def _is_of_numbers(kind: Any) -> bool:
    import pyarrow as pa

    while (inner := getattr(kind, "value_type", None)) is not None and not pa.types.is_dictionary(kind):
        kind = inner
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_json(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or _is_of_numbers(kind))


WRITERS: Mapping[str, type[ShardWriter]] = {
    ".parquet": ParquetWriter,
    ".arrow": ArrowWriter,
    ".tfrecord": TFRecordWriter,
    ".tar": TarWriter,
}
"""By the format's name in FORMATS."""
