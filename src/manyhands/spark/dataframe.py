"""A Spark DataFrame, or files that all executors can read, as training data."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import unquote

import numpy as np

from manyhands.data.dataframe_rows import WHICH, DistributedFrame
from manyhands.data.readers.shared_files import find, types_of
from manyhands.data.shards.formats.by_suffix import shard_file
from manyhands.data.spool import SpoolColumn
from manyhands.engines.spark.session import is_connect
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

_WHOLE = ("byte", "short", "integer", "long", "boolean")
_FRACTIONS = ("float", "double")
_READ = {
    "org.apache.spark.sql.execution.datasources.LogicalRelation",
    "org.apache.spark.sql.execution.datasources.HadoopFsRelation",
    "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat",  # not Delta's, whose files hold removed rows
}
_FIELDS = 10  # that an error lists of a plan


def frame(
    table: DataFrame | str | Path | Sequence[str | Path],
    *,
    features: str | Sequence[str],
    label: str | Sequence[str] | None = None,
    weight: str | None = None,
    dtype: str = "float32",
    input: Literal["stream", "files"] | None = None,
) -> DistributedFrame:
    """Columns of a table as data of a task (`train_data`, `validation_data`, …): batches of (features, label).

    table: a DataFrame; or paths, globs and folders of Parquet or TFRecord files that all executors can read (URLs of
        fsspec).
    features: a column, or several, which are concatenated: numbers, arrays (of one length in all rows) and Spark ML
        vectors. They become one tensor [rows, numbers] of `dtype`; a single column of numbers becomes [rows], of arrays
        of arrays [rows, …].
    label: as features; whole numbers and booleans become int64, others `dtype`. None: batches are the features alone.
        weight: a column of numbers; batches are then (features, label, weight). input: `stream`, the default for a
        DataFrame: Spark reads, computes and distributes its rows. `files`, the default for paths: the executors read
        the files themselves, which is faster than rows through the JVM. A DataFrame is accepted for `files` only if it
        is a plain read of Parquet files.

    No row is read here; of files, the types of the first one. Engine `spark` distributes the rows evenly to one Spark
    task for each worker, which keeps them for all epochs, in memory and on its executor's disk. No row goes through the
    driver. Raises BadInput for a column that is missing or holds no numbers, for files that cannot be read, and for
    `files` of a DataFrame that computes something.
    """
    if weight is not None and label is None:
        raise BadInput("weight is for batches of (features, label, weight): give label too")
    np.dtype(dtype)
    wanted = {"features": _listed(features), "label": _listed(label), "weight": _listed(weight)}
    files = _files(table, input)
    is_whole = partial(_is_whole_in_files, types_of(files)) if files else partial(_is_whole, cast("DataFrame", table))
    columns = []
    for name, sources in wanted.items():
        whole = [is_whole(source) for source in sources]
        if sources:
            kind = "int64" if name != "features" and all(whole) else dtype
            columns.append(SpoolColumn(name, tuple(sources), kind))
    made = DistributedFrame(key=uuid.uuid4().hex, columns=tuple(columns), files=files)
    if files:
        return made
    df = cast("DataFrame", table)
    marked = [WHICH] if WHICH in df.columns else []  # the frame that a row belongs to
    return replace(
        made, table=df.select(*(plain(df, name).alias(name) for name in dict.fromkeys(made.sources)), *marked)
    )


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _files(table: Any, input: str | None) -> tuple[str, ...]:
    """The files that executors read; none if Spark streams rows."""
    paths = [table] if isinstance(table, str | Path) else list(table) if isinstance(table, list | tuple) else []
    if input not in (None, "stream", "files"):
        raise BadInput(f"input must be 'stream' or 'files', not {input!r}")
    if input == "stream" and paths:
        raise BadInput(
            f"input='stream' is for a DataFrame: give spark.read.parquet({str(paths[0])!r}), or input='files'"
        )
    if paths:
        return find(paths)
    return files_of(table) if input == "files" else ()


def _is_whole_in_files(types: dict[str, pa.DataType], name: str) -> bool:
    """Whether a column holds whole numbers. Raises BadInput if it holds no numbers."""
    import pyarrow.types as at

    if name not in types:
        raise BadInput(
            f"the files have no column {name!r}; they have {', '.join(types)}. Columns that only folders' names hold (y=1/) "
            "are not in them: have Spark read them (input='stream')"
        )
    inner: Any = types[name]
    while at.is_list(inner) or at.is_large_list(inner) or at.is_fixed_size_list(inner):
        inner = inner.value_type
    if at.is_integer(inner) or at.is_boolean(inner):
        return True
    if at.is_floating(inner) or at.is_decimal(inner):
        return False
    raise BadInput(
        f"column {name!r} holds {types[name]}, not numbers: write numbers or arrays of them (of a vector: "
        "vector_to_array), or have Spark read them (input='stream')"
    )


def _is_whole(df: DataFrame, name: str) -> bool:
    """Whether a column holds whole numbers. Raises BadInput if it holds no numbers."""
    kind = _type_of(df, name)
    if _is_vector(kind):
        return False
    inner: Any = kind
    while inner.typeName() == "array":
        inner = inner.elementType
    number = inner.typeName()
    if number in (*_WHOLE, *_FRACTIONS) or number.startswith("decimal"):
        return number in _WHOLE
    raise BadInput(
        f"column {name!r} holds {kind.simpleString()}, not numbers: encode it first (StringIndexer, OneHotEncoder), or "
        "use columns of numbers, arrays or vectors"
    )


def _type_of(df: DataFrame, name: str) -> DataType:
    found = {field.name: field.dataType for field in df.schema.fields}
    if name not in found:
        raise BadInput(f"the DataFrame has no column {name!r}; it has {', '.join(found)}")
    return found[name]


def _is_vector(kind: DataType) -> bool:
    return type(kind).__name__ == "VectorUDT"


def plain(df: DataFrame, name: str) -> SparkColumn:
    """A column as plain numbers in Arrow: vectors as arrays, decimals as doubles."""
    from pyspark.sql import functions as F

    kind, column = _type_of(df, name), F.col(f"`{name}`")
    if _is_vector(kind):
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column)
    return column.cast("double") if kind.typeName().startswith("decimal") else column


def split(
    df: DataFrame,
    framed: Callable[[DataFrame], DistributedFrame],
    *,
    indicator: str | None = None,
    fraction: float = 0.0,
    seed: int = 0,
) -> tuple[DistributedFrame, DistributedFrame]:
    """(training, validation) of one DataFrame that is read once, so that every row belongs to exactly one of them.

    indicator: a column of booleans, true for validation; else a `fraction` is drawn at random. framed: makes a frame of
    a DataFrame.
    """
    from pyspark.sql import functions as F

    validates = F.col(f"`{indicator}`").cast("boolean") if indicator is not None else F.rand(seed) < fraction
    whole = framed(df.withColumn(WHICH, F.when(validates, F.lit(1)).otherwise(F.lit(0))))
    return whole, replace(whole, key=uuid.uuid4().hex)


# -- the files that a DataFrame reads ---------------------------------------------------------------------------------


def files_of(df: DataFrame) -> tuple[str, ...]:
    """The URLs of the Parquet files that a DataFrame reads, sorted.

    Raises BadInput if it does more than read them: a filter or a computed column would be lost silently.
    """
    if is_connect(df.sparkSession):
        raise BadInput("over Spark Connect the plan of a DataFrame is not visible: give the paths of the files instead")
    plan = df._jdf.queryExecution().analyzed()
    while plan.nodeName() == "SubqueryAlias" or (plan.nodeName() == "Project" and _chooses(plan)):
        plan = plan.child()  # such a node only names a table, or selects columns unchanged
    relation = plan.relation() if _class(plan) in _READ else None
    if relation is None or _class(relation) not in _READ or _class(relation.fileFormat()) not in _READ:
        raise BadInput(
            "input='files' needs a DataFrame that only reads Parquet files, and the plan of this one has "
            f"{plan.simpleString(_FIELDS)!r}, which would be lost: leave input out, or write the DataFrame to files "
            "and give their path"
        )
    files = tuple(sorted(unquote(url) for url in df.inputFiles()))
    for file in files:
        shard_file(file)
    return files


def _chooses(project: Any) -> bool:
    columns = project.projectList()
    return all(_class(columns.apply(i)).endswith(".AttributeReference") for i in range(columns.length()))


def _class(thing: Any) -> str:
    return str(thing.getClass().getName())
