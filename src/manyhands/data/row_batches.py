"""Rows as Arrow record batches, on their way from a worker to the driver or into a file. Nothing is pickled.

A program hands over tensors, arrays or lists (`to_batch`, `pack`), alone or in a dict, tuple or list of such; a receiver
reads them and gets them back (`unpack`), or writes the record batches into a file. What Arrow does not say of a column stands in the
metadata of its field: which kind it was, its dtype, the shape of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.batch import describe
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

PREDICTION = "prediction"
"""The column of a file in which a single tensor's rows are; those of a tuple are prediction_0, prediction_1, …"""

_META = b"manyhands"
_TENSOR, _ARRAY, _LIST = "tensor", "array", "list"
_ONE, _TUPLE, _NAMES = "one", "tuple", "names"
_BITS = {torch.bfloat16: torch.uint16}
"""Dtypes that Arrow does not have: they travel as their bits."""
_NUMBERS = "biuf"  # numpy's kinds


def to_batch(rows: Any, kept: Mapping[str, Any] | None = None) -> pa.RecordBatch:
    """A tensor, array or list whose first dimension counts rows, or a dict, tuple or list of such, as Arrow has it.

    The batch refers to the memory of what is given. kept: further columns by name; the rows are a dict of all columns
    then, as they are in a file.

    Raises BadInput for columns of different lengths, for what is no column, and for dtypes that do not travel.
    """
    import pyarrow as pa

    layout, named = _named(rows)
    if kept is not None:
        if twice := sorted(named.keys() & kept.keys()):
            raise BadInput(
                f"column {twice[0]!r} is one of the columns to keep and one of the outputs: give the output another name"
            )
        layout, named = _NAMES, {**kept, **named}
    lengths = {name: _length(name, column) for name, column in named.items()}
    if len(set(lengths.values())) != 1:
        listing = ", ".join(f"{name}: {n}" for name, n in lengths.items()) or "no column"
        raise BadInput(f"the columns of a batch's outputs must have equally many rows; got {listing}")
    fields, arrays = [], []
    for name, column in named.items():
        array, meta = _to_arrow(name, column)
        fields.append(pa.field(name, array.type, metadata={_META: json.dumps(meta)}))
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata={_META: layout}))


def pack(batches: Sequence[pa.RecordBatch]) -> memoryview:
    """The bytes of some batches, for `read`. BadInput where they are not alike."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            check_alike(batches[0].schema, batch.schema)
            stream.write_batch(batch)
    return memoryview(sink.getvalue())


def read(data: bytes | bytearray | memoryview) -> list[pa.RecordBatch]:
    """The batches of `pack`, which refer to `data`. Raises ValueError for what is none."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            batches = list(stream)
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"rows that cannot be read: {error}") from error
    return batches


def unpack(batches: Sequence[pa.RecordBatch]) -> Any:
    """The rows of all batches, one after the other, as `to_batch` was given them. BadInput where they are not alike."""
    import pyarrow as pa

    first = batches[0].schema
    for batch in batches[1:]:
        check_alike(first, batch.schema)
    table = pa.Table.from_batches(batches)
    columns = [_of_arrow(table.column(field.name), field) for field in first]
    layout = (first.metadata or {}).get(_META, b"").decode()
    if layout == _ONE:
        return columns[0]
    return tuple(columns) if layout == _TUPLE else dict(zip(first.names, columns, strict=True))


def check_alike(first: pa.Schema, other: pa.Schema) -> None:
    """BadInput where two pieces have not the same columns of the same kinds."""
    if not first.equals(other, check_metadata=True):
        raise BadInput(
            f"all batches must give the same columns with rows of one shape and dtype; one gave {_said(first)}, and another {_said(other)}"
        )


def widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """For a file: bfloat16 as float32, which holds the same numbers; the metadata of the way left out."""
    import pyarrow as pa

    arrays = []
    for column, field in zip(batch.columns, batch.schema, strict=True):
        if _meta(field).get("dtype") == "bfloat16":
            tensor = _of_arrow(pa.chunked_array([column]), field).float()
            column, _ = _to_arrow(field.name, tensor)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _named(rows: Any) -> tuple[str, dict[str, Any]]:
    """(layout, columns by name)"""
    if _is_column(rows):
        return _ONE, {PREDICTION: rows}
    if isinstance(rows, Mapping):
        return _NAMES, {_name(name): column for name, column in rows.items()}
    if isinstance(rows, list | tuple):
        return _TUPLE, {f"{PREDICTION}_{i}": column for i, column in enumerate(rows)}
    raise BadInput(
        f"a batch's outputs must be a tensor whose first dimension counts rows, or a dict or tuple of such; got {describe(rows)}: give function=lambda model, batch: …"
    )


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise BadInput(f"the outputs' columns need texts as names, not {name!r}")
    return name


