"""The x, y and sample weights of `model.fit` as rows of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.batch import map_columns, slice_rows
from manyhands.data.readers.arrays import Columns
from manyhands.errors import BadInput
from manyhands.keras.backend import keras


def is_arrays(x: Any) -> bool:
    """Whether `x` is an array, or arrays in lists, tuples and dicts. Anything else gives whole batches."""
    if isinstance(x, Mapping):
        return all(is_arrays(value) for value in x.values())
    if isinstance(x, list | tuple):
        return bool(x) and all(is_arrays(value) or isinstance(value, int | float) for value in x)
    return hasattr(x, "__array__") and hasattr(x, "shape")


def packed(x: Any, y: Any = None, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None) -> Any:
    """(x,), (x, y) or (x, y, sample_weight) with arrays at every leaf, floating ones in Keras's own dtype.

    Raises BadInput for arrays of different lengths, and for class weights with sample weights.
    """
    if class_weight is not None:
        sample_weight = _of_classes(y, sample_weight, class_weight)
    if sample_weight is not None and y is None:
        raise BadInput("sample_weight weighs the loss of targets: give y, too")
    data = tuple(_leaves(part) for part in (x, y, sample_weight) if part is not None)
    Columns(data, what="x, y and sample_weight")
    return data


def split(data: Any, fraction: float) -> tuple[Any, Any]:
    """(the first rows, the last `fraction` of them), as `validation_split`: before shuffling."""
    if not 0 < fraction < 1:
        raise BadInput(
            f"validation_split must be above 0 and below 1, not {fraction!r}: leave it out for no validation"
        )
    rows = Columns(data).rows
    at = math.floor(rows * (1 - fraction))
    if at in (0, rows):
        raise BadInput(
            f"validation_split={fraction} leaves no rows to train on, or none to validate on (rows: {rows}): give more "
            "rows, or another fraction"
        )
    return slice_rows(data, 0, at), slice_rows(data, at, rows)


def _leaves(part: Any) -> Any:
    """Convert lists of arrays to tuples, and lists of numbers, frames and series to arrays."""
    if isinstance(part, Mapping):
        return {key: _leaves(value) for key, value in part.items()}
    if isinstance(part, list | tuple) and any(hasattr(value, "shape") for value in part):
        return tuple(_leaves(value) for value in part)
    return map_columns(part if isinstance(part, Tensor) else np.asarray(part), _in_keras_float)


def _in_keras_float(column: Any) -> Any:
    kind = keras.config.floatx()
    if isinstance(column, Tensor):
        return column.to(getattr(torch, kind)) if column.is_floating_point() else column
    return column.astype(kind, copy=False) if column.dtype.kind == "f" else column


def _of_classes(y: Any, sample_weight: Any, class_weight: Mapping[int, float]) -> Any:
    """[rows] the weight of each row's class. The class of one-hot targets is that of the largest number."""
    if sample_weight is not None:
        raise BadInput("class_weight and sample_weight were both given: multiply them into sample_weight")
    if not (hasattr(y, "shape") and len(y.shape) in (1, 2)):
        raise BadInput(
            "class_weight needs targets of one output, [rows] classes or [rows, classes] one-hot; give sample_weight"
        )
    classes = np.asarray(y)
    classes = classes.argmax(1) if classes.ndim == 2 and classes.shape[1] > 1 else classes.reshape(-1)
    return np.asarray([class_weight.get(int(one), 1.0) for one in classes], dtype=keras.config.floatx())
