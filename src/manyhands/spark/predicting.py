"""A trained module at work in the executors: a column of predictions, and means of metrics over all rows."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.data.spool import Column
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType

ROWS = 1024  # of a forward
OUTPUTS = ("class", "value", "array")


@dataclass(frozen=True)
class Predict:
    """The function of `column_of`: features of some rows -> their predictions, in the same order.

    output: class: the number of the largest output, or 1 where a single one is above 0; value: the one output of a row; array: all.
    """

    model: nn.Module
    dtype: str
    output: str

    def __call__(self, parts: Iterator[tuple[pd.Series[Any], ...] | pd.Series[Any]]) -> Iterator[pd.Series[Any]]:
        import pandas as pd

        self.model.eval()
        for columns in parts:
            features = _side_by_side([columns] if isinstance(columns, pd.Series) else columns, self.dtype)
            with torch.inference_mode():
                outputs = [self.model(torch.from_numpy(features[i : i + ROWS])) for i in range(0, len(features), ROWS)]
            found = np.concatenate([said(one, self.output) for one in outputs]) if outputs else np.empty(0)
            yield pd.Series(list(found) if found.ndim > 1 else found)


def column_of(predict: Predict, kind: DataType) -> Callable[..., SparkColumn]:
    """A function of feature columns that gives the column of predictions, of the given type."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def predicted(parts: Any) -> Any:
        return predict(parts)

    # Spark reads off the types that it is a function of iterators: the model is there once, not for each batch.
    predicted.__annotations__ = {
        "parts": typing.Iterator[tuple[pd.Series, ...]],
        "return": typing.Iterator[pd.Series],
    }
    make: Any = pandas_udf  # its types know no iterators
    made: Callable[..., SparkColumn] = make(predicted, kind)
    return made


def said(outputs: Tensor, output: str) -> np.ndarray[Any, Any]:
    """[rows] or [rows, outputs] as float64."""
    flat = outputs.double().reshape(len(outputs), -1)
    if output == "array":
        return flat.numpy()
    if output == "value" and flat.shape[1] != 1:
        raise BadInput(f"the model gives {flat.shape[1]} numbers a row: say output='array' or output='class'")
    if output == "value":
        return flat[:, 0].numpy()
    return (flat.argmax(1) if flat.shape[1] > 1 else (flat[:, 0] > 0)).double().numpy()


def _side_by_side(columns: Sequence[pd.Series[Any]], dtype: str) -> np.ndarray[Any, Any]:
    """As training has them: one column as it is, several as values side by side."""
    arrays = [np.stack(list(c)) if c.dtype == object and len(c) else c.to_numpy() for c in columns]
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype=dtype)
    return np.ascontiguousarray(np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1), dtype=dtype)


@dataclass(frozen=True)
class Judge:
    """The function of `mapInArrow`: sums of (metric · weight, weight) over a partition's rows, as one row of JSON."""

    model: nn.Module
    metrics: Callable[[nn.Module, Any], Any]
    columns: tuple[Column, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        sums: dict[str, list[float]] = {}
        self.model.eval()
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                self._add(sums, batch.slice(start, ROWS))
        yield pa.RecordBatch.from_pydict({"sums": [json.dumps(sums)]})

    def _add(self, sums: dict[str, list[float]], batch: pa.RecordBatch) -> None:
        arrays = tuple(torch.from_numpy(column.of(batch)) for column in self.columns)
        with torch.inference_mode():
            found = self.metrics(self.model, arrays)
        for name, value in found.items():
            mean, weight = value if isinstance(value, tuple) else (value, batch.num_rows)
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(mean) * float(weight)
            total[1] += float(weight)
