"""A path as a rank has it: the first rank's writes are noted, another rank's go to its copy, which it also reads.

Methods are called with absolute paths whose folders are resolved, under `as_given`. Functions that take paths and
return nothing have the names and arguments of those in `os` and `shutil` for which they stand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from manyhands.rank_files.file_owner import FileSource, governing, is_own, is_trackers, source_of
from manyhands.rank_files.folder import BEGUN, CLOSED, ENDED, GONE, UNDONE, CollectiveCounts, Folder, pause
from manyhands.rank_files.merge import place, remove

_POLL_S = 0.001


class View(ABC):
    """One rank's view. A write is `begin`, the write at the path it returns, and `end`, or `undo` if it failed."""

    def __init__(self, folder: Folder, rank: int, turns: CollectiveCounts) -> None:
        self.folder, self.rank, self.turns = folder, rank, turns
        self.journal = folder.journal(rank)
        self.over = False

    @abstractmethod
    def begin(self, path: str, *, fresh: bool = True, new: bool = False) -> str:
        """Where to write. fresh: what was there does not matter. new: there must be nothing (FileExistsError)."""

    @abstractmethod
    def source(self, path: str) -> str:
        """Where to read."""

    @abstractmethod
    def turn(self) -> None:
        """A collective begins."""

    @abstractmethod
    def rmdir(self, path: str) -> None: ...

    @abstractmethod
    def rmtree(self, path: str, *given: Any, **named: Any) -> None: ...

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Also `os.replace`."""

    @abstractmethod
    def link(self, source: str, target: str) -> None: ...

    @abstractmethod
    def _remove(self, path: str, plain: Callable[[str], None]) -> None: ...

    def unlink(self, path: str) -> None:
        self._remove(path, os.unlink)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        at = self.begin(path, new=True)
        self._finish(path, lambda: os.mkdir(at, mode))

    def symlink(self, source: str, target: str, target_is_directory: bool = False) -> None:
        at = self.begin(target, new=True)
        self._finish(target, lambda: os.symlink(source, at))

    def truncate(self, path: str, length: int) -> None:
        at = self.begin(path, fresh=False)
        self._finish(path, lambda: os.truncate(at, length))

    def end(self, path: str, gone: bool = False) -> None:
        """The write of `path` is complete; gone: there is nothing at this path now."""
        if not self.over:
            self.journal.note(GONE if gone else CLOSED, path, self.turns.own)

    def _finish(self, path: str, write: Callable[[], Any], gone: bool = False) -> None:
        """The write itself, between `begin` and `end`."""
        try:
            write()
        except OSError:
            self.undo(path)
            raise
        self.end(path, gone)

    def undo(self, path: str) -> None:
        """The write did not happen."""
        self.journal.note(UNDONE, path, self.turns.own)

    def leave(self, well: bool) -> None:
        """The script is over, and ended well or not: from here on nothing is noted."""
        self.over = True

    def close(self) -> None:
        self.journal.close()

    def after_fork(self) -> None:
        """In a child of this rank's."""
        self.journal.after_fork()


class FirstView(View):
    """Rank 0's: the files are where the script says."""

    @override
    def begin(self, path: str, *, fresh: bool = True, new: bool = False) -> str:
        self.journal.note(BEGUN, path)
        return path

    @override
    def source(self, path: str) -> str:
        return path

    @override
    def turn(self) -> None:
        self.turns.own += 1
        self.turns.publish()

    @override
    def rmdir(self, path: str) -> None:
        self._remove(path, os.rmdir)

    @override
    def rmtree(self, path: str, *given: Any, **named: Any) -> None:
        self._remove(path, lambda at: shutil.rmtree(at, *given, **named))

    @override
    def _remove(self, path: str, plain: Callable[[str], None]) -> None:
        self._finish(self.begin(path), lambda: plain(path), gone=True)

    @override
    def rename(self, source: str, target: str) -> None:
        self.begin(source)
        try:
            self._finish(self.begin(target), lambda: os.replace(source, target))
        except OSError:
            self.undo(source)
            raise
        self.end(source, gone=True)

    @override
    def link(self, source: str, target: str) -> None:
        self._finish(self.begin(target), lambda: os.link(source, target))

    @override
    def leave(self, well: bool) -> None:
        if well:
            self.journal.note(ENDED)
        super().leave(well)


