"""The global batches of a stream, of which the newest are kept: where workers may be lost, others train their rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from manyhands.data.sharding import slice_of
from manyhands.data.slice_ledger import Place
from manyhands.data.source import GlobalBatch, Reading, Slice, Unsized, check_goes_on
from manyhands.errors import BadInput


class KeptBatches:
    """One worker's reading of a stream: it reads all of it, whoever of how many it is, and each batch once.

    What is kept can be cut again, for other workers, after others have come or gone. A batch that is no longer kept is
    read again, with all before it.
    """

    def __init__(self, source: Unsized) -> None:
        self._source = source
        self._coming: Generator[GlobalBatch, None, None] | None = None
        self._kept: deque[GlobalBatch] = deque()
        self._epoch, self._next = -1, 0  # the number of the batch that comes next
        self._keep_from: int | None = None  # None: from the one that is asked for on

    def keep_from(self, epoch: int, index: int) -> None:
        """Nobody asks for batches before `index` of this epoch any more."""
        if epoch == self._epoch:
            self._keep_from = index
            self._drop(index)

    def at(self, reading: Reading, index: int) -> GlobalBatch | None:
        """The global batch of this number; None where the stream has ended before."""
        if reading.epoch != self._epoch or index < self._next - len(self._kept):
            self.close()
            self._epoch, self._next, self._keep_from = reading.epoch, 0, None
            self._coming = self._source.global_batches(reading)
        while index >= self._next and self._coming is not None:
            batch = next(self._coming, None)
            if batch is None:
                self._coming = None
                break
            self._kept.append(batch)
            self._next += 1
            self._drop(index if self._keep_from is None else min(index, self._keep_from))
        first = self._next - len(self._kept)
        return self._kept[index - first] if first <= index < self._next else None

    def slice(self, reading: Reading, place: Place, digest: bool = False) -> Slice | None:
        """The rows of a place. digest: of the whole batch, too. None where the stream has ended before."""
        batch = self.at(reading, place.tick)
        if batch is None:
            check_goes_on(reading.first_tick, self._next)
            return None
        start, stop = slice_of(batch.rows, place.part, place.parts)
        return Slice(
            batch=batch.cut(start, stop) if start < stop else None,
            rows=stop - start,
            global_rows=batch.rows,
            index=place.tick,
            part=place.part,
            digest=batch.digest() if digest else "",
        )

    def again(self, reading: Reading, place: Place) -> Slice:
        """As `slice`, of a batch that other workers have read."""
        part = self.slice(reading, place)
        if part is None:
            raise BadInput(
                f"the stream has ended before batch {place.tick}, which other workers have read: give a stream that is the "
                "same on all workers, also when it is read again"
            )
        return part

    def rows(self, reading: Reading, place: Place) -> int:
        """Of the slice that `again` gives."""
        batch = self.at(reading, place.tick)
        start, stop = slice_of(0 if batch is None else batch.rows, place.part, place.parts)
        return stop - start

    def close(self) -> None:
        """End what reads. Idempotent."""
        if self._coming is not None:
            self._coming.close()
        self._coming, self._epoch = None, -1
        self._kept.clear()

    def _drop(self, before: int) -> None:
        while self._kept and self._next - len(self._kept) < before:
            self._kept.popleft()
