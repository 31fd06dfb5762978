"""Paths of fsspec file systems (hdfs://, s3://, …) with the methods of `pathlib.Path` that a run directory needs."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARTIAL = ".partial"  # ends the name of a file that is being written


@dataclass(frozen=True)
class RemotePath:
    """A file or folder by its URL; its text is that URL. Nothing is held open between two calls, so it goes to other
    processes as it is.

    Each process reaches the file system with the credentials of its own environment. Methods raise FileNotFoundError
    where what they read is not there, and ManyhandsError for anything else that the file system says.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def with_name(self, name: str) -> RemotePath:
        return RemotePath(self.url.removesuffix(self.name) + name)

    # -- what is there -----------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        with self._reached("read") as (system, path):
            return bool(system.exists(path))

    def is_dir(self) -> bool:
        """Whether it is a folder; an object store has those alone that hold something."""
        with self._reached("read") as (system, path):
            return bool(system.isdir(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies in this folder; nothing where there is no such folder."""
        return (self / name for name in self.sizes())

    def sizes(self) -> dict[str, int]:
        """What lies in this folder by name, with the bytes of each (of folders, what the file system says)."""
        with self._reached("read") as (system, path):
            found = system.ls(path, detail=True) if system.isdir(path) else []
        own = path.strip("/")  # a store may list a folder within itself
        entries = {entry["name"].strip("/"): int(entry["size"] or 0) for entry in found}
        return {name.rpartition("/")[2]: size for name, size in entries.items() if name != own}

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        with self._reached("read") as (system, path):
            return bytes(system.cat_file(path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[io.BufferedReader]:
        """The file to read, block by block."""
        assert mode == "rb"
        with self._reached("read") as (system, path), io.BufferedReader(system.open(path, mode)) as file:
            yield file

    # -- writing -----------------------------------------------------------------------------------------------------

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """The folder and those above it; nothing on an object store, but its bucket."""
        assert parents
        with self._reached("write") as (system, path):
            system.makedirs(path, exist_ok=exist_ok)

    def write_bytes(self, data: bytes) -> None:
        """A file in a folder that is there; who is killed meanwhile may leave a part of it."""
        with self._reached("write") as (system, path):
            system.pipe_file(path, data)

    @contextmanager
    def create(self) -> Iterator[BinaryIO]:
        """A file to write piece by piece, as `write_bytes`."""
        with self._reached("write") as (system, path), system.open(path, "wb") as file:
            yield file

    def write_whole(self, source: BinaryIO) -> None:
        """All of `source`, under the name with `PARTIAL` at its end first: under its own there is never a part of it.

        Who is killed before the last may leave it under that name alone, since not every file system replaces a file by
        renaming.
        """
        partial = self.with_name(self.name + PARTIAL)
        with partial._reached("write") as (system, path), system.open(path, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        with self._reached("write") as (system, target):
            if system.exists(target):
                system.rm_file(target)
            system.mv(path, target)

    def remove(self) -> None:
        """The file, or the folder and all in it; nothing where there is none."""
        with self._reached("remove") as (system, path):
            if system.exists(path):
                system.rm(path, recursive=True)

    @contextmanager
    def _reached(self, action: str) -> Iterator[tuple[AbstractFileSystem, str]]:
        """(file system, path there), without cached listings. Errors of every store become one of ours."""
        from fsspec.core import url_to_fs

        try:
            system, path = url_to_fs(self.url)
            system.invalidate_cache()
            yield system, str(path)
        except Exception as problem:
            if isinstance(problem, FileNotFoundError) and action == "read":
                raise
            why = f"{type(problem).__name__}: {problem}".partition("\n")[0]
            raise ManyhandsError(
                f"cannot {action} {self.url}: {why}. Check the address, and the credentials in this host's "
                "environment. To continue a run that had started, use resume=True (--resume)"
            ) from problem


AnyPath = Path | RemotePath


@contextmanager
def open_regular(path: AnyPath) -> Iterator[io.BufferedReader]:
    """The file to read. ValueError for a link, a FIFO, a device: nobody waits for what is in its place."""
    if isinstance(path, RemotePath):
        with path.open("rb") as file:
            yield file
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path.name} is a link, where a file was expected") from error
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield file


def path_of(given: str | AnyPath) -> AnyPath:
    """What a user names a run directory by: a local path (file:///… is one, too), or the URL of a file system that
    fsspec knows.

    Raises BadInput for a protocol that is unknown, or whose package is not installed; nothing is connected to.
    """
    if not isinstance(given, str | Path | RemotePath):
        raise BadInput(f"a directory must be given as a string or a pathlib.Path, not {given!r}")
    protocol = str(given).partition(":/")[0]
    swallowed = isinstance(given, Path) and len(given.parts) > 1 and given.parts[0] == f"{protocol}:"
    if swallowed and protocol in _protocols():
        raise BadInput(
            f"pathlib.Path cannot hold a URL and has turned it into {str(given)!r}: give the URL as a string"
        )
    if isinstance(given, Path | RemotePath):
        return given
    if "://" not in given:
        return Path(given)
    if protocol == "file":
        parts = urlsplit(given)
        if parts.netloc not in ("", "localhost"):
            raise BadInput(
                f"{given} names the host {parts.netloc}, and a file:// address must be on this host: write "
                f"file:///{parts.netloc}{parts.path}"
            )
        return Path(unquote(parts.path))
    if any(sign in given for sign in "*?[]"):
        raise BadInput(
            f"{given} contains * ? [ or ], which file systems read as a pattern: give a URL without these characters"
        )
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ValueError:
        known = ", ".join(sorted(_protocols()))
        raise BadInput(
            f"{given}: {protocol}:// is not a known file system. Give a path, or a URL that begins with one of {known}"
        ) from None
    except ImportError as error:
        from manyhands.data.shards.stored_file import missing_package

        raise missing_package(given, error) from error
    return RemotePath(given.rstrip("/"))


def _protocols() -> list[str]:
    from fsspec import available_protocols

    return list(available_protocols())
