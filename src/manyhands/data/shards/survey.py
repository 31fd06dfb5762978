"""`survey()`: what files hold, how their rows would be dealt to workers, and what is better changed before training.

It reads the index of each file and the first rows, and trains nothing.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands import units
from manyhands.data.feed import check_shard
from manyhands.data.readers.files import IN_MEMORY_BYTES, numpy_file
from manyhands.data.sharding import slice_of
from manyhands.data.shards.block_order import BlockOrder
from manyhands.data.shards.dealing import readers
from manyhands.data.shards.decode import DECODERS
from manyhands.data.shards.find import find
from manyhands.data.shards.formats.arrow import Arrow
from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, ShardFile
from manyhands.data.shards.formats.parquet import Parquet
from manyhands.data.shards.formats.tar import KEY, Tar
from manyhands.data.shards.formats.writers import WRITERS
from manyhands.data.shards.host_cache import default_folder
from manyhands.data.shards.source import GROUP_BYTES, LANES, index_cache, shards
from manyhands.data.shards.table import ShardTable, counts_soon
from manyhands.data.shards.uncounted import AHEAD_BYTES
from manyhands.data.source import nonempty
from manyhands.errors import BadInput
from manyhands.process_memory import available

if TYPE_CHECKING:
    import pyarrow as pa

_SAMPLED = 64  # rows that are looked at
_WHOLE_BYTES = 8 << 20  # what Parquet reads at once of a row group
_TINY_BYTES, _MANY_FILES = 1 << 20, 1000
_LARGE_BLOCK = 8 * BLOCK_BYTES
_UNEVEN = 10  # times the median
_BLOCKS_EACH = 4
_AMPLIFIED, _MUCH_LESS = 1.5, 0.8
_DIFFERS = "differs"
_NO_NUMBERS = "{} {}: make numbers of them in decode= or collate=, or once, in the files"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of several numbers."""

    least: int
    median: int
    most: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread:
        found = sorted(values) or [0]
        return cls(least=found[0], median=int(statistics.median(found)), most=found[-1])


