"""Shards whose rows nobody has counted: each is read by one worker from front to back, and where it stands is known.

An epoch's shards are dealt to the workers once. A worker mixes the rows of several of its shards. How many rows of each
shard are out is part of a checkpoint: a run that goes on with as many workers goes on with the same deal, bit for bit;
with another number what is left of all shards is dealt anew. Each row is handed out once.

Where there are fewer shards than workers nothing is dealt: every worker reads all of them, and keeps its slice of each
global batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from typing_extensions import override

from manyhands.data.batch import Collate, digest_of
from manyhands.data.sharding import slice_of
from manyhands.data.shards.decode import RowDecoder, joined, stored_columns, taken
from manyhands.data.shards.host_cache import HostCache
from manyhands.data.shards.table import ShardTable
from manyhands.data.source import COMPARED, GlobalBatch, Reading, ShardPositions, Slice, Slices, Unsized
from manyhands.errors import BadInput
from manyhands.rng import RngScope

AHEAD_BYTES = 16 << 20
"""Of batches that a worker reads ahead, unless `prefetch` says otherwise."""
DONE = -1  # the position of a shard that is out
_AT_ONCE = 32  # rows of a dataset, between which nobody else draws random numbers


class ShardRows(ABC):
    """Some neighbouring rows of a shard."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def cut(self, start: int, stop: int) -> ShardRows: ...


class ShardReader(ABC):
    """What the shards are, and how their rows become batches."""

    shards: int

    @abstractmethod
    def name(self, shard: int) -> str:
        """How an error calls it."""

    @abstractmethod
    def open(self, shard: int, reading: Reading) -> Iterator[ShardRows]:
        """A shard's rows in pieces, the same each time for the same shuffle, seed and epoch of a reading."""

    @abstractmethod
    def batch(self, parts: Sequence[tuple[int, int, ShardRows]], seed: int, epoch: int) -> Any:
        """A batch of (shard, the number of the first row in it, rows), one part after the other."""


@dataclass
class _Open:
    """A shard that is being read."""

    shard: int
    pieces: Iterator[ShardRows]
    position: int = 0  # rows that are out
    _piece: ShardRows | None = None
    _at: int = 0  # of the piece's rows, those that are out

    def skip(self, rows: int) -> bool:
        """Whether there were so many."""
        while rows > 0 and (part := self.take(rows)) is not None:
            rows -= len(part)
        return rows <= 0

    def take(self, most: int) -> ShardRows | None:
        """Some of the next rows; None at the end."""
        while self._piece is None or self._at == len(self._piece):
            self._piece, self._at = next(self.pieces, None), 0
            if self._piece is None:
                return None
        start, self._at = self._at, min(self._at + most, len(self._piece))
        self.position += self._at - start
        return self._piece.cut(start, self._at)


