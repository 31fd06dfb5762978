"""Files by lines: text (a column `text`), CSV whose first line names the columns, JSON objects. A block is about BLOCK_BYTES.

A value of CSV or JSON cannot hold a line's end. Empty lines are rows of text, and are no rows of CSV and JSON.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, READ_BYTES, Block, ShardFile
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_GUESSED_BYTES = 1 << 20  # of a file's beginning, from which its columns' types are guessed
_END = ord("\n")


class _Lines(ShardFile):
    begin = 0
    """The byte at which the rows begin."""
    empty_lines = False
    """Whether an empty line is a row."""

    @abstractmethod
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        """Whole lines as columns. Raises ArrowInvalid or UnicodeDecodeError for what is damaged."""

    @override
    def types(self) -> dict[str, pa.DataType]:
        return self._types

    @cached_property
    def _types(self) -> dict[str, pa.DataType]:
        with self.file.stream(self.begin, None, _GUESSED_BYTES) as stream:
            head = lines = b""
            while not lines.strip() and (more := stream.read(_GUESSED_BYTES)):
                head += more
                lines = head if self.begin + len(head) == self.file.size else head[: head.rfind(b"\n") + 1]
        return {field.name: field.type for field in self._parsed(lines, (), 0).schema} if lines.strip() else {}

    @override
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        first = rows = 0
        begin = at = self.begin
        left = b""
        with self.file.stream(self.begin, None, READ_BYTES) as stream:
            while piece := stream.read1(PIECE_BYTES):
                lines, left = _whole_lines(left + piece)
                rows += self.count(lines, first + rows)
                at += len(lines)
                if rows and at - begin >= BLOCK_BYTES:
                    blocks.append(Block(first, rows, begin, at - begin, at - begin))
                    first, rows, begin = first + rows, 0, at
        rows += self.count(left, first + rows)
        at += len(left)
        return [*blocks, Block(first, rows, begin, at - begin, at - begin)] if rows else blocks

    @override
    def whole(self) -> Block:
        return super().whole()._replace(at=self.begin, bytes=self.file.size - self.begin)

    def count(self, lines: bytes, row: int) -> int:
        """The rows of whole lines; of the file's last one the end may be missing. row: the number of the first, for errors."""
        data = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(data == _END)
        if lines and not lines.endswith(b"\n"):
            ends = np.append(ends, len(data))
        if self.empty_lines or not len(ends):
            return len(ends)
        starts = np.concatenate([[0], ends[:-1] + 1])
        return int(np.count_nonzero(np.logical_or.reduceat(self.fills(data), starts)))

    @staticmethod
    def fills(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which bytes make a line more than an empty one."""
        return np.asarray((data != _END) & (data != ord("\r")))

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        self.file.check()
        left, number = b"", 0
        with self.file.stream(block.at, block.at + block.bytes, READ_BYTES) as stream:
            while piece := stream.read1(PIECE_BYTES):
                lines, left = _whole_lines(left + piece)
                rows = self.count(lines, block.first + number)
                yield from self._rows(lines, names, rows, block.first + number, start - number)
                number += rows
        yield from self._rows(left, names, self.count(left, number), block.first + number, start - number)

    def _rows(self, lines: bytes, names: Sequence[str], rows: int, row: int, start: int) -> Iterator[pa.RecordBatch]:
        """Of these lines with so many rows, the first of which is the file's number `row`, those from `start` on."""
        if rows <= max(0, start):
            return
        table = self._parsed(lines, names, row)
        if table.num_rows != rows:
            raise BadInput(
                f"{rows:,} lines of {self.file.url} hold {table.num_rows:,} rows, after its row {row:,}: write one row a line"
            )
        yield from table.slice(max(0, start)).combine_chunks().to_batches()

    def _parsed(self, lines: bytes, names: Sequence[str], row: int) -> pa.Table:
        import pyarrow as pa

        try:
            return self.parse(lines, names)
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError) as error:
            raise BadInput(
                f"cannot read {self.file.url}, after its row {row:,}: {error}. Write the lines again, or leave the file out"
            ) from error


def _whole_lines(data: bytes) -> tuple[bytes, bytes]:
    """(whole lines, what is left of the last)"""
    cut = data.rfind(b"\n") + 1
    return data[:cut], data[cut:]


class Text(_Lines):
    empty_lines = True

    @override
    def types(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"text": pa.large_string()} if self.file.size else {}

    @override
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        texts = lines.decode("utf-8").removesuffix("\n").split("\n")
        return pa.table({"text": pa.array([text.removesuffix("\r") for text in texts], pa.large_string())})


class Csv(_Lines):
    @cached_property
    def header(self) -> bytes:
        with self.file.stream() as stream:
            return stream.readline()

    @property
    def begin(self) -> int:  # type: ignore[override]
        return len(self.header)

    @override
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        from pyarrow import csv

        convert = csv.ConvertOptions()
        if names:  # of rows to be read, whose types are known
            convert = csv.ConvertOptions(column_types=self.types(), include_columns=list(names))
        return self._table(lines, convert)

    @override
    def count(self, lines: bytes, row: int) -> int:
        rows = super().count(lines, row)
        if b'"' in lines and _open_quotes(lines) and self._values_of_lines(lines) != rows:
            raise BadInput(
                f"{self.file.url} has a line's end inside a quoted value, after its row {row:,}: a row must be one line. Write the file "
                "again without such values, or as Parquet"
            )
        return rows

    def _values_of_lines(self, lines: bytes) -> int | None:
        """The rows that a reader finds to which a quoted line's end is no end; None: it finds none."""
        import pyarrow as pa
        from pyarrow import csv

        try:
            return int(self._table(lines, csv.ConvertOptions(check_utf8=False), quoted_ends=True).num_rows)
        except pa.ArrowInvalid:
            return None

    def _table(self, lines: bytes, convert: Any, quoted_ends: bool = False) -> pa.Table:
        from pyarrow import csv

        tabs = self.file.url.lower().endswith(".tsv") or (b"\t" in self.header and b"," not in self.header)
        parse = csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=quoted_ends)
        data = self.header + lines
        read = csv.ReadOptions(use_threads=False, block_size=len(data) + 1)  # or no line may be longer
        return csv.read_csv(io.BytesIO(data), read, parse, convert)


def _open_quotes(lines: bytes) -> bool:
    """Whether any line has an odd number of quotes."""
    data = np.frombuffer(lines, np.uint8)
    return bool(np.any(np.cumsum(data == ord('"'), dtype=np.uint8)[data == _END] % 2))


class Json(_Lines):
    @staticmethod
    @override
    def fills(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(data > ord(" "))

    @override
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa
        from pyarrow import json

        schema = pa.schema(list(self.types().items())) if names else None
        parse = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error" if names else "infer")
        read = json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
        table = json.read_json(io.BytesIO(lines), read, parse)
        return table.select(list(names)) if names else table
