"""What becomes of other ranks' files: those that the first never wrote go to their paths, the rest with the folder.

The last rank that ends settles them; after any other end a process that waits for that does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from manyhands.rank_files.file_owner import destination, governing, is_trackers
from manyhands.rank_files.folder import FileJournal, Folder


def settle(folder: Folder, *, wait: bool = False) -> bool:
    """Settle all files and remove the folder, if no rank is left. wait: until then. Whether the folder is gone."""
    try:
        lock = folder.lock("lock", fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    try:
        if not os.path.isdir(folder.root):  # another one has done it, while this one waited for the lock
            return True
        first = folder.journal(folder.first)
        first.read()
        kept = [path for rank in folder.ranks() if rank != folder.first for path in _settle_rank(folder, rank, first)]
        first.close()
        if not kept:
            folder.remove()
        return not kept
    finally:
        os.close(lock)


def _settle_rank(folder: Folder, rank: int, first: FileJournal) -> list[str]:
    """The copies that could not be put to their place; they stay."""
    own, kept = folder.journal(rank), []
    own.read()
    own.close()
    root = folder.copies(rank)
    for copy in sorted(str(path) for path in Path(root).rglob("*") if path.is_symlink() or not path.is_dir()):
        path = copy.removeprefix(root)
        if not _is_firsts(path, first) and not is_trackers(path):
            try:
                place(folder, path, rank, complete=first.ended)
            except OSError as error:
                kept.append(copy)
                sys.stderr.write(
                    f"manyhands: cannot move {path}, which worker {rank} wrote, to its place ({error}). It stays in "
                    f"{copy}\n"
                )
    if first.ended:
        for path, change in own.changes.items():
            if not _is_firsts(path, first):
                if change.gone:
                    remove(folder, path, rank)
                elif os.path.isdir(root + path):  # what a rank alone made without a file in it
                    os.makedirs(path, exist_ok=True)
    return kept


def _is_firsts(path: str, first: FileJournal) -> bool:
    """Whether the first rank wrote the path, or removed a folder above it."""
    above = governing(path, first.changes)
    return path in first.changes or (above is not None and first.changes[above].gone)


def remove(folder: Folder, path: str, rank: int) -> None:
    """What a rank alone removed: a file, or of a folder what this rank put there, and what is empty then."""
    if not os.path.isdir(path) or os.path.islink(path):
        with suppress(FileNotFoundError):
            os.unlink(path)
        return
    own = folder.claimed(rank)
    for place, _, names in os.walk(path, topdown=False):
        for name in own.intersection(f"{place}/{name}" for name in names):
            os.unlink(name)
        if not os.listdir(place):
            os.rmdir(place)


def place(folder: Folder, path: str, rank: int, *, complete: bool) -> str:
    """Move a rank's copy of a path to its final place, which is returned. The first rank's files are kept."""
    copy, taken = folder.copies(rank) + path, not folder.claim(path, rank)
    to = destination(path, rank, exists=os.path.lexists(path), taken=taken, complete=complete)
    os.makedirs(os.path.dirname(to), exist_ok=True)
    beside = f"{to}.manyhands-{os.getpid()}"
    shutil.move(copy, beside)
    if os.path.lexists(to):
        os.replace(beside, to)
    else:
        try:
            os.link(beside, to, follow_symlinks=False)
        except FileExistsError:  # the first rank's, by now
            pass
        except OSError:  # a file system without hard links
            os.replace(beside, to)
            return to
        os.unlink(beside)
    return to
