"""From columns as they are stored to what a batch holds: numbers as tensors, members of tars by their suffix, rows by the user's code."""

from __future__ import annotations

import inspect
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from manyhands.data.batch import Collate
from manyhands.data.readers.tables import arrow_array
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

Stored = Any  # np.ndarray [rows, …], or an Arrow array

_NUMBERS = ("cls", "cls2", "class", "index", "inx", "id", "count", "label", "target")
_TEXTS = ("txt", "text", "transcript")
_IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp")
_TASKS = 8  # that the rows of a batch are cut into
_PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")


_BY_ROW = "give shards a decode=, or the task a collate=, which get row by row what is there"


def stored_columns(batch: pa.RecordBatch, what: str, by_row: bool) -> dict[str, Stored]:
    """{column: its values}: numbers, and lists of one length of them, as numpy arrays on Arrow's memory; anything else stays Arrow's.

    by_row: rows are made batches by the user's code, which takes missing values and lists of different lengths. Else they are a BadInput
    that names `what`.
    """
    return {
        stored.name: _stored(column, f"column {stored.name!r} of {what}", by_row)
        for stored, column in zip(batch.schema, batch.columns, strict=True)
    }


def _stored(column: pa.Array, what: str, by_row: bool) -> Stored:
    import pyarrow as pa

    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    if column.null_count == 0 and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return column
    try:
        return arrow_array(column, what, _BY_ROW)
    except BadInput:
        if by_row:
            return column
        raise


def taken(column: Stored, rows: slice | np.ndarray[Any, Any]) -> Stored:
    """These rows of a stored column."""
    import pyarrow as pa

    if isinstance(column, np.ndarray) or isinstance(rows, slice):
        return column[rows]
    return column.take(pa.array(rows))


def joined(parts: Sequence[tuple[Stored, np.ndarray[Any, Any]]]) -> Any:
    """One column of parts, each with the places that its rows get: an array where they have one shape, else a list of their values.

    Texts and bytes are lists of them; lists of different lengths are arrays.
    """
    values: list[tuple[Any, np.ndarray[Any, Any]]] = [
        (part if isinstance(part, np.ndarray) else _values(part), places) for part, places in parts
    ]
    first, rows = values[0][0], sum(len(places) for _, places in parts)
    if all(isinstance(part, np.ndarray) and part.shape[1:] == first.shape[1:] for part, _ in values):
        column = np.empty((rows, *first.shape[1:]), first.dtype)
        for part, places in values:
            column[places] = part
        return column
    listed: list[Any] = [None] * rows
    for part, places in values:
        for place, value in zip(places.tolist(), part.copy(), strict=True):  # a row is the caller's own
            listed[place] = value
    return listed


def _values(column: pa.Array) -> np.ndarray[Any, Any] | list[Any]:
    """An array where all rows have one shape, else a list by rows: arrays of what lists hold, None where a value is missing."""
    import pyarrow as pa

    if column.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        return list(column.to_pylist())
    try:
        return arrow_array(column, "")
    except BadInput:  # missing values, or lists of different lengths
        pass
    if not _is_list(column.type):
        return list(column.to_pylist())
    lists = column.drop_null()
    flat = _values(lists.flatten()).copy()
    stops = np.cumsum(lists.value_lengths().to_numpy())
    rows = (flat[start:stop] for start, stop in pairwise([0, *stops.tolist()]))
    return [next(rows) if there else None for there in column.is_valid().to_pylist()]


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


