"""One rank's changes to files, a line each: written by all its processes, read by peers on the same disk."""

from __future__ import annotations

import json
import os
import threading

from manyhands.rank_files.file_owner import Changes

BEGUN, CLOSED, GONE, UNDONE, ENDED = "begun", "closed", "gone", "undone", "ended"


class FileJournal:
    """`note` appends a line with one write, which cannot mix with other processes' lines. `read` reads new lines."""

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
