"""Rows of different lengths in flat columns, of which a slice is a view and row numbers: nothing is copied. Columns of parsed
text lie in files without names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import BadInput

Array = NDArray[Any]


class Ragged:
    """Row i of the whole data has the entries offsets[i] to offsets[i + 1] of each column in `flat`, and entry i of each in
    `by_row`. `index` [n] says which rows of the whole these are; None: all, in their order.
    """

    def __init__(
        self,
        offsets: Array,
        flat: Mapping[str, Array],
        by_row: Mapping[str, Array] | None = None,
        index: NDArray[np.int64] | None = None,
    ) -> None:
        """offsets: int64 [rows + 1], from 0, never falling."""
        self.offsets, self.flat, self.by_row, self.index = offsets, dict(flat), dict(by_row or {}), index
        if index is None:
            self._check()

    def _check(self) -> None:
        offsets, entries = self.offsets, {name: len(column) for name, column in self.flat.items()}
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise BadInput(
                "offsets must be whole numbers that begin with 0 and never fall, one more than there are rows"
            )
        if wrong := {name: n for name, n in entries.items() if n != offsets[-1]}:
            raise BadInput(f"the offsets end with {offsets[-1]:,}, and there are other numbers of entries: {wrong}")
        if wrong := {name: len(column) for name, column in self.by_row.items() if len(column) != len(offsets) - 1}:
            raise BadInput(f"there are {len(offsets) - 1:,} rows, and another number of {wrong}")

    def __len__(self) -> int:
        return len(self.offsets) - 1 if self.index is None else len(self.index)

    def numbers(self) -> NDArray[np.int64]:
        """int64 [n]: the numbers of these rows in the whole."""
        return np.arange(len(self), dtype=np.int64) if self.index is None else self.index

    def take(self, rows: Sequence[int] | NDArray[Any] | range) -> Self:
        """The rows of these numbers, in their order, on the same memory."""
        chosen = np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else np.asarray(rows, np.int64)
        taken = object.__new__(type(self))
        taken.__dict__.update(self.__dict__)
        taken.index = chosen if self.index is None else self.index[chosen]
        return taken

    def __getitem__(self, rows: slice) -> Self:
        return self.take(range(*rows.indices(len(self))))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Row by row, as lists and numbers."""
        for i in self.numbers():
            span = slice(self.offsets[i], self.offsets[i + 1])
            row = {name: column[span].tolist() for name, column in self.flat.items()}
            yield row | {name: column[i].tolist() for name, column in self.by_row.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self):,} rows"


def mapped(file: IO[bytes], dtype: Any) -> NDArray[Any]:
    """[n]: what was written to a file, which may be closed then. Changes stay with the process that makes them.

    It is a plain array, which is sent to workers out of band, and writable, so that compiled functions see one type.
    """
    file.flush()
    if not file.seek(0, 2):
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode="c"))
