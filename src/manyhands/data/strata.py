"""Data in cells: rows whose two keys lie in one block of keys each, so that cells of different blocks change different
rows of a kernel's tables.

Source: Large-Scale Matrix Factorization with Distributed Stochastic Gradient Descent, Rainer Gemulla, Erik Nijkamp, Peter
J. Haas, Yannis Sismanis, 2011. A stratum is a set of such cells that no two share a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.sharding import slice_of
from manyhands.data.source import Indexed, Pick, Reading, Slice, Slices, Source
from manyhands.errors import BadInput, Unsupported

Arrays = Mapping[str, NDArray[Any]]
_READ_ROWS = 1 << 20  # at once


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """The keys of two fields, each cut into as many blocks of equally many keys."""

    row_field: str
    """Its blocks stay where they are."""
    column_field: str
    """Its blocks travel from worker to worker."""
    keys: Mapping[str, NDArray[np.int64]]
    """By field [blocks, keys of a block]: which they are, by their places in the block; -1 where a block has one less."""

    @classmethod
    def of(cls, counts: Mapping[str, NDArray[np.int64]], blocks: int, seed: int) -> KeyBlocks:
        """counts: how many rows of the data have each key, by field; the first field is that of the rows.

        Keys are dealt to the blocks in falling order of their counts, there and back again, so that each block has about
        equally many rows of the data, too. Among equal counts the seed decides.
        """
        row_field, column_field = counts
        keys = {name: _dealt(own, blocks, seed, i) for i, (name, own) in enumerate(counts.items())}
        return cls(row_field, column_field, keys)

    @property
    def blocks(self) -> int:
        return len(self.keys[self.row_field])

    def places(self, field: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """By key: (the block, the place in it)."""
        grid = self.keys[field]
        blocks, places = np.nonzero(grid >= 0)
        own = grid[blocks, places]
        block, place = np.empty(len(own), np.uint32), np.empty(len(own), np.uint32)
        block[own], place[own] = blocks, places
        return block, place


def _dealt(counts: NDArray[np.int64], blocks: int, seed: int, field: int) -> NDArray[np.int64]:
    """[blocks, ceil(keys / blocks)] keys."""
    order = np.random.default_rng([seed, field]).permutation(len(counts))
    order = order[np.argsort(-counts[order], kind="stable")]
    size = -(-len(counts) // blocks)
    padded = np.full(size * blocks, -1, np.int64)
    padded[: len(order)] = order
    turns = padded.reshape(size, blocks)
    turns[1::2] = turns[1::2, ::-1].copy()
    return np.ascontiguousarray(turns.T)


class Cell(NamedTuple):
    """Rows of the data that meet one block of each field, with the keys' places in their blocks for keys."""

    row_block: int
    column_block: int
    arrays: dict[str, NDArray[Any]]

    @property
    def rows(self) -> int:
        return len(next(iter(self.arrays.values())))


class Cells:
    """What one worker gets of a stratum: a cell for each of its row blocks."""

    def __init__(self, stratum: int, cells: list[Cell]) -> None:
        self.stratum, self.cells = stratum, cells
        self._rows = sum(cell.rows for cell in cells)

    def __len__(self) -> int:
        return self._rows


