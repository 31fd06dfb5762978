"""All files of a data set as one table: which blocks of rows they have, with which columns, and how a block is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from manyhands import units
from manyhands.data.input_counters import InputCounters
from manyhands.data.shards.formats import base
from manyhands.data.shards.formats.base import Block, ShardFile
from manyhands.data.shards.formats.by_suffix import shard_file
from manyhands.data.shards.formats.parquet import Parquet
from manyhands.data.shards.host_cache import HostCache, key_of
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 8  # files whose index is read at the same time: each is a few round trips to the storage


@dataclass(frozen=True)
class ShardTable:
    """The files in their order. Nothing is read before it is asked for; then every file's index is read, once.

    An index (the blocks and the types of the columns) that took a reading of the file is kept in the user's cache folder.
    """

    files: tuple[ShardFile, ...]
    counters: InputCounters
    columns: tuple[str, ...] = ()
    """Those that are read; (): all that the first file with rows has."""
    index_cache: HostCache | None = None
    counted: bool = True
    """Whether the files' blocks are asked for; else only `types`, which are the first file's, and `read_whole`."""

    @classmethod
    def of(
        cls,
        urls: Sequence[str],
        columns: Sequence[str] = (),
        index_cache: HostCache | None = None,
        counted: bool = True,
    ) -> ShardTable:
        """Of the files that `find` found."""
        counters = InputCounters()
        return cls(tuple(shard_file(url, counters) for url in urls), counters, tuple(columns), index_cache, counted)

    @cached_property
    def _indexes(self) -> list[tuple[list[Block], dict[str, pa.DataType]]]:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._index, self.files))

    def _index(self, shard: ShardFile) -> tuple[list[Block], dict[str, pa.DataType]]:
        cache = self.index_cache
        if cache is None or isinstance(shard, Parquet):  # a look at the footer
            return shard.blocks(), shard.types()
        key = key_of(
            "index", base.BLOCK_BYTES, base.PIECE_BYTES, type(shard).__name__, shard.file.url, *shard.file.info
        )
        blocks, types = cache.json(key, lambda: [shard.blocks(), _encoded(shard.types())])
        return [Block(*block) for block in blocks], _decoded(types)

    @cached_property
    def types(self) -> dict[str, pa.DataType]:
        """{column: Arrow type}. BadInput where a file with rows lacks a column, has it with another type, or has one more."""
        indexes = self._types_of_files
        if not indexes:
            listed = units.listed([shard.file.url for shard in self.files], 3)
            raise BadInput(f"the data files have no rows, and at least one is needed: check {listed}")
        first, whole = indexes[0]
        if missing := [name for name in self.columns if name not in whole]:
            raise BadInput(f"{first.file.url} has no column {missing[0]!r}; it has {', '.join(whole)}")
        wanted = {name: whole[name] for name in self.columns or whole}
        for shard, types in indexes[1:]:
            for name, kind in wanted.items():
                if types.get(name) != kind:
                    how = f"has it as {types[name]}" if name in types else f"has {', '.join(types)}"
                    raise BadInput(
                        f"column {name!r} is {kind} in {first.file.url}, and {shard.file.url} {how}: write all files with the same "
                        "columns and types, or give columns= that they share"
                    )
            if more := [name for name in types if name not in wanted and not self.columns]:
                raise BadInput(
                    f"{shard.file.url} has a column {more[0]!r}, and {first.file.url} has none (it has {', '.join(whole)}): write all files "
                    "with the same columns, or give columns= that they share"
                )
        return wanted

    @cached_property
    def _types_of_files(self) -> list[tuple[ShardFile, dict[str, pa.DataType]]]:
        """Of those with rows; of files that are not counted, the first of them."""
        if not self.counted:
            found = ((shard, shard.types()) for shard in self.files)
            return list(islice(((shard, types) for shard, types in found if types), 1))
        each = zip(self.files, self._indexes, strict=True)
        return [(shard, types) for shard, (blocks, types) in each if any(block.rows for block in blocks)]

    def suffixes(self) -> dict[str, str]:
        """{column: suffix} of the columns that hold files' bytes."""
        return self._types_of_files[0][0].suffixes(list(self.types)) if self._types_of_files else {}

    @cached_property
    def blocks(self) -> list[tuple[int, Block]]:
        """(file, block) of all, in order."""
        return [(i, block) for i, (blocks, _) in enumerate(self._indexes) for block in blocks]

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """(block, piece) of all, in order."""
        counts = (-(-block.rows // block.piece_rows) for _, block in self.blocks)
        return [(block, piece) for block, many in enumerate(counts) for piece in range(many)]

    def rows_before(self) -> list[int]:
        """The number in the table of each piece's first row."""
        firsts = [0, *accumulate(block.rows for _, block in self.blocks)]
        return [firsts[block] + piece * self.blocks[block][1].piece_rows for block, piece in self.pieces]

    @property
    def rows(self) -> int:
        return sum(block.rows for _, block in self.blocks)

    @property
    def bytes(self) -> int:
        """Of the files."""
        return sum(shard.file.size for shard in self.files)

    @property
    def memory(self) -> int:
        """About as many bytes as all rows have when they are decoded."""
        return sum(block.memory for _, block in self.blocks)

    def url(self, number: int) -> str:
        """The file of a block."""
        return self.files[self.blocks[number][0]].file.url

    def read(self, number: int, start: int = 0) -> Iterator[pa.RecordBatch]:
        """The rows of block `number` from its row `start` on. BadInput where they are not as the index says."""
        file, block = self.blocks[number]
        shard, seen = self.files[file], start
        for batch in self._read(shard, block, start):
            seen += batch.num_rows
            yield batch
        if shard.file.local is not None:  # of a store, each look costs a round trip
            shard.file.check()
        if seen != block.rows:
            raise BadInput(
                f"{shard.file.url} has {seen} rows where {block.rows} were counted: it is damaged, or changed while it was read. "
                "Write it again, and not during a run"
            )

    def read_whole(self, file: int, cache: HostCache | None = None) -> Iterator[pa.RecordBatch]:
        """All rows of a file that nobody has counted."""
        shard = self.files[file]
        if cache is not None:
            key = key_of("file", base.PIECE_BYTES, shard.file.url, *shard.file.info, list(self.types))
            batches, was_there = cache.block(key, lambda: self.read_whole(file))
            self.counters.add(**{"hits" if was_there else "misses": 1})
            yield from batches
            return
        if shard.tells_rows:
            there = shard.types()
            if missing := [name for name in self.types if name not in there]:
                raise BadInput(
                    f"{shard.file.url} has no column {missing[0]!r}, which other files have; it has {', '.join(there)}: write all files with the "
                    "same columns, or give columns= that they share"
                )
        for block in shard.blocks() if shard.tells_rows else [shard.whole()]:
            yield from self._read(shard, block)
        shard.file.check()

    def _read(self, shard: ShardFile, block: Block, start: int = 0) -> Iterator[pa.RecordBatch]:
        try:
            for batch in shard.read(block, list(self.types), start):
                yield self._as_typed(batch, shard)
        except BadInput:
            shard.file.check()  # what is wrong with it may be that it changed
            raise

    def cached(self, number: int, cache: HostCache) -> list[pa.RecordBatch]:
        """All rows of a block, a record batch for each of its pieces, mapped from the host's cache."""
        rows = self.blocks[number][1].piece_rows
        batches, was_there = cache.block(self.key(number), lambda: in_pieces(self.read(number), rows))
        self.counters.add(**{"hits" if was_there else "misses": 1})
        return batches

    def key(self, number: int) -> str:
        """What the host's cache calls a block."""
        file, block = self.blocks[number]
        stored = self.files[file].file
        return key_of(
            "block", stored.url, *stored.info, list(self.types), block.at, block.first, block.rows, block.piece_rows
        )

    def _as_typed(self, batch: pa.RecordBatch, shard: ShardFile) -> pa.RecordBatch:
        import pyarrow as pa

        if [field.type for field in batch.schema] == list(self.types.values()):
            return batch
        columns = []
        for (name, kind), column in zip(self.types.items(), batch.columns, strict=True):
            if column.type != kind and pa.types.is_large_list(kind) and column.type == kind.value_type:
                column = pa.LargeListArray.from_arrays(
                    range(len(column) + 1), column
                )  # a TFRecord's lists of one value
            elif column.type != kind:
                raise BadInput(
                    f"column {name!r} of {shard.file.url} is {column.type} in some rows, and {kind} in others: write every row with "
                    "the same types and lengths"
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=list(self.types))


def counts_soon(urls: Sequence[str]) -> bool:
    """Whether these files say how many rows they have, or are at hand to be counted."""
    shard = shard_file(urls[0])
    return shard.tells_rows or shard.file.local is not None


def in_pieces(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `rows`, the last one shorter."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    have = 0
    for batch in batches:
        while have + batch.num_rows >= rows:
            held.append(batch.slice(0, rows - have))
            batch = batch.slice(rows - have)
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held, have = [], 0
        if batch.num_rows:
            held.append(batch)
            have += batch.num_rows
    if held:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)


def _encoded(types: dict[str, pa.DataType]) -> str:
    import pyarrow as pa

    return bytes(pa.schema(list(types.items())).serialize()).hex()


def _decoded(text: str) -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {field.name: field.type for field in pa.ipc.read_schema(pa.BufferReader(bytes.fromhex(text)))}
