"""Tables in files that every host sees, Parquet and TFRecord: found by fsspec's URLs, dealt by ranges of rows.

All files together are one table, in the order in which they were found. Each of N readers takes a range of its rows, so
that their shares are even whatever the files look like. How many rows a file has is read once, by one of the readers:
from the footer of a Parquet file; a TFRecord file has none, and its records are counted from length to length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands import units
from manyhands.data.readers.tables import arrow_columns
from manyhands.data.sharding import slice_of
from manyhands.data.shards import find as shard_files
from manyhands.data.shards.formats.by_suffix import shard_file
from manyhands.data.shards.formats.parquet import Parquet
from manyhands.data.shards.stored_file import filesystem
from manyhands.data.source import nonempty
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ".parquet, .tfrecord (also .tfrecord.gz), or a folder of these"
_READS_AT_ONCE = 8  # footers: each is a few round trips to the storage, and little else


def find(paths: Sequence[str | Path], kinds: str = KINDS) -> tuple[str, ...]:
    """As `data.shards.find.find`, of Parquet and TFRecord files."""
    return shard_files.find(paths, (".parquet", ".tfrecord"), kinds)


def types_of(files: Sequence[str]) -> dict[str, pa.DataType]:
    """{column: Arrow type} of the first file that has any; for TFRecord of its first record. BadInput without one."""
    for file in files:
        if types := shard_file(file).types():
            return types
    raise BadInput(f"the data files have no rows, and at least one is needed: check {units.listed(files, 3)}")


def count(files: Sequence[str], part: int, parts: int) -> list[int]:
    """The rows of the files part, part + parts, …: what one reader counts for all."""

    def rows(file: str) -> int:
        return sum(block.rows for block in shard_file(file).blocks())

    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        return list(pool.map(rows, files[part::parts]))


def together(counts: Sequence[Sequence[int]]) -> list[int]:
    """The rows of each file, of what every reader counted."""
    files = sum(len(own) for own in counts)
    return [counts[i % len(counts)][i // len(counts)] for i in range(files)]


def dealt(rows: Sequence[int], part: int, parts: int) -> list[tuple[int, int, int]]:
    """(file, first row, end) of rows [part·R // parts, (part + 1)·R // parts) of a table of R; `rows` of each file."""
    return list(_overlaps(rows, *slice_of(sum(rows), part, parts)))


def _overlaps(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(i, first, end): what [start, stop) takes of each piece, where pieces of these sizes are concatenated."""
    for i, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        begin = end - size
        first, last = max(start, begin) - begin, min(stop, end) - begin
        if first < last:
            yield i, first, last


def read(
    files: Sequence[str], rows: Sequence[int], names: Sequence[str], part: int, parts: int
) -> Iterator[pa.RecordBatch]:
    """One reader's part of the table, in order, a bounded number of bytes at a time; of columns `names` alone.

    rows: in each file, as they were counted. Raises BadInput for what cannot be read, and for a file that has changed
        since.
    """
    for i, start, stop in dealt(rows, part, parts):
        seen = 0
        for batch in _rows_of(files[i], start, stop, names):
            seen += batch.num_rows
            yield batch
        if seen != stop - start:
            raise BadInput(
                f"{files[i]} changed while the run read it (rows when counted: {rows[i]}, and now fewer): start again, "
                "and do not change it during a run"
            )


def _rows_of(file: str, start: int, stop: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Rows [start, stop) of one file."""
    shard = shard_file(file)
    blocks = shard.blocks()
    for i, first, last in _overlaps([block.rows for block in blocks], start, stop):
        with closing(shard.read(blocks[i], names, first)) as batches:
            while first < last:
                batch = next(batches).slice(0, last - first)
                first += batch.num_rows
                yield batch


def columns_of(files: Sequence[str], what: str) -> dict[str, np.ndarray[Any, Any]]:
    """{column: array [rows, …]} of the whole table, in this process's memory.

    For more than that holds, stream (Hugging Face's `load_dataset("parquet", data_files=…, streaming=True)`).
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    shards = [shard_file(file) for file in files]
    if isinstance(shards[0], Parquet):
        places = [filesystem(file) for file in files]
        try:
            dataset = ds.dataset([place for _, place in places], filesystem=places[0][0], format="parquet")
            return arrow_columns(dataset.to_table(), what)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput(
                f"cannot read {what} as Parquet: {error}. Check that it is a complete Parquet file"
            ) from error
    names = list(next(filter(None, (shard.types() for shard in shards)), ()))
    batches = [batch for shard in shards for block in shard.blocks() for batch in shard.read(block, names)]
    nonempty(len(batches), what)
    try:
        return arrow_columns(pa.Table.from_batches(batches), what)
    except pa.ArrowInvalid as error:
        raise BadInput(
            f"the features of {what} differ in type or length: {error}. Write every row with the same types and lengths"
        ) from error
