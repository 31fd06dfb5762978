"""What the tasks on tables share: columns of files as arrays of numbers, and how many rows a slice has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands import units
from manyhands.data.readers import shared_files
from manyhands.data.readers.files import numpy_file
from manyhands.data.readers.tables import arrow_columns
from manyhands.errors import BadInput

Array = NDArray[Any]

KINDS = ".csv, .npz or .parquet"
SLICE_NS = 10_000_000
"""What a slice should take: a step of the loop costs about 0.3 ms besides."""
SLICES_AN_EPOCH = 16
"""At least, so that workers share an epoch and rates fall smoothly, also where a few slices would be long enough."""


def slice_rows(rows: int, ns: float) -> int:
    """Rows that a worker takes at once, if a row takes so many nanoseconds."""
    return max(1, min(int(SLICE_NS / ns), rows // SLICES_AN_EPOCH))


def read_columns(path: str, names: Mapping[str, str]) -> dict[str, Array]:
    """{name: the column of a file that is called names[name]}: numbers, [rows].

    Raises BadInput for a file that cannot be read, and for columns that it lacks or that hold other things than finite
    numbers.
    """
    table = _table(path)
    if missing := [name for name in names.values() if name not in table]:
        options = ", ".join(f"{name}=NAME" for name, column in names.items() if column in missing)
        raise BadInput(
            f"{path} has no column {units.listed(missing, 3)}; it has {units.listed(list(table), 10)}: name the right ones ({options})"
        )
    return {name: _numbers(table[column], f"column {column!r} of {path}") for name, column in names.items()}


def read_matrix(path: str) -> Array:
    """[rows, columns] of an .npy file, memory-mapped, or all columns of a table side by side. BadInput as `read_columns`."""
    if Path(path).suffix.lower() == ".npy":
        matrix: Array = numpy_file(path)
        if matrix.ndim != 2:
            raise BadInput(f"{path} must hold an array [rows, columns], and holds one of shape {list(matrix.shape)}")
        return matrix
    columns = [_numbers(column, f"column {name!r} of {path}") for name, column in _table(path).items()]
    return np.stack(columns, 1)


def _table(path: str) -> dict[str, Array]:
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        return _csv(path)
    if suffix == ".npz":
        return dict(numpy_file(path))
    return shared_files.columns_of(shared_files.find([path], f"{KINDS}, or a folder of .parquet"), path)


def _csv(path: str) -> dict[str, Array]:
    import pyarrow as pa
    from pyarrow import csv

    try:
        return arrow_columns(csv.read_csv(Path(path).expanduser()), path)
    except FileNotFoundError as error:
        raise BadInput(f"there is no file {path!r} (the current folder is {Path.cwd()})") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(
            f"cannot read {path}: {error}. Its first line must name the columns, and each line have a value for each, with commas between"
        ) from error


def _numbers(column: Array, what: str) -> Array:
    if column.ndim != 1:
        raise BadInput(f"{what} must have a number in each row, and has {list(column.shape[1:])}")
    if column.dtype.kind not in "iuf":
        row = next((i for i, value in enumerate(column.tolist()) if not _is_number(value)), 0)
        raise BadInput(
            f"{what} must hold numbers, and row {row + 1:,} holds {column[row]!r}: correct it, or leave it out"
        )
    if not (finite := np.isfinite(column)).all():
        row = int(finite.argmin())
        raise BadInput(f"{what} must hold finite numbers, and row {row + 1:,} holds {column[row]}: leave it out")
    return column


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
