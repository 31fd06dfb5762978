"""data/shards/uncounted.py: each row once, whoever reads it, and however often the run goes on with other workers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numbered_rows
import pytest
import torch

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.source import ShardPositions, Slice
from refusals import refused
from sharded_streams import Sharded

SIZES = [60, 0, 1, 200, 34, 120, 19]
ROWS = list(range(sum(SIZES)))


@dataclass
class Noisy:
    """Rows that draw."""

    rows: range

    def __iter__(self) -> Iterator[float]:
        return (row + float(torch.rand(())) * 0.4 for row in self.rows)


def ranges() -> list[range]:
    firsts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    return [range(first, first + size) for first, size in zip(firsts, SIZES, strict=True)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rows")
    for i, numbers in enumerate(ranges()):
        (folder / f"{i}.txt").write_text("".join(f"{number}\n" for number in numbers))
    return str(folder)


@dataclass
class Epoch:
    """An epoch that is begun by some workers and goes on with others."""

    data: Any
    batch_size: int = 30
    rows: list[int] = field(default_factory=list)
    positions: ShardPositions | None = None
    tick: int = 0

    def go_on(self, size: int, ticks: int | None = None) -> list[list[int]]:
        """So many workers make so many ticks, or all that are left; by tick, the rows of all."""
        by_tick: dict[int, list[int]] = {}
        read: dict[str, int] = {}
        dealt: ShardPositions | None = None
        for rank in range(size):
            for part in self._slices(rank, size):
                if ticks is not None and part.index >= self.tick + ticks:
                    break
                by_tick.setdefault(part.index, []).extend(numbers(part))
                assert part.rows == len(numbers(part))
                read, dealt = {**read, **part.read}, part.dealt
        if dealt is not None:
            self.positions = ShardPositions(size=dealt.size, begun=dealt.begun, read={**dealt.read, **read})
        made = [by_tick[index] for index in sorted(by_tick)]
        self.tick += len(made)
        self.rows += [row for rows in made for row in rows]
        return made

    def _slices(self, rank: int, size: int) -> Iterator[Slice]:
        feed = Feed(open_source(self.data), rank=rank, size=size, batch_size=self.batch_size, seed=1)
        if self.positions is not None:
            feed.go_on(0, self.positions)
        return feed.epoch(0, self.tick)


def numbers(part: Slice) -> list[int]:
    if part.batch is None:
        return []
    found = part.batch["text"] if isinstance(part.batch, dict) else part.batch
    return [int(value) for value in found]


PLANS: list[list[tuple[int, int | None]]] = [
    *([(size, None)] for size in (1, 4)),
    [(3, 4), (2, 3), (5, 2), (9, 1), (1, None)],
    [(9, 3), (2, 4), (2, 1), (2, None)],
    [(2, 1), (4, 1), (3, 1), (5, 1), (2, 30), (3, None)],
]


@pytest.mark.parametrize("shuffle", [None, "blocks:1", "blocks:4", False, "dataset"])
def test_each_row_is_handed_out_once(texts: str, shuffle: str | bool | None) -> None:
    """Of files, and of a dataset's shards."""
    for plan in PLANS:
        data = Sharded(ranges()) if shuffle == "dataset" else mh.shards(texts, counted=False, shuffle=shuffle)
        epoch = Epoch(data)
        for size, ticks in plan:
            epoch.go_on(size, ticks)
        assert sorted(epoch.rows) == ROWS, plan
        if shuffle is False and plan == [(1, None)]:
            assert epoch.rows == ROWS


@pytest.mark.parametrize("data", ["files", "dataset"])
def test_as_many_workers_go_on_as_if_never_stopped(texts: str, data: str) -> None:
    def begun() -> Epoch:
        return Epoch(mh.shards(texts, counted=False) if data == "files" else Sharded([*map(Noisy, ranges())]))

    expected = begun().go_on(2)
    for stops in ([1], [3, 2], [9]):
        again = begun()
        assert [rows for ticks in [*stops, None] for rows in again.go_on(2, ticks)] == expected, stops


def test_fewer_files_than_workers_are_read_by_all_in_the_batches_of_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(50)))
    data = mh.shards(tmp_path, counted=False, shuffle=False)
    alone, three = Epoch(data), Epoch(data)
    assert alone.go_on(1) == three.go_on(3)
    assert sorted(three.rows) == list(range(50))
    slices = Feed(open_source(mh.shards(tmp_path, counted=False)), batch_size=10).epoch(0)
    # the position is that of the slice in hand, whatever a thread has read meanwhile
    assert [next(slices).read for _ in range(2)] == [{"0": 10}, {"0": 20}]
    slices.close()


def test_files_without_any_row_and_all_rows_by_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    refused("no rows", open_source, mh.shards(tmp_path, counted=False))
    refused("counted=False", lambda: mh.shards(tmp_path, counted=False, shuffle=True))


@pytest.mark.parametrize("data", ["files", "dataset"])
def test_a_run_goes_on_with_other_workers_and_trains_each_row_once(texts: str, data: str, tmp_path: Path) -> None:
    files = mh.shards(texts, counted=False, decode=lambda row: int(row["text"]))
    task = numbered_rows.task(len(ROWS), 30, train_data=files if data == "files" else Sharded(ranges()))
    options: dict[str, Any] = {"engine": "sim", "run_dir": tmp_path / "run", "checkpoint_every": 1}
    total = 0
    for workers, steps in ((2, 4), (2, 6), (3, 8), (3, 9), (2, None)):  # twice with the same deal, then with another
        run = mh.train(task.with_fields(max_steps=steps), workers=workers, resume=total > 0, **options)
        total = run.rows["total"]
        assert int((run.model.of > 0).sum()) == total
    assert total == len(ROWS)
