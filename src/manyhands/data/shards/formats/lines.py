"""Files by lines: text (a column `text`), CSV whose first line names the columns, JSON objects. A block is about BLOCK_BYTES.

A value of CSV or JSON cannot hold a line's end. Empty lines are rows of text, and are no rows of CSV and JSON.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, Block, ShardFile
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
        with self.file.stream(self.begin, None, _GUESSED_BYTES) as stream:
            head = stream.read(_GUESSED_BYTES)
        if self.begin + len(head) < self.file.size:
            head = head[: head.rfind(b"\n") + 1]
        return {field.name: field.type for field in self._parsed(head, (), 0).schema} if head.strip() else {}

    @override
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        first = rows = 0
        begin = at = self.begin
        last = b"\n"
        with self.file.stream(self.begin, None, PIECE_BYTES) as stream:
            while piece := stream.read1(PIECE_BYTES):
                if at + len(piece) - begin > BLOCK_BYTES and (cut := piece.rfind(b"\n") + 1):
                    rows += self._count(last + piece[:cut])
                    blocks.append(Block(first, rows, begin, at + cut - begin, at + cut - begin))
                    first, rows, begin = first + rows, 0, at + cut
                    at, last, piece = at + cut, b"\n", piece[cut:]
                rows += self._count(last + piece)
                at, last = at + len(piece), piece[-1:] or last
        rows += last != b"\n"  # the last line has no end
        return [*blocks, Block(first, rows, begin, at - begin, at - begin)] if rows else blocks

    @override
    def whole(self) -> Block:
        return super().whole()._replace(at=self.begin, bytes=self.file.size - self.begin)

    def _count(self, piece: bytes) -> int:
        """The lines that end in piece[1:], of which piece[0] is the byte before."""
        data = np.frombuffer(piece, np.uint8)
        ends = data == _END
        many = int(np.count_nonzero(ends[1:]))
        if not self.empty_lines:
            many -= int(np.count_nonzero(ends[1:] & ends[:-1]))
            many -= piece.count(b"\n\r\n")
        return many

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        self.file.check()
        behind, left, number = 0, b"", 0
        with self.file.stream(block.at, block.at + block.bytes, PIECE_BYTES) as stream:
            while piece := stream.read1(PIECE_BYTES):
                lines = left + piece
                cut = lines.rfind(b"\n") + 1
                lines, left = lines[:cut], lines[cut:]
                if lines:
                    table = self._parsed(lines, names, block.first + number)
                    number += table.num_rows
                    yield from self._after(table, start, behind)
                    behind = number
        if left:
            yield from self._after(self._parsed(left, names, block.first + number), start, behind)

    @staticmethod
    def _after(table: pa.Table, start: int, behind: int) -> Iterator[pa.RecordBatch]:
        kept = table.slice(max(0, start - behind))
        if kept.num_rows:
            yield from kept.combine_chunks().to_batches()

    def _parsed(self, lines: bytes, names: Sequence[str], row: int) -> pa.Table:
        import pyarrow as pa

        try:
            return self.parse(lines, names)
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeDecodeError) as error:
            raise BadInput(
                f"cannot read {self.file.url}, near its row {row:,}: {error}. Write the lines again, or leave the file out"
            ) from error


class Text(_Lines):
    empty_lines = True

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

    @cached_property
    def _types(self) -> dict[str, pa.DataType]:
        return super().types()

    @override
    def types(self) -> dict[str, pa.DataType]:
        return self._types

    @override
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        from pyarrow import csv

        convert = csv.ConvertOptions()
        if names:  # of rows to be read, whose types are known
            convert = csv.ConvertOptions(column_types=self.types(), include_columns=list(names))
        delimiter = "\t" if b"\t" in self.header and b"," not in self.header else ","
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=False)
        return csv.read_csv(io.BytesIO(self.header + lines), csv.ReadOptions(use_threads=False), parse, convert)


class Json(_Lines):
    @cached_property
    def _types(self) -> dict[str, pa.DataType]:
        return super().types()

    @override
    def types(self) -> dict[str, pa.DataType]:
        return self._types

    @override
    def parse(self, lines: bytes, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa
        from pyarrow import json

        schema = pa.schema(list(self.types().items())) if names else None
        parse = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error" if names else "infer")
        read = json.ReadOptions(use_threads=False, block_size=max(1 << 20, len(lines)))
        table = json.read_json(io.BytesIO(lines), read, parse)
        return table.select(list(names)) if names else table
