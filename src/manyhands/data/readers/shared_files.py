"""Tables in files that every host sees, Parquet and TFRecord: found by fsspec's URLs, dealt by ranges of rows.

All files together are one table, in the order in which they were found. Each of N readers takes a range of its rows, so
that their shares are even whatever the files look like. How many rows a file has is read once, by one of the readers:
from the footer of a Parquet file; a TFRecord file has none, and its records are counted from length to length.
"""

from __future__ import annotations

import glob
import posixpath
import re
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from typing_extensions import override

from manyhands import units
from manyhands.data.readers import tfrecords
from manyhands.data.readers.tables import arrow_columns
from manyhands.data.sharding import slice_of
from manyhands.data.source import nonempty
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

KINDS = ".parquet, .tfrecord (also .tfrecord.gz), or a folder of these"
_PARQUET = re.compile(r"\.(parquet|pq)$", re.IGNORECASE)
_TFRECORD = re.compile(r"\.tfrecords?(-\d+-of-\d+)?(\.gz)?$", re.IGNORECASE)

_LOGS = {
    "a Delta table": re.compile(r"/_delta_log(/|$)"),
    "an Iceberg table": re.compile(r"/metadata/[^/]+\.metadata\.json"),
    "a Hudi table": re.compile(r"/\.hoodie(_partition_metadata)?(/|$)"),
    "the output of a Spark stream": re.compile(r"/_spark_metadata(/|$)"),
}
"""A log that says which files count: the others in its folder were removed, replaced or never committed."""

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 65536
_READS_AT_ONCE = 8  # footers: each is a few round trips to the storage, and little else


def find(paths: Sequence[str | Path], kinds: str = KINDS) -> tuple[str, ...]:
    """The URLs of the files that paths, globs and folders name; those of one glob or folder in the order of their
    names.

    A name that begins with `_` or `.` inside a folder is none of the table's (`_SUCCESS`, `.part.crc`). kinds: what the
    error says that can be read.

    Raises BadInput for a path that is not there, a folder without such files, a folder or glob in a table whose log
    says which files count (Delta, Iceberg, Hudi, the output of a Spark stream), files of another kind, of both kinds,
    or named twice, and for storage of which the package is not installed.
    """
    files = [file for path in paths for file in _found(str(path), kinds)]
    if twice := [file for file, n in Counter(files).items() if n > 1]:
        raise BadInput(f"{twice[0]} is named twice: its rows would count twice")
    if len({type(table_file(file, kinds)) for file in files}) > 1:
        raise BadInput(f"the data mixes Parquet and TFRecord files ({paths[0]} and others): give files of one kind")
    return tuple(files)


def types_of(files: Sequence[str]) -> dict[str, pa.DataType]:
    """{column: Arrow type} of the first file that has any; for TFRecord of its first record. BadInput without one."""
    for file in files:
        if types := table_file(file).types():
            return types
    raise BadInput(f"the data files have no rows, and at least one is needed: check {units.listed(files, 3)}")


def count(files: Sequence[str], part: int, parts: int) -> list[int]:
    """The rows of the files part, part + parts, …: what one reader counts for all."""

    def rows(file: str) -> int:
        with _seen_here(file):
            return table_file(file).rows()

    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        return list(pool.map(rows, files[part::parts]))


