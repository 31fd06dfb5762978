"""Which files a path, glob, folder or URL names."""

from __future__ import annotations

import glob
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.data.shards.formats.by_suffix import FORMATS, KINDS, format_of
from manyhands.data.shards.stored_file import filesystem, not_opened
from manyhands.errors import BadInput

_LOGS = {
    "a Delta table": re.compile(r"/_delta_log(/|$)"),
    "an Iceberg table": re.compile(r"/metadata/[^/]+\.metadata\.json"),
    "a Hudi table": re.compile(r"/\.hoodie(_partition_metadata)?(/|$)"),
    "the output of a Spark stream": re.compile(r"/_spark_metadata(/|$)"),
}
"""A log that says which files count: the others in its folder were removed, replaced or never committed."""

_SPLIT = re.compile(r"/(train|validation|valid|val|dev|test)(?=/|-\d+-of-\d+\.)")
"""In the names that Hugging Face and many others give to files: `test/part.parquet`, `test-00000-of-00002.parquet`."""


def find(paths: Sequence[str | Path], suffixes: Sequence[str] = tuple(FORMATS), kinds: str = KINDS) -> tuple[str, ...]:
    """The URLs of the files that paths, globs and folders name; those of one glob or folder in the order of their
    names.

    A name that begins with `_` or `.` inside a folder is none of the table's (`_SUCCESS`, `.part.crc`). suffixes: of
    FORMATS, those that can be read. kinds: what the error says of them.

    Raises BadInput for a path that is not there, a folder without such files, a folder or glob in a table whose log
    says which files count (Delta, Iceberg, Hudi, the output of a Spark stream), a folder of several splits (train,
    test), files of another kind, of several kinds, or named twice, and for storage of which the package is not
    installed.
    """
    files = [file for path in paths for file in _found(str(path), suffixes, kinds)]
    if twice := [file for file, n in Counter(files).items() if n > 1]:
        raise BadInput(f"{twice[0]} is named twice: its rows would count twice")
    found = {file: format_of(file) for file in files}
    if other := [file for file, name in found.items() if name not in suffixes]:
        raise BadInput(
            f"cannot read {other[0]!r}: expected {kinds}. Read it yourself and give arrays, a DataFrame or a Dataset"
        )
    if len(set(found.values())) > 1:
        several = " and ".join(sorted(str(name) for name in set(found.values())))
        raise BadInput(f"the data mixes {several} files ({paths[0]} and others): give files of one kind")
    return tuple(files)


def _found(path: str, suffixes: Sequence[str], kinds: str) -> list[str]:
    fs, place = filesystem(path)
    fs.invalidate_cache()  # else a listing of before, without the files that were written since
    try:
        named = fs.exists(place)
    except ValueError as error:  # Hugging Face's, of an address that is none
        raise not_opened(path, error) from error
    places = [place] if named else sorted(fs.glob(place)) if glob.has_magic(place) else []
    if not places:
        raise BadInput(
            f"there is no file or folder {path!r}" + ("" if "://" in path else f" (the current folder is {Path.cwd()})")
        )
    files, folders = [], set()
    for one in places:
        if fs.isdir(one):
            files += _inside(fs, one, suffixes, kinds)
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


def _inside(fs: Any, folder: str, suffixes: Sequence[str], kinds: str) -> list[str]:
    names = {file: file.removeprefix(folder.rstrip("/")) for file in fs.find(folder)}  # "/day=1/part.parquet"
    _refuse_log(folder, names.values())
    tables = [file for file, name in names.items() if not re.search(r"/[_.]", name) and format_of(file) in suffixes]
    if not tables:
        raise BadInput(f"the folder {folder!r} holds no {' or '.join(suffixes)} file: expected {kinds}")
    splits: dict[str, str] = {}  # with what names one alone
    for file in tables:
        if found := _SPLIT.search(names[file]):
            end = "" if names[file][found.end()] == "/" else "-*"
            splits[found[1]] = folder.rstrip("/") + names[file][: found.end()] + end
    if len(splits) > 1:
        one = splits.get("train") or min(splits.values())
        raise BadInput(
            f"the folder {folder!r} holds {' and '.join(sorted(splits))} files, whose rows would be mixed: name one, such as {one!r}, or list all of "
            "them"
        )
    return sorted(tables)


def _url(fs: Any, path: str, place: str, file: str) -> str:
    """The URL of a file found under `path`, with the host or account that its path in the file system lacks."""
    stem = path.rstrip("/")
    if "://" in path and stem.endswith(place):
        return stem.removesuffix(place) + file
    return str(fs.unstrip_protocol(file))
