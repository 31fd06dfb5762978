"""`write_shards()`: the rows of any data as files, in bounded memory; all of them, or none."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.data.shards.arrow_rows import arrow_rows
from manyhands.data.shards.formats import base
from manyhands.data.shards.formats.by_suffix import format_of
from manyhands.data.shards.formats.writers import WRITERS, ShardWriter
from manyhands.data.shards.row_shuffle import shuffled
from manyhands.data.shards.stored_file import filesystem
from manyhands.errors import BadInput, ManyhandsError, is_whole

if TYPE_CHECKING:
    import pyarrow as pa

FILE_BYTES = 256 << 20
"""In a folder a file ends with so many bytes of rows, as they are in memory, unless rows_per_file says when."""
KINDS = "a file .parquet, .arrow, .tfrecord or .tar, or a folder"
_UNFINISHED = ".part"

Progress = Callable[[int, int], None]  # (rows that are written, rows in all)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `write_shards` wrote."""

    files: tuple[str, ...]
    """In the order of the rows."""
    rows: int
    bytes: int
    """Of the files."""
    changes: tuple[str, ...] = ()
    """What will be read otherwise than it was, since the format has no such type or name: `x: double becomes float`."""


def write_shards(
    data: Any,
    path: str | Path,
    *,
    format: str | None = None,
    columns: Sequence[str] = (),
    rows_per_file: int | None = None,
    row_group_bytes: int | str | None = None,
    shuffle: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Written:
    """Write the rows of any data as files that `shards` reads, in bounded memory.

    data: anything that `train_data` may be, also a path, or shards(…), whose `decode` then makes the rows.
    path: FILE.parquet, .arrow, .tfrecord or .tar: one file; or a folder: part-00000.parquet and so on. A path or a URL.
    format: of the files in a folder: parquet (the default), arrow, tfrecord or tar.
    columns: those that are written; default: all. Of data without names, such as a pair of arrays, they are its names.
    rows_per_file: in a folder; default: about 256 MB of rows.
    row_group_bytes: of a row group of Parquet or a record batch of Arrow, as it is in memory; default: 16 MB. Smaller ones
        are shared out among more workers and mixed better; larger ones compress better.
    shuffle: write the rows in a random order, drawn once by `seed`; as many bytes as the rows have in memory must be free
        beside the files (of a URL: in this machine's temporary folder).
    progress: is called with (rows that are written, rows in all; of a stream, those so far).

    Members of tars become numbers, texts and arrays, as their suffixes say, unless a tar is written; in a tar numbers are
    members `.npy`, texts `.txt`, and what JSON can say `.json`, unless their names have such a suffix.

    Files are written under other names, and renamed when all are complete: an error leaves none. Raises BadInput, before
    anything is written, for a path that exists and for a column that the format cannot hold, and later for a row that it
    cannot hold; ManyhandsError where the disk or store fails.
    """
    target = _target_of(str(path), format, rows_per_file)
    writer = WRITERS[target.format]
    if row_group_bytes is not None and not writer.in_blocks:
        raise BadInput(
            f"row_group_bytes is of Parquet and Arrow, and {target.format} files have no row groups: leave it out"
        )
    if rows_per_file is not None and not is_whole(rows_per_file):
        raise BadInput(f"rows_per_file must be a whole number of at least 1, not {rows_per_file!r}")
    if isinstance(row_group_bytes, str):
        row_group_bytes = units.read_bytes(row_group_bytes, "row_group_bytes")
    if row_group_bytes is not None and not is_whole(row_group_bytes):
        raise BadInput(f"row_group_bytes must be a size of at least 1 byte, such as 16MB, not {row_group_bytes!r}")
    rows = arrow_rows(data, [columns] if isinstance(columns, str) else columns, members=target.format == ".tar")
    changes = writer.changes(rows.schema)
    output = _Output(target, writer, rows.schema, row_group_bytes or base.BLOCK_BYTES, rows_per_file)
    with output.complete_or_none():
        batches = rows.batches
        if shuffle:
            batches = shuffled(batches, rows.schema, seed, rows.memory, output.scratch)
        with closing(batches):
            for batch in batches:
                output.write(batch)
                if progress is not None:
                    progress(output.rows, rows.rows or output.rows)
    return Written(files=tuple(output.files), rows=output.rows, bytes=output.bytes, changes=tuple(changes))


@dataclass(frozen=True)
class _Target:
    """Where files go: one file, or those of a folder."""

    fs: Any
    url: str
    place: str
    """In the file system."""
    format: str
    """In WRITERS."""
    folder: bool

    def file(self, number: int) -> str:
        return posixpath.join(self.place, f"part-{number:05d}{self.format}") if self.folder else self.place

    @property
    def local(self) -> bool:
        return "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple | list) else (self.fs.protocol,))


def _target_of(path: str, format: str | None, rows_per_file: int | None) -> _Target:
    """BadInput for a path that cannot be written to as it is asked for."""
    last = path.rstrip("/").rpartition("/")[2]
    suffix = None if path.endswith("/") else format_of(last)
    if suffix is None and "." in last and not path.endswith("/") and format is None:
        raise BadInput(f"cannot write {path!r}: give {KINDS}")
    if suffix is not None and (suffix not in WRITERS or not last.lower().endswith(suffix)):
        raise BadInput(f"cannot write {path!r}: give {KINDS}")
    if suffix is not None and format is not None and f".{format}" != suffix:
        raise BadInput(
            f"{path} would be a {suffix} file, and format is {format!r}: leave format out, or name a folder, {path}/"
        )
    if suffix is not None and rows_per_file is not None:
        raise BadInput(
            f"rows_per_file makes several files, and {path!r} is one: give a folder, and format={suffix[1:]!r}"
        )
    if format is not None and f".{format}" not in WRITERS:
        raise BadInput(f"format must be one of {', '.join(name[1:] for name in WRITERS)}, not {format!r}")
    fs, place = filesystem(path)
    target = _Target(fs, path, place.rstrip("/"), suffix or f".{format or 'parquet'}", suffix is None)
    if target.folder and fs.isdir(target.place):
        if fs.ls(target.place, detail=False):
            raise BadInput(f"the folder {path!r} is not empty, and nothing is overwritten: name another, or empty it")
    elif fs.exists(target.place):
        raise BadInput(f"{path!r} exists already, and nothing is overwritten: name another, or delete it")
    above = posixpath.dirname(target.place)
    if target.local and not fs.isdir(above):
        raise BadInput(f"{path!r} is in a folder that does not exist: make {above} first, or name another path")
    return target


@dataclass
class _Output:
    """The files under way."""

    target: _Target
    writer: type[ShardWriter]
    schema: pa.Schema
    block_bytes: int
    rows_per_file: int | None
    files: list[str] = field(default_factory=list)
    """Those that are renamed."""
    rows: int = 0
    bytes: int = 0
    _writing: ShardWriter | None = None
    _rows_in_file: int = 0
    _bytes_in_file: int = 0  # as they are in memory
    _unfinished: list[str] = field(default_factory=list)

    @property
    def scratch(self) -> Path:
        """A folder of this machine for what is written meanwhile."""
        if not self.target.local:
            return Path(gettempdir())
        return Path(self.target.place if self.target.folder else posixpath.dirname(self.target.place))

    @contextmanager
    def complete_or_none(self) -> Iterator[None]:
        """At the end all files get their names; after an error there are none, nor the folder that was made for them."""
        fs, place = self.target.fs, self.target.place
        made = self.target.folder and not fs.exists(place)
        try:
            if made:
                with self._failing():
                    fs.makedirs(place)
            yield
            with self._failing():
                self._end_file()
                self._rename()
        except BaseException:
            self._discard(made)
            raise

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Say what an error of the disk or store means."""
        try:
            yield
        except OSError as error:
            raise ManyhandsError(
                f"{self.target.url} could not be written ({error.strerror or error}), and what was written is deleted: check the disk or "
                "store, and write again"
            ) from error

    def write(self, batch: pa.RecordBatch) -> None:
        """In pieces that fit into a block."""
        piece = max(1, batch.num_rows * self.block_bytes // max(1, 4 * batch.nbytes))
        while batch.num_rows:
            room = batch.num_rows if self.rows_per_file is None else self.rows_per_file - self._rows_in_file
            with self._failing():
                self._write(batch.slice(0, min(piece, room)))
            batch = batch.slice(min(piece, room))

    def _write(self, part: pa.RecordBatch) -> None:
        if self._writing is None:
            self._writing = self._next_file()
        self._writing.write(part, self.rows)
        self.rows += part.num_rows
        self._rows_in_file += part.num_rows
        self._bytes_in_file += part.nbytes
        full = self.rows_per_file is None and self.target.folder and self._bytes_in_file >= FILE_BYTES
        if full or self._rows_in_file == self.rows_per_file:
            self._end_file()

    def _next_file(self) -> ShardWriter:
        folder, name = posixpath.split(self.target.file(len(self._unfinished)))
        self._unfinished.append(posixpath.join(folder, f".{name}{_UNFINISHED}"))
        return self.writer(self.target.fs.open(self._unfinished[-1], "wb"), self.schema, self.block_bytes)

    def _end_file(self) -> None:
        if self._writing is not None:
            self._writing.close()
            self._writing.file.close()
        self._writing, self._rows_in_file, self._bytes_in_file = None, 0, 0

    def _rename(self) -> None:
        fs = self.target.fs
        for number, unfinished in enumerate(self._unfinished):
            file = self.target.file(number)
            fs.mv(unfinished, file)
            self.files.append(file if self.target.local else str(fs.unstrip_protocol(file)))
            self.bytes += int(fs.size(file))

    def _discard(self, made: bool) -> None:
        fs = self.target.fs
        if self._writing is not None:
            self._writing.abandon()
        for file in [*self._unfinished, *(self.target.file(i) for i in range(len(self.files)))]:
            if fs.exists(file):
                fs.rm_file(file)
        if made and fs.isdir(self.target.place):
            fs.rmdir(self.target.place)
