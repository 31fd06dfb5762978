"""What the driver does with rows that workers deliver: put in order, kept in memory or written into a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from typing_extensions import override

from manyhands.data import row_batches
from manyhands.data.row_files import RowFile
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import Observer
from manyhands.engines.driver.row_order import RowOrder
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.transport.frame import FrameError

if TYPE_CHECKING:
    import pyarrow as pa

WAITING_BYTES = 64 << 20
"""So much may wait for rows that come before it, where rows go into a file."""
TOTAL = "rows"  # the type of the event that holds how many rows will come


class RowCollector(Observer):
    """Rows of all workers, in their order. As a context manager it leaves no half file.

    output: a file (`RowFile`), or None: they are kept in memory.
    holds: where more than WAITING_BYTES wait for rows of a slow worker, the others wait, too. Without, what is too much
        lies in a file without a name meanwhile, because workers that wait for each other must not wait for the driver.
    writes: whether this process writes the file; of several that get the same rows, one does.
    progress: called with (rows so far, all rows, or 0 where nobody knows).
    """

    def __init__(
        self,
        output: str | Path | None,
        *,
        holds: bool = True,
        writes: bool = True,
        progress: Callable[[int, int], None] | None = None,
        waiting_bytes: int | None = None,
    ) -> None:
        self._file = RowFile(output) if output is not None and writes else None
        self._keeps = output is None
        self._holds = holds
        self._limit = WAITING_BYTES if waiting_bytes is None else waiting_bytes
        self._progress = progress
        self._order = RowOrder()
        self._kept: list[pa.RecordBatch] = []
        self._early: IO[bytes] | None = None  # the file without a name
        self._early_at: dict[tuple[int, int], tuple[int, int]] = {}  # place of a piece -> (offset, bytes) there
        self._ends = ExitStack()
        self._total = 0
        self.rows = 0
        self.rows_of_workers: dict[int, int] = {}
        self.stop_reason = ""

    def __enter__(self) -> Self:
        if self._file is not None:
            self._ends.enter_context(self._file)
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    def stop(self, reason: str) -> None:
        """Ask all workers to stop."""
        self.stop_reason = reason

    @override
    def stopping(self) -> str:
        return self.stop_reason

    @override
    def event(self, event: Event) -> None:
        if event.type == TOTAL:
            self._total = event.values["rows"]

    @override
    def take_rows(self, piece: RowPiece) -> None:
        self.rows_of_workers[piece.rank] = self.rows_of_workers.get(piece.rank, 0) + piece.rows
        too_much = self._order.waiting_bytes + len(piece.data) > self._limit
        if not (self._keeps or self._holds or self._order.is_next(piece)) and too_much:
            piece = self._put_aside(piece)
        try:
            for ready in self._order.add(piece):
                self._go_on(ready)
        except ValueError as error:
            if isinstance(error, ManyhandsError):
                raise
            raise FrameError(str(error)) from error

    @override
    def must_wait(self, piece: RowPiece) -> bool:
        too_much = self._holds and not self._keeps and self._order.waiting_bytes > self._limit
        return too_much and self._order.waits(piece)

    def finish(self) -> None:
        """All workers have returned: the file gets its name. ManyhandsError where rows are missing."""
        if missing := self._order.missing():
            raise ManyhandsError(f"the workers delivered too little: {missing} never came. Please report this")
        if self._file is not None:
            self._file.finish()

    def values(self) -> Any:
        """All rows, as the workers gave them, where they are kept in memory; None: there are none."""
        return row_batches.unpack(self._kept) if self._kept else None

    def _go_on(self, piece: RowPiece) -> None:
        self.rows += piece.rows
        if piece.rows and (self._keeps or self._file is not None):
            for batch in row_batches.read(self._data_of(piece)):
                if self._file is not None:
                    self._file.write(batch)
                else:
                    self._kept.append(batch)
        if self._progress is not None:
            self._progress(self.rows, self._total)

    def _put_aside(self, piece: RowPiece) -> RowPiece:
        assert self._file is not None or not self._keeps
        if self._early is None:
            folder = None if self._file is None else self._file.path.parent
            self._early = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is closed with all the rest
            self._ends.callback(self._early.close)
        offset = self._early.seek(0, os.SEEK_END)
        self._early.write(piece.data)
        self._early_at[piece.place] = offset, len(piece.data)
        return replace(piece, data=b"")

    def _data_of(self, piece: RowPiece) -> Any:
        if piece.place not in self._early_at:
            return piece.data
        assert self._early is not None
        offset, size = self._early_at.pop(piece.place)
        self._early.seek(offset)
        return self._early.read(size)
