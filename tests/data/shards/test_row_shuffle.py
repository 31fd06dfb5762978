"""data/shards/row_shuffle.py: every row once, in an order that a seed gives, of which none is likelier."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from manyhands.data.shards import row_shuffle
from manyhands.data.shards.formats import base
from manyhands.data.shards.row_shuffle import shuffled


def order(rows: int, seed: int, memory: int | None, folder: Path, at_once: int = 10) -> list[int]:
    table = pa.table({"x": range(rows)})
    batches = table.to_batches(max_chunksize=at_once)
    return [x for batch in shuffled(batches, table.schema, seed, memory, folder) for x in batch["x"].to_pylist()]


@pytest.mark.parametrize("memory", [None, 0, 800])
def test_each_row_once_in_an_order_of_the_seed(
    memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_shuffle, "PART_BYTES", 200)  # four files of 800 bytes
    found = order(100, 3, memory, tmp_path)
    assert sorted(found) == list(range(100))
    assert found != list(range(100))
    assert found == order(100, 3, memory, tmp_path)
    assert found != order(100, 4, memory, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_order_is_as_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rows in two files: chi-squared of 5 degrees of freedom is below 20.5 in 999 of 1000 cases."""
    monkeypatch.setattr(row_shuffle, "PART_BYTES", 12)
    times = Counter(tuple(order(3, seed, 24, tmp_path, at_once=2)) for seed in range(300))
    assert len(times) == 6
    assert sum((many - 50) ** 2 / 50 for many in times.values()) < 20.5


def test_pieces_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 80)
    table = pa.table({"x": range(100)})
    sizes = [batch.num_rows for batch in shuffled(table.to_batches(), table.schema, 0, 800, tmp_path)]
    assert sizes == [10] * 10


def test_closing_it_early_leaves_nothing(tmp_path: Path) -> None:
    table = pa.table({"x": range(100)})
    batches = shuffled(table.to_batches(), table.schema, 0, None, tmp_path)
    next(batches)
    assert len(list(tmp_path.iterdir())) == 1
    batches.close()
    assert list(tmp_path.iterdir()) == []
