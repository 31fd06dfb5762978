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

from manyhands.data.frames import DistributedFrame
from manyhands.data.spool import SpoolColumn
from manyhands.errors import BadInput
from manyhands.replica.evaluation import Measured, means_of
from manyhands.task import Evaluate, Metrics, Summed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType

ROWS = 1024  # of a forward
_COLUMN = "told"  # the column of what a partition measured
OUTPUTS = ("class", "value", "array")


@dataclass(frozen=True)
class Predict:
    """The function of `column_of`: features of some rows -> their predictions, in the same order.

    output: class: the number of the largest output, or 1 where a single one is above `threshold`; value: the one output of a
        row; array: all.
    """

    model: nn.Module
    dtype: str
    output: str
    threshold: float = 0.0

    def __call__(self, parts: Iterator[tuple[pd.Series[Any], ...] | pd.Series[Any]]) -> Iterator[pd.Series[Any]]:
        import pandas as pd

        self.model.eval()
        for columns in parts:
            features = _side_by_side([columns] if isinstance(columns, pd.Series) else columns, self.dtype)
            with torch.inference_mode():
                outputs = [self.model(torch.from_numpy(features[i : i + ROWS])) for i in range(0, len(features), ROWS)]
            found = (
                np.concatenate([to_column(one, self.output, self.threshold) for one in outputs])
                if outputs
                else np.empty(0)
            )
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


def to_column(outputs: Tensor, output: str, threshold: float = 0.0) -> np.ndarray[Any, Any]:
    """[rows] or [rows, outputs] as float64."""
    flat = outputs.double().reshape(len(outputs), -1)
    if output == "array":
        return flat.numpy()
    if output == "value" and flat.shape[1] != 1:
        raise BadInput(f"the model gives {flat.shape[1]} numbers a row: say output='array' or output='class'")
    if output == "value":
        return flat[:, 0].numpy()
    return (flat.argmax(1) if flat.shape[1] > 1 else (flat[:, 0] > threshold)).double().numpy()


def _stacked(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Arrays in an array, at any depth, as one."""
    if values.dtype != object or not len(values):
        return values
    return np.stack([_stacked(np.asarray(value)) for value in values])


def _side_by_side(columns: Sequence[pd.Series[Any]], dtype: str) -> np.ndarray[Any, Any]:
    """As training has them: one column as it is, several as values side by side."""
    arrays = [_stacked(column.to_numpy()) for column in columns]
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype=dtype)
    return np.ascontiguousarray(np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1), dtype=dtype)


def judged(model: nn.Module, metrics: Evaluate, data: DistributedFrame) -> dict[str, float]:
    """{metric: weighted mean over all rows, or what their sums say}, computed in the executors. BadInput where nothing counts."""
    judge = MetricSums(model, metrics, data.columns)
    measured = [json.loads(row[_COLUMN]) for row in data.table.mapInArrow(judge, f"{_COLUMN} string").collect()]
    found = means_of([one["means"] for one in measured])
    summed = dict.fromkeys(name for one in measured for name in one["sums"])
    if not found and not summed:
        raise BadInput("there is nothing to evaluate: the DataFrame has no rows, or none with a weight")
    if not summed:
        return found
    import pyarrow as pa

    first = pa.RecordBatch.from_pandas(data.table.limit(1).toPandas(), preserve_index=False)
    measures = judge.measured(first)  # a metric says what its sums mean once it has seen a row
    for name in summed:
        measure = measures[name]
        assert isinstance(measure, Summed)
        total = torch.tensor([one["sums"][name] for one in measured if name in one["sums"]], dtype=torch.float64).sum(0)
        found |= {to_column: float(value) for to_column, value in measure.result(total).items()}
    return found


@dataclass(frozen=True)
class MetricSums:
    """The function of `mapInArrow`: what was measured on a partition's rows, as one row of JSON."""

    model: nn.Module
    metrics: Evaluate
    columns: tuple[SpoolColumn, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        found = Measured()
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                part = batch.slice(start, ROWS)
                found.add(self.measured(part), part.num_rows)
        sums = {name: one.sums.tolist() for name, one in found.summed.items()}
        yield pa.RecordBatch.from_pydict({_COLUMN: [json.dumps({"means": found.means, "sums": sums})]})

    def measured(self, batch: pa.RecordBatch) -> Metrics:
        """The metrics of these rows."""
        arrays = tuple(torch.from_numpy(column.of(batch)) for column in self.columns)
        self.model.eval()
        with torch.no_grad():  # not inference mode: a metric may keep what it makes here
            return self.metrics(self.model, arrays)
