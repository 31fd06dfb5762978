"""The folder where ranks of one file system keep messages about files, and the copies of ranks other than 0."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyhands.rank_files.file_owner import Changes

BEGUN, CLOSED, GONE, UNDONE, ENDED = "begun", "closed", "gone", "undone", "ended"
_TURNS = struct.Struct("<q")
PREFIX = "manyhands-files-"


class Folder:
    """`root` holds for each rank a journal and, of ranks other than the first, a tree of copies by absolute path.

    The first rank's turns (how many collectives it has begun) lie in a page that all map. Every rank holds a shared
    lock as long as it lives, which the system drops with its process: who gets the exclusive one is the last.
    """

    def __init__(self, root: str, first: int) -> None:
        self.root, self.first = root, first
        self._owners = FileJournal(f"{root}/owners")

    @classmethod
    def make(cls, where: str, first: int) -> Folder:
        """A new one inside `where`."""
        folder = cls(tempfile.mkdtemp(prefix=PREFIX, dir=where), first)
        for name in ("lock", "alive"):
            Path(folder.root, name).touch()
        Path(folder.root, "turns").write_bytes(_TURNS.pack(0))
        return folder

    def journal(self, rank: int) -> FileJournal:
        return FileJournal(f"{self.root}/journal-{rank}")

    def copies(self, rank: int) -> str:
        """The root of a rank's tree of copies."""
        return f"{self.root}/rank-{rank}"

    def ranks(self) -> list[int]:
        """All that have a journal."""
        names = (name.partition("journal-")[2] for name in os.listdir(self.root))
        return sorted(int(name) for name in names if name.isdecimal())

    def claim(self, path: str, rank: int) -> bool:
        """Whether `rank` is the first of the other ranks to claim this path for its own file."""
        self._owners.note(str(rank), path)
        self._owners.read()
        return self._owners.owners[path] == str(rank)

    def claimed(self, rank: int) -> set[str]:
        """Paths that hold files of this rank's own."""
        self._owners.read()
        return {path for path, owner in self._owners.owners.items() if owner == str(rank)}

    def lock(self, name: str, how: int) -> int | None:
        """A lock on `name` as a descriptor to close; None where another lock excludes it and `how` does not wait."""
        fd = os.open(f"{self.root}/{name}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, how)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def remove(self) -> None:
        self._owners.close()
        shutil.rmtree(self.root)


class FileJournal:
    """One rank's changes to files, a line each: written by all its processes, read by peers on the same disk.

    `note` appends a line with one write, which cannot mix with other processes' lines. `read` reads new lines.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, -1  # opened with the first line, by whichever process
        self._at = self._lines = 0
        self._lock = threading.RLock()  # a signal handler may write files while this thread reads
        self.changes: dict[str, Changes] = {}
        self.ended = False
        self.owners: dict[str, str] = {}  # path -> the first word that was noted of it
        self.news: set[str] = set()  # paths of lines that came since somebody emptied it

    def open(self) -> None:
        """Make the file, if no process of this rank has."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, what: str, path: str = "", turn: int = 0) -> None:
        self.open()
        os.write(self._fd, json.dumps([what, turn, path]).encode() + b"\n")

    def read(self) -> None:
        with self._lock:
            if self._fd < 0:
                try:
                    self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
                except FileNotFoundError:
                    return
            while lines := os.pread(self._fd, 1 << 20, self._at):
                whole = lines[: lines.rfind(b"\n") + 1]
                if not whole:
                    return
                self._at += len(whole)
                for line in whole.splitlines():
                    self._take(*json.loads(line))

    def of(self, path: str) -> Changes:
        return self.changes.get(path) or Changes()

    def _take(self, what: str, turn: int, path: str) -> None:
        if what == ENDED:
            self.ended = True
            return
        self._lines += 1
        self.owners.setdefault(path, what)
        self.news.add(path)
        change = self.changes.setdefault(path, Changes())
        change.turn, change.at = max(change.turn, turn), self._lines
        match what:
            case "begun":
                change.begun += 1
            case "undone":
                change.begun -= 1
                if not change.begun:
                    del self.changes[path]
            case _:
                change.closed += 1
                change.gone = what == GONE

    def after_fork(self) -> None:
        """In a child: another thread of the parent's may have held the lock."""
        self._lock = threading.RLock()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class CollectiveCounts:
    """How many collectives the first rank has begun, and this one."""

    def __init__(self, folder: Folder) -> None:
        with open(f"{folder.root}/turns", "r+b") as file:
            self._page = mmap.mmap(file.fileno(), _TURNS.size)
        self.own = 0

    @property
    def first(self) -> int:
        return int(_TURNS.unpack_from(self._page)[0])

    def publish(self) -> None:
        _TURNS.pack_into(self._page, 0, self.own)


class _Depth(threading.local):
    depth = 0


_here = _Depth()


@contextmanager
def as_given() -> Iterator[None]:
    """Within, this thread's writes go where they say, on every rank: each writes parts of one checkpoint, say."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def pause(seconds: float) -> None:
    """Sleep, and leave `as_given` meanwhile: a signal handler of the script's runs now, and may save something."""
    depth, _here.depth = _here.depth, 0
    try:
        time.sleep(seconds)
    finally:
        _here.depth = depth


def is_as_given() -> bool:
    return _here.depth > 0
