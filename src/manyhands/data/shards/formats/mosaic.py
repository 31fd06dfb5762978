"""Mosaic's MDS shards: a block is about BLOCK_BYTES of neighbouring samples.

A file is, little-endian: the number of samples n, where each begins and the last ends ((n + 1) uint32), a JSON object
with the columns' names, encodings and sizes, and the samples. A sample is the sizes of its columns of no fixed size
(uint32 each), then the columns' bytes. `index.json` beside the files repeats what they say themselves, and is not read.
Source: mosaicml-streaming, `streaming/base/format/mds` (https://github.com/mosaicml/streaming).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, Block, ShardFile
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_SUFFIXES = {"jpeg": "jpg", "png": "png", "json": "json", "pkl": "pkl"}
"""Encodings whose bytes are decoded as members of a tar are, by the suffix that stands for the same."""


class _Column(NamedTuple):
    name: str
    encoding: str
    size: int | None  # bytes; None: each sample says it


@dataclass(frozen=True)
class _Header:
    columns: list[_Column]
    begins: np.ndarray[Any, np.dtype[np.int64]]
    """[n + 1] where samples begin; the last ends at the last."""


class Mosaic(ShardFile):
    tells_rows = True

    @cached_property
    def _header(self) -> _Header:
        try:
            (many,) = struct.unpack("<I", self.file.read(0, 4))
            begins = np.frombuffer(self.file.read(4, 4 + 4 * (many + 1)), "<u4").astype(np.int64)
            config = json.loads(self.file.read(4 + 4 * (many + 1), int(begins[0])))
            given = zip(config["column_names"], config["column_encodings"], config["column_sizes"], strict=True)
            columns = [_Column(name, encoding, size or None) for name, encoding, size in given]
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise self._damaged(f"its header is damaged ({error})") from error
        if (np.diff(begins) < 0).any() or begins[-1] != self.file.size:
            raise self._damaged(f"its samples end at byte {begins[-1]:,}, and it has {self.file.size:,} bytes")
        return _Header(columns, begins)

    @override
    def types(self) -> dict[str, pa.DataType]:
        return {column.name: self._type(column) for column in self._header.columns}

    @override
    def suffixes(self, columns: Sequence[str]) -> dict[str, str]:
        encodings = {one.name: one.encoding for one in self._header.columns}
        return {name: _SUFFIXES[encodings[name]] for name in columns if encodings[name] in _SUFFIXES}

    @override
    def blocks(self) -> list[Block]:
        begins = self._header.begins
        blocks, first = [], 0
        while first < len(begins) - 1:
            after = int(np.searchsorted(begins, begins[first] + BLOCK_BYTES, side="left"))
            after = min(max(after, first + 1), len(begins) - 1)
            size = int(begins[after] - begins[first])
            blocks.append(Block(first, after - first, int(begins[first]), size, size))
            first = after
        return blocks

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        import pyarrow as pa

        self.file.check()
        begins = self._header.begins
        first, end = block.first + start, block.first + block.rows
        while first < end:
            after = int(np.searchsorted(begins, begins[first] + PIECE_BYTES, side="left"))
            after = min(max(after, first + 1), end)
            data = self.file.read(int(begins[first]), int(begins[after]))
            samples = [data[begins[i] - begins[first] : begins[i + 1] - begins[first]] for i in range(first, after)]
            values = list(zip(*map(self._split, samples, range(first, after)), strict=True))
            held = {
                column.name: self._array(column, own) for column, own in zip(self._header.columns, values, strict=True)
            }
            yield pa.RecordBatch.from_arrays([held[name] for name in names], names=list(names))
            first = after

    def _split(self, sample: bytes, number: int) -> Iterator[bytes]:
        """The bytes of each column of a sample."""
        open_sizes = sum(column.size is None for column in self._header.columns)
        found, at = [], 4 * open_sizes
        try:
            sizes = iter(struct.unpack(f"<{open_sizes}I", sample[:at]))
        except struct.error as error:
            raise self._damaged(f"sample {number:,} is cut off") from error
        for column in self._header.columns:
            size = next(sizes) if column.size is None else column.size
            found.append(sample[at : at + size])
            at += size
        if at != len(sample):
            raise self._damaged(f"the columns of sample {number:,} have {at:,} bytes, and it has {len(sample):,}")
        return iter(found)

    def _type(self, column: _Column) -> pa.DataType:
        import pyarrow as pa

        kind, _, options = column.encoding.partition(":")
        if kind == "str":
            return pa.large_string()
        if kind == "int":
            return pa.int64()
        if kind in _SCALARS:
            return pa.from_numpy_dtype(np.dtype(kind))
        if kind == "ndarray":
            dtype, _, shape = options.partition(":")
            if not shape:
                raise BadInput(
                    f"column {column.name!r} of {self.file.url} holds arrays whose shape differs by row (encoding {column.encoding}): read the "
                    "other columns (columns=), or write it with a shape (ndarray:float32:3,32)"
                )
            found = pa.from_numpy_dtype(np.dtype(dtype))
            for size in reversed([int(one) for one in shape.split(",")]):
                found = pa.list_(found, size)
            return found
        return pa.large_binary()

    def _array(self, column: _Column, values: Sequence[bytes]) -> pa.Array:
        import pyarrow as pa

        kind, _, options = column.encoding.partition(":")
        if kind == "str":
            try:
                return pa.array([value.decode() for value in values], pa.large_string())
            except UnicodeDecodeError as error:
                raise self._damaged(f"column {column.name!r} holds what is no text ({error})") from error
        if kind == "int" or kind in _SCALARS:
            return pa.array(np.frombuffer(b"".join(values), "int64" if kind == "int" else kind))
        if kind == "ndarray":
            dtype, _, text = options.partition(":")
            shape = [int(one) for one in text.split(",")]
            found = pa.array(np.frombuffer(b"".join(values), dtype))
            if len(found) != len(values) * math.prod(shape):
                raise self._damaged(f"column {column.name!r} holds arrays of another shape than {text}")
            for size in reversed(shape):
                found = pa.FixedSizeListArray.from_arrays(found, size)
            return found
        return pa.array(values, pa.large_binary())

    def _damaged(self, how: str) -> BadInput:
        return BadInput(f"cannot read {self.file.url} as a Mosaic shard: {how}. Write the file again, or leave it out")
