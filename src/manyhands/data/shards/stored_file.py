"""One file of a folder or store, read by ranges of bytes: counted, read again where the store fails, refused where it changes."""

from __future__ import annotations

import errno
import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from typing_extensions import Buffer, override

from manyhands.data.input_counters import InputCounters
from manyhands.errors import BadInput, ManyhandsError

T = TypeVar("T")

TRIES = 6
FIRST_PAUSE_S = 0.05  # before the second try; each further pause is twice as long
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "modified", "created")


class StoredFile:
    """A file of this machine or of storage that fsspec knows. All methods may be called by several threads.

    A read that the store fails is made again, TRIES times in all. Each raises BadInput, naming the file, where it is
    gone, where it is not the one that was opened (its size, or its time or tag, differs), and where it ends too early;
    ManyhandsError where the store still fails.
    """

    def __init__(self, url: str, counters: InputCounters | None = None) -> None:
        self.url = url
        self.counters = counters or InputCounters()

    @cached_property
    def _where(self) -> tuple[Any, str]:
        return filesystem(self.url)

    @cached_property
    def local(self) -> str | None:
        """Its path, where it is a file of this machine's file system."""
        fs, place = self._where
        protocols = fs.protocol if isinstance(fs.protocol, tuple | list) else (fs.protocol,)
        return place if "file" in protocols else None

    @cached_property
    def info(self) -> tuple[int, str]:
        """(bytes, what changes when it is written again) as it was at first."""
        return self._info()

    @property
    def size(self) -> int:
        return self.info[0]

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        """What a read that may succeed next time raises. Each store's package has errors of its own."""
        return (OSError,) if self.local is not None else (Exception,)

    def check(self) -> None:
        """Raise BadInput where it is not what it was at first."""
        self.info  # noqa: B018 - read at first
        self._compare(self._info())

    def _compare(self, now: tuple[int, str]) -> None:
        if now != self.info:
            how = (
                f"it has {now[0]:,} bytes now, and had {self.size:,}" if now[0] != self.size else "it was written again"
            )
            self._changed(how)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), exactly so many."""
        data = self._tried(lambda: self._read(start, stop))
        if len(data) != stop - start:
            self._changed(f"it ends at byte {start + len(data):,}, and had {self.size:,} bytes")
        self.counters.add(bytes=len(data), reads=1)
        return data

    def stream(self, start: int = 0, stop: int | None = None, piece: int = 1 << 20) -> io.BufferedReader:
        """Bytes [start, stop) as a file of Python's, read in pieces of at least `piece` bytes."""
        return io.BufferedReader(RangedReads(self, start, stop), piece)

    def _info(self) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            if self.local is not None:
                return _identity(os.stat(self.local))
            fs, place = self._where
            fs.invalidate_cache(fs._parent(place))
            told: Mapping[str, Any] = fs.info(place)
            return int(told["size"]), "-".join(str(told[name]) for name in _VERSIONS if told.get(name) is not None)

        return self._tried(ask)

    def _read(self, start: int, stop: int) -> bytes:
        if self.local is None:
            fs, place = self._where
            return bytes(fs.cat_file(place, start=start, end=stop)) if stop > start else b""
        with open(self.local, "rb", buffering=0) as file:
            self._compare(_identity(os.fstat(file.fileno())))
            data = os.pread(file.fileno(), stop - start, start)
            while 0 < len(data) < stop - start:  # a call reads 2 GB at most
                more = os.pread(file.fileno(), stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
            return data

    def _tried(self, call: Callable[[], T]) -> T:
        for attempt in range(TRIES):
            try:
                return call()
            except FileNotFoundError as error:
                raise BadInput(
                    f"{self.url} does not exist on {socket.gethostname()}, and all hosts must see it: put it on shared storage, or (on "
                    "Spark) let Spark read the rows (input='stream')"
                ) from error
            except BadInput:
                raise
            except _FINAL as error:
                raise BadInput(f"{self.url} cannot be read: {error}") from error
            except self._failures as error:
                if attempt + 1 == TRIES or getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
                    raise ManyhandsError(
                        f"{self.url} could not be read, in {attempt + 1} tries: {error or type(error).__name__}. Check the "
                        "storage, and resume the run"
                    ) from error
                self.counters.add(retries=1)
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("not reached")

    def _changed(self, how: str) -> None:
        raise BadInput(
            f"{self.url} changed while it was read ({how}): start again, and do not write to it during a run"
        )


def _identity(found: os.stat_result) -> tuple[int, str]:
    return found.st_size, f"{found.st_mtime_ns}-{found.st_ino}"


class RangedReads(io.RawIOBase):
    """Bytes [start, stop) of a stored file as a file of Python's, each of whose reads is one read of the store."""

    def __init__(self, file: StoredFile, start: int = 0, stop: int | None = None) -> None:
        self._file, self._start, self._at = file, start, 0
        self._size = (file.size if stop is None else stop) - start

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    @override
    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        data = self._file.read(self._start + self._at, self._start + end) if end > self._at else b""
        self._at += len(data)
        return data


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL or path, and the path in it. BadInput if unknown, or its package is missing."""
    from fsspec.core import url_to_fs

    try:
        fs, place = url_to_fs(url)
    except ImportError as error:
        raise missing_package(url, error) from error
    except (ValueError, OSError) as error:
        raise not_opened(url, error) from error
    return fs, str(place)


def not_opened(url: str, error: ValueError | OSError) -> BadInput:
    """The error for what its file system does not take."""
    return BadInput(f"{url} cannot be opened: {error}. Give a path, or a URL that fsspec knows (s3://, hdfs://, gs://)")


def missing_package(url: str, error: ImportError) -> BadInput:
    """The error for storage whose package is not installed here."""
    from fsspec.registry import known_implementations

    package = known_implementations.get(url.partition("://")[0], {"class": "fsspec"})["class"].partition(".")[0]
    install = "" if package == "fsspec" else f"; pip install {package}, on every host"
    return BadInput(f"{url} needs a package that is not installed: {error}{install}")
