"""data/shards/source.py: each row of many files once, in the same order for any number of workers."""

import os
import random
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import manyhands as mh
from manyhands.data import feed as feed_module
from manyhands.data.feed import Feed
from manyhands.data.leases import Leases, Segment
from manyhands.data.open_source import open_source
from manyhands.data.sharding import epoch_order
from manyhands.data.shards import source as source_module
from manyhands.data.shards.formats import base
from manyhands.data.shards.source import shards
from manyhands.errors import ManyhandsError
from refusals import refused
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


def static(data: Any, size: int, epoch: int = 0) -> dict[tuple[int, int], list[int]]:
    """{(tick, part): row numbers}"""
    parts = [part for feed in feeds(data, size) for part in feed.epoch(epoch)]
    return {(part.index, part.part): numbers(part.batch) for part in parts if part.rows}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(source_module, "GROUP_ROWS", 16)  # else all of such an epoch is one gather


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """{suffix: files of SIZES rows}"""
    return {suffix: write(tmp_path_factory.mktemp(suffix), suffix, SIZES) for suffix in BYTES_OF}


@pytest.mark.parametrize("suffix", BYTES_OF)
def test_each_row_once_in_the_order_of_one_worker(paths: dict[str, list[str]], suffix: str) -> None:
    """CASE 18, of files with 0, 1 and many rows, and batches that do not divide."""
    number = list(BYTES_OF).index(suffix)
    for shuffle in (SHUFFLES[number % 5], SHUFFLES[(number + 2) % 5]):
        data = shards(paths[suffix], shuffle=shuffle, threads=3)
        size, batch_size = [(2, 7), (3, 10), (5, 64)][(number + SHUFFLES.index(shuffle)) % 3]
        alone = batches(data, batch_size=batch_size, epoch=1)
        assert [len(batch) for batch in alone] == [batch_size] * (ROWS // batch_size) + [ROWS % batch_size], shuffle
        rows = [row for batch in alone for row in batch]
        assert sorted(rows) == list(range(ROWS)), shuffle
        assert (rows == list(range(ROWS))) == (shuffle is False), shuffle
        assert batches(data, size, batch_size=batch_size, epoch=1) == alone, (shuffle, size, batch_size)


def test_orders_are_those_of_seed_and_epoch_or_ones_own(paths: dict[str, list[str]]) -> None:
    for shuffle in SHUFFLES:  # the task's shuffle=False is the rows' own order
        rows = [row for batch in batches(shards(paths["jsonl"], shuffle=shuffle), 3, shuffle=False) for row in batch]
        assert rows == list(range(ROWS)), shuffle
    data = shards(paths["parquet"])
    assert batches(data, epoch=1) == batches(data, epoch=1)
    assert len({str(batches(data, epoch=epoch, seed=seed)) for epoch in range(2) for seed in range(2)}) == 4
    order = epoch_order(ROWS, 3, 2).tolist()  # shuffle=True: as of tensors
    assert batches(shards(paths["csv"], shuffle=True), 2, epoch=2) == [order[i : i + 10] for i in range(0, ROWS, 10)]
    mapped, rows = shards(paths["parquet"], shuffle=True), [5, 5, 64, 0, 63, 5]
    assert batches(mapped, order=lambda epoch: rows, batch_size=4) == [[5, 5, 64, 0], [63, 5]]
    assert numbers(open_source(mapped).take([64, 5, 5])) == [64, 5, 5]
    assert sorted(row for batch in batches(mapped, 3, partition="fixed") for row in batch) == list(range(ROWS))
    refused("read from front to back: give shards.*shuffle=True", lambda: feeds(data, order=lambda epoch: range(5)))
    refused("partition=fixed .*read from front to back", lambda: feeds(data, partition="fixed"))


@pytest.mark.parametrize(
    ("suffix", "shuffles"), [("parquet", ("blocks:3", True)), ("tar", ("blocks:3", False)), ("csv", (True, False))]
)
def test_leased_slices_are_static_ones(paths: dict[str, list[str]], suffix: str, shuffles: tuple[Any, ...]) -> None:
    """CASE 18: the slices are those of the static reading, whoever gets them, and with another number of workers."""
    for shuffle in shuffles:
        data = shards(paths[suffix], shuffle=shuffle)
        assert leased(feeds(data, 4)) == static(data, 4), shuffle
        whole = batches(data, 3)
        for first, size in [(3, 2), (7, 1)]:
            assert batches(data, size, first_tick=first) == whole[first:], (shuffle, first, size)
    data = shards(paths[suffix], shuffle="blocks:3")  # as after a loss: any slices, in any order
    known = static(data, 2, epoch=1)
    places = [(tick, part, 2) for tick, part in random.Random(0).sample(sorted(known), len(known))]
    again = list(feeds(data)[0].read(1, places))
    assert [numbers(part.batch) for part in again] == [known[tick, part] for tick, part, _ in places]


def leased(workers: list[Feed]) -> dict[tuple[int, int], list[int]]:
    """{(tick, part): row numbers} of an epoch of workers that take turns, once the first has taken more than its own."""
    leases, segment = Leases(), Segment(epoch=0, first=0, until=7, parts=len(workers))
    readings = [feed.leased(segment, partial(leases.take, rank, segment)) for rank, feed in enumerate(workers)]
    parts = [*islice(readings[0], 9), *chain.from_iterable(zip_longest(*readings))]
    found = [((part.index, part.part), numbers(part.batch)) for part in parts if part is not None and part.rows]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("suffix", BYTES_OF)
def test_every_value_of_the_columns_asked_for(paths: dict[str, list[str]], suffix: str) -> None:
    """In the order asked for, also where their types differ."""
    columns = {"tar": ["txt", "cls"], "tar.gz": ["txt", "cls"], "txt": ["text"]}.get(suffix, ["name", "x"])
    seen = []
    for part in feeds(shards(paths[suffix], columns=columns))[0].epoch(0):
        assert list(part.batch) == columns
        seen += numbers(part.batch)
    assert sorted(seen) == list(range(ROWS))
    if suffix in ("parquet", "arrow", "stream.arrow", "tfrecord", "jsonl"):
        for part in feeds(shards(paths[suffix], shuffle=True))[0].epoch(0):
            x, v = part.batch["x"], part.batch["v"]
            assert x.dtype == torch.int64
            assert torch.equal(v, torch.stack([x + 0.5, -x.to(torch.float64)], 1).to(v.dtype))
            names = [name.decode() if isinstance(name, bytes) else name for name in part.batch["name"]]
            assert names == [f"row {i}" for i in x.tolist()]


def test_decode_draws_the_same_for_a_row_whatever_the_workers_and_threads(paths: dict[str, list[str]]) -> None:
    def decode(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": row["x"], "drawn": rng.random(2)}

    def read(size: int, epoch: int = 1, **options: Any) -> dict[int, list[float]]:
        drawn: dict[int, list[float]] = {}
        for feed in feeds(shards(paths["parquet"], decode=decode, **options), size):
            for part in feed.epoch(epoch):
                if part.rows:
                    drawn.update(zip(part.batch["x"].tolist(), part.batch["drawn"].tolist(), strict=True))
        return drawn

    first = read(1, threads=1, shuffle="blocks:3")
    assert sorted(first) == list(range(ROWS))
    assert len({str(value) for value in first.values()}) == ROWS  # each row's own
    for size, threads, shuffle in [(1, 4, "blocks:3"), (3, 2, True), (5, 1, "blocks:3"), (1, 1, True)]:
        assert read(size, threads=threads, shuffle=shuffle) == first, (size, threads, shuffle)  # not its place
    other = read(1, epoch=2)
    assert all(other[row] != first[row] for row in range(ROWS))


def test_decode_runs_in_threads_of_its_own_and_collate_gets_rows(paths: dict[str, list[str]]) -> None:
    seen = set()

    def decode(row: dict[str, Any]) -> int:
        seen.add(threading.current_thread().name)
        return int(row["x"])

    for shuffle in (None, True):
        seen.clear()
        (feed,) = feeds(shards(paths["parquet"], decode=decode, shuffle=shuffle))
        assert sorted(torch.cat([part.batch for part in feed.epoch(0)]).tolist()) == list(range(ROWS))
        assert seen
        assert all(name.startswith("manyhands-decode") for name in seen)
    (feed,) = feeds(shards(paths["parquet"], columns="x", decode=dict))  # a type without a signature
    assert sorted(x for part in feed.epoch(0) for x in part.batch["x"].tolist()) == list(range(ROWS))
    pairs = open_source(shards(paths["parquet"]), collate=lambda rows: [(int(row["x"]), row["name"]) for row in rows])
    rows = [row for part in Feed(pairs, batch_size=10).epoch(0) for row in part.batch]
    assert sorted(rows) == [(i, f"row {i}") for i in range(ROWS)]


def test_errors_of_decode_and_lack_of_memory(paths: dict[str, list[str]]) -> None:
    def raising(error: Exception) -> Callable[[Any], Any]:
        def decode(row: dict[str, Any]) -> int:
            raise error

        return decode

    before = threads_of_shards()
    (feed,) = feeds(shards(paths["parquet"], decode=raising(ZeroDivisionError("of the user's"))))
    with pytest.raises(ZeroDivisionError, match="of the user's"):
        list(feed.epoch(0))
    assert threads_of_shards() <= before
    lacks = shards(paths["parquet"], decode=raising(MemoryError("std::bad_alloc")))
    with pytest.raises(MemoryError) as caught:
        next(feeds(lacks)[0].epoch(0))
    (note,) = caught.value.__notes__
    assert "prefetch=" in note
    with pytest.raises(ManyhandsError, match="prefetch=") as of_a_run:
        mh.train(
            model=lambda: torch.nn.Linear(1, 1),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            train_data=lacks,
            workers=1,
        )
    assert "micro_batch_size" not in str(of_a_run.value)  # which helps models


# -- what is open, read ahead and counted --------------------------------------------------------------------------------


def threads_of_shards() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith(("manyhands-shards", "manyhands-decode"))}


def opened(paths: list[str]) -> list[str]:
    """Those of these files that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # another thread has closed it
            continue
        found += [path for path in paths if path == target]
    return found


def test_nothing_stays_open(paths: dict[str, list[str]]) -> None:
    """Neither threads nor files, after a whole epoch, after a part of one, and with slices read aside."""
    for suffix, shuffle in [*product(["parquet"], [None, True, False]), ("arrow", None), ("tar", True), ("csv", False)]:
        before = threads_of_shards()
        data = shards(paths[suffix], shuffle=shuffle, cache="1MB" if suffix == "csv" else None)
        (feed,) = feeds(data)
        list(feed.epoch(0))
        assert opened(paths[suffix]) == [], shuffle
        with closing(feed.epoch(2)) as slices:
            next(slices)
            next(slices)
        part = feed.epoch(3)
        next(part)
        del part
        assert threads_of_shards() <= before, shuffle
        assert opened(paths[suffix]) == [], shuffle
        list(feed.read(0, [(0, 0, 1), (5, 0, 1)]))
        del feed
        assert opened(paths[suffix]) == [], shuffle
        for thread in threads_of_shards() - before:  # their pool is gone
            thread.join(10)
            assert not thread.is_alive(), shuffle


def test_blocks_that_are_read_are_closed(tmp_path: Path) -> None:
    """Of 40 files of one block each, no more than two and those that come next are open."""
    paths = write(tmp_path, "parquet", [12] * 40)
    (feed,) = feeds(shards(paths, shuffle="blocks:2"), batch_size=8)
    most = max(len(opened(paths)) for part in feed.epoch(0))
    assert 0 < most <= 6


def test_pieces_of_a_slot_that_workers_share_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's rows of one block have gaps, where others' are: they are many runs, and few pieces."""
    pq.write_table(pa.table({"x": np.arange(8_000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(base, "PIECE_BYTES", 800)
    held = []
    gather = source_module._Pieces.gather

    def counted(self: source_module._Pieces, positions: Any, places: Any) -> Any:
        found = gather(self, positions, places)
        held.append((len(self._held), len({position // 100 for position in positions.tolist()})))
        return found

    monkeypatch.setattr(source_module._Pieces, "gather", counted)
    slices = list(Feed(open_source(shards(tmp_path)), rank=1, size=4, batch_size=8).epoch(0))
    assert sum(part.rows for part in slices) == 2000
    assert max(pieces - 2 * wanted for pieces, wanted in held) <= source_module._FEW + 2


def test_as_many_bytes_as_asked_for_are_read_ahead(
    paths: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_feed.py says how much that is."""
    asked: list[int] = []

    def prefetch(items: Any, most: int, size: Callable[[Any], int]) -> Any:
        asked.append(most)
        assert size == feed_module._bytes
        return items

    monkeypatch.setattr(feed_module, "prefetch", prefetch)
    for options in ({}, {"shuffle": True}, {"counted": False}):
        for given, most in ((1, 1), (200_000, 200_000), ("1MB", 1_000_000)):
            (feed,) = feeds(shards(paths["parquet"], prefetch=given, **options))
            assert sum(part.rows for part in feed.epoch(0)) == ROWS, options
            assert asked.pop() == most, options


def test_a_reading_counts_what_it_read(tmp_path: Path) -> None:
    paths = write(tmp_path, "tar", [40])
    source = open_source(shards(paths))
    indexed = source.counters.bytes
    assert indexed >= 40 * 512  # the headers
    list(Feed(source, batch_size=10).epoch(0))
    assert source.counters.bytes - indexed >= 40 * 2 * 1024
    assert open_source(shards(paths)).counters.bytes == 0  # the index is kept


def test_with_a_cache_each_block_is_decoded_once(tmp_path: Path, cache_folder: Path) -> None:
    paths = write(tmp_path, "parquet", [70])  # 10 row groups, of several pieces each
    source = open_source(shards(paths, cache="1MB"))
    list(Feed(source, batch_size=10).epoch(0))
    read, split = source.counters.bytes, source.counters.hits  # blocks that were opened again
    assert split < 10
    list(Feed(source, batch_size=10).epoch(1))
    assert (source.counters.misses, source.counters.bytes) == (10, read)
    assert 10 + split <= source.counters.hits < 20 + split
    mapped = open_source(shards(paths, shuffle=True, cache="1MB"))
    list(Feed(mapped, batch_size=10).epoch(0))
    assert (mapped.counters.misses, mapped.counters.hits) == (0, 10)
    assert len(list(cache_folder.glob("*.arrow"))) == 10
    assert not list(cache_folder.glob("*.part"))


def test_the_cache_tells_files_and_blocks_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is written again; and blocks of other sizes, as when a later version cuts files otherwise."""
    paths = write(tmp_path, "csv", [20])
    for first in (0, 100):
        Path(paths[0]).write_bytes(BYTES_OF["csv"](range(first, first + 20)))
        assert sorted(batches(shards(paths, shuffle=True), batch_size=20)[0]) == list(range(first, first + 20))
    for suffix in ("tar", "csv", "parquet"):
        paths = write(tmp_path, suffix, [30])
        for block, piece in [(300, 60), (300, 90), (500, 60)]:
            small_blocks(monkeypatch, block, piece)
            assert sorted(row for batch in batches(shards(paths, shuffle=True)) for row in batch) == list(range(30))


def test_options_that_cannot_be() -> None:
    for options, words in [
        ({"shuffle": "blocks:0"}, '"blocks:K", with K of at least 1'),
        ({"shuffle": "blocks:x"}, '"blocks:K"'),
        ({"shuffle": "blocks:" + "9" * 5000}, '"blocks:K"'),
        ({"shuffle": "rows"}, "not 'rows': \"blocks:16\", for example"),
        ({"shuffle": 3}, "not 3"),
        ({"cache": "5 parrots"}, "cache must be a size with its unit"),
        ({"cache": 0}, "cache must be a number of bytes, at least 1"),
        ({"prefetch": 0}, "prefetch must be a number of bytes, at least 1, .*, not 0"),
        ({"prefetch": "much"}, "prefetch must be a size with its unit"),
        ({"threads": 0}, "threads must be a whole number of at least 1, not 0"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"decode": 5}, "decode must be a function of a row"),
        ({"paths": []}, "was given no path"),
    ]:
        refused(words, lambda options: shards(**{"paths": "a.parquet", **options}), options)


def test_files_without_rows_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    write(tmp_path / "none", "parquet", [0, 0])
    refused("none has no rows: expected at least one", open_source, shards(tmp_path / "none"))


def test_files_of_different_columns_name_file_and_column(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("x,y\n1,2\n")
    for text, words in [
        ("x,z\n1,2\n", "column 'y' is int64 in .*a.csv, and .*b.csv has x, z"),
        ("x,y\n1,2.5\n", "column 'y' is int64 in .*a.csv, and .*b.csv has it as double"),
        ("x,y,z\n1,2,3\n", r"b.csv has a column 'z', and .*a.csv has none \(it has x, y\)"),
    ]:
        second.write_text(text)
        for shuffle in (None, True):
            refused(words, open_source, shards([first, second], shuffle=shuffle))
            assert batches(shards([first, second], columns=["x"], shuffle=shuffle)) == [[1, 1]]
    for shuffle in (None, True):
        refused("a.csv has no column 'w'; it has x, y", open_source, shards(first, columns=["w"], shuffle=shuffle))