@dataclass(frozen=True, kw_only=True)
class FoundColumn:
    """A column, as its first rows have it."""

    name: str
    type: str
    """Of a value, or of the values in a list or an array."""
    shape: str = ""
    """Of a row's list or array: `3`, `224×224×3`, `1…7` where rows differ; "" of a single value."""
    bytes: float
    """A row, when it is decoded."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What each worker reads in an epoch, and needs for it."""

    workers: int
    batch_size: int
    """Global."""
    shuffle: str
    """blocks:K, rows or none."""
    rows: tuple[int, ...]
    """By worker; () where they are uncounted."""
    blocks: tuple[int, ...]
    """Of which a worker reads rows; where they are uncounted, files."""
    bytes: tuple[int, ...]
    """Read from the files; with `rows` each host reads them once, and the number is a worker's share."""
    amplification: float
    """Bytes that all workers read, over the bytes of all files."""
    memory: int
    """About as many bytes as a worker needs for reading."""
    disk: int = 0
    """Of each host, for decoded rows."""
    available: int | None = None
    """Memory that is free on this machine; None: the system does not say."""

    @property
    def fits(self) -> bool | None:
        """Whether so many workers have the memory on this machine; None: nobody knows."""
        return None if self.available is None else self.workers * self.memory <= self.available


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What `survey` found."""

    paths: tuple[str, ...]
    format: str
    """Parquet, Arrow, TFRecord, Tar, Csv, Json or Text; npz or npy."""
    files: int
    bytes: int
    """As they are stored."""
    file_bytes: Spread
    rows: int | None
    """None: uncounted."""
    about_rows: int
    """As many as the first file lets expect, where they are uncounted."""
    blocks: int
    """Of the files that were counted: row groups, record batches, or neighbouring rows."""
    block_rows: Spread
    block_bytes: Spread
    """As they are stored."""
    block_memory: Spread
    """About as many bytes when they are decoded."""
    columns: tuple[FoundColumn, ...]
    row_stored: float
    """Bytes."""
    row_decoded: float
    """Bytes."""
    first_rows: tuple[dict[str, str], ...]
    """{column: its value as text}"""
    dealt: Sharing
    advice: tuple[str, ...] = ()

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2)


def survey(
    paths: Sequence[str | Path],
    *,
    columns: Sequence[str] = (),
    workers: int = 1,
    batch_size: int = 64,
    shuffle: str = f"blocks:{LANES}",
    rows: int = 3,
    count: bool | None = None,
) -> Survey:
    """What these paths, globs, folders or URLs hold, and what so many workers would read of them.

    columns: those that would be read; (): all. shuffle: blocks:K, rows or none. rows: so many first ones are told.
    count: as `counted` of `shards`. Rows that are not counted are estimated from those of the first file.

    Raises BadInput for what `shards` would refuse, and for fewer rows in a batch than workers.
    """
    check_shard(0, workers, batch_size)
    choice: bool | str = {"rows": True, "none": False}.get(shuffle, shuffle)
    if shuffle not in ("rows", "none") and not shuffle.startswith("blocks:"):
        raise BadInput(f"shuffle must be blocks:K, rows or none, not {shuffle!r}")
    named = [str(path) for path in paths]
    if len(named) == 1 and Path(named[0]).suffix.lower() in (".npz", ".npy"):
        return _of_arrays(named[0], columns, workers, batch_size, shuffle, rows)
    lanes = shards(named, shuffle=choice, counted=count).lanes
    for path in named:
        _refuse_splits(path)
    files = find(named)
    count = shuffle == "rows" or counts_soon(files) if count is None else count
    table = ShardTable.of(files, columns, index_cache(default_folder()), count)
    seen = table if count else replace(table, files=table.files[:1], counted=True)
    nonempty(seen.rows, units.listed(named, 3))
    return _of_table(named, table, seen, _Asked(workers, batch_size, shuffle, lanes), rows)


@dataclass(frozen=True)
class _Asked:
    workers: int
    batch_size: int
    shuffle: str
    lanes: int


def _refuse_splits(path: str) -> None:
    file = Path(path) / "dataset_dict.json"
    if "://" not in path and file.is_file():
        splits = json.loads(file.read_text()).get("splits", [])
        raise BadInput(
            f"{path} holds several splits of a Hugging Face dataset ({', '.join(splits)}): name one, {path}/{splits[0]}"
        )


def _of_table(named: list[str], table: ShardTable, seen: ShardTable, asked: _Asked, rows: int) -> Survey:
    """seen: the files of the table whose rows are counted."""
    first = next(i for i, (_, block) in enumerate(seen.blocks) if block.rows)
    shard = seen.files[seen.blocks[first][0]]
    sample = next(seen.read(first)).slice(0, max(_SAMPLED, rows))
    facts = _Columns(shard, sample)
    blocks = [block for _, block in seen.blocks]
    stored, memory = facts.shares(list(seen.types))
    decoded = sum(column.bytes for column in facts.columns)
    dealt = _dealt(table, asked, stored, decoded) if seen is table else _dealt_files(table, asked)
    found = Survey(
        paths=tuple(named),
        format=type(shard).__name__,
        files=len(table.files),
        bytes=table.bytes,
        file_bytes=Spread.of(one.file.size for one in table.files),
        rows=seen.rows if seen is table else None,
        about_rows=int(seen.rows * table.bytes / max(1, seen.bytes)),
        blocks=len(blocks),
        block_rows=Spread.of(block.rows for block in blocks),
        block_bytes=Spread.of(int(block.bytes * stored) for block in blocks),
        block_memory=Spread.of(int(max(block.memory * memory, 0)) for block in blocks),
        columns=tuple(facts.columns),
        row_stored=stored * seen.bytes / seen.rows,
        row_decoded=decoded,
        first_rows=tuple(facts.first_rows(rows)),
        dealt=dealt,
    )
    return replace(found, advice=(*_advice(found, table, asked), *facts.advice))


def _dealt(table: ShardTable, asked: _Asked, share: float, row_bytes: float) -> Sharing:
    """share: of the stored bytes, those of the columns that are read. row_bytes: of a decoded row."""
    blocks = [block for _, block in table.blocks]
    by_rows = asked.shuffle == "rows"
    read = readers(_order(table, asked), asked.batch_size, asked.workers)
    stored = [int(block.bytes * share) for block in blocks]
    if by_rows:  # each block is read by the first worker of a host that asks for it
        of_workers = [sum(stored) // asked.workers] * asked.workers
    else:
        of_workers = [sum(stored[block] for block in own) for own in read.blocks]
    piece = max(
        int(max(block.piece_rows * row_bytes, min(block.memory, PIECE_BYTES))) for block in blocks if block.rows
    )
    lanes = 1 if by_rows else max(read.open)
    under_way, everything = _held_by_open(table, share), int(row_bytes * table.rows)
    return Sharing(
        workers=asked.workers,
        batch_size=asked.batch_size,
        shuffle=asked.shuffle,
        rows=read.rows,
        blocks=tuple(len(blocks) if by_rows else len(own) for own in read.blocks),
        bytes=tuple(of_workers),
        amplification=1.0 if by_rows else sum(of_workers) / max(1, sum(stored)),
        memory=min(lanes * (2 * piece + under_way), 2 * everything)
        + min(2 * GROUP_BYTES + AHEAD_BYTES, 2 * everything),
        disk=table.memory if by_rows else 0,
        available=available(),
    )


def _dealt_files(table: ShardTable, asked: _Asked) -> Sharing:
    """Of rows that nobody has counted: whole files are dealt, or every worker reads all."""
    sizes = [one.file.size for one in table.files]
    order = np.random.default_rng((0, 0)).permutation(len(sizes)) if asked.shuffle != "none" else np.arange(len(sizes))
    apart = len(sizes) >= asked.workers
    own = [order[rank :: asked.workers] if apart else order for rank in range(asked.workers)]
    of_workers = tuple(sum(sizes[i] for i in files) for files in own)
    under_way = max(1, asked.lanes // asked.workers if apart else asked.lanes) if asked.shuffle != "none" else 1
    return Sharing(
        workers=asked.workers,
        batch_size=asked.batch_size,
        shuffle=asked.shuffle,
        rows=(),
        blocks=tuple(map(len, own)),
        bytes=of_workers,
        amplification=sum(of_workers) / max(1, sum(sizes)),
        memory=min(under_way * 2 * PIECE_BYTES, 2 * sum(sizes)) + min(AHEAD_BYTES, 2 * sum(sizes)),
        available=available(),
    )


def _order(table: ShardTable, asked: _Asked) -> BlockOrder:
    shuffled = asked.shuffle != "none"
    return BlockOrder(
        rows=[block.rows for _, block in table.blocks],
        piece_rows=[block.piece_rows for _, block in table.blocks],
        lanes=asked.lanes if shuffled else 1,
        shuffled=shuffled,
    )


def _held_by_open(table: ShardTable, share: float) -> int:
    """Bytes that a block under way holds beside its pieces, at most."""
    largest = max(block.bytes for _, block in table.blocks)
    if isinstance(table.files[0], Parquet):
        return min(int(largest * share), _WHOLE_BYTES)
    return largest if isinstance(table.files[0], Arrow) else PIECE_BYTES


# -- columns and rows --------------------------------------------------------------------------------------------------------


@dataclass
class _Columns:
    """What the first rows say of the columns."""

    shard: ShardFile
    sample: pa.RecordBatch
    columns: list[FoundColumn] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    _values: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stored = self._stored_types()
        for name, column in zip(self.sample.schema.names, self.sample.columns, strict=True):
            suffix = name.rpartition(".")[2]
            if isinstance(self.shard, Tar) and suffix in DECODERS and self._decode(name, suffix, column.to_pylist()):
                self.columns.append(_of_values(name, self._values[name]))
                self._advise_on_values(name, self.columns[-1])
            else:
                self._values[name] = column.to_pylist()
                self.columns.append(self._of_column(name, column, stored.get(name, column.type)))

    def shares(self, names: Sequence[str]) -> tuple[float, float]:
        """Of the bytes stored and in memory, those of these columns; 1 where a format reads all."""
        import pyarrow.parquet as pq

        if not isinstance(self.shard, Parquet):
            return 1.0, 1.0
        with self.shard.file.stream() as stream:
            metadata = pq.read_metadata(stream)
        sums = np.zeros(4)
        for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
            for column in (group.column(j) for j in range(group.num_columns)):
                wanted = column.path_in_schema.split(".")[0] in names
                both = column.total_compressed_size, column.total_uncompressed_size
                sums += [*both, *(size * wanted for size in both)]
        return float(sums[2] / max(1, sums[0])), float(sums[3] / max(1, sums[1]))

    def first_rows(self, rows: int) -> Iterator[dict[str, str]]:
        for i in range(min(rows, self.sample.num_rows)):
            yield {name: told(values[i]) for name, values in self._values.items()}

    def _stored_types(self) -> dict[str, Any]:
        """Of Parquet as they are written: decimals are read as doubles."""
        import pyarrow.parquet as pq

        if not isinstance(self.shard, Parquet):
            return {}
        with self.shard.file.stream() as stream:
            return {one.name: one.type for one in pq.read_schema(stream)}

    def _decode(self, name: str, suffix: str, members: list[bytes]) -> bool:
        try:
            self._values[name] = [DECODERS[suffix](member) for member in members]
        except (ValueError, OSError, EOFError) as error:  # BadInput is a ValueError: images without Pillow
            self.advice.append(f"members .{name} cannot be decoded: {error}")
            return False
        return True

    def _of_column(self, name: str, column: Any, stored: Any) -> FoundColumn:
        import pyarrow as pa

        types, lengths, inner, kind = pa.types, list[str](), column, stored
        if column.null_count:
            self.advice.append(
                f"column {name} has missing values ({column.null_count} of the first {len(column)}), and training refuses them: fill or drop them"
            )
        while types.is_list(inner.type) or types.is_large_list(inner.type) or types.is_fixed_size_list(inner.type):
            each = (
                set(inner.value_lengths().drop_null().to_pylist()) or {0} if hasattr(inner, "value_lengths") else set()
            )
            each = each or {inner.type.list_size}
            lengths.append(str(each.pop()) if len(each) == 1 else f"{min(each)}…{max(each)}")
            inner, kind = inner.flatten(), kind.value_type
        self._advise_on(name, kind, any("…" in length for length in lengths))
        primitive = types.is_primitive(inner.type) and not types.is_boolean(inner.type)
        size = (
            len(inner) * inner.type.bit_width // 8 if primitive else column.nbytes
        )  # nbytes has what says which are missing
        return FoundColumn(name=name, type=str(kind), shape="×".join(lengths), bytes=size / max(1, len(column)))

    def _advise_on_values(self, name: str, found: FoundColumn) -> None:
        if found.type in ("string", "json"):
            self.advice.append(
                _NO_NUMBERS.format(f"members .{name} are", "texts" if found.type == "string" else "of JSON")
            )
        elif found.shape == _DIFFERS:
            self.advice.append(f"members .{name} have different shapes: bring them to one in decode=, or give collate=")

    def _advise_on(self, name: str, kind: Any, uneven: bool) -> None:
        import pyarrow as pa

        types = pa.types
        if types.is_decimal(kind):
            self.advice.append(
                f"column {name} holds decimals, which are read as double: write float32 instead, as models compute"
            )
        elif (types.is_string(kind) or types.is_large_string(kind)) and name != KEY:
            self.advice.append(_NO_NUMBERS.format(f"column {name} holds", "texts"))
        elif types.is_struct(kind) or types.is_map(kind) or types.is_temporal(kind):
            self.advice.append(
                f"column {name} holds {kind}, which becomes no tensor: make numbers of it in decode=, or leave it out with --columns"
            )
        if uneven:
            self.advice.append(
                f"column {name} holds lists of different lengths: pad them in the files, or read them as rows of decode= and collate="
            )


def _of_values(name: str, values: list[Any]) -> FoundColumn:
    """Of decoded members of a tar."""
    first = values[0]
    if isinstance(first, np.ndarray):
        shapes = {value.shape for value in values}
        shape = "×".join(map(str, first.shape)) if len(shapes) == 1 else _DIFFERS
        size = sum(value.nbytes for value in values) / len(values)
        return FoundColumn(name=name, type=str(first.dtype), shape=shape, bytes=size)
    if isinstance(first, int):
        return FoundColumn(name=name, type="int64", bytes=8)
    if isinstance(first, str):
        return FoundColumn(name=name, type="string", bytes=sum(len(value.encode()) for value in values) / len(values))
    return FoundColumn(name=name, type="json", bytes=sum(len(json.dumps(value)) for value in values) / len(values))


def told(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return f"{value.dtype} {'×'.join(map(str, value.shape))}"
    if isinstance(value, list | np.ndarray):
        shown = ", ".join(told(one) for one in value[:4])
        return f"[{shown}, …]" if len(value) > 4 else f"[{shown}]"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return units.printable(value)


# -- arrays of this machine ----------------------------------------------------------------------------------------------------


def _of_arrays(path: str, columns: Sequence[str], workers: int, batch_size: int, shuffle: str, rows: int) -> Survey:
    arrays = numpy_file(path)
    arrays = arrays if isinstance(arrays, dict) else {"": arrays}
    if missing := [name for name in columns if name not in arrays]:
        raise BadInput(
            f"{path} has no array {missing[0]!r}; it has {', '.join(filter(None, arrays)) or 'one, without a name'}"
        )
    arrays = {name: array for name, array in arrays.items() if name in columns or not columns}
    lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
    if len(lengths) < len(arrays) or len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name or 'the array'}: {list(array.shape)}" for name, array in arrays.items())
        raise BadInput(f"the arrays of {path} must have equally many rows, their first dimension; got {listed}")
    many = nonempty(next(iter(lengths.values())), path)
    size = Path(path).expanduser().stat().st_size
    memory = sum(array.nbytes for array in arrays.values())
    mapped = Path(path).suffix.lower() == ".npy"
    found = [
        FoundColumn(
            name=name, type=str(array.dtype), shape="×".join(map(str, array.shape[1:])), bytes=array.nbytes / many
        )
        for name, array in arrays.items()
    ]
    whole, rest = divmod(many, batch_size)
    dealt = Sharing(
        workers=workers,
        batch_size=batch_size,
        shuffle="none" if shuffle == "none" else "rows",
        rows=tuple(whole * _share(batch_size, i, workers) + _share(rest, i, workers) for i in range(workers)),
        blocks=(1,) * workers,
        bytes=(size,) * workers,
        amplification=float(workers),
        memory=0 if mapped else memory,
        available=available(),
    )
    too_large = f"each worker loads all of {path}: write it as files that are read while a run trains, manyhands data {shlex.quote(path)} --to NEW/"
    one = Spread.of([size])
    return Survey(
        paths=(path,),
        format="npy" if mapped else "npz",
        files=1,
        bytes=size,
        file_bytes=one,
        rows=many,
        about_rows=many,
        blocks=1,
        block_rows=Spread.of([many]),
        block_bytes=one,
        block_memory=Spread.of([memory]),
        columns=tuple(found),
        row_stored=size / many,
        row_decoded=memory / many,
        first_rows=tuple({name: told(array[i]) for name, array in arrays.items()} for i in range(min(rows, many))),
        dealt=dealt,
        advice=(too_large,) if dealt.fits is False else (),
    )


def _share(rows: int, rank: int, size: int) -> int:
    start, stop = slice_of(rows, rank, size)
    return stop - start


# -- advice --------------------------------------------------------------------------------------------------------------------


def _advice(found: Survey, table: ShardTable, asked: _Asked) -> Iterator[str]:
    """What is wrong with the files, or with how they would be dealt."""
    word, dealt, again = block_word(found.format), found.dealt, _rewrite(found, asked)
    packed = [one.file.url for one in table.files if one.file.url.lower().endswith(("gz", "tgz"))]
    if packed:
        yield (
            f"{units.count(len(packed), 'file')} packed with gzip: a worker unpacks a file from its beginning to reach a row. Write without, "
            f"{again}"
        )
    elif (
        found.rows is not None
        and asked.shuffle.startswith("blocks:")
        and found.blocks < max(asked.workers, asked.lanes)
    ):
        shared = f", and each is read by several of {asked.workers} workers" if found.blocks < asked.workers else ""
        few = f"rows of {asked.lanes} blocks are to be mixed, and there {'is' if found.blocks == 1 else 'are'} {units.count(found.blocks, word)}{shared}"
        if table.memory <= IN_MEMORY_BYTES:
            yield f"{few}. All rows together are {units.size(table.memory)}: shuffle=True (--shuffle rows) mixes all of them"
        else:
            yield f"{few}. Write smaller ones, {again}"
    if found.block_memory.most > _LARGE_BLOCK and not packed:
        held = ", and a worker holds a whole one for each that it reads" if found.format == "Arrow" else ""
        yield (
            f"the largest {word} is {units.size(found.block_memory.most)} when decoded, and pieces of {units.size(PIECE_BYTES)} are read at a "
            f"time: rows are mixed in few large lumps{held}. Write smaller ones, {again}"
        )
    if found.blocks > 3 and found.block_memory.most > max(BLOCK_BYTES, _UNEVEN * found.block_memory.median):
        yield (
            f"the largest {word} has {units.times(found.block_memory.most / max(1, found.block_memory.median))} the bytes of the median one: "
            f"many batches in a row get most of their rows from it. Write even ones, {again}"
        )
    if found.files >= _MANY_FILES and found.file_bytes.median < _TINY_BYTES:
        yield (
            f"{found.files:,} files, half of them of {units.size(found.file_bytes.median)} or less: opening one costs more than reading it. "
            f"Write fewer, {again}"
        )
    if found.rows is None:
        yield from _advice_on_files(found, asked, again)
    elif asked.shuffle == "none" and asked.workers > 1:
        yield (
            f"without shuffling each of {asked.workers} workers has some of any {asked.batch_size} neighbouring rows, and so reads nearly all "
            "files: --shuffle blocks:16, if the order does not matter"
        )
    elif asked.shuffle.startswith("blocks:") and dealt.amplification > _AMPLIFIED and found.blocks >= asked.workers:
        yield (
            f"workers read {units.times(dealt.amplification)} the bytes of the files, since several read the same {word}s: "
            f"{_less_read(table, asked, dealt.amplification) or f'write smaller {word}s, {again}'}"
        )
    if dealt.fits is False:
        assert dealt.available is not None
        yield (
            f"{asked.workers} workers need about {units.size(asked.workers * dealt.memory)} for reading, and {units.size(dealt.available)} are "
            "free here: shuffle fewer blocks (blocks:4), or write smaller ones"
        )


def _advice_on_files(found: Survey, asked: _Asked, again: str) -> Iterator[str]:
    """Where rows are uncounted, whole files are dealt."""
    if found.files < asked.workers:
        yield (
            f"{units.count(found.files, 'file')} for {asked.workers} workers: where rows are not counted, each worker reads all files. Write at "
            f"least {asked.workers} ({again}), or give counted=True"
        )
    elif asked.workers > 1 and found.files > 2 and found.file_bytes.most > _UNEVEN * found.file_bytes.median:
        yield (
            f"the largest file has {units.times(found.file_bytes.most / max(1, found.file_bytes.median))} the bytes of the median one, and "
            f"where rows are not counted, a worker reads whole files: others are out of rows long before. Write even ones, {again}"
        )


def _less_read(table: ShardTable, asked: _Asked, now: float) -> str:
    """The options that deal rows such that fewer blocks are read by several workers; "" where none are much better.

    Slices of a batch and slots have the same borders where the slots are a multiple of the workers, and the rows of a batch
    of the slots.
    """
    blocks = [block.bytes for _, block in table.blocks]
    near = sorted((asked.workers * i for i in range(1, 65)), key=lambda lanes: abs(lanes - asked.lanes))[:4]
    for batch_size in dict.fromkeys((asked.batch_size, *(-(-asked.batch_size // lanes) * lanes for lanes in near))):
        for lanes in near:
            tried = replace(asked, batch_size=batch_size, lanes=lanes)
            read = readers(_order(table, tried), batch_size, asked.workers)
            times = sum(blocks[block] for own in read.blocks for block in own) / max(1, sum(blocks))
            if times < _MUCH_LESS * now:
                batches = "" if batch_size == asked.batch_size else f" --batch-size {batch_size}"
                return f"--shuffle blocks:{lanes}{batches} reads {units.times(times)}"
    return ""


def _rewrite(found: Survey, asked: _Asked) -> str:
    """The command that writes files with a few blocks for each that is mixed and for each worker."""
    own = f".{found.format.lower()}"
    format = own if own in WRITERS else ".parquet"
    wanted = _BLOCKS_EACH * (asked.workers if found.rows is None else max(asked.lanes, asked.workers))
    memory = int(found.row_decoded * found.about_rows)
    size = ""
    if memory // wanted < BLOCK_BYTES and WRITERS[format].in_blocks:
        size = f" --row-group-bytes {max(1, memory // wanted // 1000)}KB"
    elif memory // wanted < BLOCK_BYTES:
        size = f" --rows-per-file {max(1, found.about_rows // wanted)}"
    return f"manyhands data {' '.join(map(shlex.quote, found.paths))} --to NEW/ --format {format[1:]}{size}"


def block_word(format: str) -> str:
    """What a block is called in a format."""
    return {"Parquet": "row group", "Arrow": "record batch"}.get(format, "block")
