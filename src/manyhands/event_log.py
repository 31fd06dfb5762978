"""`events.jsonl`: every event of a run, one a line, appended as it happens."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.rank_files.guard import as_given
from manyhands.remote_path import PARTIAL, AnyPath, RemotePath

FILE = "events.jsonl"
FLUSH_EVERY_S = 1.0


class EventLog:
    """The file of one launch's driver; whole lines reach it at least once a second while events come, and at the end.

    A half line at its end (the driver was killed, or the disk was full) is cut off when the file is opened again.

    Elsewhere than on a disk nothing can be appended: there it grows in a nameless local file, of which a copy is put at
    `path` (`publish`) after each checkpoint, and at the end.
    """

    @as_given()  # it is no file of a script's, whichever rank writes it
    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._pending: list[str] = []
        self._flushed_s = 0.0
        self._failed = False
        self._unpublished = False
        self._file = _copied(path) if isinstance(path, RemotePath) else path.open("a+b", buffering=0)
        self._cut_half_line()

    def write(self, event: Event) -> None:
        """Take a line; events that are not steps are rare, and go to the disk at once."""
        self._pending.append(event.to_json() + "\n")
        if event.type != "step":
            self.flush()
        if event.type == "checkpoint":
            self.publish()

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
        self._unpublished = True
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as problem:
            self._failed = True
            raise ManyhandsError(
                f"cannot write {self._path}: {problem.strerror}. The run was stopped; make room, then go on with resume=True (--resume)"
            ) from problem

    def publish(self) -> None:
        """Flush; where the file lies elsewhere, put it there if anything is new (ManyhandsError; nothing is put from then on)."""
        self.flush()
        if self._failed or not self._unpublished or not isinstance(self._path, RemotePath):
            return
        self._failed, self._unpublished = True, False
        self._file.seek(0)
        self._path.write_whole(self._file)
        self._failed = False

    def close(self) -> None:
        """Flush, publish and give the descriptor back; idempotent."""
        try:
            self.publish()
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
        self._file.seek(0, os.SEEK_END)


def left_at(path: AnyPath) -> AnyPath | None:
    """Where the events lie that earlier launches left for `path`; None: nowhere.

    Elsewhere than on a disk that is what was to replace it, where a launch was killed just before it had its name.
    """
    if path.exists():
        return path
    if isinstance(path, RemotePath) and (partial := path.with_name(path.name + PARTIAL)).exists():
        return partial
    return None


def _copied(path: RemotePath) -> BinaryIO:
    """A nameless local file with what earlier launches left."""
    file = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 - the log's, which closes it
    left = left_at(path)
    if left is not None:
        with left.open("rb") as source:
            shutil.copyfileobj(source, file)
    return file


def read(path: AnyPath) -> Iterator[Event]:
    """The events of a file, in the order written; a half line at the end is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield Event.from_json(line)


Left = tuple[int, list[list[int]]]  # an epoch, and by part [front, back): the slices that were not leased yet


def steps_that_count(path: AnyPath, before_tick: int | None = None, left: Left | None = None) -> list[Event]:
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
