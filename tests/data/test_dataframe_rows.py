"""data/dataframe_rows.py and spool.py: rows of a DataFrame, by the hosts that keep them."""

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from manyhands.data.dataframe_rows import ORDER, VARIABLE, DistributedFrame, HostRows, SharedRows, open_pool
from manyhands.data.feed import Feed
from manyhands.data.leases import Segment
from manyhands.data.open_source import open_source
from manyhands.data.spool import Spool, SpoolColumn, SpoolPart, open_part
from manyhands.errors import BadInput
from refusals import refused

COLUMNS = (SpoolColumn("features", ("x",), "float32"), SpoolColumn("label", ("x",), "int64"))


@pytest.fixture
def spools() -> Iterator[list[Spool]]:
    kept: list[Spool] = []
    yield kept
    for spool in kept:
        spool.close()


def filled(spools: list[Spool], *parts: range) -> list[Spool]:
    """A spool for each range, its rows the numbers; half of them beyond the budget."""
    made = []
    for numbers in parts:
        spool = Spool(COLUMNS, 12 * (len(numbers) // 2))
        for x in numbers:
            spool.add(pa.record_batch({"x": [x]}))
        made.append(spool)
    spools += made
    return made


def source_of(spools: list[Spool], *parts: range) -> HostRows:
    return HostRows([p for spool in filled(spools, *parts) for p in spool.parts()], ["features", "label"])


def test_any_row_of_any_partition(spools: list[Spool]) -> None:
    source = source_of(spools, range(5), range(5, 6), range(0), range(6, 11))
    assert source.rows == 11
    for wanted in ([10, 0, 5, 4, 5], range(3, 8), np.array([7])):
        features, label = source.take(wanted)
        assert features.tolist() == label.tolist() == list(wanted)
        assert (features.dtype, label.dtype) == (torch.float32, torch.int64)


def test_rows_are_numbered_by_their_place_in_the_table(spools: list[Spool]) -> None:
    """Whatever way they came in, and to whom."""
    frame = DistributedFrame("k", COLUMNS)
    parts = []
    for rows in ([4, 0], [9], [7, 1, 3]):
        spool = Spool(frame.kept, 1 << 20)
        spools.append(spool)
        spool.add(pa.record_batch({"x": rows, ORDER: [10 * x for x in rows]}))
        parts += spool.parts()
    source = HostRows(parts, ["features", "label"])
    assert source.take(range(6))[1].tolist() == [0, 1, 3, 4, 7, 9]
    assert source.take([5, 0])[1].tolist() == [9, 0]
    assert DistributedFrame("k", COLUMNS, files=("a.parquet",)).kept == COLUMNS


HOSTS = [
    ([range(20), range(20, 41)], [2, 1]),
    ([range(0), range(7)], [1, 1]),
    ([range(1), range(1, 30), range(30, 33)], [1, 2, 1]),
]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_once_an_epoch_on_several_hosts(spools: list[Spool], shuffle: bool) -> None:
    for rows, workers in HOSTS:
        counts, size = [len(one) for one in rows], sum(workers)
        here = [source_of(spools, own) for own in rows]
        hosts = [host for host, many in enumerate(workers) for _ in range(many)]
        orders = []
        for epoch in range(2):
            seen: list[int] = []
            by_tick: dict[int, list[int]] = {}
            for rank, host in enumerate(hosts):
                source = SharedRows(here[host], counts, workers, host)
                feed = Feed(source, rank=rank, size=size, batch_size=8, shuffle=shuffle)
                assert feed.rows == sum(counts), workers
                parts = list(feed.epoch(epoch))
                assert [part.index for part in parts] == list(range(feed.ticks or 0)), workers
                for part in parts:
                    by_tick.setdefault(part.index, [part.global_rows or 0, 0])[1] += part.rows
                    seen += [] if part.batch is None else part.batch[1].tolist()
                    assert part.rows <= -(-8 // size), workers
            assert Counter(seen) == Counter(x for own in rows for x in own), workers
            assert all(told == found for told, found in by_tick.values()), workers
            orders.append(seen)
        assert (orders[0] != orders[1]) == shuffle, workers


def test_fewer_read_than_bring(spools: list[Spool]) -> None:
    """Of another framework's cluster only some processes train: the first ones, as ranks go."""
    rows, seen = [range(20), range(20, 41)], []
    for rank, host in enumerate((0, 0, 1)):
        source = SharedRows(source_of(spools, rows[host]), [20, 21], [2, 2], host)
        seen += [part.batch[1].tolist() for part in Feed(source, rank=rank, size=3, batch_size=9).epoch(0) if part.rows]
    assert Counter(sum(seen, [])) == Counter(range(41))
    with pytest.raises(BadInput, match="a host has rows .21. and no worker that trains"):
        Feed(SharedRows(source_of(spools, rows[0]), [20, 21], [2, 2], 0), size=2, batch_size=9)


def test_several_hosts_go_on_from_any_tick_lease_nothing_and_take_no_order(spools: list[Spool]) -> None:
    here = source_of(spools, range(21))
    source = SharedRows(here, [21, 20], [1, 1], 0)
    feed = Feed(source, rank=0, size=2, batch_size=6)
    whole, rest = list(feed.epoch(1)), list(feed.epoch(1, 3))
    assert [part.index for part in rest] == [part.index for part in whole[3:]]
    assert all(torch.equal(a.batch[1], b.batch[1]) for a, b in zip(rest, whole[3:], strict=True) if a.batch is not None)
    assert Feed(here, size=2).leasable
    assert not feed.leasable
    parts = list(feed.leased(Segment(epoch=0, first=0, until=7, parts=2), lambda: pytest.fail("leased")))
    assert sum(part.rows for part in parts) == 21
    refused("order= needs all rows on one host", lambda: Feed(source, size=2, order=lambda epoch: np.arange(6)))


def pools(spools: list[Spool], rows: list[int], workers: list[int], *parts: range) -> dict[str, Any]:
    held = [part.to_json() for spool in filled(spools, *parts) for part in spool.parts()]
    return {"rows": [{"k": n} for n in rows], "workers": workers, "host": 0, "parts": {"k": held}}


def test_a_frame_opens_the_pool(spools: list[Spool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: DistributedFrame = pickle.loads(pickle.dumps(DistributedFrame("k", COLUMNS, table=object())))
    assert (there.key, there.columns, there.table) == ("k", COLUMNS, None)
    read: DistributedFrame = pickle.loads(pickle.dumps(DistributedFrame("k", COLUMNS, files=("s3://a",))))
    assert (read.files, read.sources) == (("s3://a",), ["x"])
    file = tmp_path / "pool"
    monkeypatch.setenv(VARIABLE, str(file))
    for counts, workers, rows in [([4], [2], 4), ([4, 3], [2, 1], 7)]:
        file.write_text(json.dumps(pools(spools, counts, workers, range(4))))
        assert open_source(there).rows == rows


def test_what_cannot_be_read_is_refused(spools: list[Spool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    refused("only engine spark", open_source, DistributedFrame("k", COLUMNS))
    refused("has no rows", open_pool, pools(spools, [0], [1]), "k", ["features"], None)
    made = [Spool((SpoolColumn("features", ("x",)),), 1 << 20) for _ in range(2)]
    spools += made
    for i, spool in enumerate(made):
        spool.add(pa.record_batch({"x": [[1.0] * (i + 1)]}))
    parts = [part for spool in made for part in spool.parts()]
    refused(r"features has rows of float64 \[1\] .* float64 \[2\]", HostRows, parts, ["features"])


# -- spool.py ------------------------------------------------------------------------------------------------------------


PAIR = (SpoolColumn("features", ("a", "b"), "float32"), SpoolColumn("label", ("y",), "int64"))


def batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = np.arange(first, first + rows)
    return pa.record_batch({"a": numbers / 2, "b": numbers, "y": numbers % 3, "unused": numbers})


def everything(spool: Spool, name: str) -> list[list[float]]:
    return [row for part in spool.parts() for row in np.asarray(open_part(part)[name]).tolist()]


def test_rows_come_back_as_they_came(tmp_path: Path) -> None:
    for memory, on_disk in [(1 << 20, False), (0, True), (50, True)]:
        spool = Spool(PAIR, memory, str(tmp_path))
        for first, rows in ((0, 3), (3, 0), (3, 2), (5, 1)):
            spool.add(batch(first, rows))
        assert everything(spool, "features") == [[i / 2, i] for i in range(6)], memory
        assert everything(spool, "label") == [i % 3 for i in range(6)], memory
        assert (spool.rows, spool.bytes, spool.on_disk) == (6, 6 * 16, on_disk), memory
        assert not list(tmp_path.iterdir())  # a file without a name is gone with its owner
        for part in spool.parts():
            assert SpoolPart.from_json(part.to_json()) == part
        spool.close()


def test_what_is_beyond_the_budget_is_on_disk_and_closed_with_the_rest() -> None:
    spool = Spool(PAIR, 3 * 16)
    for first in range(0, 8, 2):
        spool.add(batch(first, 2))
    assert [part.rows for part in spool.parts()] == [2, 6]
    files = [f"/proc/self/fd/{column.fd}" for part in spool.parts() for column in part.columns.values()]
    kinds = {file: os.readlink(file) for file in files}
    assert {"memfd" in kind for kind in kinds.values()} == {True, False}
    spool.close()
    for file, kind in kinds.items():  # another thread may have opened a file with the same number meanwhile
        assert not os.path.lexists(file) or os.readlink(file) != kind


def test_arrays_become_dimensions_and_stand_beside_numbers() -> None:
    lists = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64()))
    table = pa.record_batch({"v": lists, "x": pa.array([5, 6])})
    assert SpoolColumn("f", ("v",), "float32").of(table).tolist() == [[1, 2], [3, 4]]
    assert SpoolColumn("f", ("v", "x")).of(table).tolist() == [[1, 2, 5], [3, 4, 6]]
    label = SpoolColumn("label", ("y",), "int64")
    assert label.of(pa.record_batch({"y": [1.0, 2.0]})).tolist() == [1, 2]


def test_what_cannot_be_a_column_is_named() -> None:
    for column, values, words in [
        (SpoolColumn("f", ("a",)), ["x", "y"], "column 'a' holds .*, not numbers: encode it"),
        (SpoolColumn("f", ("a",)), [1.0, None], "column 'a' has missing values .1."),
        (SpoolColumn("f", ("a",)), [[1.0], [1.0, 2.0]], "column 'a' holds lists of 1 to 2 values"),
        (SpoolColumn("label", ("a",), "int64"), [1.0, 2.5], "label has fractions, and its type is int64"),
    ]:
        refused(words, column.of, pa.record_batch({"a": values}))
    spool = Spool((SpoolColumn("f", ("a",)),), 1 << 20)
    spool.add(pa.record_batch({"a": [[1.0], [2.0]]}))
    refused(r"f has rows of float64 \[1\] and of float64 \[2\]", spool.add, pa.record_batch({"a": [[1.0, 2.0]]}))
    spool.close()
