"""`shards()`: rows of many files, read while the run trains; in the order of shuffled blocks, or in any order at all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from manyhands import units
from manyhands.data.batch import Collate
from manyhands.data.sharding import ticks
from manyhands.data.shards.block_order import BlockOrder, Positions
from manyhands.data.shards.decode import RowDecoder, Stored, joined, stored_columns, taken
from manyhands.data.shards.find import find
from manyhands.data.shards.host_cache import HostCache, default_folder
from manyhands.data.shards.table import ShardTable, counts_soon, in_pieces
from manyhands.data.shards.uncounted import AHEAD_BYTES, FileReader, UncountedRows
from manyhands.data.source import Indexed, Pick, Picks, Planned, Reading, Slice, Slices, Source, nonempty
from manyhands.errors import BadInput, is_whole, whole_of

if TYPE_CHECKING:
    import pyarrow as pa

LANES = 16
GROUP_ROWS, GROUP_BYTES = 1 << 14, 4 << 20
"""Rows that are gathered at once, and about how many bytes they may be."""
_FEW = 4  # pieces that are kept beside those in use


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Files whose rows are read while a run trains: what `shards` makes. `open_source` opens it, on every worker."""

    paths: tuple[str, ...]
    columns: tuple[str, ...] = ()
    shuffle: bool | str | None = None
    decode: Callable[..., Any] | None = None
    cache: int | None = None
    cache_folder: str | None = None
    threads: int = 2
    counted: bool | None = None
    prefetch: int = AHEAD_BYTES

    @cached_property
    def lanes(self) -> int:
        """Blocks that are open at a time."""
        if self.shuffle is None or isinstance(self.shuffle, bool):
            return LANES
        kind, _, many = str(self.shuffle).partition(":")
        if kind != "blocks" or not (many.isascii() and many.isdigit() and (whole_of(many) or 0) > 0):
            raise BadInput(
                f'shuffle must be True, False or "blocks:K", with K of at least 1, the number of blocks whose rows are mixed, not '
                f'{self.shuffle!r}: "blocks:{LANES}", for example'
            )
        return int(many)

    def open(self, collate: Collate | None) -> Source:
        """The source, on the worker that calls it. BadInput for what cannot be read."""
        folder = Path(self.cache_folder).expanduser() if self.cache_folder is not None else default_folder()
        cache = None
        if self.cache is not None or self.shuffle is True:
            cache = HostCache(folder, self.cache)
        files = find(self.paths)
        counted = self.counted
        if counted is None:
            counted = self.shuffle is True or counts_soon(files)
        table = ShardTable.of(files, self.columns, cache or index_cache(folder), counted)
        decoder = RowDecoder(suffixes=table.suffixes(), decode=self.decode, collate=collate)
        if not counted:
            reader = FileReader(table, cache, decoder, self.shuffle is not False)
            return UncountedRows(reader, self.lanes, self.shuffle is not False, table, self.prefetch)
        nonempty(table.rows, units.listed(list(self.paths), 3))
        table.types  # noqa: B018 - the same in all files, or an error
        if self.shuffle is True:
            assert cache is not None
            cache.check_room(
                table.memory,
                f'give a larger one, or shuffle="blocks:{LANES}", which reads the files from front to back',
            )
            return MappedRows(table, cache, decoder, self.threads, self.prefetch)
        return BlockRows(table, cache, decoder, self.lanes, self.shuffle is not False, self.threads, self.prefetch)


