"""data/shards/source.py: each row of many files once, in the same order for any number of workers."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.data.open_source import open_source
from manyhands.data.sharding import epoch_order
from manyhands.data.shards import source as source_module
from manyhands.data.shards.formats import base
from manyhands.data.shards.source import BlockRows, MappedRows, shards
from manyhands.errors import BadInput, ManyhandsError
from open_files import open_files
from shard_files import BYTES_OF, numbers, small_blocks, write

SIZES = [0, 1, 23, 0, 40, 1]  # rows of each file
ROWS = sum(SIZES)
SHUFFLES: list[bool | str | None] = [None, "blocks:1", "blocks:3", True, False]


def feeds(data: Any, size: int = 1, **options: Any) -> list[Feed]:
    options = {"batch_size": 10, "seed": 3, **options}
    return [Feed(open_source(data), rank=rank, size=size, **options) for rank in range(size)]


def batches(data: Any, size: int = 1, epoch: int = 0, first_tick: int = 0, **options: Any) -> list[list[int]]:
    """The numbers of the rows of each global batch, of all workers in their order."""
    of_all = [list(feed.epoch(epoch, first_tick)) for feed in feeds(data, size, **options)]
    return [
        [row for part in parts for row in (numbers(part.batch) if part.batch is not None else [])]
        for parts in zip(*of_all, strict=True)
    ]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(source_module, "GROUP_ROWS", 16)  # else all of such an epoch is one gather


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("suffix", BYTES_OF)
def test_each_row_once_in_the_order_of_one_worker(tmp_path: Path, suffix: str, shuffle: Any) -> None:
    """CASE 18, of files with 0, 1 and many rows, and batches that do not divide."""
    data = shards(write(tmp_path, suffix, SIZES), shuffle=shuffle, threads=3)
    for batch_size in (7, 10, 64):
        alone = batches(data, batch_size=batch_size, epoch=1)
        assert [len(batch) for batch in alone] == [batch_size] * (ROWS // batch_size) + [ROWS % batch_size]
        rows = [row for batch in alone for row in batch]
        assert sorted(rows) == list(range(ROWS))
        assert (rows == list(range(ROWS))) == (shuffle is False)
        for size in (2, 3, 5):
            assert batches(data, size, batch_size=batch_size, epoch=1) == alone


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_the_tasks_shuffle_false_is_the_rows_own_order(tmp_path: Path, shuffle: Any) -> None:
    data = shards(write(tmp_path, "jsonl", SIZES), shuffle=shuffle)
    rows = [row for batch in batches(data, 3, shuffle=False) for row in batch]
    assert rows == list(range(ROWS))


def test_epochs_and_seeds_have_orders_of_their_own_and_the_same_again(tmp_path: Path) -> None:
    data = shards(write(tmp_path, "parquet", SIZES))
    assert batches(data, epoch=1) == batches(data, epoch=1)
    drawn = {str(batches(data, epoch=epoch, seed=seed)) for epoch in range(2) for seed in range(2)}
    assert len(drawn) == 4


def test_shuffle_true_is_the_order_of_a_plain_loop(tmp_path: Path) -> None:
    """As of tensors: bit for bit what `epoch_order` says."""
    data = shards(write(tmp_path, "csv", SIZES), shuffle=True)
    order = epoch_order(ROWS, 3, 2).tolist()
    assert batches(data, 2, epoch=2) == [order[i : i + 10] for i in range(0, ROWS, 10)]


def test_shuffle_true_takes_an_order_of_ones_own_with_repeats(tmp_path: Path) -> None:
    data = shards(write(tmp_path, "parquet", SIZES), shuffle=True)
    rows = [5, 5, 64, 0, 63, 5]
    assert batches(data, order=lambda epoch: rows, batch_size=4) == [[5, 5, 64, 0], [63, 5]]
    assert numbers(open_source(data).take([64, 5, 5])) == [64, 5, 5]  # type: ignore[attr-defined]


@pytest.mark.parametrize("shuffle", ["blocks:3", True, False])
@pytest.mark.parametrize("suffix", ["parquet", "tar", "csv"])
def test_at_their_own_pace_workers_get_each_row_once(tmp_path: Path, suffix: str, shuffle: Any) -> None:
    """CASE 18: the slices are those of the static reading, whoever gets them."""
    data = shards(write(tmp_path, suffix, SIZES), shuffle=shuffle)
    for size in (1, 3, 4):
        static = {(p.index, p.part): numbers(p.batch) for feed in feeds(data, size) for p in feed.epoch(0) if p.rows}
        drawn = random.Random(size)
        got, ends = leased(feeds(data, size), Segment(epoch=0, first=0, until=7, parts=size), drawn.randrange)
        assert got == static
        assert [end.reason for end in ends] == [""] * size


def leased(
    all_feeds: list[Feed], segment: Segment, pick: Callable[[int], int]
) -> tuple[dict[tuple[int, int], list[int]], list[End]]:
    """{(tick, part): row numbers} and the ends of all workers, which take turns as `pick` says."""
    leases, got, ends = Leases(), {}, []

    def take_of(rank: int) -> Callable[[], Lease | End]:
        return lambda: leases.take(rank, segment)  # type: ignore[return-value]

    readings = [feed.leased(segment, take_of(rank)) for rank, feed in enumerate(all_feeds)]
    while readings:
        reading = readings[pick(len(readings))]
        try:
            part = next(reading)
        except StopIteration as end:
            ends.append(end.value)
            readings.remove(reading)
        else:
            assert (part.index, part.part) not in got
            if part.rows:
                got[part.index, part.part] = numbers(part.batch)
    return got, ends


@pytest.mark.parametrize("shuffle", ["blocks:3", True, False])
@pytest.mark.parametrize("suffix", ["parquet", "tar", "tfrecord"])
def test_from_any_tick_on_with_another_number_of_workers_what_remains_comes_once(
    tmp_path: Path, suffix: str, shuffle: Any
) -> None:
    data = shards(write(tmp_path, suffix, SIZES), shuffle=shuffle)
    whole = batches(data, 3)
    for first, size in [(0, 2), (3, 1), (4, 5), (6, 2), (7, 1)]:
        assert batches(data, size, first_tick=first) == whole[first:]


def test_a_few_slices_are_read_again(tmp_path: Path) -> None:
    """As after a loss: any slices, in any order."""
    data = shards(write(tmp_path, "parquet", SIZES), shuffle="blocks:3")
    static = {(p.index, p.part): numbers(p.batch) for feed in feeds(data, 2) for p in feed.epoch(1) if p.rows}
    (feed,) = feeds(data)
    places = [(tick, part, 2) for tick, part in random.Random(0).sample(sorted(static), len(static))]
    again = list(feed.read(1, places))
    assert [numbers(part.batch) for part in again] == [static[tick, part] for tick, part, _ in places]


def test_every_value_comes_with_its_row(tmp_path: Path) -> None:
    for suffix in ("parquet", "arrow", "stream.arrow", "tfrecord", "jsonl"):
        for shuffle in (None, True):
            for part in feeds(shards(write(tmp_path / suffix, suffix, SIZES), shuffle=shuffle))[0].epoch(0):
                x = part.batch["x"]
                assert x.dtype == torch.int64
                assert torch.equal(
                    part.batch["v"], torch.stack([x + 0.5, -x.to(torch.float64)], 1).to(part.batch["v"].dtype)
                )
                names = [name.decode() if isinstance(name, bytes) else name for name in part.batch["name"]]
                assert names == [f"row {i}" for i in x.tolist()]


@pytest.mark.parametrize("suffix", BYTES_OF)
def test_only_the_columns_asked_for(tmp_path: Path, suffix: str) -> None:
    """In the order asked for, also where their types differ."""
    columns = {"tar": ["txt", "cls"], "tar.gz": ["txt", "cls"], "txt": ["text"]}.get(suffix, ["name", "x"])
    for shuffle in (None, True):
        (feed,) = feeds(shards(write(tmp_path, suffix, SIZES), columns=columns, shuffle=shuffle))
        seen = []
        for part in feed.epoch(0):
            assert list(part.batch) == columns
            seen += numbers(part.batch)
        assert sorted(seen) == list(range(ROWS))


def test_decode_draws_the_same_for_a_row_whatever_the_workers_and_threads(tmp_path: Path) -> None:
    data: dict[str, Any] = {}

    def decode(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"], "drawn": rng.random(2)}

    paths = write(tmp_path, "parquet", SIZES)
    for shuffle in ("blocks:3", True):
        for size, threads in [(1, 1), (1, 4), (3, 2), (5, 1)]:
            drawn = {}
            for feed in feeds(shards(paths, shuffle=shuffle, decode=decode, threads=threads), size):
                for part in feed.epoch(1):
                    if part.rows:
                        drawn.update(zip(part.batch["x"].tolist(), part.batch["drawn"].tolist(), strict=True))
            assert sorted(drawn) == list(range(ROWS))
            assert len({str(value) for value in drawn.values()}) == ROWS  # each row's own
            assert data.setdefault("1", drawn) == drawn  # the row counts, not its place: for both kinds of shuffle
    (feed,) = feeds(shards(paths, decode=decode))
    other = {
        x: d for part in feed.epoch(2) for x, d in zip(*(part.batch[n].tolist() for n in ("x", "drawn")), strict=True)
    }
    assert all(other[row] != data["1"][row] for row in range(ROWS))


def test_decode_runs_in_threads_of_its_own(tmp_path: Path) -> None:
    seen = set()

    def decode(row: dict[str, Any]) -> int:
        seen.add(threading.current_thread().name)
        return int(row["x"])

    for shuffle in (None, True):
        seen.clear()
        (feed,) = feeds(shards(write(tmp_path, "parquet", SIZES), decode=decode, shuffle=shuffle))
        rows = torch.cat([part.batch for part in feed.epoch(0)])
        assert sorted(rows.tolist()) == list(range(ROWS))
        assert seen
        assert all(name.startswith("manyhands-decode") for name in seen)


def test_rows_become_batches_by_collate(tmp_path: Path) -> None:
    def collate(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
        return [(int(row["x"]), row["name"]) for row in rows]

    source = open_source(shards(write(tmp_path, "parquet", SIZES)), collate=collate)
    rows = [row for part in Feed(source, batch_size=10).epoch(0) for row in part.batch]
    assert sorted(rows) == [(i, f"row {i}") for i in range(ROWS)]


def test_an_error_of_decode_comes_out_as_it_is(tmp_path: Path) -> None:
    def decode(row: dict[str, Any]) -> int:
        raise ZeroDivisionError("of the user's")

    (feed,) = feeds(shards(write(tmp_path, "parquet", [30]), decode=decode))
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        list(feed.epoch(0))
    assert not threads_of_shards()


def test_decode_may_be_a_type_without_a_signature(tmp_path: Path) -> None:
    (feed,) = feeds(shards(write(tmp_path, "parquet", [12]), columns="x", decode=dict))
    assert sorted(x for part in feed.epoch(0) for x in part.batch["x"].tolist()) == list(range(12))


@pytest.mark.parametrize("shuffle", [None, True, False])
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "tar", "csv"])
def test_nothing_stays_open(tmp_path: Path, suffix: str, shuffle: Any) -> None:
    """Neither threads nor descriptors, after a whole epoch, after a part of one, and with slices read aside."""
    data = shards(write(tmp_path, suffix, SIZES), shuffle=shuffle, cache="1MB" if suffix == "csv" else None)
    (feed,) = feeds(data)
    list(feed.epoch(0))
    before = open_files()
    list(feed.epoch(1))
    with closing(feed.epoch(2)) as slices:
        next(slices)
        next(slices)
    part = feed.epoch(3)
    next(part)
    del part
    assert not threads_of_shards()
    assert open_files() <= before
    list(feed.read(0, [(0, 0, 1), (5, 0, 1)]))
    del feed
    assert open_files() <= before
    for thread in threads_of_shards():  # their pool is gone
        thread.join(10)
        assert not thread.is_alive()


def threads_of_shards() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(("manyhands-shards", "manyhands-decode"))]


def test_blocks_that_are_read_are_closed(tmp_path: Path) -> None:
    """Of 40 files of one block each, no more than two and those that come next are open."""
    (feed,) = feeds(shards(write(tmp_path, "parquet", [12] * 40), shuffle="blocks:2"), batch_size=8)
    before, most = len(open_files()), 0
    for part in feed.epoch(0):
        if part.index % 8 == 7:  # a look takes a tenth of a second
            most = max(most, len(open_files()) - before)
    assert most <= 6


def test_a_reading_counts_what_it_read(tmp_path: Path) -> None:
    paths = write(tmp_path, "tar", [40])
    source = open_source(shards(paths))
    assert isinstance(source, BlockRows)
    indexed = source.counters.bytes
    assert indexed >= 40 * 512  # the headers
    list(Feed(source, batch_size=10).epoch(0))
    assert source.counters.bytes - indexed >= 40 * 2 * 1024
    assert (source.counters.retries, source.counters.hits, source.counters.misses) == (0, 0, 0)
    again = open_source(shards(paths))
    assert again.counters.bytes == 0  # the index is kept


def test_with_a_cache_each_block_is_decoded_once(tmp_path: Path, cache_folder: Path) -> None:
    paths = write(tmp_path, "parquet", [70])  # 10 row groups, of several pieces each
    source = open_source(shards(paths, cache="1MB"))
    rows = [row for part in Feed(source, batch_size=10).epoch(0) for row in numbers(part.batch)]
    assert sorted(rows) == list(range(70))
    assert source.counters.misses == 10
    split = source.counters.hits  # blocks that were opened again
    assert split < 10
    read = source.counters.bytes
    list(Feed(source, batch_size=10).epoch(1))
    assert source.counters.misses == 10
    assert 10 + split <= source.counters.hits < 20 + split
    assert source.counters.bytes == read
    mapped = open_source(shards(paths, shuffle=True, cache="1MB"))
    assert isinstance(mapped, MappedRows)
    list(Feed(mapped, batch_size=10).epoch(0))
    assert (mapped.counters.misses, mapped.counters.hits) == (0, 10)
    assert len(list(cache_folder.glob("*.arrow"))) == 10
    assert not list(cache_folder.glob("*.part"))


def test_a_cache_that_is_smaller_than_the_rows_keeps_its_limit(tmp_path: Path, cache_folder: Path) -> None:
    paths = write(tmp_path, "parquet", [700])
    for epoch in range(2):
        source = open_source(shards(paths, cache="10KB", shuffle="blocks:3"))
        rows = [row for part in Feed(source, batch_size=10).epoch(epoch) for row in numbers(part.batch)]
        assert sorted(rows) == list(range(700))
        assert sum(path.stat().st_size for path in cache_folder.glob("*.arrow")) <= 10_000


def test_a_file_that_is_written_again_is_not_read_from_the_cache(tmp_path: Path) -> None:
    paths = write(tmp_path, "csv", [20])
    for first in (0, 100):
        Path(paths[0]).write_bytes(BYTES_OF["csv"](range(first, first + 20)))
        assert sorted(batches(shards(paths, shuffle=True), batch_size=20)[0]) == list(range(first, first + 20))


def test_blocks_of_other_sizes_are_others_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a later version cuts files otherwise: neither their index nor their blocks are those that were kept."""
    for suffix in ("tar", "csv", "parquet"):
        paths = write(tmp_path, suffix, [60])
        for block, piece in [(300, 60), (300, 90), (500, 60)]:
            small_blocks(monkeypatch, block, piece)
            assert sorted(row for batch in batches(shards(paths, shuffle=True)) for row in batch) == list(range(60))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": "blocks:0"}, '"blocks:K", with K of at least 1'),
        ({"shuffle": "blocks:x"}, '"blocks:K"'),
        ({"shuffle": "blocks:" + "9" * 5000}, '"blocks:K"'),
        ({"shuffle": "rows"}, "not 'rows': \"blocks:16\", for example"),
        ({"shuffle": 3}, "not 3"),
        ({"cache": "5 parrots"}, "cache must be a size with its unit"),
        ({"cache": 0}, "cache must be a number of bytes, at least 1"),
        ({"cache": -5}, "cache must be a number of bytes"),
        ({"prefetch": 0}, 'prefetch must be a number of bytes, at least 1, or a size such as "64MB", not 0'),
        ({"prefetch": None}, "prefetch must be a number of bytes, at least 1"),
        ({"prefetch": "much"}, "prefetch must be a size with its unit"),
        ({"threads": 0}, "threads must be a whole number of at least 1, not 0"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"decode": 5}, "decode must be a function of a row"),
        ({"paths": []}, "was given no path"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        shards(**{"paths": "a.parquet", **options})


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"counted": False}])
@pytest.mark.parametrize(("given", "ready"), [(1, 2), (200_000, 5), ("1MB", 25)])
def test_as_many_bytes_as_asked_for_are_read_ahead(
    tmp_path: Path, given: int | str, ready: int, options: dict[str, Any]
) -> None:
    """Batches of 40,000 bytes: one was taken, `ready` wait, and one is in the thread's hand."""
    pq.write_table(pa.table({"x": range(400)}), tmp_path / "a.parquet", row_group_size=40)
    decoded: list[int] = []

    def decode(row: dict[str, Any]) -> torch.Tensor:
        decoded.append(row["x"])
        return torch.zeros(1000)

    (feed,) = feeds(shards(tmp_path / "a.parquet", decode=decode, prefetch=given, **options))
    with closing(feed.epoch(0)) as slices:
        next(slices)
        expected, deadline = 10 * (1 + ready + 1), time.monotonic() + 30
        while not prefetch_waits() or len(decoded) < expected:
            assert time.monotonic() < deadline, f"{len(decoded)} rows were read"
        assert len(decoded) == expected


