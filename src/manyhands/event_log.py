"""`events.jsonl`: every event of a run, one a line, appended as it happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import ManyhandsError
from manyhands.events import Event

FILE = "events.jsonl"
FLUSH_EVERY_S = 1.0


class EventLog:
    """The file of one launch's driver; whole lines reach it at least once a second while events come, and at the end.

    A half line at its end (the driver was killed, or the disk was full) is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[str] = []
        self._flushed_s = 0.0
        self._failed = False
        self._file = path.open("a+b", buffering=0)
        self._cut_half_line()

    def write(self, event: Event) -> None:
        """Take a line; events that are not steps are rare, and go to the disk at once."""
        self._pending.append(event.to_json() + "\n")
        if event.type != "step":
            self.flush()

    def poll(self, now_s: float) -> None:
        """Give the lines to the disk if the last time is a second ago, on any steady clock."""
        if now_s - self._flushed_s >= FLUSH_EVERY_S:
            self._flushed_s = now_s
            self.flush()

    def flush(self) -> None:
        """Raises ManyhandsError where the disk takes no more; nothing is written from then on."""
        if self._failed or not self._pending:
            return
        data = memoryview("".join(self._pending).encode())
        self._pending.clear()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as problem:
            self._failed = True
            raise ManyhandsError(
                f"cannot write {self._path}: {problem.strerror}. The run was stopped; make room, then go on with resume=True (--resume)"
            ) from problem

    def close(self) -> None:
        """Flush and give the descriptor back; idempotent."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _cut_half_line(self) -> None:
        size = end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            self._file.truncate(end)


def read(path: Path) -> Iterator[Event]:
    """The events of a file, in the order written; a half line at the end is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Event.from_json(line)


Left = tuple[int, list[list[int]]]  # an epoch, and by part [front, back): the slices that were not leased yet


def steps_that_count(path: Path, before_tick: int | None = None, left: Left | None = None) -> list[Event]:
    """The `step` and `closing` events of all launches that wrote this file, without those that a resumed launch did again.

    A launch begins with `start`, whose tick is where it goes on; its `left`, where rows are leased and the epoch was
    interrupted, says which slices of earlier ticks it does. before_tick, left: where the next launch will go on.
    """
    kept: list[Event] = []
    for event in read(path):
        if event.type == "start":
            kept = [step for step in kept if _counts(step, event.tick, event.values.get("left"))]
        elif event.type in ("step", "closing"):
            kept.append(event)
    return [step for step in kept if before_tick is None or _counts(step, before_tick, left)]


def _counts(step: Event, tick: int, left: Left | None) -> bool:
    """Whether this step is before the place where a launch goes on."""
    if left is None or "lease" not in step.values or step.values["epoch"] != left[0]:
        return step.tick < tick
    index, part, _ = step.values["lease"]
    front, back = left[1][part] if part < len(left[1]) else (0, 0)
    return step.tick < tick and not front <= index < back
