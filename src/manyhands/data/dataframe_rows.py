"""A distributed DataFrame as training data: the driver names its columns, an engine brings its rows to the workers'
hosts.

On the driver a `DistributedFrame` holds the DataFrame. To the workers it travels without it, and opens there the pool
of rows that the engine has filled on their host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from manyhands.data.batch import Collate
from manyhands.data.readers.arrays import Columns
from manyhands.data.sharding import epoch_order, shared, slice_of, ticks
from manyhands.data.source import Indexed, Reading, Slice, Slices, Source, nonempty
from manyhands.data.spool import Array, SpoolColumn, SpoolPart, open_part
from manyhands.errors import BadInput

WHICH = "manyhands_frame"
"""The column that says of which frame of a run a row is, by number; a table with it holds the rows of all of them."""
ORDER = "manyhands_order"
"""The column that says where a row stands in its DataFrame: whatever way rows come in, they are read in this order."""
VARIABLE = "MANYHANDS_POOL"
"""Names the file in which a host's workers find what was brought to them."""


@dataclass(frozen=True, eq=False)
class DistributedFrame:
    """Columns of a table: rows of (features, label), (features, label, weight), or of features alone.

    table: a DataFrame, whose rows are brought; None on a worker. files: URLs (`shared_files.find`) that the hosts read
    themselves instead.
    """

    key: str
    columns: tuple[SpoolColumn, ...]
    table: Any = None
    files: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedFrame, (self.key, self.columns, None, self.files)

    @property
    def sources(self) -> list[str]:
        """The names of the table's columns, each once."""
        return list(dict.fromkeys(source for column in self.columns for source in column.sources))

    @property
    def kept(self) -> tuple[SpoolColumn, ...]:
        """What is to be kept of a row where it is brought: all columns, and its place."""
        return self.columns if self.files else (*self.columns, SpoolColumn(ORDER, (ORDER,), "int64"))

    def open(self, collate: Collate | None = None) -> Source:
        """The rows, on a worker. Raises BadInput where no engine has brought them."""
        path = os.environ.get(VARIABLE)
        if path is None:
            raise BadInput(
                "only engine spark can read the rows of a Spark DataFrame: train with engine='spark', or give files "
                "(train_data='rows.parquet')"
            )
        with open(path) as file:
            pools = json.load(file)
        names = tuple(column.name for column in self.columns)
        return open_pool(pools, self.key, names, collate, "the table in files" if self.files else "the DataFrame")


def open_pool(
    pools: dict[str, Any], key: str, names: Sequence[str], collate: Collate | None, what: str = "the DataFrame"
) -> Source:
    """What was brought here of one frame: all of it on a single host, else this host's share."""
    rows: list[int] = [host[key] for host in pools["rows"]]  # by host
    workers: list[int] = pools["workers"]
    nonempty(sum(rows), what)
    here = HostRows([SpoolPart.from_json(part) for part in pools["parts"][key]], names, collate)
    if len(rows) == 1:
        return here
    return SharedRows(here, rows, workers, pools["host"])


