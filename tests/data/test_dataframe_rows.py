from __future__ import annotations

import json
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
from manyhands.data.spool import Spool, SpoolColumn
from manyhands.errors import BadInput

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
        features, label = source.take(wanted)  # type: ignore[arg-type]
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


def test_one_host_reads_as_an_array_would(spools: list[Spool]) -> None:
    source = source_of(spools, range(7), range(7, 33))
    rows = torch.arange(33)
    same = open_source((rows.float(), rows))
    for rank in range(4):
        ours = [part.batch for part in Feed(source, rank=rank, size=4, batch_size=8).epoch(1)]
        theirs = [part.batch for part in Feed(same, rank=rank, size=4, batch_size=8).epoch(1)]
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a[1], b[1])


HOSTS = [
    ([range(20), range(20, 41)], [2, 1]),
    ([range(0), range(7)], [1, 1]),
    ([range(1), range(1, 30), range(30, 33)], [1, 2, 1]),
]


@pytest.mark.parametrize(("rows", "workers"), HOSTS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_once_an_epoch_on_several_hosts(
    spools: list[Spool], rows: list[range], workers: list[int], shuffle: bool
) -> None:
    size, batch_size = sum(workers), 8
    counts = [len(one) for one in rows]
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        by_tick: dict[int, list[int]] = {}
        rank = 0
        for host, own in enumerate(rows):
            here = source_of(spools, own)
            for _ in range(workers[host]):
                source = SharedRows(here, counts, workers, host)
                feed = Feed(source, rank=rank, size=size, batch_size=batch_size, shuffle=shuffle)
                assert feed.rows == sum(counts)
                parts = list(feed.epoch(epoch))
                assert [part.index for part in parts] == list(range(feed.ticks or 0))
                for part in parts:
                    by_tick.setdefault(part.index, [part.global_rows or 0, 0])[1] += part.rows
                    seen += [] if part.batch is None else part.batch[1].tolist()
                    assert part.rows <= -(-batch_size // size)
                rank += 1
        assert Counter(seen) == Counter(x for own in rows for x in own)
        assert all(told == found for told, found in by_tick.values())
        orders.append(seen)
    assert (orders[0] != orders[1]) == shuffle


def test_fewer_read_than_bring(spools: list[Spool]) -> None:
    """Of another framework's cluster only some processes train: the first ones, as ranks go."""
    rows, seen = [range(20), range(20, 41)], []
    for rank, host in enumerate((0, 0, 1)):
        source = SharedRows(source_of(spools, rows[host]), [20, 21], [2, 2], host)
        seen += [part.batch[1].tolist() for part in Feed(source, rank=rank, size=3, batch_size=9).epoch(0) if part.rows]
    assert Counter(sum(seen, [])) == Counter(range(41))
    with pytest.raises(BadInput, match="a host has rows .21. and no worker that trains"):
        Feed(SharedRows(source_of(spools, rows[0]), [20, 21], [2, 2], 0), size=2, batch_size=9)


def test_an_epoch_goes_on_from_any_tick(spools: list[Spool]) -> None:
    source = SharedRows(source_of(spools, range(21)), [21, 20], [1, 1], 0)
    feed = Feed(source, rank=0, size=2, batch_size=6)
    whole, rest = list(feed.epoch(1)), list(feed.epoch(1, 3))
    assert [part.index for part in rest] == [part.index for part in whole[3:]]
    assert all(torch.equal(a.batch[1], b.batch[1]) for a, b in zip(rest, whole[3:], strict=True) if a.batch is not None)


def test_several_hosts_lease_nothing(spools: list[Spool]) -> None:
    here = source_of(spools, range(21))
    assert Feed(here, size=2).leasable
    feed = Feed(SharedRows(here, [21, 20], [1, 1], 0), size=2, batch_size=6)
    assert not feed.leasable
    parts = list(feed.leased(Segment(epoch=0, first=0, until=7, parts=2), lambda: pytest.fail("leased")))
    assert sum(part.rows for part in parts) == 21


def test_an_order_needs_one_host(spools: list[Spool]) -> None:
    source = SharedRows(source_of(spools, range(3)), [3, 3], [1, 1], 0)
    with pytest.raises(BadInput, match="order= needs all rows on one host"):
        Feed(source, size=2, order=lambda epoch: np.arange(6))


def pools(spools: list[Spool], rows: list[int], workers: list[int], *parts: range) -> dict[str, Any]:
    held = [part.to_json() for spool in filled(spools, *parts) for part in spool.parts()]
    return {"rows": [{"k": n} for n in rows], "workers": workers, "host": 0, "parts": {"k": held}}


def test_a_frame_travels_without_its_table_and_opens_the_pool(
    spools: list[Spool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = DistributedFrame("k", COLUMNS, table=object())
    there: DistributedFrame = pickle.loads(pickle.dumps(frame))
    assert (there.key, there.columns, there.table) == ("k", COLUMNS, None)
    read: DistributedFrame = pickle.loads(pickle.dumps(DistributedFrame("k", COLUMNS, files=("s3://a",))))
    assert (read.files, read.sources) == (("s3://a",), ["x"])
    file = tmp_path / "pool"
    file.write_text(json.dumps(pools(spools, [4], [2], range(4))))
    monkeypatch.setenv(VARIABLE, str(file))
    assert open_source(there).rows == 4
    file.write_text(json.dumps(pools(spools, [4, 3], [2, 1], range(4))))
    assert open_source(there).rows == 7


def test_without_an_engine_that_brings_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(BadInput, match="only engine spark can read"):
        open_source(DistributedFrame("k", COLUMNS))


def test_no_rows_at_all(spools: list[Spool]) -> None:
    with pytest.raises(BadInput, match="the DataFrame has no rows"):
        open_pool(pools(spools, [0], [1]), "k", ["features"], None)


def test_partitions_of_other_lengths(spools: list[Spool]) -> None:
    column = (SpoolColumn("features", ("x",)),)
    made = [Spool(column, 1 << 20) for _ in range(2)]
    spools += made
    for i, spool in enumerate(made):
        spool.add(pa.record_batch({"x": [[1.0] * (i + 1)]}))
    with pytest.raises(
        BadInput, match=r"features has rows of float64 \[1\] in one partition and of float64 \[2\] in another"
    ):
        HostRows([part for spool in made for part in spool.parts()], ["features"])
