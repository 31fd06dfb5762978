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
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _replacing(self.folder / "probe", keep=False) as probe, probe.open("wb") as file:
                file.write(b"\0" * 4096)
                _locked(file.fileno())
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
        return self._path(key).exists()

    def block(self, key: str, make: Callable[[], Iterable[pa.RecordBatch]]) -> tuple[list[pa.RecordBatch], bool]:
        """(the record batches of a block, mapped; whether they were there). `make` reads them, on one worker."""
        path = self._path(key)
        try:
            while (batches := _mapped(path)) is None:
                with _written_by_us(path) as file:
                    if file is not None:
                        batches = _written(path, file, make())
                if batches is not None:
                    self._drop_oldest(path)
                    return batches, False
        except OSError as error:
            raise ManyhandsError(
                f"the cache folder {self.folder} cannot be used ({error.strerror or error}): give a smaller cache=, or another folder, and "
                "resume the run"
            ) from error
        return batches, True

    def json(self, key: str, make: Callable[[], Any]) -> Any:
        """A value that is made once, as JSON; where it cannot be kept, each time."""
        path = self.folder / f"{key}.json"
        with suppress(OSError, ValueError):
            return json.loads(path.read_text())
        value = make()
        with suppress(OSError), _replacing(path) as unfinished:
            unfinished.write_text(json.dumps(value))
        return value

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_BLOCK}"

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
            if path != newest and (path.suffix != _UNFINISHED or _left_behind(path)):
                path.unlink(missing_ok=True)
                over -= size


def key_of(*what: Any) -> str:
    """The name of what these values make, JSON all of them."""
    return hashlib.sha256(json.dumps([_FORMAT, *what]).encode()).hexdigest()[:40]


def _mapped(path: Path) -> list[pa.RecordBatch] | None:
    """None: it is not there, or no longer, since it was not whole."""
    import pyarrow as pa

    try:
        os.utime(path)
        return _record_batches(path)
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None):
            raise
        path.unlink(missing_ok=True)  # a crash of the machine left it half written
        return None


def _record_batches(path: Path) -> list[pa.RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]


@contextmanager
def _written_by_us(path: Path) -> Iterator[int | None]:
    """A descriptor of the locked, empty file to write to; None where another has written it, or is gone, meanwhile."""
    unfinished = path.with_suffix(_UNFINISHED)
    file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        here = _wait_for_lock(file, path) and _is_at(file, unfinished)
        ours = here and not path.exists()
        if here and not ours:
            unfinished.unlink(missing_ok=True)  # made here, after another's had got its name
        try:
            if ours:
                os.ftruncate(file, 0)
            yield file if ours else None
        except BaseException:
            if ours:
                unfinished.unlink(missing_ok=True)
            raise
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing it would not, where a process forked meanwhile has it, too
        os.close(file)


def _wait_for_lock(file: int, path: Path) -> bool:
    """False: what another wrote is there. ManyhandsError where nobody writes."""
    waited, size = time.monotonic(), -1
    while not _locked(file):
        if path.exists():
            return False
        if (now := os.fstat(file).st_size) != size:
            waited, size = time.monotonic(), now
        if time.monotonic() - waited > _SILENT_S:
            raise ManyhandsError(
                f"another process has held {path.with_suffix(_UNFINISHED)} for {_SILENT_S:.0f} s without writing to it: end it, or delete "
                "the file"
            )
        time.sleep(_POLL_S)
    return True


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one of this name, and not one that was removed."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _left_behind(path: Path) -> bool:
    """Whether nobody writes to an unfinished file any more; then it is removed, while it is locked."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if left := _locked(file) and _is_at(file, path):
            path.unlink(missing_ok=True)
        return left
    finally:
        os.close(file)


def _written(path: Path, file: int, batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """What was written, mapped; before it has its name, since others may remove it then, to have room."""
    import pyarrow as pa

    unfinished, writer = path.with_suffix(_UNFINISHED), None
    with os.fdopen(os.dup(file), "wb") as sink:
        for batch in batches:
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
    mapped = _record_batches(unfinished)
    unfinished.replace(path)
    return mapped


@contextmanager
def _replacing(path: Path, keep: bool = True) -> Iterator[Path]:
    """A file to write to, which then is `path`, unless writing fails."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        yield unfinished
        if keep:
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
