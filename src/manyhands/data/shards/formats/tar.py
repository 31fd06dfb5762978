"""Tar archives in webdataset's layout: neighbouring members of one name before the first dot of the last path part are a row.

    000001.jpg  000001.cls  000002.jpg  000002.cls  …       two rows with columns __key__, jpg, cls

A column holds the members' bytes. Members that are no files, and names such as `__meta__`, are passed over.
Source: webdataset, docs "The WebDataset Format" (https://github.com/webdataset/webdataset).
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from typing_extensions import override

from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, READ_BYTES, Block, ShardFile
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "__key__"
_RECORD = 512  # bytes: headers and members begin at multiples
_END = b"\x00" * _RECORD
_NAME = re.compile(r"^((?:.*/|)[^./][^./]*)[.]([^/]*)$")
_PASSED_OVER = re.compile(r"(^|/)__[^/]*__(/|$)")
_FILES, _WITHOUT_DATA = b"0\x007", b"123456"  # kinds of members: the latter are links, devices, folders


def row_of(member: str) -> tuple[str, str] | None:
    """(key, column) of a member's name; None where it belongs to no row."""
    found = None if _PASSED_OVER.search(member) else _NAME.match(member)
    return None if found is None else (found[1], found[2].lower())


class _Member(NamedTuple):
    key: str
    column: str
    at: int  # where the first of its headers begins
    end: int  # of its data, as they are stored


