"""Rows in a random order, in bounded memory, whatever their number: each goes to one of several files, drawn at random, and
each file's rows are then permuted. Every order of all rows is as likely as any other."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from manyhands.data.shards.formats import base

if TYPE_CHECKING:
    import pyarrow as pa

PART_BYTES = 64 << 20
"""Of rows that are permuted in memory."""
_MOST_PARTS, _UNKNOWN_PARTS = 512, 64  # files that are open at a time


def shuffled(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, seed: int, memory: int | None, folder: Path
) -> Generator[pa.RecordBatch, None, None]:
    """All rows in an order that depends on their number, the batches and the seed.

    memory: about as many bytes as all rows have; None: nobody knows. folder: where as many bytes have room meanwhile.
    """
    import pyarrow as pa

    parts = _UNKNOWN_PARTS if memory is None else min(_MOST_PARTS, -(-memory // PART_BYTES))
    random = np.random.default_rng(seed)
    with TemporaryDirectory(prefix=".shuffle-", dir=folder) as temporary:
        paths = [Path(temporary) / str(i) for i in range(max(1, parts))]
        with ExitStack() as stack:
            writers = [stack.enter_context(pa.ipc.new_file(path, schema)) for path in paths]
            for batch in batches:
                part = random.integers(len(writers), size=batch.num_rows)
                for i in np.unique(part):
                    writers[i].write_batch(batch.take(pa.array(np.flatnonzero(part == i))))
        for path in paths:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                rows = reader.read_all()
                order = random.permutation(rows.num_rows)
                at_once = max(1, rows.num_rows * base.PIECE_BYTES // max(base.PIECE_BYTES, rows.nbytes))
                for at in range(0, len(order), at_once):
                    yield from rows.take(pa.array(order[at : at + at_once])).combine_chunks().to_batches()
            path.unlink()
