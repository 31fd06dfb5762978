"""A Spark DataFrame as training data."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.data.frames import WHICH, Frame
from manyhands.data.spool import Column
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_WHOLE = ("byte", "short", "integer", "long", "boolean")
_FRACTIONS = ("float", "double")


def frame(
    df: DataFrame,
    *,
    features: str | Sequence[str],
    label: str | Sequence[str] | None = None,
    weight: str | None = None,
    dtype: str = "float32",
) -> Frame:
    """Columns of a DataFrame, for `train_data` and its like: batches are (features, label), or what of it there is.

    features: a column, or several side by side: numbers, arrays (of one length in all rows) and Spark ML vectors. They become
        one tensor [rows, numbers] of `dtype`; a single column of numbers [rows], of arrays of arrays [rows, …].
    label: likewise; whole numbers and booleans become int64, others `dtype`. None: batches are the features alone.
    weight: a column of numbers; batches are then (features, label, weight).

    Nothing is read here. Engine `spark` deals the rows evenly to one Spark task a worker, which keeps them for all epochs, in
    memory and on its executor's disk; nothing goes through the driver. Raises BadInput for a column that is not there or
    holds no numbers.
    """
    if weight is not None and label is None:
        raise BadInput("weight is for batches of (features, label, weight): give label too")
    wanted = {"features": _listed(features), "label": _listed(label), "weight": _listed(weight)}
    columns = tuple(
        Column(name, tuple(sources), _dtype(df, sources, dtype, whole=name != "features"))
        for name, sources in wanted.items()
        if sources
    )
    return Frame(key=uuid.uuid4().hex, columns=columns, table=_selected(df, [s for c in columns for s in c.sources]))


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _dtype(df: DataFrame, sources: list[str], dtype: str, whole: bool) -> str:
    np.dtype(dtype)
    kinds = [_number_of(_type_of(df, source), source) for source in sources]
    return "int64" if whole and all(kind in _WHOLE for kind in kinds) else dtype


def _type_of(df: DataFrame, name: str) -> DataType:
    found = {field.name: field.dataType for field in df.schema.fields}
    if name not in found:
        raise BadInput(f"the DataFrame has no column {name!r}; it has {', '.join(found)}")
    return found[name]


def _number_of(kind: DataType, name: str) -> str:
    """The type of the numbers in a column."""
    if _is_vector(kind):
        return "double"
    inner: Any = kind
    while inner.typeName() == "array":
        inner = inner.elementType
    if inner.typeName() in (*_WHOLE, *_FRACTIONS) or inner.typeName().startswith("decimal"):
        return str(inner.typeName())
    raise BadInput(
        f"column {name!r} holds {kind.simpleString()}, not numbers: encode it first (StringIndexer, OneHotEncoder), or take columns of "
        "numbers, arrays or vectors"
    )


def _is_vector(kind: DataType) -> bool:
    return type(kind).__name__ == "VectorUDT"


def _selected(df: DataFrame, names: list[str]) -> DataFrame:
    """Those columns as plain numbers, and which frame a row is of, where that is there."""
    marked = [WHICH] if WHICH in df.columns else []
    return df.select(*(plain(df, name).alias(name) for name in dict.fromkeys(names)), *marked)


def plain(df: DataFrame, name: str) -> SparkColumn:
    """A column as Arrow brings it as plain numbers: vectors as arrays, decimals as doubles."""
    from pyspark.sql import functions as F

    kind, column = _type_of(df, name), F.col(f"`{name}`")
    if _is_vector(kind):
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column)
    return column.cast("double") if kind.typeName().startswith("decimal") else column


def split(
    df: DataFrame,
    framed: Callable[[DataFrame], Frame],
    *,
    indicator: str | None = None,
    fraction: float = 0.0,
    seed: int = 0,
) -> tuple[Frame, Frame]:
    """(training, validation) of one DataFrame that is read once: a row is of one of them, whatever a second reading would give.

    indicator: a column of booleans, true for validation; else a `fraction` drawn at random. framed: makes a frame of a DataFrame.
    """
    from pyspark.sql import functions as F

    validates = F.col(f"`{indicator}`").cast("boolean") if indicator is not None else F.rand(seed) < fraction
    whole = framed(df.withColumn(WHICH, F.when(validates, F.lit(1)).otherwise(F.lit(0))))
    return whole, replace(whole, key=uuid.uuid4().hex)