class OtherView(View):
    """Another rank's: as an overlay of its own copies over the first rank's files."""

    def __init__(
        self,
        folder: Folder,
        rank: int,
        size: int,
        turns: CollectiveCounts,
        timeout_s: float,
        is_private: Callable[[str], bool],
    ) -> None:
        super().__init__(folder, rank, turns)
        self._size, self._timeout_s, self.is_private = size, timeout_s, is_private
        self._root, self._first = folder.copies(rank), folder.journal(folder.first)
        self._warned = False
        self._open_news: set[str] = set()

    @override
    def close(self) -> None:
        super().close()
        self._first.close()

    @override
    def after_fork(self) -> None:
        super().after_fork()
        self._first.after_fork()

    # -- reading -----------------------------------------------------------------------------------------------------

    @override
    def source(self, path: str) -> str:
        """The first rank's file once it has written as often as this rank; waits for that while it may still come."""
        self.journal.read()
        changed = governing(path, self.journal.changes)
        if changed is None:
            return path
        deadline = time.monotonic() + self._timeout_s
        while (source := self._source_of(changed)) is FileSource.WAIT and self._first_lives():
            if time.monotonic() > deadline:
                sys.stderr.write(
                    f"manyhands: worker {self.rank} waited {self._timeout_s:g} s for worker {self.folder.first} to "
                    f"write {changed}, and now reads its own copy instead\n"
                )
                break
            pause(_POLL_S)
        if source is FileSource.REAL:
            return path
        self._place_own([changed], self._has_passed(self.journal.of(changed).turn))
        return self._seen(path)

    def _source_of(self, path: str) -> FileSource:
        own = self.journal.of(path)
        passed = self._has_passed(own.turn)  # looked up before the journal: what was written before, is in it
        self._first.read()
        return source_of(own, self._first.of(path), passed)

    def _has_passed(self, turn: int) -> bool:
        return self._first.ended or self.turns.first > turn

    def _first_lives(self) -> bool:
        lock = self.folder.lock("alive", fcntl.LOCK_SH | fcntl.LOCK_NB)
        if lock is not None:
            os.close(lock)
        return lock is None

    def _seen(self, path: str) -> str:
        """The path as this rank left it: its copy, nothing (a copy that is not there), or what is there untouched."""
        copy = self._root + path
        if os.path.lexists(copy):
            return copy
        changes = self.journal.changes
        changed = governing(path, changes)
        emptied = changed is not None and (changes[changed].gone or (changed != path and path in changes))
        return copy if emptied else path

    def has_changes(self) -> bool:
        self.journal.read()
        return bool(self.journal.changes)

    def has_changes_in(self, folder: str) -> bool:
        """Whether it has changed this folder, one above it, or a path in it."""
        changes = self.journal.changes
        return governing(folder, changes) is not None or any(os.path.dirname(path) == folder for path in list(changes))

    def listdir(self, path: str) -> list[str]:
        at = self.source(path)
        own = [changed for changed in list(self.journal.changes) if os.path.dirname(changed) == path]
        try:
            names = set(os.listdir(at))
        except FileNotFoundError:
            if not own:
                raise
            names = set()
        for child in own:
            (names.add if os.path.lexists(self.source(child)) else names.discard)(os.path.basename(child))
        return sorted(names)

    # -- writing -----------------------------------------------------------------------------------------------------

    @override
    def begin(self, path: str, *, fresh: bool = True, new: bool = False) -> str:
        self.journal.read()
        copy, seen = self._root + path, self._seen(path)
        if new and seen == path and os.path.lexists(path) and not self._is_behind(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        above = os.path.dirname(path)
        if os.path.isdir(self._seen(above)) or self._is_behind(above):
            os.makedirs(self._root + above, exist_ok=True)
        if not (fresh or new) and seen == path and os.path.isfile(path):
            shutil.copy(path, copy)
        self.journal.note(BEGUN, path, self.turns.own)
        if not self._warned:
            self._warned = True
            sys.stderr.write(
                f"manyhands: worker {self.rank} of {self._size} writes its files to {self._root}. Of a file that "
                f"worker {self.folder.first} writes too, only worker {self.folder.first}'s is kept; all others are "
                "moved to their place at the end\n"
            )
        return copy

    def _is_behind(self, path: str) -> bool:
        """Whether the first rank changed the path more often, so that its present state is the first rank's."""
        self._first.read()
        return self._first.of(path).begun > self.journal.of(path).begun

    @override
    def rmdir(self, path: str) -> None:
        seen = self._seen(path)
        if os.path.isdir(seen) and any(os.path.lexists(self._seen(f"{path}/{name}")) for name in os.listdir(seen)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._remove(path, os.rmdir)

    @override
    def rmtree(self, path: str, *given: Any, **named: Any) -> None:
        if not os.path.lexists(self._seen(path)) and not self._is_behind(path):
            shutil.rmtree(self._root + path, *given, **named)  # reports that there is nothing, as the caller chose
            return
        self._remove(path, lambda copy: shutil.rmtree(copy))

    @override
    def _remove(self, path: str, plain: Callable[[str], None]) -> None:
        self.journal.read()
        seen = self._seen(path)
        if not os.path.lexists(seen) and not self._is_behind(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if plain is os.unlink and os.path.isdir(seen) and not os.path.islink(seen):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.journal.note(BEGUN, path, self.turns.own)
        self._finish(path, lambda: plain(seen) if seen != path and os.path.lexists(seen) else None, gone=True)

    @override
    def rename(self, source: str, target: str) -> None:
        if self.is_private(source):  # it is at its real place, where this rank alone looks
            copy = self.begin(target)
            self._finish(target, lambda: shutil.move(source, copy))
            return
        if self.is_private(target):
            shutil.copy2(self._seen(source), target)
            self._remove(source, os.unlink)
            return
        self.journal.read()
        seen, behind = self._seen(source), self._is_behind(source)
        if not os.path.lexists(seen) and not behind:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
        self.journal.note(BEGUN, source, self.turns.own)
        copy = self.begin(target)

        def move() -> None:
            if seen != source:
                os.replace(seen, copy)
            elif os.path.lexists(seen):  # else the first rank has moved it already; it is the first's to move
                (shutil.copytree if os.path.isdir(seen) else shutil.copy2)(seen, copy)

        try:
            self._finish(target, move)
        except OSError:
            self.undo(source)
            raise
        self.end(source, gone=True)

    @override
    def link(self, source: str, target: str) -> None:
        at = self._seen(source)
        copy = self.begin(target, new=True)
        self._finish(target, lambda: shutil.copy2(at, copy))

    def of_copy(self, plain: Callable[..., None], path: str, *given: Any, **named: Any) -> None:
        """What changes a file's mode or times changes the copy's; the first's file it leaves."""
        self.journal.read()
        seen = self._seen(path)
        if seen != path:
            plain(seen, *given, **named)
        elif not os.path.lexists(path) and not self._is_behind(path):
            plain(path, *given, **named)  # says that there is nothing

    # -- what is this rank's own -------------------------------------------------------------------------------------

    @override
    def turn(self) -> None:
        """What the first rank has not begun to write when it begins this collective is this rank's own.

        It goes to its place, where whoever reads it after the collective finds it.
        """
        self.turns.own += 1
        self.journal.read()
        news, self.journal.news = self.journal.news | self._open_news, set()
        if not news:
            return
        deadline = time.monotonic() + self._timeout_s
        while self.turns.first < self.turns.own and self._first_lives() and time.monotonic() < deadline:
            pause(_POLL_S)  # until the first rank has begun the same collective, which cannot be over before
        self._open_news = self._place_own(sorted(news), self._has_passed(self.turns.own - 1))

    def _place_own(self, paths: list[str], passed: bool) -> set[str]:
        """Those that may still become this rank's own."""
        self._first.read()
        still_open = set()
        for path in paths:
            own, first = self.journal.of(path), self._first.of(path)
            if is_own(own, first, passed):
                self._place(path)
            elif own.begun > own.closed and not first.begun:
                still_open.add(path)
        return still_open

    def _place(self, path: str) -> None:
        copy = self._root + path
        if is_trackers(path):
            return
        if self.journal.of(path).gone:
            remove(self.folder, path, self.rank)
        elif os.path.isdir(copy) and not os.path.islink(copy):
            os.makedirs(path, exist_ok=True)
            for name in os.listdir(copy):  # of a folder that was moved here: what was written in it is not new
                child = f"{path}/{name}"
                if not self._first.of(child).begun and child not in self.journal.changes:
                    self._place(child)
        elif os.path.lexists(copy):
            place(self.folder, path, self.rank, complete=True)
