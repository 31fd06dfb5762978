"""Columns in memory: tensors and arrays of equally many rows, alone or in dicts, tuples and dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from manyhands.data.batch import Collate, columns, describe, like_sequence, map_columns, row_at
from manyhands.data.sharding import slice_of
from manyhands.data.source import Indexed, Reading, nonempty
from manyhands.errors import BadInput

_NUMPY_GATHERS = (torch.uint16, torch.uint32, torch.uint64)
"""Of these dtypes torch selects no rows."""

BACKGROUND_BYTES = 4 << 20
"""A batch below this is gathered in well under a millisecond: less than a thread's hand-over costs."""


class Columns(Indexed):
    """Columns of equally many rows; a batch is the same structure with rows gathered, bit-equal to `x[order[i:i+b]]`.

    Numeric arrays become tensors of their own dtype without a copy (read-only and memory-mapped ones are copied batch
    by batch); strings and objects stay numpy arrays. Neighbouring rows (shuffle=False) are views of the data, as
    `x[i:j]` is.
    """

    def __init__(self, data: Any, collate: Collate | None = None, what: str = "the data") -> None:
        """Raises BadInput for columns of different lengths, without rows, or of none."""
        self._data, self._collate = _as_columns(data, what), collate
        lengths = {path: len(column) for path, column in columns(self._data)}
        if not lengths:
            raise BadInput(f"{what} has no columns: expected at least one array; got {describe(data)}")
        if len(set(lengths.values())) > 1:
            listing = ", ".join(f"{path or 'array'}: {n}" for path, n in lengths.items())
            raise BadInput(
                f"the arrays of {what} must be equally long; got {listing}. Rows are the first dimension: is one transposed, or cut?"
            )
        self.rows = nonempty(next(iter(lengths.values())), what)
        self._row_bytes = sum(column.nbytes for _, column in columns(self._data)) / self.rows

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        batch = map_columns(self._data, lambda column: _gather(column, indices))
        if self._collate is None:
            return batch
        return self._collate([row_at(batch, i) for i in range(len(indices))])

    @override
    def in_background(self, reading: Reading) -> bool:
        """Only for large gathers: neighbouring rows are views, and a user's `collate` may draw random numbers."""
        gathers = reading.shuffle or reading.order is not None
        start, stop = slice_of(reading.batch_size, reading.rank, reading.size)
        return gathers and self._collate is None and self._row_bytes * (stop - start) > BACKGROUND_BYTES


def _gather(column: Any, indices: Sequence[Any]) -> Any:
    if isinstance(indices, range):
        part = column[indices.start : indices.stop]
        return part if isinstance(part, Tensor) else _tensor(np.array(part))
    if isinstance(column, Tensor) and column.dtype in _NUMPY_GATHERS:
        return torch.from_numpy(column.numpy()[np.asarray(indices)])
    if isinstance(column, Tensor):
        return column.index_select(0, torch.from_numpy(np.asarray(indices)).to(column.device))
    return _tensor(column[np.asarray(indices)])


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    """A tensor, where torch has the dtype."""
    if array.dtype.kind not in "biufc":
        return array
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def _as_columns(data: Any, what: str) -> Any:
    """`data` with every leaf a tensor or an array with rows; lists of numbers become arrays."""
    if isinstance(data, Tensor | np.ndarray | list):
        return _column(data, what)
    if isinstance(data, Mapping):
        return {key: _as_columns(value, what) for key, value in data.items()}
    if isinstance(data, tuple):
        return like_sequence(data, [_as_columns(value, what) for value in data])
    if hasattr(data, "__array__"):  # a pandas Series, an array of another library
        return _column(np.asarray(data), what)
    if hasattr(data, "__dataclass_fields__"):
        return map_columns(data, lambda column: _column(column, what))
    raise BadInput(f"{what} must consist of arrays; got {describe(data)}")


def _column(value: Any, what: str) -> Any:
    if isinstance(value, list):
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise BadInput(
                f"a list in {what} cannot become an array ({error}): pad its rows to one length, or give a Dataset and collate"
            ) from error
        if array.dtype == object:
            raise BadInput(
                f"a list in {what} must hold numbers or strings; got {describe(value)}. Give rows of objects as a list or Dataset of rows"
            )
        value = array
    if value.ndim == 0:
        raise BadInput(
            f"every array of {what} needs a first dimension that counts rows; got a single number, {value!r}"
        )
    if isinstance(value, Tensor):
        return value.detach()
    native = value.dtype.isnative and all(stride >= 0 for stride in value.strides)
    return _tensor(value) if value.flags.writeable and native else value