def test_an_error_for_lack_of_memory_says_what_needs_less(tmp_path: Path) -> None:
    def decode(row: dict[str, Any]) -> int:
        raise MemoryError("std::bad_alloc")

    paths = write(tmp_path, "parquet", [5])
    (feed,) = feeds(shards(paths, decode=decode))
    with pytest.raises(MemoryError) as caught:
        next(feed.epoch(0))
    (note,) = caught.value.__notes__
    assert "prefetch=" in note
    with pytest.raises(ManyhandsError) as of_a_run:
        mh.train(
            model=lambda: torch.nn.Linear(1, 1),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=shards(paths, decode=decode),
            workers=1,
        )
    assert "prefetch=" in str(of_a_run.value)
    assert "micro_batch_size" not in str(of_a_run.value)  # which helps models


def prefetch_waits() -> bool:
    """Whether the thread that reads ahead has read enough, or has ended."""
    thread = next((one for one in threading.enumerate() if one.name == "manyhands-prefetch"), None)
    if thread is None:
        return True
    frame, calls = sys._current_frames().get(thread.ident or 0), list[str]()
    while frame is not None:
        calls.append(frame.f_code.co_name)
        frame = frame.f_back
    return {"wait", "wait_for"} <= set(calls)


def test_an_order_and_a_fixed_partition_need_rows_that_lie_ready(tmp_path: Path) -> None:
    data = shards(write(tmp_path, "parquet", SIZES))
    with pytest.raises(BadInput, match=r"read from front to back: give shards\(…, shuffle=True\)"):
        feeds(data, order=lambda epoch: range(5))
    with pytest.raises(
        BadInput, match="partition=fixed deals rows by their numbers, and shards are read from front to back"
    ):
        feeds(data, partition="fixed")
    mapped = shards(write(tmp_path, "parquet", SIZES), shuffle=True)
    rows = [row for batch in batches(mapped, 3, partition="fixed") for row in batch]
    assert sorted(rows) == list(range(ROWS))