class HostRows(Indexed):
    """Rows in the spools of this host, all of them mapped: any worker here takes any of them."""

    def __init__(self, parts: Sequence[SpoolPart], names: Sequence[str], collate: Collate | None = None) -> None:
        for part in parts[1:]:
            for name, stored in part.columns.items():
                first = parts[0].columns[name]
                if (first.dtype, first.shape) != (stored.dtype, stored.shape):
                    raise BadInput(
                        f"{name} has rows of {np.dtype(first.dtype)} {list(first.shape)} in one partition and of "
                        f"{np.dtype(stored.dtype)} {list(stored.shape)} in another: give all rows of a column the same "
                        "length and type"
                    )
        opened = [open_part(part) for part in parts]
        self.rows = sum(part.rows for part in parts)
        self._names, self._collate = names, collate
        self._columns = {name: [arrays[name] for arrays in opened] for name in names}
        self._starts = np.cumsum([0, *(part.rows for part in parts)])
        self._places: Array | None = None  # rows as they are numbered -> as they lie
        if opened and ORDER in opened[0]:
            self._places = np.argsort(np.concatenate([arrays[ORDER] for arrays in opened]), kind="stable")

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        wanted = np.asarray(indices, dtype=np.int64)
        if self._places is not None:
            wanted = self._places[wanted]
        batch = tuple(torch.from_numpy(self._gather(self._columns[name], wanted)) for name in self._names)
        if self._collate is not None:
            return Columns(batch, self._collate).take(range(len(wanted)))
        return batch[0] if len(batch) == 1 else batch

    def _gather(self, parts: list[Array], wanted: Array) -> Array:
        if len(parts) == 1:
            return np.asarray(parts[0][wanted])
        out = np.empty((len(wanted), *parts[0].shape[1:]), parts[0].dtype)
        part_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for i in np.unique(part_of):
            mine = part_of == i
            out[mine] = parts[i][wanted[mine] - self._starts[i]]
        return out

    @override
    def in_background(self, reading: Reading) -> bool:
        return self._collate is None


class SharedRows(Source):
    """Rows on several hosts. Every host's workers share that host's rows, in an order of each epoch's own.

    A host's part of a global batch is as large as its workers' together; where its rows end sooner than another's, the
    last batches are smaller, and weights keep the mean what it is. So every row counts once an epoch, and none travels
    twice.
    """

    def __init__(self, here: HostRows, rows: Sequence[int], workers: Sequence[int], host: int) -> None:
        self._here, self._all, self._workers, self._host = here, list(rows), list(workers), host
        self.rows = sum(rows)

    @override
    def epoch_rows(self, reading: Reading) -> int:
        if reading.order is not None:
            raise BadInput(
                "order= needs all rows on one host, and these rows are spread over several: leave order out, or use "
                "one host"
            )
        return self.rows or 0

    @override
    def ticks(self, reading: Reading) -> int:
        return max(ticks(rows, share) for rows, share in zip(self._all, self._shares(reading), strict=True) if share)

    def _ends(self, reading: Reading) -> list[int]:
        """0, and behind each host the first rank that is not its; those who do not read come last, and have no rank."""
        return [min(int(end), reading.size) for end in np.cumsum([0, *self._workers])]

    def _shares(self, reading: Reading) -> list[int]:
        """Rows of each host in a full global batch, over its ranks. BadInput for rows on a host without readers."""
        bounds = [slice_of(reading.batch_size, rank, reading.size)[0] for rank in range(reading.size)]
        bounds.append(reading.batch_size)
        shares = [bounds[stop] - bounds[start] for start, stop in pairwise(self._ends(reading))]
        if idle := [i for i, share in enumerate(shares) if self._all[i] and not share]:
            raise BadInput(
                f"a host has rows ({self._all[idle[0]]}) and no worker that trains: start more workers, or fewer "
                "processes of other roles, so that each host has one"
            )
        return shares

    @override
    def slices(self, reading: Reading) -> Slices:
        shares, ends = self._shares(reading), self._ends(reading)
        own, first, size = shares[self._host], ends[self._host], ends[self._host + 1] - ends[self._host]
        place = reading.rank - first
        order: Any = range(self._here.rows)
        if reading.shuffle and self._here.rows:
            order = shared(epoch_order, self._here.rows, reading.seed + 1_000_003 * self._host, reading.epoch)
        for index in range(reading.first_tick, self.ticks(reading)):
            mine = order[index * own : (index + 1) * own]
            start, stop = slice_of(len(mine), place, size)
            everybody = sum(
                max(0, min(share, rows - index * share)) for share, rows in zip(shares, self._all, strict=True)
            )
            batch = self._here.take(mine[start:stop]) if stop > start else None
            yield Slice(batch, stop - start, everybody, index, reading.rank)

    @override
    def in_background(self, reading: Reading) -> bool:
        return self._here.in_background(reading)
