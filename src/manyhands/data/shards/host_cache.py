"""What a host keeps of the rows that its workers read: each block once, as an Arrow file that all of them map.

A block's file is written under another name, by the one worker that holds the lock on it, and renamed when it is whole.
The others wait for that and map what it wrote. The files that were not used for the longest time go when there are more
bytes than the limit; who has mapped one keeps it. A worker that dies leaves an unlocked file, which the next one takes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    import pyarrow as pa

VARIABLE = "MANYHANDS_CACHE"
_POLL_S, _SILENT_S = 0.02, 300.0  # who writes a block grows its file, or has failed
_BLOCK, _UNFINISHED = ".arrow", ".part"
_FORMAT = 1  # of the files' contents


def default_folder() -> Path:
    """What the variable MANYHANDS_CACHE names, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(VARIABLE) or Path(base).expanduser() / "manyhands")


@dataclass
class HostCache:
    """A folder of blocks. Threads and processes may use it at the same time."""

    folder: Path
    limit: int | None = None
    """Bytes; None: half of what was free at first."""
    _maps: dict[str, list[pa.RecordBatch]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f"{os.getpid()}-{time.monotonic_ns()}{_UNFINISHED}"
            probe.write_bytes(b"\0" * 4096)
            probe.unlink()
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise BadInput(
                f"the cache folder {self.folder} cannot be written to ({error.strerror}): name another one with cache_folder= or the "
                f"variable {VARIABLE}"
            ) from error
        if self.limit is None:
            self.limit = (free + self._held()) // 2
        elif self.limit > free + self._held():
            raise BadInput(
                f"a cache of {units.size(self.limit)} was asked for, and the disk of {self.folder} has {units.size(free)} free: give a "
                f"smaller one, or another folder with cache_folder= or the variable {VARIABLE}"
            )

    def check_room(self, size: int, todo: str) -> None:
        """Raise BadInput where so many bytes have no room together."""
        assert self.limit is not None
        if size > self.limit:
            raise BadInput(
                f"the rows are about {units.size(size)} when decoded, and the cache in {self.folder} may hold {units.size(self.limit)}: {todo}"
            )

    def has(self, key: str) -> bool:
        return key in self._maps or self._path(key).exists()

    def block(self, key: str, make: Callable[[], Iterable[pa.RecordBatch]]) -> tuple[list[pa.RecordBatch], bool]:
        """(the record batches of a block, mapped; whether they were there). `make` reads them, on one worker."""
        if (found := self._maps.get(key)) is not None:
            return found, True
        path = self._path(key)
        batches, was_there = self._mapped(path), True
        while batches is None:
            with self._written_by_us(path) as file:
                if file is None:
                    batches = self._mapped(path)
                    continue
                was_there = False
                _write(path, file, make())
            batches = self._mapped(path)
            self._drop_oldest(path)
        self._maps[key] = batches
        return batches, was_there

    def forget(self, key: str) -> None:
        """Its mapping is not needed now."""
        self._maps.pop(key, None)

    def json(self, key: str, make: Callable[[], Any]) -> Any:
        """A value that is made once, as JSON."""
        path = self.folder / f"{key}.json"
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            value = make()
            temporary = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
            temporary.write_text(json.dumps(value))
            temporary.replace(path)
            return value

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_BLOCK}"

    @staticmethod
    def _mapped(path: Path) -> list[pa.RecordBatch] | None:
        import pyarrow as pa

        try:
            os.utime(path)
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                return [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except FileNotFoundError:
            return None
        except pa.ArrowInvalid:  # a crash of the machine left it half written
            path.unlink(missing_ok=True)
            return None

    @contextmanager
    def _written_by_us(self, path: Path) -> Iterator[int | None]:
        """A descriptor of the locked, empty file to write to; None where another has written it, or is gone, meanwhile."""
        unfinished = path.with_suffix(_UNFINISHED)
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waited, size = time.monotonic(), -1
            while not _locked(file):
                if (now := os.fstat(file).st_size) != size:
                    waited, size = time.monotonic(), now
                if time.monotonic() - waited > _SILENT_S:
                    raise ManyhandsError(
                        f"another process has held {unfinished} for {_SILENT_S:.0f} s without writing to it: end it, or delete the file"
                    )
                time.sleep(_POLL_S)
            ours = not path.exists() and unfinished.exists() and os.path.samestat(os.fstat(file), os.stat(unfinished))
            if ours:
                os.ftruncate(file, 0)
            try:
                yield file if ours else None
            except BaseException:
                if ours:
                    unfinished.unlink(missing_ok=True)
                raise
        finally:
            os.close(file)

    def _held(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of all blocks, the oldest first."""
        found = []
        for one in os.scandir(self.folder):
            if one.name.endswith((_BLOCK, _UNFINISHED)):
                try:
                    told = one.stat()
                except FileNotFoundError:
                    continue
                found.append((told.st_mtime, told.st_size, Path(one.path)))
        return sorted(found)

    def _drop_oldest(self, newest: Path) -> None:
        assert self.limit is not None
        files = self._files()
        over = sum(size for _, size, _ in files) - self.limit
        for _, size, path in files:
            if over <= 0:
                return
            if path == newest or (path.suffix == _UNFINISHED and not _left_behind(path)):
                continue
            path.unlink(missing_ok=True)
            over -= size


def key_of(*what: Any) -> str:
    """The name of what these values make, JSON all of them."""
    return hashlib.sha256(json.dumps([_FORMAT, *what]).encode()).hexdigest()[:40]


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _left_behind(path: Path) -> bool:
    """Whether nobody writes to an unfinished file any more."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return _locked(file)
    finally:
        os.close(file)


def _write(path: Path, file: int, batches: Iterable[pa.RecordBatch]) -> None:
    import pyarrow as pa

    unfinished = path.with_suffix(_UNFINISHED)
    try:
        writer = None
        with os.fdopen(os.dup(file), "wb") as sink:
            for batch in batches:
                writer = writer or pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch)
            if writer is not None:
                writer.close()
    except OSError as error:
        raise ManyhandsError(
            f"the cache folder {path.parent} cannot be written to ({error.strerror or error}): give a smaller cache=, or another folder, and resume the run"
        ) from error
    os.replace(unfinished, path)