def together(counts: Sequence[Sequence[int]]) -> list[int]:
    """The rows of each file, of what every reader counted."""
    files = sum(len(own) for own in counts)
    return [counts[i % len(counts)][i // len(counts)] for i in range(files)]


def dealt(rows: Sequence[int], part: int, parts: int) -> list[tuple[int, int, int]]:
    """(file, first row, end) of rows [part·R // parts, (part + 1)·R // parts) of a table of R; `rows` of each file."""
    return list(_overlaps(rows, *slice_of(sum(rows), part, parts)))


def _overlaps(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(i, first, end): what [start, stop) takes of each piece, where pieces of these sizes are concatenated."""
    for i, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        begin = end - size
        first, last = max(start, begin) - begin, min(stop, end) - begin
        if first < last:
            yield i, first, last


def read(
    files: Sequence[str], rows: Sequence[int], names: Sequence[str], part: int, parts: int
) -> Iterator[pa.RecordBatch]:
    """One reader's part of the table, in order, a bounded number of bytes at a time; of columns `names` alone.

    rows: in each file, as they were counted. Raises BadInput for what cannot be read, and for a file that has changed
        since.
    """
    for i, start, stop in dealt(rows, part, parts):
        seen = 0
        with _seen_here(files[i]):
            for batch in table_file(files[i]).read(start, stop, names):
                seen += batch.num_rows
                yield batch
        if seen != stop - start:
            raise BadInput(
                f"{files[i]} changed while the run read it (rows when counted: {rows[i]}, and now fewer): start again, "
                "and do not change it during a run"
            )


@contextmanager
def _seen_here(file: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BadInput(
            f"{file} does not exist on {socket.gethostname()}, and all hosts must see it: put it on shared storage, or "
            "let Spark read the rows (input='stream')"
        ) from error


def columns_of(files: Sequence[str], what: str) -> dict[str, np.ndarray[Any, Any]]:
    """{column: array [rows, …]} of the whole table, in this process's memory.

    For more than that holds, stream (Hugging Face's `load_dataset("parquet", data_files=…, streaming=True)`).
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    if isinstance(table_file(files[0]), Parquet):
        places = [filesystem(file) for file in files]
        try:
            dataset = ds.dataset([place for _, place in places], filesystem=places[0][0], format="parquet")
            return arrow_columns(dataset.to_table(), what)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput(
                f"cannot read {what} as Parquet: {error}. Check that it is a complete Parquet file"
            ) from error
    batches = [batch for file in files for batch in table_file(file).read(0, None, None)]
    nonempty(len(batches), what)
    try:
        return arrow_columns(pa.Table.from_batches(batches), what)
    except pa.ArrowInvalid as error:
        raise BadInput(
            f"the features of {what} differ in type or length: {error}. Write every row with the same types and lengths"
        ) from error


def filesystem(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL or path, and the path in it. BadInput if unknown, or its package is missing."""
    from fsspec.core import url_to_fs

    try:
        fs, place = url_to_fs(url)
    except ImportError as error:
        raise missing_package(url, error) from error
    except (ValueError, OSError) as error:
        raise BadInput(
            f"{url} cannot be opened: {error}. Give a path, or a URL that fsspec knows (s3://, hdfs://, gs://)"
        ) from error
    return fs, str(place)


def missing_package(url: str, error: ImportError) -> BadInput:
    """The error for storage whose package is not installed here."""
    from fsspec.registry import known_implementations

    package = known_implementations.get(url.partition("://")[0], {"class": "fsspec"})["class"].partition(".")[0]
    install = "" if package == "fsspec" else f"; pip install {package}, on every host"
    return BadInput(f"{url} needs a package that is not installed: {error}{install}")


def _found(path: str, kinds: str) -> list[str]:
    fs, place = filesystem(path)
    fs.invalidate_cache()  # else a listing of before, without the files that were written since
    named = fs.exists(place)
    places = [place] if named else sorted(fs.glob(place)) if glob.has_magic(place) else []
    if not places:
        raise BadInput(
            f"there is no file or folder {path!r}" + ("" if "://" in path else f" (the current folder is {Path.cwd()})")
        )
    files, folders = [], set()
    for one in places:
        if fs.isdir(one):
            files += _inside(fs, one, kinds)
            folders.add(one)
        else:
            files.append(one)
            if not named:  # a file that is named outright may be one of those that a log lists
                folders.add(posixpath.dirname(one))
    for folder in {above for one in folders for above in _tables_around(one)}:
        try:
            names = fs.ls(folder, detail=False)
            names += [name for one in names if one.endswith("/metadata") for name in fs.ls(one, detail=False)]
        except PermissionError:  # storage may show somebody one partition and not the table around it
            continue
        _refuse_log(folder, names)
    return [_url(fs, path, place, file) for file in files]


def _tables_around(folder: str) -> Iterator[str]:
    """The folders of which `folder` may be a partition: `TABLE/day=1/hour=2`, Iceberg's `TABLE/data/day=1`."""
    while "=" in posixpath.basename(folder) and posixpath.dirname(folder):
        folder = posixpath.dirname(folder)
    yield folder
    if posixpath.basename(folder) == "data" and posixpath.dirname(folder):
        yield posixpath.dirname(folder)


def _refuse_log(folder: str, names: Iterable[str]) -> None:
    for kind, log in _LOGS.items():
        if any(log.search(name) for name in names):
            raise BadInput(
                f"{folder!r} is part of {kind}, and some of its files may hold rows that were removed, replaced or "
                "never committed: let Spark read it, or give the current files one by one"
            )


def _inside(fs: Any, folder: str, kinds: str) -> list[str]:
    names = {file: file.removeprefix(folder.rstrip("/")) for file in fs.find(folder)}  # "/day=1/part.parquet"
    _refuse_log(folder, names.values())
    tables = [
        file
        for file, name in names.items()
        if not re.search(r"/[_.]", name) and (_PARQUET.search(file) or _TFRECORD.search(file))
    ]
    if not tables:
        raise BadInput(f"the folder {folder!r} holds no .parquet file and no .tfrecord file: expected {kinds}")
    return sorted(tables)


def _url(fs: Any, path: str, place: str, file: str) -> str:
    """The URL of a file found under `path`, with the host or account that its path in the file system lacks."""
    stem = path.rstrip("/")
    if "://" in path and stem.endswith(place):
        return stem.removesuffix(place) + file
    return str(fs.unstrip_protocol(file))


class TableFile(ABC):
    """One file of a table."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def types(self) -> dict[str, pa.DataType]:
        """{column: Arrow type}; {} where nothing says it."""

    @abstractmethod
    def rows(self) -> int:
        """How many, without reading them."""

    @abstractmethod
    def read(self, start: int, stop: int | None, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """The rows [start, stop), or to the end; of all columns without `names`."""


def table_file(url: str, kinds: str = KINDS) -> TableFile:
    """The file of a URL, by its suffix; it is not opened. Raises BadInput for another suffix."""
    if _PARQUET.search(url):
        return Parquet(url)
    if _TFRECORD.search(url):
        return TFRecord(url)
    raise BadInput(f"cannot read {url!r}: expected {kinds}. Read it yourself and give arrays, a DataFrame or a Dataset")


class Parquet(TableFile):
    @override
    def types(self) -> dict[str, pa.DataType]:
        with self._opened() as file:
            return {field.name: field.type for field in file.schema_arrow}

    @override
    def rows(self) -> int:
        with self._opened() as file:
            return int(file.metadata.num_rows)

    @override
    def read(self, start: int, stop: int | None, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        with self._opened() as file:
            if missing := [name for name in names or () if name not in file.schema_arrow.names]:
                raise BadInput(f"{self.url} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            for group, first, last in _overlaps(sizes, start, sum(sizes) if stop is None else stop):
                yield from _of_group(file, group, first, last, names)

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fs, place = filesystem(self.url)
        try:
            with pq.ParquetFile(place, filesystem=fs) as file:
                yield file
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise BadInput(
                f"cannot read {self.url} as Parquet: {error}. Check that it is a complete Parquet file"
            ) from error


def _of_group(
    file: pq.ParquetFile, group: int, start: int, stop: int, names: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Rows of one row group, so many at a time that a batch is of about _BATCH_BYTES."""
    stored = file.metadata.row_group(group)
    rows = min(_BATCH_ROWS, max(1, stored.num_rows * _BATCH_BYTES // max(1, stored.total_byte_size)))
    at = 0
    for batch in file.iter_batches(rows, row_groups=[group], columns=names):
        first, last = max(start - at, 0), min(stop - at, batch.num_rows)
        at += batch.num_rows
        if first < last:
            yield _plain(batch.slice(first, last - first))
        if at >= stop:
            return


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Decimals as doubles, which is what they become on their way from Spark, too."""
    import pyarrow as pa

    columns = [column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


class TFRecord(TableFile):
    @override
    def types(self) -> dict[str, pa.DataType]:
        with self._opened() as file:
            for batch in tfrecords.read(file, self.url, stop=1):
                return {field.name: field.type for field in batch.schema}
        return {}

    @override
    def rows(self) -> int:
        with self._opened() as file:
            return tfrecords.count(file, self.url)

    @override
    def read(self, start: int, stop: int | None, names: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        with self._opened() as file:
            yield from tfrecords.read(file, self.url, names, start, stop)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        fs, place = filesystem(self.url)
        with fs.open(place, "rb") as file:
            yield file