def shards(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] = (),
    shuffle: bool | str | None = None,
    decode: Callable[..., Any] | None = None,
    cache: int | str | None = None,
    cache_folder: str | Path | None = None,
    threads: int = 2,
    counted: bool | None = None,
    prefetch: int | str = AHEAD_BYTES,
) -> Shards:
    """Rows of files that are read while the run trains, so that they need not fit into memory.

    paths: files, globs, folders or URLs of one format: Parquet, Arrow, TFRecord, tar (webdataset's layout), MDS (Mosaic's), CSV, JSON lines or text.
    columns: those that are read; default: all.
    shuffle: "blocks:K" mixes the rows of K blocks at a time (a row group, a record batch, 16 MB of other files) and reads files from
        front to back; True draws from all rows, which are kept decoded in the host's cache; False takes rows in their own order.
        Default: "blocks:16", or the rows' own order where the task says shuffle=False.
    decode: {column: value} -> row, called in threads; with a parameter `rng` it gets numpy's Generator of that row, which depends on
        (seed, epoch, row) alone. Rows then become batches by the task's `collate`, or torch's default_collate.
    cache: keep decoded blocks in a folder of each host, up to so many bytes (`"50GB"`); all workers of the host share it.
    cache_folder: where; default: the variable MANYHANDS_CACHE, or ~/.cache/manyhands.
    threads: that read and decode, for each worker.
    counted: whether the rows are counted before the first one is read, which costs a reading of files other than Parquet, Arrow and MDS.
        Default: files of this machine's disks are, those behind a URL are not.
    prefetch: how many bytes of batches each worker reads ahead (`"64MB"`; default: 16 MiB), and at least two batches. Raise it where
        reading is slow by turns; lower it where memory is scarce.

    Each worker reads the rows of its slices, and N workers train the same global batches as one. Of files that are not counted a worker
    reads whole ones, dealt anew where a run goes on with another number of workers: each row once, in batches that depend on that number.

    Raises BadInput for other values. What is wrong with the files shows when they are opened.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise BadInput("shards was given no path: give a file, a folder, a glob or a URL")
    if not is_whole(threads):
        raise BadInput(f"threads must be a whole number of at least 1, not {threads!r}")
    if decode is not None and not callable(decode):
        raise BadInput(f"decode must be a function of a row, {{column: value}}, not {decode!r}")
    made = Shards(
        paths=tuple(str(path) for path in given),
        columns=(columns,) if isinstance(columns, str) else tuple(columns),
        shuffle=shuffle,
        decode=decode,
        cache=None if cache is None else _bytes_of(cache, "cache", "50GB"),
        cache_folder=None if cache_folder is None else str(cache_folder),
        threads=threads,
        counted=counted,
        prefetch=_bytes_of(prefetch, "prefetch", "64MB"),
    )
    made.lanes  # noqa: B018 - checks `shuffle`
    if shuffle is True and counted is False:
        raise BadInput(
            f'shuffle=True draws from all rows by their numbers, and counted=False leaves them without: give shuffle="blocks:{LANES}", or '
            "leave counted out"
        )
    return made


def _bytes_of(given: Any, name: str, example: str) -> int:
    found = units.read_bytes(given, name) if isinstance(given, str) else given
    if not is_whole(found):
        raise BadInput(f'{name} must be a number of bytes, at least 1, or a size such as "{example}", not {given!r}')
    return int(found)


def index_cache(folder: Path) -> HostCache | None:
    """Where an index is kept; None where this user has no such folder, and every run reads it anew."""
    try:
        return HostCache(folder)
    except BadInput:
        return None


class BlockRows(Planned):
    """Rows in the order of shuffled blocks, or in their own: files are read from front to back."""

    named_by = "shards are read from front to back, unless they have shuffle=True"

    def __init__(
        self,
        table: ShardTable,
        cache: HostCache | None,
        decoder: RowDecoder,
        lanes: int,
        shuffle: bool,
        threads: int,
        ahead_bytes: int,
    ) -> None:
        self.table, self.rows, self.counters = table, table.rows, table.counters
        self.ahead_bytes, self.stored_bytes = ahead_bytes, table.bytes
        self._cache, self._decoder, self._lanes, self._shuffle, self._threads = cache, decoder, lanes, shuffle, threads
        self._aside: _Pieces | None = None
        self._order: BlockOrder | None = None

    @override
    def epoch_rows(self, reading: Reading) -> int:
        if reading.order is not None:
            raise BadInput(
                "order= names rows by their numbers, and these shards are read from front to back: give shards(…, shuffle=True), which "
                "keeps all rows where any can be read"
            )
        return self.rows

    @override
    def ticks(self, reading: Reading) -> int:
        return ticks(self.rows, reading.batch_size)

    @override
    def samples(self, count: int) -> None:
        """None: reading a few rows would cost as many blocks."""
        return

    @override
    def in_background(self, reading: Reading) -> bool:
        return True

    def order(self, reading: Reading) -> BlockOrder:
        """Made once for an epoch: there may be many thousands of blocks."""
        shuffled, order = reading.shuffle and self._shuffle, self._order
        if order is None or (order.seed, order.epoch, order.shuffled) != (reading.seed, reading.epoch, shuffled):
            order = self._order = BlockOrder(
                rows=tuple(block.rows for _, block in self.table.blocks),
                piece_rows=tuple(block.piece_rows for _, block in self.table.blocks),
                lanes=self._lanes if shuffled else 1,
                seed=reading.seed,
                epoch=reading.epoch,
                shuffled=shuffled,
            )
        return order

    @override
    def picks(self, reading: Reading) -> Picks:
        order, size = self.order(reading), reading.batch_size
        many = -(-GROUP_ROWS // size)

        @lru_cache(maxsize=2)
        def some(number: int) -> list[Positions]:
            return order.batches(number * many * size, (number + 1) * many * size, size)

        return Picks(lambda i: some(i // many)[i % many], self.ticks(reading), reading.size)

    @override
    def load(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        order = self.order(reading)
        with closing(_Pieces(self.table, order, self._cache, self._decoder.by_row, self._threads)) as open_pieces:
            yield from self._slices(picks, open_pieces)

    @override
    def load_here(self, pick: Pick, reading: Reading) -> Slice:
        """What is not read ahead: its pieces stay open for the next one."""
        order = self.order(reading)
        if self._aside is None or self._aside.order is not order:
            if self._aside is not None:
                self._aside.close()
            self._aside = _Pieces(self.table, order, self._cache, self._decoder.by_row, self._threads, ahead=False)
        return next(self._slices(iter([pick]), self._aside))

    def _slices(self, picks: Iterator[Pick], open_pieces: _Pieces) -> Slices:
        order = open_pieces.order
        key = order.seed, order.epoch
        return _in_groups(picks, self.table, open_pieces.gather, order.row_numbers, self._decoder, key, self._threads)


Piece = tuple[dict[str, Stored], Positions | None]
"""Columns as they are stored, and the order of their rows."""


@dataclass
class _Pieces:
    """The pieces under way of one reading of an epoch. Of each that is in use the next one is being read."""

    table: ShardTable
    order: BlockOrder
    cache: HostCache | None
    by_row: bool
    threads: int
    ahead: bool = True
    _held: OrderedDict[tuple[int, int], Future[Piece]] = field(default_factory=OrderedDict)
    _cursors: dict[tuple[int, int], Iterator[pa.RecordBatch]] = field(default_factory=dict)  # by the piece that comes

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # of the cursors
        self._most = _FEW  # blocks that stay open: those in use, and those that follow them
        self._pool = ThreadPoolExecutor(self.threads, "manyhands-shards")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cursors.clear()
        self._held.clear()

    def gather(self, positions: Positions, places: Positions) -> dict[str, Any]:
        """{column: values} of the rows at these positions, which rise; each gets a place."""
        spans = list(self.order.spans(positions))
        self._most = 2 * len({span.block for span in spans}) + _FEW
        for span in spans:
            self._request(span.block, span.piece)
        if self.ahead:
            for span in spans:
                half = self.order.piece_rows[span.block] // 2  # until then it would only take memory
                if span.stop > half and (following := self.order.after(span)) is not None:
                    self._request(*following)
        parts = [(*self._held[span.block, span.piece].result(), slice(span.start, span.stop)) for span in spans]
        for span in spans:
            if self.ahead and span.stop == self.order.rows_of(span.block, span.piece):  # it will not be asked for again
                self._held.pop((span.block, span.piece), None)
        while len(self._held) > 2 * len({(span.block, span.piece) for span in spans}) + _FEW:
            self._held.popitem(last=False)
        own = np.split(places, np.cumsum([span.stop - span.start for span in spans])[:-1])
        return {
            name: joined(
                [
                    (taken(columns[name], rows if order is None else order[rows]), at)
                    for (columns, order, rows), at in zip(parts, own, strict=True)
                ]
            )
            for name in self.table.types
        }

    def _request(self, block: int, piece: int) -> None:
        key = block, piece
        if key in self._held:
            self._held.move_to_end(key)
        else:
            before = self._held.get((block, piece - 1))  # whose cursor goes on with this piece
            self._held[key] = self._pool.submit(self._read, block, piece, before)

    def _read(self, block: int, piece: int, before: Future[Piece] | None) -> Piece:
        """In a thread of the pool, which has begun with `before` already."""
        if before is not None:
            wait([before])
        with self._lock:
            cursor = self._cursors.pop((block, piece), None)
        cursor = cursor or self._from(block, piece)
        columns = stored_columns(next(cursor), self.table.url(block), self.by_row)
        order = self.order.within(block, piece)
        if (piece + 1) * self.order.piece_rows[block] < self.order.rows[block]:
            self._keep_open(block, piece + 1, cursor)
        else:
            for _ in cursor:  # nothing, or an error: the file is not as it was
                pass
        return columns, order

    def _from(self, block: int, piece: int) -> Iterator[pa.RecordBatch]:
        """The pieces of a block from this one on."""
        if self.cache is not None:
            return iter(self.table.cached(block, self.cache)[piece:])
        rows = self.order.piece_rows[block]
        return in_pieces(self.table.read(block, piece * rows), rows)

    def _keep_open(self, block: int, piece: int, cursor: Iterator[pa.RecordBatch]) -> None:
        """For the piece that comes; those that have waited longest are closed where there are more than is needed."""
        with self._lock:
            self._cursors[block, piece] = cursor
            while len(self._cursors) > self._most:
                self._cursors.pop(next(iter(self._cursors)))


class MappedRows(Indexed):
    """Rows in any order: every block lies decoded in the host's cache, and is mapped."""

    def __init__(
        self, table: ShardTable, cache: HostCache, decoder: RowDecoder, threads: int, ahead_bytes: int
    ) -> None:
        self.table, self.rows, self.counters = table, table.rows, table.counters
        self.ahead_bytes, self.stored_bytes = ahead_bytes, table.bytes
        self._cache, self._decoder, self._threads = cache, decoder, threads
        self._firsts = np.asarray(table.rows_before(), np.int64)
        self._columns: dict[int, dict[str, Stored]] = {}  # by piece

    @override
    def samples(self, count: int) -> None:  # type: ignore[override]
        """None: reading a few rows would cost as many blocks."""
        return

    @override
    def in_background(self, reading: Reading) -> bool:
        return True

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        return next(self.load(iter([Pick(0, indices, len(indices))]), Reading())).batch

    @override
    def load(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        key = reading.seed, reading.epoch
        return _in_groups(picks, self.table, self._gather, lambda own: own, self._decoder, key, self._threads)

    def _gather(self, numbers: Positions, places: Positions) -> dict[str, Any]:
        """{column: values} of the rows of these numbers, which rise; each gets a place."""
        piece = np.searchsorted(self._firsts, numbers, side="right") - 1
        groups = np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(piece)) + 1)
        parts = [(self._piece(int(piece[own[0]])), numbers[own] - self._firsts[piece[own[0]]], own) for own in groups]
        return {
            name: joined([(taken(columns[name], rows), places[own]) for columns, rows, own in parts])
            for name in self.table.types
        }

    def _piece(self, number: int) -> dict[str, Stored]:
        if number not in self._columns:
            block, piece = self.table.pieces[number]
            for i, batch in enumerate(self.table.cached(block, self._cache), number - piece):
                self._columns[i] = stored_columns(batch, self.table.url(block), self._decoder.by_row)
        return self._columns[number]


