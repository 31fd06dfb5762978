"""Tables: pandas DataFrames, Arrow tables, Hugging Face datasets. Each is imported when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from manyhands.data.batch import Collate
from manyhands.data.readers.datasets import fetch, set_epoch
from manyhands.data.source import BY_OPTION, Indexed, Loading, Picks, Reading, nonempty
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa


def frame_columns(frame: pd.DataFrame) -> dict[str, np.ndarray[Any, Any]]:
    """{column name: array [rows]} of a DataFrame, without its index. BadInput for a nullable column with gaps."""
    columns = {}
    for name, column in frame.items():
        if not isinstance(column.dtype, np.dtype) and column.isna().any():  # a float column's NaN is a number
            raise BadInput(
                f"column {name!r} ({column.dtype}) has missing values: fill or drop them (frame.dropna()) before training"
            )
        columns[str(name)] = column.to_numpy()
    return columns


def arrow_columns(table: pa.Table, what: str) -> dict[str, np.ndarray[Any, Any]]:
    """{column name: array [rows, …]}; lists of one length become further dimensions, strings object arrays.

    Raises BadInput, naming the column, for missing values and for lists of different lengths.
    """
    nonempty(table.num_rows, what)
    columns = ((name, table.column(name).combine_chunks()) for name in table.column_names)
    return {name: arrow_array(column, f"column {name!r} of {what}") for name, column in columns}


def arrow_array(column: Any, what: str, otherwise: str = "give a Dataset and collate") -> np.ndarray[Any, Any]:
    """[rows, …] of an Arrow array. BadInput, naming `what` and what else can be done, for missing values and lists of different
    lengths.
    """
    import pyarrow as pa

    if column.null_count:
        raise BadInput(
            f"{what} has missing values ({column.null_count}): fill or drop them before training, or {otherwise}"
        )
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.from_dlpack(column)  # `to_numpy` imports pandas
    if pa.types.is_fixed_size_list(kind):
        shortest = longest = kind.list_size
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(np.from_dlpack(column.offsets))
        shortest, longest = int(lengths.min()), int(lengths.max())
    else:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if shortest < longest:
        raise BadInput(f"{what} holds lists of {shortest} to {longest} values: pad them to one length, or {otherwise}")
    flat = arrow_array(column.flatten(), what, otherwise)
    return flat.reshape(len(column), longest, *flat.shape[1:])


class HuggingFace(Indexed):
    """A Hugging Face dataset: rows are read in batches (`dataset[indices]`), a dict of columns.

    Columns come as the format that was set on it gives them; without one, as torch tensors (whole numbers int64, others
    float32, strings as lists). It is read ahead in a thread, unless the user's own code (a transform, collate) takes
    part.
    """

    def __init__(self, dataset: datasets.Dataset, collate: Collate | None = None) -> None:
        self.rows = nonempty(len(dataset), "the Hugging Face dataset")
        formatted = dataset.format["type"] is not None
        self._dataset = dataset if formatted or collate is not None else dataset.with_format("torch")
        self._collate = collate
        self.loading = Loading() if collate is None else Loading(0, BY_OPTION)

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        chosen = [int(i) for i in indices]
        if self._collate is not None:
            return self._collate(fetch(self._dataset, chosen))
        batch = self._dataset[chosen]
        if not isinstance(batch, Mapping):
            return batch
        ragged = [
            name
            for name, column in batch.items()
            if isinstance(column, list) and any(hasattr(item, "shape") for item in column)
        ]
        if ragged:
            raise BadInput(
                f"the rows of column {', '.join(ragged)} differ in length: pad them (collate=, or in dataset.map), or remove the column"
            )
        return dict(batch)

    @override
    def picks(self, reading: Reading) -> Picks:
        set_epoch(self._dataset, reading.epoch)
        return super().picks(reading)

    @override
    def in_background(self, reading: Reading) -> bool:
        return self._collate is None and self._dataset.format["type"] != "custom"
