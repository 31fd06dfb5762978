"""`events.jsonl`: every event of a run, one a line, appended as it happens."""

from __future__ import annotations

import heapq
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.paths import PARTIAL, AnyPath, RemotePath, open_regular
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from manyhands.rank_files.folder import as_given

FILE = "events.jsonl"
FLUSH_EVERY_S = 1.0
_RANK_FILE = re.compile(r"events-[0-9]{5,}\.jsonl")


class EventLog:
    """The file of one launch's driver; whole lines reach it at least once a second while events come, and at the end.

    A half line at its end (the driver was killed, or the disk was full) is cut off when the file is opened again.

    `sync` puts them on the disk itself, so that they outlive a power loss too. Elsewhere than on a disk nothing can be
    appended: there the file grows without a name on this host, and `sync` puts a copy of it at `path`.
    """

    @as_given()  # it is no file of a script's, whichever rank writes it
    def __init__(self, path: AnyPath, claim: Claim | None = None) -> None:
        """claim: of the launch that writes; ManyhandsError once another launch has the run directory."""
        self._path, self._claim = path, claim
        self._pending: list[str] = []
        self._flushed_s = 0.0
        self._failed = False
        self._unsynced = False
        try:
            self._file = _copied(path) if isinstance(path, RemotePath) else path.open("a+b", buffering=0)
        except OSError as problem:
            raise ManyhandsError(
                f"cannot write {path}: {problem.strerror}. Check its permissions, or give another run directory"
            ) from problem
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
        self._unsynced = True
        with self._written():
            self._check_claim()
            while data:
                data = data[self._file.write(data) :]

    @as_given()
    def sync(self) -> None:
        """Flush, and wait until what is new is where it stays (ManyhandsError; nothing is written from then on)."""
        self.flush()
        if self._failed or not self._unsynced:
            return
        with self._written():
            if isinstance(self._path, RemotePath):
                self._check_claim()
                self._file.seek(0)
                self._path.write_whole(self._file)
            elif stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):  # a pipe has no disk
                os.fsync(self._file.fileno())
        self._unsynced = False

    def close(self) -> None:
        """Flush, sync and give the descriptor back; idempotent."""
        try:
            self.sync()
        finally:
            self._file.close()

    def _check_claim(self) -> None:
        if self._claim is not None:
            self._claim.check()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Nothing is written any more after a failure within."""
        self._failed = True
        try:
            yield
        except OSError as problem:
            raise ManyhandsError(
                f"cannot write {self._path}: {problem.strerror}. The run was stopped; make room, then go on with resume=True (--resume)"
            ) from problem
        self._failed = False

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


def file_of(rank: int) -> str:
    """Where the events of this rank's process lie, in a run whose every rank writes its own."""
    return FILE if rank == 0 else f"events-{rank:05d}.jsonl"


def files_in(directory: AnyPath) -> list[AnyPath]:
    """All files of events that launches left in a run directory, the driver's first; none where that one is missing."""
    first = left_at(directory / FILE)
    others = (path for path in directory.iterdir() if _RANK_FILE.fullmatch(path.name)) if first is not None else ()
    return [] if first is None else [first, *sorted(others, key=lambda path: path.name)]


def read(path: AnyPath, warn: Callable[[str], None] | None = None) -> Iterator[Event]:
    """The events of a file, in the order written, one at a time; a half line at the end is left out.

    Lines that are no events are left out too, and reported to `warn` once all is read; without it the first is a
    BadInput, as is a file that cannot be read.
    """
    damaged, first = 0, ""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path))
        except (OSError, ValueError) as problem:
            raise BadInput(f"the events in {path} cannot be read: {problem}") from None
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                event = Event.from_json(line)
                event.check_values()
            except ValueError as problem:
                damaged, first = damaged + 1, first or f"line {number}: {problem}"
                if warn is None:
                    raise BadInput(f"{path} is damaged in {first:.200}") from None
                continue
            yield event
    if damaged and warn is not None:
        warn(f"{path} is damaged. Lines that cannot be read are ignored: {damaged}; the first is {first:.200}")


Left = tuple[int, list[list[int]]]  # an epoch, and by part [front, back): the slices that were not leased yet
Counted = tuple[Event, int]  # and how many workers its launch had; 0: nobody knows


@dataclass(frozen=True)
class _Start:
    """Where a launch began, or within it a generation other than the first."""

    number: tuple[int, int]  # of the launch, and of the generation
    tick: int
    left: Left | None
    workers: int
    launch: bool = True  # whether a launch began


def steps_that_count(
    files: Sequence[AnyPath],
    before_tick: int | None = None,
    left: Left | None = None,
    warn: Callable[[str], None] | None = None,
) -> Iterator[Counted]:
    """The `step` and `closing` events of all launches that wrote these files, without those that a resumed launch, or a
    later generation of the same one, did again.

    A launch begins with `start`, whose tick is where it goes on; its `left`, where rows are leased and the epoch was
    interrupted, says which slices of earlier ticks it does. before_tick, left: where the next launch will go on. The
    files are those of `files_in`, which are read twice, an event at a time. warn: as in `read`.
    """
    starts = _starts(files[0]) if files else []
    if before_tick is not None:
        starts.append(_Start((sys.maxsize, 0), before_tick, left, 0))
    workers = {start.number: start.workers for start in starts}
    for number, _, event in heapq.merge(*(_steps_of(path, warn) for path in files), key=lambda numbered: numbered[:2]):
        if all(_counts(event, start) for start in starts if start.number > number):
            yield event, workers.get(number, 0)


def _starts(path: AnyPath) -> list[_Start]:
    """All launches and their generations, in order. Damaged lines are reported when the file is read again."""
    starts, number = list[_Start](), 0
    for event in read(path, lambda message: None):
        if event.type == "start":
            number = event.values.get("launch", number + 1)
        if event.type in ("start", "membership"):
            began = number, event.generation
            left, workers = event.values.get("left"), event.values.get("workers", 0)
            starts.append(_Start(began, event.tick, left, workers, launch=event.type == "start"))
    return starts


def _steps_of(path: AnyPath, warn: Callable[[str], None] | None) -> Iterator[tuple[tuple[int, int], int, Event]]:
    """(the numbers of launch and generation, the tick, the event)"""
    number = 0
    for event in read(path, warn):
        if event.type == "start":
            number = event.values.get("launch", number + 1)
        elif event.type in ("step", "closing"):
            yield (number, event.generation), event.tick, event


def _counts(step: Event, start: _Start) -> bool:
    """Whether this step is before the place where a launch, or a generation, goes on. Leases outlast generations."""
    tick, left = start.tick, start.left
    if not start.launch and "lease" in step.values:
        return True
    if left is None or "lease" not in step.values or step.values["epoch"] != left[0]:
        return step.tick < tick
    index, part, _ = step.values["lease"]
    front, back = left[1][part] if part < len(left[1]) else (0, 0)
    return step.tick < tick and not front <= index < back
