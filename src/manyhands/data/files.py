"""Data in files: `.npz`, `.npy`, `.parquet` (a folder of them too) and `.txt`."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from manyhands.data.arrays import Columns
from manyhands.data.source import Indexed, Reading, Source, nonempty
from manyhands.data.tables import parquet_columns
from manyhands.errors import BadInput

Collate = Callable[[list[Any]], Any]
KINDS = ".npz, .npy, .parquet, .txt, or a folder of .parquet files"


def open_file(path: Path, collate: Collate | None = None) -> Source:
    """The source that a file is, by its suffix. Raises BadInput for a path that is not there or of another kind."""
    if not path.exists():
        raise BadInput(f"no file or folder {str(path)!r} (looked from {Path.cwd()})")
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in (".parquet", ".pq"):
        _check_folder(path)
        return Columns(parquet_columns(path), collate, str(path))
    if suffix in (".npz", ".npy"):
        return Columns(_numpy(path), collate, str(path))
    if suffix == ".txt":
        return Lines(path, collate)
    raise BadInput(
        f"cannot read {str(path)!r}: expected {KINDS}. Read it yourself and give arrays, a DataFrame or a Dataset"
    )


def _check_folder(path: Path) -> None:
    if path.is_dir() and not any(path.rglob("*.parquet")):
        raise BadInput(f"the folder {str(path)!r} holds no .parquet file: expected {KINDS}")


def _numpy(path: Path) -> Any:
    """The arrays of an .npz by name, or the one of an .npy, memory-mapped. Never unpickles."""
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(
            f"{path} cannot be read as {path.suffix} without unpickling: {error}. Save plain arrays with numpy.savez"
        ) from error


class Lines(Indexed):
    """A text file, UTF-8: a row is a line without its end; a batch is a list of strings, or what `collate` makes of it.

    The file stays memory-mapped: a worker holds one offset (8 bytes) a line. An empty line is a row.
    """

    def __init__(self, path: Path, collate: Collate | None = None) -> None:
        self._path, self._collate = path, collate
        nonempty(path.stat().st_size, str(path))
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        ends = np.flatnonzero(self._bytes == ord("\n"))
        if self._bytes[-1] != ord("\n"):
            ends = np.append(ends, len(self._bytes))
        self._ends = ends
        self.rows = len(ends)

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        lines = [self._line(int(i)) for i in indices]
        return lines if self._collate is None else self._collate(lines)

    @override
    def in_background(self, reading: Reading) -> bool:
        return self._collate is None

    def _line(self, i: int) -> str:
        start = int(self._ends[i - 1]) + 1 if i else 0
        raw = self._bytes[start : int(self._ends[i])].tobytes()
        try:
            return raw.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise BadInput(
                f"line {i + 1} of {self._path} is not UTF-8: {error}. Convert the file, or give a list of strings"
            ) from error