def test_what_no_shards_can_be_made_of_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "none", "parquet", [0, 0])
    write(tmp_path / "mixed", "csv", [2])
    write(tmp_path / "mixed", "jsonl", [2])
    (tmp_path / "a.xyz").write_text("1")
    for name, message in [
        ("missing.tar", "no file or folder '.*missing.tar'"),
        ("empty", "holds no .parquet or .arrow"),
        ("none", "none has no rows: expected at least one"),
        ("mixed", "mixes .csv and .jsonl files"),
        ("a.xyz", "cannot read '.*a.xyz': expected .parquet"),
    ]:
        with pytest.raises(BadInput, match=message):
            open_source(shards(tmp_path / name))
    with pytest.raises(BadInput, match="001.parquet is named twice"):
        open_source(shards([tmp_path / "none", tmp_path / "none" / "001.parquet"]))
    with pytest.raises(BadInput, match=r"s3://bucket/a.tar needs a package that is not installed.*pip install s3fs"):
        open_source(shards("s3://bucket/a.tar"))


@pytest.mark.parametrize("shuffle", [None, True])
def test_files_of_different_columns_name_file_and_column(tmp_path: Path, shuffle: Any) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("x,y\n1,2\n")
    for text, message in [
        ("x,z\n1,2\n", r"column 'y' is int64 in .*a.csv, and .*b.csv has x, z"),
        ("x,y\n1,2.5\n", r"column 'y' is int64 in .*a.csv, and .*b.csv has it as double"),
        ("x,y,z\n1,2,3\n", r"b.csv has a column 'z', and .*a.csv has none \(it has x, y\)"),
    ]:
        second.write_text(text)
        with pytest.raises(BadInput, match=message):
            open_source(shards([first, second], shuffle=shuffle))
        assert [*batches(shards([first, second], columns=["x"], shuffle=shuffle))] == [[1, 1]]
    with pytest.raises(BadInput, match="a.csv has no column 'w'; it has x, y"):
        open_source(shards(first, columns=["w"], shuffle=shuffle))


def test_pieces_of_a_slot_that_workers_share_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's rows of one block have gaps, where others' are: they are many runs, and few pieces."""
    pq.write_table(pa.table({"x": np.arange(20_000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(base, "PIECE_BYTES", 800)
    held = []
    gather = source_module._Pieces.gather

    def counted(self: source_module._Pieces, positions: Any, places: Any) -> Any:
        found = gather(self, positions, places)
        held.append((len(self._held), len({position // 100 for position in positions.tolist()})))
        return found

    monkeypatch.setattr(source_module._Pieces, "gather", counted)
    slices = list(Feed(open_source(shards(tmp_path)), rank=1, size=4, batch_size=8).epoch(0))
    assert sum(part.rows for part in slices) == 5000
    assert max(pieces - 2 * wanted for pieces, wanted in held) <= source_module._FEW + 2