class Tar(ShardFile):
    @override
    def types(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        with self._opened(0, None) as stream:
            for sample in self._samples(self._members(stream, 0, fetch=True)):
                return {KEY: pa.string()} | dict.fromkeys((member.column for member, _ in sample), pa.large_binary())
        return {}

    @override
    def suffixes(self, columns: Sequence[str]) -> dict[str, str]:
        return {name: name.rpartition(".")[2] for name in columns if name != KEY}

    @override
    def blocks(self) -> list[Block]:
        blocks: list[Block] = []
        first = rows = begin = end = 0
        with self._opened(0, None) as stream:
            for sample in self._samples(self._members(stream, 0, fetch=False)):
                last, _ = sample[-1]
                if rows and not self._packed and sample[0][0].at - begin >= BLOCK_BYTES:
                    blocks.append(Block(first, rows, begin, end - begin, end - begin))
                    first, rows, begin = first + rows, 0, sample[0][0].at
                rows += 1
                end = last.end
        if rows:
            stored = self.file.size if self._packed else end - begin  # a packed file is one block
            blocks.append(Block(first, rows, 0 if self._packed else begin, stored, end - begin))
        return blocks

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        self.file.check()
        rows: list[dict[str, bytes | str]] = []
        held = number = 0
        with self._opened(block.at, block.at + block.bytes) as stream:
            for sample in self._samples(self._members(stream, block.at, fetch=True)):
                if number >= start:
                    rows.append({KEY: sample[0][0].key} | {member.column: data for member, data in sample})
                    held += sum(len(data) for _, data in sample)
                number += 1
                if held >= PIECE_BYTES:
                    batch = self._batch(rows, names)
                    rows, held = [], 0  # now, and not when the next piece is asked for
                    yield batch
        if rows:
            yield self._batch(rows, names)

    def _batch(self, rows: list[dict[str, bytes | str]], names: Sequence[str]) -> pa.RecordBatch:
        import pyarrow as pa

        try:
            columns = [
                pa.array([row[name] for row in rows], pa.string() if name == KEY else pa.large_binary())
                for name in names
            ]
        except KeyError as error:
            row = next(row for row in rows if error.args[0] not in row)
            raise BadInput(
                f"{row[KEY]!r} in {self.file.url} has no member .{error.args[0]}, and other rows have one (it has "
                f"{', '.join(name for name in row if name != KEY)}): write all rows with the same members, or give columns= that all have"
            ) from error
        return pa.RecordBatch.from_arrays(columns, names=list(names))

    @property
    def _packed(self) -> bool:
        return self.file.url.lower().endswith(("gz", "tgz"))

    @contextmanager
    def _opened(self, start: int, stop: int | None) -> Iterator[BinaryIO]:
        with self.file.stream(start, stop, READ_BYTES) as stream:
            try:
                yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if self._packed else cast(BinaryIO, stream)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise self._damaged(f"it cannot be unpacked ({error})") from error

    def _damaged(self, how: str) -> BadInput:
        return BadInput(f"cannot read {self.file.url} as tar: {how}. Write the file again, or leave it out")

    def _members(self, stream: BinaryIO, base: int, fetch: bool) -> Iterator[tuple[_Member, bytes]]:
        """The members that belong to rows, with their bytes where `fetch` says so; base: where in the file it begins."""
        at = begin = base
        name, size_given = "", ""
        while len(header := stream.read(_RECORD)) == _RECORD and header != _END:
            try:
                size, own = _size_and_name(header)
                kind = header[156:157]
                if kind in b"Lxg":  # a longer name than a header holds, or pax's values, of the next member
                    data, at = self._data(stream, size, at), at + _RECORD + _padded(size)
                    if kind == b"L":
                        name = data.rstrip(b"\x00").decode("utf-8", "surrogateescape")
                    elif kind == b"x":
                        values = _pax(data)
                        name, size_given = values.get("path", name), values.get("size", size_given)
                    continue
                size = int(size_given or size)
                if size < 0:
                    raise ValueError(f"a size of {size}")
            except BadInput:
                raise
            except (ValueError, tarfile.HeaderError) as error:
                raise self._damaged(f"the header at byte {at:,} is damaged ({error})") from error
            name = name or own.decode("utf-8", "surrogateescape")
            stored = 0 if kind in _WITHOUT_DATA else _padded(size)
            end = at + _RECORD + stored
            found = row_of(name)
            if found is not None and kind == b"S":
                raise self._damaged(f"{name} is a sparse file, of which the holes are left out")
            member = _Member(*found, begin, end) if found is not None and kind in _FILES else None
            if member is not None and fetch:
                yield member, self._data(stream, size, at)
            else:
                if not self._packed and at + _RECORD + min(size, stored) > self.file.size:
                    raise self._damaged(f"{name} is cut off")
                stream.seek(stored, 1)
                if member is not None:
                    yield member, b""
            at = begin = end
            name, size_given = "", ""
        if 0 < len(header) < _RECORD:
            raise self._damaged(f"the header at byte {at:,} is cut off")
        if self._packed:
            while stream.read(READ_BYTES):  # the checksum comes last
                pass
        if not header and (self._packed or at >= self.file.size):  # and not of a block
            raise self._damaged(f"it is cut off at byte {at:,}, where the mark of its end is missing")

    def _data(self, stream: BinaryIO, size: int, at: int) -> bytes:
        data = stream.read(_padded(size))
        if len(data) < size:
            raise self._damaged(f"the member at byte {at:,} is cut off")
        return data[:size]

    def _samples(self, members: Iterator[tuple[_Member, bytes]]) -> Iterator[list[tuple[_Member, bytes]]]:
        """Neighbours of one key together. BadInput for a column that a row has twice."""
        sample: list[tuple[_Member, bytes]] = []
        for member, data in members:
            if sample and sample[0][0].key != member.key:
                yield sample
                sample = []
            if any(one.column == member.column for one, _ in sample):
                raise BadInput(
                    f"{member.key}.{member.column} stands twice in a row of {self.file.url}: give each row's members a name of their own"
                )
            sample.append((member, data))
        if sample:
            yield sample


def _size_and_name(header: bytes) -> tuple[int, bytes]:
    """What a header says. ValueError or HeaderError where it is damaged."""
    told = int(header[148:156].strip(b" \x00"), 8)
    plain = header[257:262] == b"ustar" and header[124] < 128
    if plain and told == 256 + sum(header[:148]) + sum(header[156:]):  # most are so: tarfile takes five times as long
        prefix = header[345:500].partition(b"\x00")[0] if header[262] == 0 else b""
        own = header[:100].partition(b"\x00")[0]
        return int(header[124:136].strip(b" \x00"), 8), prefix + b"/" + own if prefix else own
    info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    return info.size, info.name.encode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _RECORD) * _RECORD


def _pax(data: bytes) -> dict[str, str]:
    """Of records `LENGTH key=value\\n`. ValueError for others."""
    values = {}
    while data:
        length = data.partition(b" ")[0]
        if not len(length) < int(length) <= len(data):
            raise ValueError(f"a record of {int(length)} bytes among {len(data)}")
        record, data = data[: int(length)], data[int(length) :]
        key, _, value = record[len(length) + 1 : -1].partition(b"=")
        values[key.decode()] = value.decode("utf-8", "surrogateescape")
    return values
