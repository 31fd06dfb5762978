"""Whose file a path is. Pure: numbers and names in, a decision out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass
class Changes:
    """What one rank has done to one path: how many writes it began and closed, whether the last left nothing there."""

    begun: int = 0
    closed: int = 0
    gone: bool = False
    turn: int = 0  # collectives that the rank had begun at the last of them
    at: int = 0  # the last of them, counted over all paths


class FileSource(Enum):
    """Where a rank other than the first reads a path from."""

    REAL = "where the script says"
    OWN = "this rank's own copy"
    WAIT = "not known before the first rank goes on"


def source_of(own: Changes, first: Changes, passed: bool) -> FileSource:
    """Where a rank reads a path that it changed: from the first rank's, once that has closed as many writes of it.

    passed: the first rank has begun a collective that comes after this rank's last write. In the same program it would
    have written the path before, so there is nothing to wait for.
    """
    if not own.begun:
        return FileSource.REAL
    if own.begun > own.closed or max(first.begun, first.closed) > own.closed:
        return FileSource.OWN  # still being written here, or already being written anew there
    if first.closed == own.closed:
        return FileSource.REAL
    return FileSource.OWN if passed else FileSource.WAIT


def is_own(own: Changes, first: Changes, passed: bool) -> bool:
    """Whether a path belongs to the rank that wrote it: closed here, and not written by the first rank."""
    return passed and own.begun == own.closed > 0 and not first.begun


def is_trackers(path: str) -> bool:
    """Whether a tracker wrote it under a name with this process's number: the first rank's has its own."""
    return os.path.basename(path).startswith("events.out.tfevents.")


def destination(path: str, rank: int, *, exists: bool, taken: bool, complete: bool) -> str:
    """Where a rank's own file goes: to its path, or beside it, where it would replace what is not its own to replace.

    exists: the path is there. taken: another rank's file went there. complete: the first rank has come to its end, or
    past the write, so that what it did not write it does not write any more.
    """
    return f"{path}.rank-{rank}" if taken or (exists and not complete) else path


def governing(path: str, changes: Mapping[str, Changes]) -> str | None:
    """What was changed last: the path itself or a folder above it; None where none of them was."""
    newest, place = None, path
    while True:
        if place in changes and (newest is None or changes[place].at > changes[newest].at):
            newest = place
        above = os.path.dirname(place)
        if above == place:
            return newest
        place = above


SYSTEM = ("/dev", "/proc", "/sys")


def is_shared(path: str, private: Collection[str]) -> bool:
    """Whether ranks meet at this path: not below a private place, a device's folder or a cache of compiled Python."""
    place = path
    while place not in private and place not in SYSTEM and not place.endswith("/__pycache__"):
        above = os.path.dirname(place)
        if above == place:
            return True
        place = above
    return False


def caches(environment: Mapping[str, str], temporary: str, user: str) -> tuple[str, ...]:
    """Folders whose owners let several processes write at once: locks, random names, one rename at the end."""
    home = environment.get("HOME", "/")
    found = [environment.get("XDG_CACHE_HOME", f"{home}/.cache"), f"{home}/.triton"]
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "TORCH_HOME", "HF_HOME"):
        if name in environment:
            found.append(environment[name])
    found.append(f"{temporary}/torchinductor_{user}")
    return tuple(os.path.realpath(path) for path in found)