def _is_column(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    return isinstance(value, list) and all(isinstance(item, str | int | float | bool) for item in value)


def _length(name: str, column: Any) -> int:
    if not _is_column(column) or (not isinstance(column, list) and column.ndim == 0):
        what = f"{column!r}" if isinstance(column, int | float | str) else describe(column)
        raise BadInput(f"output {name!r} must be a tensor whose first dimension counts rows; got {what}")
    return len(column)


def _to_arrow(name: str, column: Any) -> tuple[Any, dict[str, Any]]:
    """(array, what its field's metadata says)

    Arrays are made of their memory: `pa.array` and `to_numpy` would import pandas, a third of a second of each worker.
    """
    import pyarrow as pa

    if isinstance(column, list):
        if column and all(isinstance(value, int | float) for value in column):
            return _of_numbers(np.array(column)), {"kind": _LIST}
        return _of_texts(name, column), {"kind": _LIST}
    meta: dict[str, Any] = {"kind": _ARRAY}
    if isinstance(column, Tensor):
        if column.layout != torch.strided or column.is_complex() or column.is_quantized:
            raise BadInput(
                f"output {name!r} is a {column.dtype} tensor of layout {column.layout}, and dense real numbers travel: give its parts"
            )
        tensor = column.detach().cpu().contiguous()
        meta = {"kind": _TENSOR, "dtype": str(tensor.dtype).removeprefix("torch.")}
        column = tensor.view(_BITS[tensor.dtype]) if tensor.dtype in _BITS else tensor
        try:
            column = column.numpy()
        except TypeError:
            raise BadInput(
                f"output {name!r} has dtype {tensor.dtype}, which does not travel: give it as float32"
            ) from None
    if column.dtype.kind in "OU" and column.ndim == 1:
        return _of_texts(name, column.tolist()), {"kind": _ARRAY}
    if column.dtype.kind not in _NUMBERS:
        raise BadInput(f"output {name!r} holds {column.dtype}, and numbers, booleans and texts travel")
    meta["shape"] = list(column.shape[1:])
    array = _of_numbers(np.ascontiguousarray(column).reshape(-1))
    for size in reversed(column.shape[1:]):
        if size == 0:
            raise BadInput(f"output {name!r} has rows of shape {list(column.shape[1:])}, which hold nothing")
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array, meta


def _of_numbers(flat: np.ndarray[Any, Any]) -> Any:
    """An Arrow array in this memory; of booleans, which Arrow packs, in memory of its own."""
    import pyarrow as pa

    if not flat.dtype.isnative:
        flat = flat.astype(flat.dtype.newbyteorder("="))
    memory = np.packbits(flat, bitorder="little") if flat.dtype == bool else flat
    return pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(memory)])


def _of_texts(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    if all(isinstance(value, str) for value in values):
        kind, encoded = pa.large_string(), [value.encode("utf-8", "surrogatepass") for value in values]
    elif all(isinstance(value, bytes) for value in values):
        kind, encoded = pa.large_binary(), values
    else:
        kinds = sorted({type(value).__name__ for value in values})
        raise BadInput(
            f"column {name!r} holds {', '.join(kinds)}, and numbers, booleans and texts travel, of one type each"
        )
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))])


def _of_arrow(column: Any, field: pa.Field) -> Any:
    """A column as it was given, with rows of its own memory."""
    meta = _meta(field)
    if meta.get("kind") == _LIST:
        return column.to_pylist()
    if "shape" not in meta:  # texts
        return np.array(column.to_pylist(), dtype=object)
    shape = tuple(meta["shape"])
    rows = np.concatenate([_flat(chunk, len(shape)) for chunk in column.chunks])
    rows = rows.reshape(len(column), *shape)
    if meta["kind"] == _ARRAY:
        return rows
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if meta["dtype"] == "bfloat16" else tensor


def _flat(chunk: Any, depth: int) -> np.ndarray[Any, Any]:
    """All numbers of an array of lists, in its memory."""
    import pyarrow as pa

    for _ in range(depth):
        chunk = chunk.flatten()
    memory = chunk.buffers()[1]
    if pa.types.is_boolean(chunk.type):
        bits = np.unpackbits(np.frombuffer(memory, np.uint8), bitorder="little")
        return bits[chunk.offset : chunk.offset + len(chunk)].view(bool)
    dtype = np.dtype(chunk.type.to_pandas_dtype())
    return np.frombuffer(memory, dtype, len(chunk), chunk.offset * dtype.itemsize)


def _meta(field: pa.Field) -> dict[str, Any]:
    return dict(json.loads((field.metadata or {}).get(_META, b"{}")))


def _said(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