@dataclass(frozen=True)
class RowDecoder:
    """What makes a batch of the columns of its rows."""

    suffixes: Mapping[str, str] = field(default_factory=dict)
    """{column: suffix} of those that hold files' bytes, such as members of a tar."""
    decode: Callable[..., Any] | None = None
    """The user's: {column: value} -> row; with a parameter `rng` also numpy's Generator of that row."""
    collate: Collate | None = None
    executor: Executor | None = None
    """What runs it; None: this thread."""

    @property
    def by_row(self) -> bool:
        """Whether batches are made by the user's code, row by row."""
        return self.decode is not None or self.collate is not None

    @property
    def plain(self) -> bool:
        """Whether a batch is its columns as they are stored, so that those of several batches can be made at once."""
        return not (self.by_row or self.suffixes)

    @cached_property
    def draws(self) -> bool:
        """Whether `decode` asks for random numbers."""
        try:
            return self.decode is not None and "rng" in inspect.signature(self.decode).parameters
        except ValueError:  # some types of Python's own, `dict` for one, have no signature
            return False

    def batch(self, columns: Mapping[str, Any], rngs: Callable[[int], np.random.Generator] | None = None) -> Any:
        """columns: as `joined` makes them. rngs: the Generator of a row, by its place in the batch; for `decode`."""
        if self.decode is None:
            columns = {
                name: self._decoded(name, values) if name in self.suffixes else values
                for name, values in columns.items()
            }
        if not self.by_row:
            return {
                name: _as_tensor(name, values)
                if self.suffixes or isinstance(values, np.ndarray) or isinstance(values[0], np.ndarray)
                else np.array(values, object)
                for name, values in columns.items()
            }
        rows: list[Any] = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if self.decode is not None:
            own = [rngs(i) if self.draws and rngs is not None else None for i in range(len(rows))]
            rows = self._mapped(self._row, rows, own)
        if self.collate is not None:
            return self.collate(rows)
        try:
            return default_collate(rows)
        except (TypeError, RuntimeError) as error:
            raise BadInput(
                f"the rows that decode= returns cannot be stacked: {error}. Return numbers, texts, and arrays of one shape, or give the task "
                "a collate="
            ) from error

    def _row(self, row: dict[str, Any], own: np.random.Generator | None) -> Any:
        assert self.decode is not None
        return self.decode(row) if own is None else self.decode(row, rng=own)

    def _decoded(self, name: str, values: Any) -> Any:
        suffix = self.suffixes[name]
        if suffix in _PICKLED:
            raise BadInput(
                f"members .{name} may hold pickled objects, which are never loaded: give decode=, a function of the row that makes "
                "something of its bytes, or columns= without it"
            )
        if suffix not in DECODERS:
            return values
        if suffix == "npy" and (together := _npys(values)) is not None:
            return together
        if suffix in _IMAGES:
            return self._mapped(lambda value: _member(suffix, value, name), values)
        return [_member(suffix, value, name) for value in values]

    def _mapped(self, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        """`function` of each row, in the executor's threads, some rows at a time."""
        if self.executor is None:
            return list(map(function, *values))
        cuts = range(0, len(values[0]), max(1, -(-len(values[0]) // _TASKS)))
        some = [[column[at : at + cuts.step] for column in values] for at in cuts]
        return [
            one for found in self.executor.map(lambda columns: list(map(function, *columns)), some) for one in found
        ]


def _member(suffix: str, value: bytes, name: str) -> Any:
    try:
        return DECODERS[suffix](value)
    except (ValueError, OSError, EOFError) as error:
        raise BadInput(
            f"a member .{name} cannot be decoded as its suffix says: {error}. Write it again, or give decode=, a function of the row"
        ) from error


def _image(data: bytes) -> np.ndarray[Any, Any]:
    """uint8 [height, width, 3], or [height, width] of one in grey; one with more than 8 bits stays so."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput(
            f"images in tars need Pillow ({error}): pip install pillow, or give decode=, a function of the row"
        ) from error
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image if image.mode in ("L", "F") or image.mode.startswith("I") else image.convert("RGB"))


def _npys(values: Sequence[bytes]) -> np.ndarray[Any, Any] | None:
    """Arrays whose headers are the same bytes, put together at once; None for others."""
    first = io.BytesIO(values[0])
    try:
        version = np.lib.format.read_magic(first)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(first)
    except (ValueError, EOFError):
        return None
    header, size = values[0][: first.tell()], dtype.itemsize * math.prod(shape)
    if fortran or dtype.hasobject or any(len(v) != len(header) + size or not v.startswith(header) for v in values):
        return None
    data = b"".join([memoryview(value)[len(header) :] for value in values])
    return np.frombuffer(bytearray(data), dtype).reshape(len(values), *shape)


def _npy(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_NUMBERS, int),
    **dict.fromkeys(_TEXTS, bytes.decode),
    **dict.fromkeys(_IMAGES, _image),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _npy,
}
"""By suffix."""


def _as_tensor(name: str, values: Any) -> Any:
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "biufc":
            return values
        return torch.from_numpy(values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("=")))
    if values and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        try:
            return torch.from_numpy(np.array(values))
        except TypeError as error:
            raise BadInput(
                f"column {name!r} holds numbers of more than 64 bits: make something else of them in decode="
            ) from error
    if values and isinstance(values[0], np.ndarray):
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            listed = ", ".join(sorted(str(list(shape)) for shape in shapes)[:3])
            raise BadInput(
                f"the rows of column {name!r} have different shapes ({listed}): bring them to one in decode=, or give collate="
            )
        return _as_tensor(name, np.stack(values))
    return values
