"""Files: `.npz`, `.npy` and `.txt` of this machine; those that `shards` reads, and folders of them, also by URL."""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import override

from manyhands.data.batch import Collate
from manyhands.data.readers import shared_files
from manyhands.data.readers.arrays import Columns
from manyhands.data.shards.find import find
from manyhands.data.shards.formats import by_suffix
from manyhands.data.shards.formats.parquet import Parquet
from manyhands.data.shards.formats.tfrecord import TFRecord
from manyhands.data.shards.source import shards
from manyhands.data.shards.table import ShardTable
from manyhands.data.source import Indexed, Reading, Source, nonempty
from manyhands.errors import BadInput

IN_MEMORY_BYTES = 64 << 20
"""A table of so many bytes, decoded, is held by each worker; of a larger one a host's workers map one copy."""
_STRIDE = 16  # lines between two whose places are held
_PIECE = 1 << 17  # bytes
KINDS = f".npz, .npy, {by_suffix.KINDS}"


def open_file(path: str | Path, collate: Collate | None = None) -> Source:
    """The source that a file is, by its suffix. path: a path, `~` at home; of those that `shards` reads also a glob, a folder,
    or a URL that fsspec knows. The rows of Parquet and TFRecord files have an order of all, others are read as `shards` reads them.

    Raises BadInput for a path that is not there or of another kind, and for storage of which the package is not
    installed.
    """
    what = str(path)
    suffix = Path(what).suffix.lower()
    if suffix in (".npz", ".npy"):
        return Columns(numpy_file(what), collate, what)
    if suffix == ".txt" and "://" not in what and Path(what).expanduser().exists():
        return Lines(_here(what), collate)
    files = find([what], kinds=KINDS)
    first, table = by_suffix.shard_file(files[0]), ShardTable.of(files)
    if not isinstance(first, Parquet | TFRecord):
        return shards(what).open(collate)
    if (
        table.memory if isinstance(first, Parquet) else table.bytes
    ) > IN_MEMORY_BYTES:  # records are not counted for it
        return shards(what, shuffle=True).open(collate)
    return Columns(shared_files.columns_of(files, what), collate, what)


def _here(path: str) -> Path:
    if "://" in path and not path.startswith("file://"):
        raise BadInput(
            f"{path!r} cannot be read by URL: copy the file to this machine. By URL, manyhands reads "
            f"{shared_files.KINDS}"
        )
    local = Path(path.removeprefix("file://")).expanduser()
    if not local.exists():
        raise BadInput(f"there is no file or folder {path!r} (the current folder is {Path.cwd()})")
    return local


def numpy_file(given: str) -> Any:
    """The arrays of an .npz by name, or the one of an .npy, memory-mapped. Never unpickles; BadInput for other things."""
    path = _here(given)
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(
            f"cannot read {path}: {error}. It must hold plain arrays without Python objects: save it with numpy.save "
            "or numpy.savez"
        ) from error


class Lines(Indexed):
    """A text file, UTF-8: a row is a line without its end; a batch is a list of strings, or what `collate` makes of it.

    The file stays memory-mapped: a worker holds half a byte a line, the place of every sixteenth. An empty line is a
    row.
    """

    def __init__(self, path: Path, collate: Collate | None = None) -> None:
        self._path, self._collate = path, collate
        nonempty(path.stat().st_size, str(path))
        with path.open("rb") as file:
            self.rows, self._starts = _places(file)
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        lines = [self._line(int(i)) for i in indices]
        return lines if self._collate is None else self._collate(lines)

    @override
    def in_background(self, reading: Reading) -> bool:
        return self._collate is None

    def _line(self, i: int) -> str:
        start = int(self._starts[i // _STRIDE])
        for _ in range(i % _STRIDE):
            start = self._text.find(b"\n", start) + 1
        end = self._text.find(b"\n", start)
        raw = self._text[start : len(self._text) if end < 0 else end]
        try:
            return raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise BadInput(
                f"line {i + 1} of {self._path} is not UTF-8: {error}. Convert the file, or give a list of strings"
            ) from error


def _places(file: BinaryIO) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """(lines, offsets of lines 0, 16, 32, …), read in pieces: a mapping would count as this process's memory."""
    lines, at, last = 0, 0, b"\n"
    starts = [np.zeros(1, np.int64)]
    while piece := file.read(_PIECE):
        after = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + (at + 1)  # where lines + 1, … start
        starts.append(after[-(lines + 1) % _STRIDE :: _STRIDE].copy())  # a view would hold all of it
        lines, at, last = lines + len(after), at + len(piece), piece[-1:]
    return lines + (last != b"\n"), np.concatenate(starts)
