"""A trained module in the executors: a column of predictions, and metrics over all rows."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.spool import SpoolColumn
from manyhands.errors import BadInput
from manyhands.replica.evaluation import Measured, means_of
from manyhands.task import Evaluate, Metrics, Summed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType

ROWS = 1024  # of a forward pass
_MEASURED = "measured"  # the column of a partition's measures
OUTPUTS = ("class", "value", "array")


@dataclass(frozen=True)
class Predict:
    """The function of `column_of`: features of rows -> their predictions, in the same order.

    output: class: the number of the largest output, or 1 if a single output is above `threshold`; value: the only
        output of a row; array: all outputs.
    """

    model: nn.Module
    dtype: str
    output: str
    threshold: float = 0.0

    def __call__(self, parts: Iterator[tuple[pd.Series[Any], ...] | pd.Series[Any]]) -> Iterator[pd.Series[Any]]:
        import pandas as pd

        self.model.eval()
        for columns in parts:
            features = _concatenated([columns] if isinstance(columns, pd.Series) else columns, self.dtype)
            with torch.inference_mode():
                outputs = [self.model(torch.from_numpy(features[i : i + ROWS])) for i in range(0, len(features), ROWS)]
            parts_of_column = [predictions_of(one, self.output, self.threshold) for one in outputs]
            found = np.concatenate(parts_of_column) if outputs else np.empty(0)
            yield pd.Series(list(found) if found.ndim > 1 else found)


def column_of(predict: Predict, kind: DataType) -> Callable[..., SparkColumn]:
    """A function of feature columns that returns the column of predictions, of type `kind`."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def predicted(parts: Any) -> Any:
        return predict(parts)

    # By these types Spark knows that it is a function of iterators, so that the model is loaded once, not for each batch.
    predicted.__annotations__ = {
        "parts": typing.Iterator[tuple[pd.Series, ...]],
        "return": typing.Iterator[pd.Series],
    }
    make: Any = pandas_udf  # its types know no iterators
    made: Callable[..., SparkColumn] = make(predicted, kind)
    return made


def predictions_of(outputs: Tensor, output: str, threshold: float = 0.0) -> np.ndarray[Any, Any]:
    """[rows] or [rows, outputs] of float64."""
    flat = outputs.double().reshape(len(outputs), -1)
    if output == "array":
        return flat.numpy()
    if output == "value" and flat.shape[1] != 1:
        raise BadInput(f"the model gives {flat.shape[1]} numbers a row: give output='array' or output='class'")
    if output == "value":
        return flat[:, 0].numpy()
    return (flat.argmax(1) if flat.shape[1] > 1 else (flat[:, 0] > threshold)).double().numpy()


def _stacked(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One array of nested arrays."""
    if values.dtype != object or not len(values):
        return values
    return np.stack([_stacked(np.asarray(value)) for value in values])


def _concatenated(columns: Sequence[pd.Series[Any]], dtype: str) -> np.ndarray[Any, Any]:
    """As in training: one column as it is, several concatenated."""
    arrays = [_stacked(column.to_numpy()) for column in columns]
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], dtype=dtype)
    return np.ascontiguousarray(np.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1), dtype=dtype)


def evaluate(model: nn.Module, metrics: Evaluate, data: DistributedFrame) -> dict[str, float]:
    """{metric: weighted mean over all rows, or the result of their sums}, computed in the executors.

    Raises BadInput if no row counts.
    """
    of_partition = MetricSums(model, metrics, data.columns)
    partitions = [
        json.loads(row[_MEASURED]) for row in data.table.mapInArrow(of_partition, f"{_MEASURED} string").collect()
    ]
    found = means_of([one["means"] for one in partitions])
    summed = dict.fromkeys(name for one in partitions for name in one["sums"])
    if not found and not summed:
        raise BadInput("there is nothing to evaluate: the DataFrame has no rows, or none with a weight")
    if not summed:
        return found
    import pyarrow as pa

    first = pa.RecordBatch.from_pandas(data.table.limit(1).toPandas(), preserve_index=False)
    measures = of_partition.measured(first)  # a metric knows what its sums mean after a row
    for name in summed:
        measure = measures[name]
        assert isinstance(measure, Summed)
        total = torch.tensor([one["sums"][name] for one in partitions if name in one["sums"]], dtype=torch.float64).sum(
            0
        )
        found |= {label: float(value) for label, value in measure.result(total).items()}
    return found


@dataclass(frozen=True)
class MetricSums:
    """The function of `mapInArrow`: the measures of a partition's rows, as one row of JSON."""

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
        yield pa.RecordBatch.from_pydict({_MEASURED: [json.dumps({"means": found.means, "sums": sums})]})

    def measured(self, batch: pa.RecordBatch) -> Metrics:
        """The metrics of these rows."""
        arrays = tuple(torch.from_numpy(column.of(batch)) for column in self.columns)
        self.model.eval()
        with torch.no_grad():  # not inference mode: a metric may keep tensors
            return self.metrics(self.model, arrays)