class UncountedRows(Unsized):
    """The rows of shards, dealt as the module says. They are mixed from `lanes` shards at a time, by all workers together."""

    def __init__(
        self,
        reader: ShardReader,
        lanes: int = 1,
        shuffle: bool = False,
        table: ShardTable | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """table: of files, of which a thread reads `ahead_bytes` ahead; None: a dataset, whose code draws random numbers."""
        self.reader, self._lanes, self._shuffle = reader, lanes, shuffle
        if table is not None:
            self.counters, self.stored_bytes, self.ahead_bytes = table.counters, table.bytes, ahead_bytes

    @override
    def in_background(self, reading: Reading) -> bool:
        return self.counters is not None

    @override
    def slices(self, reading: Reading) -> Slices:
        dealt, own = self._dealt(reading)
        start, stop = (
            slice_of(reading.batch_size, reading.rank, reading.size) if dealt.size > 1 else (0, reading.batch_size)
        )
        chunks = self._chunks(own, dealt, stop - start, reading)
        for index, (chunk, read) in enumerate(chunks, reading.first_tick):
            rows = sum(len(part) for _, _, part in chunk)
            known, digest = rows if dealt.size == 1 else None, ""
            if dealt.size < reading.size:  # everybody reads everything
                digest = digest_of(self._batch(chunk, reading)) if index < reading.first_tick + COMPARED else ""
                first, last = slice_of(rows, reading.rank, reading.size)
                chunk, rows = _cut(chunk, first, last), last - first
            batch = self._batch(chunk, reading) if rows else None
            yield Slice(batch, rows, known, index, reading.rank, digest, dealt, read)

    @override
    def global_batches(self, reading: Reading) -> Generator[GlobalBatch, None, None]:
        own = self._order(reading)
        for chunk, _ in self._chunks(own, ShardPositions(size=1), reading.batch_size, reading):
            rows = sum(len(part) for _, _, part in chunk)
            cut = partial(self._cut_batch, chunk, reading)
            yield GlobalBatch(rows, cut, partial(lambda cut, rows: digest_of(cut(0, rows)), cut, rows))

    def _cut_batch(self, chunk: list[tuple[int, int, ShardRows]], reading: Reading, start: int, stop: int) -> Any:
        return self._batch(_cut(chunk, start, stop), reading)

    def _batch(self, chunk: list[tuple[int, int, ShardRows]], reading: Reading) -> Any:
        return self.reader.batch(chunk, reading.seed, reading.epoch)

    def _order(self, reading: Reading) -> list[int]:
        shards = np.arange(self.reader.shards)
        if reading.shuffle and self._shuffle:
            shards = np.random.default_rng((reading.seed, reading.epoch)).permutation(shards)
        return [int(shard) for shard in shards]

    def _dealt(self, reading: Reading) -> tuple[ShardPositions, list[int]]:
        """(the deal that holds, the shards of this worker in their order)"""
        order, dealt = self._order(reading), reading.shards or ShardPositions()

        def left(begun: Mapping[str, int]) -> list[int]:
            return [shard for shard in order if begun.get(str(shard)) != DONE]

        def parts(shards: list[int]) -> int:
            return reading.size if len(shards) >= reading.size else 1

        if parts(left(dealt.begun)) != dealt.size:  # it begins, or was dealt to others
            begun = {**dealt.begun, **dealt.read}
            dealt = ShardPositions(size=parts(left(begun)), begun=begun)
        own = left(dealt.begun)
        return dealt, own if dealt.size == 1 else own[reading.rank :: dealt.size]

    def _chunks(
        self, own: list[int], dealt: ShardPositions, rows: int, reading: Reading
    ) -> Generator[tuple[list[tuple[int, int, ShardRows]], dict[str, int]], None, None]:
        """(rows of the next slice as parts, the positions of the shards that they are of) until the shards are out."""
        lanes = max(1, self._lanes // dealt.size) if self._shuffle and reading.shuffle else 1
        waiting = deque(shard for shard in own if dealt.now(shard) != DONE)
        under_way: list[_Open] = []
        while True:
            chunk: list[tuple[int, int, ShardRows]] = []
            read: dict[str, int] = {}
            wanted = rows
            while wanted:
                while waiting and len(under_way) < lanes:
                    shard = waiting.popleft()
                    one = _Open(shard, iter(self.reader.open(shard, reading)))
                    if not one.skip(dealt.now(shard)):
                        raise BadInput(
                            f"the run goes on after {dealt.now(shard)} rows of {self.reader.name(shard)}, which has {one.position}: give the data that "
                            "the run began with, or begin in another run directory"
                        )
                    under_way.append(one)
                if not under_way:
                    break
                # who is furthest behind first: a function of the positions alone, so that a resumed run goes on the same
                turn = sorted(range(len(under_way)), key=lambda i: under_way[i].position)
                shares = [slice_of(wanted, j, len(turn)) for j in range(len(turn))]
                for i, (start, stop) in zip(reversed(turn), shares, strict=True):
                    wanted -= self._take(under_way[i], stop - start, chunk, read)
                under_way = [one for one in under_way if read.get(str(one.shard)) != DONE]
            if not chunk:
                return
            yield chunk, read

    @staticmethod
    def _take(one: _Open, rows: int, chunk: list[tuple[int, int, ShardRows]], read: dict[str, int]) -> int:
        taken = 0
        while taken < rows:
            first = one.position
            part = one.take(rows - taken)
            if part is None:
                read[str(one.shard)] = DONE
                return taken
            chunk.append((one.shard, first, part))
            taken += len(part)
        if taken:
            read[str(one.shard)] = one.position
        return taken


def _cut(chunk: list[tuple[int, int, ShardRows]], start: int, stop: int) -> list[tuple[int, int, ShardRows]]:
    """Rows [start, stop) of what the parts hold together."""
    found, at = [], 0
    for shard, number, rows in chunk:
        first, last = max(start - at, 0), min(stop - at, len(rows))
        if first < last:
            found.append((shard, number + first, rows.cut(first, last)))
        at += len(rows)
    return found


@dataclass(frozen=True)
class _Columns(ShardRows):
    columns: Mapping[str, Any]
    rows: int

    @override
    def __len__(self) -> int:
        return self.rows

    @override
    def cut(self, start: int, stop: int) -> _Columns:
        return _Columns({name: values[start:stop] for name, values in self.columns.items()}, stop - start)


class FileReader(ShardReader):
    """Files as shards. Rows are shuffled in pieces of about a megabyte, as those of counted files are."""

    def __init__(self, table: ShardTable, cache: HostCache | None, decoder: RowDecoder, shuffle: bool) -> None:
        self.shards = len(table.files)
        self._table, self._cache, self._decoder, self._shuffle = table, cache, decoder, shuffle
        table.types  # noqa: B018 - raises where there are no rows at all

    @override
    def name(self, shard: int) -> str:
        return self._table.files[shard].file.url

    @override
    def open(self, shard: int, reading: Reading) -> Iterator[ShardRows]:
        for number, piece in enumerate(self._table.read_whole(shard, self._cache)):
            order = None
            if self._shuffle and reading.shuffle:
                own = np.random.default_rng((reading.seed, reading.epoch, shard, number))
                order = own.permutation(piece.num_rows)
            url = self._table.files[shard].file.url
            columns = stored_columns(piece, url, self._decoder.by_row)
            if order is not None:
                columns = {name: taken(values, order) for name, values in columns.items()}
            yield _Columns(columns, piece.num_rows)

    @override
    def batch(self, parts: Sequence[tuple[int, int, ShardRows]], seed: int, epoch: int) -> Any:
        held: list[Any] = [part.columns for _, _, part in parts]  # type: ignore[attr-defined]
        ends = np.cumsum([len(part) for _, _, part in parts])
        places = np.split(np.arange(ends[-1]), ends[:-1])
        columns = {name: joined([(one[name], own) for one, own in zip(held, places, strict=True)]) for name in held[0]}
        numbers = [(shard, first + i) for shard, first, part in parts for i in range(len(part))]
        return self._decoder.batch(columns, lambda i: np.random.default_rng((seed, epoch, *numbers[i])))


@dataclass(frozen=True)
class _Listed(ShardRows):
    rows: list[Any]

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def cut(self, start: int, stop: int) -> _Listed:
        return _Listed(self.rows[start:stop])


class DatasetReader(ShardReader):
    """The shards of an iterable dataset that has `num_shards` and `shard(num_shards=, index=)`, as Hugging Face's."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.shards = int(dataset.num_shards)
        self._dataset, self._collate = dataset, collate

    @override
    def name(self, shard: int) -> str:
        return f"shard {shard} of the dataset"

    @override
    def open(self, shard: int, reading: Reading) -> Iterator[ShardRows]:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(reading.epoch)
        own = RngScope((reading.seed, reading.epoch, shard))
        with own:
            rows = iter(self._dataset.shard(num_shards=self.shards, index=shard))
        while True:
            with own:
                some = list(islice(rows, _AT_ONCE))
            if not some:
                return
            yield _Listed(some)

    @override
    def batch(self, parts: Sequence[tuple[int, int, ShardRows]], seed: int, epoch: int) -> Any:
        shard, first, _ = parts[0]
        with RngScope((seed, epoch, shard, first)):
            return self._collate([row for _, _, part in parts for row in part.rows])  # type: ignore[attr-defined]
