"""Rows that come once, as Arrow batches, kept for many epochs: plain columns in memory, and on disk beyond a budget.

Whoever receives rows (a Spark task) appends them to a `Spool`. Its files have no names, so that nothing is left of them
however their owner ends; the workers of the host open them through /proc, and map them: no row is copied between
processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.data.readers.tables import arrow_array
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SpoolColumn:
    """What a batch of a frame is to have: one array, made of one or more columns of the table side by side."""

    name: str
    sources: tuple[str, ...]
    dtype: str | None = None  # numpy's name; None: as it comes

    def of(self, batch: pa.RecordBatch) -> Array:
        """[rows, …]. Several sources are put side by side in the last dimension: numbers count as one value a row.

        Raises BadInput for missing values, lists of different lengths, what is no number, and fractions in a column of
        whole numbers.
        """
        arrays = [arrow_array(batch.column(source), f"column {source!r}") for source in self.sources]
        for source, array in zip(self.sources, arrays, strict=True):
            if array.dtype.kind not in "biuf":
                raise BadInput(f"column {source!r} holds {array.dtype}, not numbers: encode it before training")
        if len(arrays) > 1:
            arrays = [np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)]
        array = np.ascontiguousarray(arrays[0], dtype=self.dtype or arrays[0].dtype)
        if array.dtype.kind in "iu" and arrays[0].dtype.kind == "f" and not np.array_equal(array, arrays[0]):
            raise BadInput(
                f"{self.name} has fractions, and its type is {array.dtype} (from its first rows, or from dtype): write "
                "the whole column in one type"
            )
        return array


@dataclass(frozen=True)
class Stored:
    """One array of a part: the descriptor of its file in the process that holds it, and what a row of it is."""

    fd: int
    dtype: str
    shape: tuple[int, ...]  # of a row


@dataclass(frozen=True)
class SpoolPart:
    """Rows that lie together: the same number in the file of every column."""

    pid: int
    rows: int
    columns: dict[str, Stored]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SpoolPart:
        stored = values["columns"].items()
        columns = {name: Stored(one["fd"], one["dtype"], tuple(one["shape"])) for name, one in stored}
        return cls(values["pid"], values["rows"], columns)


@dataclass
class Spool:
    """Appends what comes. The first `memory` bytes are kept in memory, the others in files of `folder`.

    Its descriptors stay open for as long as the process lives, or until `close`.
    """

    columns: Sequence[SpoolColumn]
    memory: int
    folder: str = field(default_factory=tempfile.gettempdir)
    rows: int = 0
    bytes: int = 0
    on_disk: bool = False
    _parts: list[SpoolPart] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """Raises BadInput for rows unlike those before them, and OSError where the disk is full."""
        if batch.num_rows == 0:
            return
        arrays = {column.name: column.of(batch) for column in self.columns}
        size = sum(array.nbytes for array in arrays.values())
        spills = not self.on_disk and self.bytes + size > self.memory
        if spills or not self._parts:
            self.on_disk = self.on_disk or spills
            columns = {name: Stored(self._file(), array.dtype.str, array.shape[1:]) for name, array in arrays.items()}
            self._parts.append(SpoolPart(os.getpid(), 0, columns))
        part = self._parts[-1]
        for name, array in arrays.items():
            stored = part.columns[name]
            if (array.dtype.str, array.shape[1:]) != (stored.dtype, stored.shape):
                raise BadInput(
                    f"{name} has rows of {_row(stored.dtype, stored.shape)} and of {_row(array.dtype.str, array.shape[1:])}: "
                    "give all rows of a column the same length and type"
                )
            data = array.reshape(-1).view(np.uint8).data
            while data.nbytes:  # one call writes 2 GB at most
                data = data[os.write(stored.fd, data) :]
        self._parts[-1] = SpoolPart(part.pid, part.rows + batch.num_rows, part.columns)
        self.rows, self.bytes = self.rows + batch.num_rows, self.bytes + size

    def _file(self) -> int:
        if not self.on_disk:
            return os.memfd_create("manyhands-rows", os.MFD_CLOEXEC)
        with tempfile.TemporaryFile(dir=self.folder, prefix="manyhands-") as file:
            return os.dup(file.fileno())

    def parts(self) -> list[SpoolPart]:
        return list(self._parts)

    def close(self) -> None:
        for part in self._parts:
            for stored in part.columns.values():
                os.close(stored.fd)
        self._parts.clear()


def _row(dtype: str, shape: Sequence[int]) -> str:
    return f"{np.dtype(dtype)} {list(shape)}"


def open_part(part: SpoolPart) -> dict[str, Array]:
    """{name: array [rows, …]} of a part that a process of this host holds, mapped and not to be written to."""
    arrays: dict[str, Array] = {}
    for name, stored in part.columns.items():
        shape = (part.rows, *stored.shape)
        if 0 in shape:
            arrays[name] = np.empty(shape, stored.dtype)
        else:
            arrays[name] = np.memmap(f"/proc/{part.pid}/fd/{stored.fd}", dtype=stored.dtype, mode="r", shape=shape)
    return arrays
