from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from manyhands.data.spool import Spool, SpoolColumn, SpoolPart, open_part
from manyhands.errors import BadInput
from open_files import open_files

PAIR = (SpoolColumn("features", ("a", "b"), "float32"), SpoolColumn("label", ("y",), "int64"))


def batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = np.arange(first, first + rows)
    return pa.record_batch({"a": numbers / 2, "b": numbers, "y": numbers % 3, "unused": numbers})


def everything(spool: Spool, name: str) -> list[list[float]]:
    return [row for part in spool.parts() for row in np.asarray(open_part(part)[name]).tolist()]


@pytest.mark.parametrize(("memory", "on_disk"), [(1 << 20, False), (0, True), (50, True)])
def test_rows_come_back_as_they_came(memory: int, on_disk: bool, tmp_path: Path) -> None:
    spool = Spool(PAIR, memory, str(tmp_path))
    for first, rows in ((0, 3), (3, 0), (3, 2), (5, 1)):
        spool.add(batch(first, rows))
    assert everything(spool, "features") == [[i / 2, i] for i in range(6)]
    assert everything(spool, "label") == [i % 3 for i in range(6)]
    assert (spool.rows, spool.bytes, spool.on_disk) == (6, 6 * 16, on_disk)
    assert not list(tmp_path.iterdir())  # a file without a name is gone with its owner
    spool.close()


def test_what_is_beyond_the_budget_is_on_disk() -> None:
    spool = Spool(PAIR, 3 * 16)
    for first in range(0, 8, 2):
        spool.add(batch(first, 2))
    assert [part.rows for part in spool.parts()] == [2, 6]
    kinds = [os.readlink(f"/proc/self/fd/{part.columns['label'].fd}") for part in spool.parts()]
    assert ["memfd" in kind for kind in kinds] == [True, False]
    spool.close()


def test_a_part_travels_as_json() -> None:
    spool = Spool(PAIR, 1 << 20)
    spool.add(batch(0, 2))
    (part,) = spool.parts()
    assert SpoolPart.from_json(part.to_json()) == part
    spool.close()


def test_nothing_stays_open() -> None:
    before = open_files()
    spool = Spool(PAIR, 10)
    spool.add(batch(0, 2))
    assert len(open_files() - before) == 2
    spool.close()
    assert open_files() <= before


def test_arrays_become_dimensions_and_stand_beside_numbers() -> None:
    lists = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64()))
    table = pa.record_batch({"v": lists, "x": pa.array([5, 6])})
    assert SpoolColumn("f", ("v",), "float32").of(table).tolist() == [[1, 2], [3, 4]]
    assert SpoolColumn("f", ("v", "x")).of(table).tolist() == [[1, 2, 5], [3, 4, 6]]


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(BadInput, match="column 'a' holds .*, not numbers: encode it"):
        SpoolColumn("f", ("a",)).of(pa.record_batch({"a": ["x", "y"]}))
    with pytest.raises(BadInput, match="column 'a' has missing values .1."):
        SpoolColumn("f", ("a",)).of(pa.record_batch({"a": [1.0, None]}))
    with pytest.raises(BadInput, match="column 'a' holds lists of 1 to 2 values"):
        SpoolColumn("f", ("a",)).of(pa.record_batch({"a": [[1.0], [1.0, 2.0]]}))


def test_fractions_do_not_become_whole_numbers_silently() -> None:
    label = SpoolColumn("label", ("y",), "int64")
    assert label.of(pa.record_batch({"y": [1.0, 2.0]})).tolist() == [1, 2]
    with pytest.raises(BadInput, match="label has fractions, and its type is int64"):
        label.of(pa.record_batch({"y": [1.0, 2.5]}))


def test_later_rows_must_be_like_the_first() -> None:
    spool = Spool((SpoolColumn("f", ("a",)),), 1 << 20)
    spool.add(pa.record_batch({"a": [[1.0], [2.0]]}))
    with pytest.raises(BadInput, match=r"f has rows of float64 \[1\] and of float64 \[2\]"):
        spool.add(pa.record_batch({"a": [[1.0, 2.0]]}))
    spool.close()
