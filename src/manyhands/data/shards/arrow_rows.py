"""Any data as record batches of one schema, in its own order: what `write_shards` writes."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from manyhands.data.batch import PLAIN, describe
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.feed import Feed
from manyhands.data.open_source import is_function, open_source
from manyhands.data.ragged import Ragged
from manyhands.data.readers.arrays import Columns
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.files import numpy_file
from manyhands.data.readers.streams import Stream
from manyhands.data.shards.decode import DECODERS
from manyhands.data.shards.find import find
from manyhands.data.shards.formats import base
from manyhands.data.shards.formats.tar import Tar
from manyhands.data.shards.source import Shards
from manyhands.data.shards.table import ShardTable, counts_soon
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE, _MOST_AT_ONCE = 256, 1 << 16  # rows that are loaded together; of arrays in memory
_ONLY = "x"  # the name of a column that has none


@dataclass(frozen=True, kw_only=True)
class ArrowRows:
    """The rows of some data. They can be read once."""

    schema: pa.Schema
    batches: Generator[pa.RecordBatch, None, None]
    """All have the schema."""
    rows: int | None = None
    """None: nobody knows before the end."""
    memory: int | None = None
    """About as many bytes as all rows have; None: nobody knows."""


def arrow_rows(data: Any, columns: Sequence[str] = (), *, members: bool = False) -> ArrowRows:
    """The rows of whatever `open_source` accepts, in their own order.

    columns: those that are kept; (): all. Data without names, such as a pair of arrays, is given these names instead; by
        default x, or 0, 1, ….
    members: whether members of tars stay bytes; else numbers, texts and arrays are decoded, as their suffixes say.

    Raises BadInput for what cannot become columns, for a column that is not there, for no rows, and, while the rows are
    read, for one that differs from the first.
    """
    while is_function(data):
        data = data()
    if isinstance(data, DistributedFrame | Ragged):
        raise BadInput(
            f"{describe(data)} cannot be written: give arrays, a table, a Dataset or files. A DataFrame of Spark is written by Spark, "
            "df.write.parquet(…)"
        )
    if isinstance(data, str | Path):
        arrays = Path(data).suffix.lower() in (".npz", ".npy")
        data = numpy_file(str(data)) if arrays else Shards(paths=(str(data),))
    if isinstance(data, Shards) and data.decode is None:
        return _of_files(data.paths, columns or data.columns, members)
    if (tables := _tables(data)) is not None:
        batches = (batch for table in tables for batch in table.to_batches())
        return _checked((_chosen(batch, columns) for batch in batches), len(data), getattr(data, "nbytes", None))
    by_row = isinstance(data, Shards)
    source = replace(data, shuffle=False).open(list) if by_row else open_source(data)
    if not by_row and isinstance(source, DatasetRows | Stream):
        by_row, source = True, open_source(data, collate=list)
    at_once = _rows_of_a_piece(source) if isinstance(source, Columns) else _AT_ONCE
    feed = Feed(source, batch_size=source.batch_size or at_once, shuffle=False)
    found = (_of_rows(part.batch) if by_row else _of_columns(part.batch) for part in feed.epoch(0))
    return _checked((_named(batch, columns) for batch in found), source.rows)


def _rows_of_a_piece(source: Columns) -> int:
    row = sum(array.nbytes for array in _of_columns(source.take(range(1))).values())
    return int(max(1, min(_MOST_AT_ONCE, base.PIECE_BYTES // max(1, row))))


def _of_files(paths: Sequence[str], columns: Sequence[str], members: bool) -> ArrowRows:
    files = find(paths)
    counted = counts_soon(files)
    table = ShardTable.of(files, columns, counted=counted)
    table.types  # noqa: B018 - checks the files before anything is written
    if counted:
        batches = (batch for i in range(len(table.blocks)) for batch in table.read(i))
    else:
        batches = (batch for i in range(len(files)) for batch in table.read_whole(i))
    decoded = isinstance(table.files[0], Tar) and not members
    found = map(_decoded, batches) if decoded else batches
    return _checked(found, table.rows, table.memory) if counted else _checked(found, None, table.bytes)


def _checked(batches: Iterable[pa.RecordBatch], rows: int | None, memory: int | None = None) -> ArrowRows:
    """With the schema of the first batch, which all others must have."""
    batches = iter(batches)
    first = next((batch for batch in batches if batch.num_rows), None)
    if first is None:
        raise BadInput("the data has no rows: there is nothing to write")
    schema = first.schema.remove_metadata()
    for column in schema:
        if str(column.type) == "null":
            raise BadInput(
                f"column {column.name!r} has no values in the first {first.num_rows:,} rows, so that its type is not known: leave it out"
            )
    return ArrowRows(schema=schema, batches=_alike(chain([first], batches), schema), rows=rows, memory=memory)


def _alike(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Generator[pa.RecordBatch, None, None]:
    import pyarrow as pa

    row = 0
    for batch in batches:
        if batch.schema.names != schema.names:
            raise BadInput(
                f"a row near {row:,} has the columns {', '.join(batch.schema.names)}, and the first ones have {', '.join(schema.names)}: "
                "give all rows the same columns"
            )
        columns = []
        for column, kind in zip(batch.columns, schema, strict=True):
            if column.type != kind.type and column.null_count < len(column):
                raise BadInput(
                    f"column {kind.name!r} is {column.type} near row {row:,}, and {kind.type} in the first ones: give all rows one type"
                )
            columns.append(column if column.type == kind.type else column.cast(kind.type))
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
        row += batch.num_rows


# -- tables --------------------------------------------------------------------------------------------------------------


def _tables(data: Any) -> Iterator[pa.Table] | None:
    """Of a library's table that knows the types of its columns: Arrow's, pandas' or Hugging Face's. None: it is none."""
    import pyarrow as pa

    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if isinstance(data, pa.Table):
        return iter([data])
    if pandas is not None and isinstance(data, pandas.DataFrame):
        try:
            return iter([pa.Table.from_pandas(data, preserve_index=False)])
        except (pa.ArrowException, TypeError) as error:
            raise BadInput(f"the DataFrame cannot be written: {error}. Give each column one type") from error
    if datasets is not None and isinstance(data, datasets.Dataset):
        rows = data.with_format("arrow")
        return (rows[at : at + _AT_ONCE] for at in range(0, len(rows), _AT_ONCE))
    return None


def _chosen(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    if missing := [name for name in columns if name not in batch.schema.names]:
        raise BadInput(f"the data has no column {missing[0]!r}; it has {', '.join(batch.schema.names)}")
    return batch.select(list(columns)) if columns else batch


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Members of a tar as values. Images and JSON stay as they are, and so does what has no decoder."""
    import pyarrow as pa

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        suffix = name.rpartition(".")[2]
        try:
            if suffix == "json":
                column = column.cast(pa.large_binary()).cast(pa.large_string())
            elif suffix == "npy" or DECODERS.get(suffix) in (int, bytes.decode):
                column = _array(name, [DECODERS[suffix](value) for value in column.to_pylist()])
        except (ValueError, EOFError, OSError) as error:  # BadInput is a ValueError
            raise BadInput(
                f"a member .{name} cannot be decoded as its suffix says: {error}. Write the file again, or leave it out"
            ) from error
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


