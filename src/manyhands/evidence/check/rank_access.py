"""Who asks which worker this is, or how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from manyhands.evidence.check import source_locations
from manyhands.evidence.check.findings import SourceLocation
from manyhands.worker import Worker, current, set_current


class _Listening(Worker):
    """One worker alone, that notes from where its rank and size are read."""

    lines: list[SourceLocation]

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in ("rank", "size") and "lines" in vars(self):
            place = source_locations.running()
            if place is not None:
                self.lines.append(place)
        return super().__getattribute__(name)


@contextmanager
def rank_reads() -> Iterator[list[SourceLocation]]:
    """The user's lines that ask, within."""
    before, worker = current(), _Listening()
    worker.lines = []
    set_current(worker)
    try:
        yield worker.lines
    finally:
        set_current(before)