class Strata(Source):
    """The rows of a source in cells, of which this worker keeps those of its row blocks. A tick is a stratum: with B blocks
    an epoch has B ticks, and in tick s row block i meets column block (i + s) mod B.

    Rows of a cell come in an order of (seed, epoch, cell) alone, so that what is trained does not depend on the number
    of workers.
    """

    def __init__(
        self,
        source: Source,
        blocks: KeyBlocks,
        prepare: Callable[[Any], dict[str, NDArray[Any]]],
        rank: int,
        size: int,
    ) -> None:
        """prepare: a kernel's, whose arrays have an entry for each row."""
        self.inner, self._rank, self._size = source, rank, size
        self.blocks = blocks.blocks
        self._own = range(*slice_of(self.blocks, rank, size))
        self._fields = blocks.row_field, blocks.column_field
        self._arrays, self._offsets, self._sizes = self._read(blocks, prepare)
        self.rows = int(self._sizes.sum())
        self.batch_size = -(-self.rows // self.blocks)

    def _read(
        self, blocks: KeyBlocks, prepare: Callable[[Any], dict[str, NDArray[Any]]]
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64], NDArray[np.int64]]:
        """This worker's rows, cell by cell; where the cells begin [own row blocks · B + 1]; the rows of all cells [B, B]."""
        count, (row_field, column_field) = self.blocks, self._fields
        (row_block, row_place), (column_block, column_place) = blocks.places(row_field), blocks.places(column_field)
        sizes = np.zeros(count * count, np.int64)
        found: list[dict[str, NDArray[Any]]] = []
        cells: list[NDArray[np.int64]] = []
        for batch in read_in_order(self.inner):
            arrays = prepare(batch)
            rows, columns = arrays[row_field], arrays[column_field]
            cell = row_block[rows].astype(np.int64) * count + column_block[columns]
            sizes += np.bincount(cell, minlength=count * count)
            own = np.flatnonzero((cell >= self._own.start * count) & (cell < self._own.stop * count))
            kept = {name: array[own] for name, array in arrays.items()}
            for field, place in ((row_field, row_place), (column_field, column_place)):
                kept[field] = place[kept[field]].astype(kept[field].dtype)  # as it was: one compiled step is enough
            found.append(kept)
            cells.append(cell[own] - self._own.start * count)
        order = np.argsort(np.concatenate(cells), kind="stable")
        arrays = {name: np.concatenate([one[name] for one in found])[order] for name in found[0]}
        own_sizes = sizes.reshape(count, count)[self._own.start : self._own.stop].ravel()
        return arrays, np.concatenate([[0], np.cumsum(own_sizes)]), sizes.reshape(count, count)

    @property
    def imbalance(self) -> float:
        """Rows of the slowest worker of each stratum, summed up, beside an equal share: 1 is perfect."""
        count, size = self.blocks, self._size
        shifted = np.stack([np.roll(self._sizes[i], -i) for i in range(count)])  # [row block, stratum]
        by_worker = shifted.reshape(size, count // size, count).sum(1)
        return float(by_worker.max(0).sum() * size / max(1, self.rows or 0))

    @override
    def epoch_rows(self, reading: Reading) -> int | None:
        if reading.order is not None:
            raise BadInput("order was given, and strategy rotate goes through the rows cell by cell: leave order out")
        return self.rows

    @override
    def ticks(self, reading: Reading) -> int:
        return self.blocks

    @override
    def slices(self, reading: Reading) -> Slices:
        for stratum in range(reading.first_tick, self.blocks):
            cells = [self._cell(i, (i + stratum) % self.blocks, reading) for i in self._own]
            own = Cells(stratum, cells)
            rows = sum(int(self._sizes[i, (i + stratum) % self.blocks]) for i in range(self.blocks))
            yield Slice(own, len(own), rows, stratum, self._rank)

    def _cell(self, row_block: int, column_block: int, reading: Reading) -> Cell:
        at = (row_block - self._own.start) * self.blocks + column_block
        start, stop = int(self._offsets[at]), int(self._offsets[at + 1])
        if not reading.shuffle:
            return Cell(row_block, column_block, {name: array[start:stop] for name, array in self._arrays.items()})
        seeds = [reading.seed, reading.epoch, row_block, column_block]
        order = start + np.random.default_rng(seeds).permutation(stop - start)
        return Cell(row_block, column_block, {name: array[order] for name, array in self._arrays.items()})


def read_in_order(source: Source) -> Iterator[Any]:
    """All rows of a source, batch by batch, in their own order. Unsupported where they have no numbers."""
    if not isinstance(source, Indexed):
        raise Unsupported(no_cells_of_a_stream("rotate"))
    for start in range(0, source.rows, _READ_ROWS):
        own = range(start, min(start + _READ_ROWS, source.rows))
        yield source.load_here(Pick(0, own, len(own)), Reading()).batch


def no_cells_of_a_stream(strategy: str) -> str:
    """Why rows without numbers are not cut."""
    return (
        f"strategy {strategy} sorts the rows by their keys before it trains, and a stream has no rows to sort: give data with a length and row numbers, such as "
        "arrays, a table or a file of columns"
    )


def count_keys(
    source: Source, rows: Mapping[str, int], prepare: Callable[[Any], dict[str, NDArray[Any]]]
) -> dict[str, NDArray[np.int64]]:
    """How many rows of a source have each key, by field. rows: how many keys each field has."""
    counts = {field: np.zeros(count, np.int64) for field, count in rows.items()}
    for batch in read_in_order(source):
        arrays = prepare(batch)
        for field, own in counts.items():
            own += np.bincount(arrays[field], minlength=len(own))
    return counts