# -- arrays and rows -------------------------------------------------------------------------------------------------------


def _named(columns: dict[str, pa.Array], names: Sequence[str]) -> pa.RecordBatch:
    """names: those that are kept, or those of columns without any."""
    import pyarrow as pa

    unnamed = all(name.isdigit() or not name for name in columns)
    if unnamed and names and len(names) != len(columns):
        raise BadInput(
            f"the data has {len(columns)} columns without names, and columns= gives {len(names)}: {', '.join(names)}"
        )
    titles = (names if unnamed and names else [name or _ONLY for name in columns]) or ()
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(titles))
    return batch if unnamed else _chosen(batch, names)


def _of_columns(batch: Any, name: str = "") -> dict[str, pa.Array]:
    """{name: array} of a batch, whose parts in other parts are called `outer.inner`."""
    parts = None if isinstance(batch, list) and all(isinstance(one, PLAIN) for one in batch) else _parts(batch)
    if parts is None:
        return {name: _array(name, batch)}
    found: dict[str, pa.Array] = {}
    for key, part in parts.items():
        found |= _of_columns(part, f"{name}.{key}" if name else key)
    return found


def _of_rows(rows: Any) -> dict[str, pa.Array]:
    """{name: array} of rows as a Dataset gives them: dicts, tuples, or values."""
    first = _parts(rows[0])
    if first is None:
        return {"": _array("", list(rows))}
    parts = [_parts(row) or {} for row in rows]
    if odd := next((row for row in parts if row.keys() != first.keys()), None):
        raise BadInput(
            f"a row has {', '.join(odd)}, and the first one {', '.join(first)}: give all rows the same columns"
        )
    return {name: _array(name, [row[name] for row in parts]) for name in first}


def _parts(value: Any) -> dict[str, Any] | None:
    """{name: part} of what has parts; None of a value."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    return None


def _array(name: str, values: Any) -> pa.Array:
    """values: a tensor or array [rows, …], or a list of a row's values: numbers, texts, bytes, lists, arrays, dicts."""
    import pyarrow as pa

    what = f"column {name!r}" if name else "the data"
    try:
        if isinstance(values, Tensor | np.ndarray):
            return _even_lists(_numpy(values), fixed=True)
        if any(isinstance(value, Tensor | np.ndarray) for value in values):
            arrays = [_numpy(value) for value in values]
            if len({(one.dtype, one.ndim) for one in arrays}) > 1:
                raise BadInput(f"{what} has arrays of different types or dimensions: give all rows the same")
            return _lists(arrays) if arrays[0].ndim else _even_lists(np.stack(arrays), fixed=True)
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise BadInput(
            f"{what} cannot be written: {error}. It must hold numbers, texts, bytes, or lists of these; torch's bfloat16 as float32"
        ) from error


def _numpy(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _even_lists(array: np.ndarray[Any, Any], fixed: bool) -> pa.Array:
    """[rows, …]: further dimensions are lists of one length. fixed: as their type says."""
    import pyarrow as pa

    if array.ndim == 1:
        return pa.array(array.tolist() if array.dtype.kind in "OSU" else np.ascontiguousarray(array))
    if array.shape[1] == 0:
        raise TypeError(f"an array of shape {list(array.shape)} holds nothing")
    inner = _even_lists(array.reshape(-1, *array.shape[2:]), fixed)
    if fixed:
        return pa.FixedSizeListArray.from_arrays(inner, array.shape[1])
    return pa.ListArray.from_arrays(np.arange(len(array) + 1, dtype=np.int32) * array.shape[1], inner)


def _lists(arrays: Sequence[np.ndarray[Any, Any]]) -> pa.Array:
    """A list for each array, of any lengths."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
    if len({one.shape[1:] for one in arrays}) == 1:
        inner = _even_lists(np.concatenate(arrays), fixed=False)
    else:
        inner = _lists([row for one in arrays for row in one])
    return pa.ListArray.from_arrays(ends, inner)