def _in_groups(
    picks: Iterator[Pick],
    table: ShardTable,
    gather: Callable[[Positions, Positions], dict[str, Any]],
    numbers: Callable[[Positions], Positions],
    decoder: RowDecoder,
    key: tuple[int, int],
    threads: int,
) -> Slices:
    """The slices of picks, of which many are gathered at once: what a gather costs is shared by thousands of rows.

    gather: of rising positions and the places of their rows, columns. numbers: of the rows at positions. key: (seed, epoch).
    """
    most = max(1, min(GROUP_ROWS, GROUP_BYTES * table.rows // max(1, table.memory)))
    rows = 1
    with _memory_named(), ThreadPoolExecutor(threads, "manyhands-decode") as pool:
        decoder = replace(decoder, executor=pool)
        while group := _taken_up_to(picks, rows):
            rows = min(2 * sum(len(pick.own) for pick in group) + 1, most)  # the first batches come at once
            own = np.concatenate([np.asarray(pick.own, np.int64) for pick in group])
            rising = np.argsort(own, kind="stable")
            columns = gather(own[rising], rising) if len(own) else {}
            sizes = [len(pick.own) for pick in group]
            parts = _split(decoder.batch(columns) if decoder.plain else columns, sizes)
            for pick, part in zip(group, parts, strict=True):
                yield pick.load(partial(_batch, decoder, part, numbers, key))


@contextmanager
def _memory_named() -> Iterator[None]:
    """An error for lack of memory says what helps."""
    try:
        yield
    except MemoryError as error:
        error.add_note(
            "manyhands: this worker has too little memory for the shards that it reads. Fewer blocks at a time, mh.shards(…, "
            'shuffle="blocks:4", prefetch="4MB"), need less, and so do more workers; `manyhands data PATH -n WORKERS` says about how much'
        )
        raise


def _taken_up_to(picks: Iterator[Pick], rows: int) -> list[Pick]:
    """The next picks, of at least so many rows together unless they end."""
    group: list[Pick] = []
    while rows > 0 and (pick := next(picks, None)) is not None:
        group.append(pick)
        rows -= len(pick.own)
    return group


def _split(columns: dict[str, Any], sizes: list[int]) -> Iterator[dict[str, Any]]:
    """The columns of neighbouring rows, so many at a time; tensors on the same memory, which are no views of each other to torch."""
    bounds = [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    parts = [
        list(map(torch.from_numpy, map(values.numpy().__getitem__, bounds)))
        if isinstance(values, torch.Tensor)
        else [values[own] for own in bounds]
        for values in columns.values()
    ]
    if not parts:
        yield from ({} for _ in sizes)
    for some in zip(*parts, strict=True):
        yield dict(zip(columns, some, strict=True))


def _batch(
    decoder: RowDecoder,
    part: dict[str, Any],
    numbers: Callable[[Positions], Positions],
    key: tuple[int, int],
    own: Sequence[Any],
) -> Any:
    """The batch of these columns, whose rows have the positions `own`."""
    if decoder.plain:
        return part
    found = numbers(np.asarray(own, np.int64)) if decoder.draws else np.empty(0, np.int64)
    return decoder.batch(part, lambda i: np.random.default_rng((*key, int(found[i]))))
