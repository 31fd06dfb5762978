"""A stream that is read once, whatever slices are asked for, as long as they are of what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.slice_ledger import Place
from manyhands.errors import BadInput

ROWS, BATCH = 20, 6


class Counted:
    """Rows that say how far they were read, and how often from the beginning."""

    def __init__(self) -> None:
        self.begun = self.given = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        for row in torch.arange(ROWS):
            self.given += 1
            yield row


def feed(rows: Iterable[Tensor], collate: Callable[[list[Tensor]], Tensor] | None = None, size: int = 2) -> Feed:
    return Feed(open_source(rows, collate=collate), rank=0, size=size, batch_size=BATCH, keeps=True)


def numbers(batch: Tensor) -> list[int]:
    return [int(number) for number in batch]


def test_after_a_change_of_members_the_batch_under_way_is_cut_anew_and_nothing_is_read_again() -> None:
    rows = Counted()
    own = feed(rows)
    slices = own.epoch(0)
    assert numbers(next(slices).batch) == [0, 1, 2]
    assert numbers(next(slices).batch) == [6, 7, 8]
    next(slices)  # one is read ahead
    slices.close()
    own.set_shard(0, 1)
    again = own.epoch(0, 1)
    assert [(part.index, part.rows, part.global_rows) for part in again] == [(1, 6, 6), (2, 6, 6), (3, 2, 2)]
    assert rows.begun == 1


def test_what_may_be_needed_is_kept_and_what_may_not_is_read_again() -> None:
    rows = Counted()
    own = feed(rows)
    slices = own.epoch(0)
    for _ in range(3):
        next(slices)
    assert [numbers(part.batch) for part in own.read(0, [Place(0, 1, 2), Place(2, 0, 3)])] == [[3, 4, 5], [12, 13]]
    assert own.rows_of(0, [Place(0, 1, 2), Place(3, 2, 3)]) == 4
    assert rows.begun == 1
    own.keep_from(0, 2)
    assert numbers(next(own.read(0, [Place(2, 2, 3)])).batch) == [16, 17]
    assert rows.begun == 1
    assert numbers(next(own.read(0, [Place(1, 0, 1)])).batch) == [6, 7, 8, 9, 10, 11]
    assert rows.begun == 2


def test_one_that_joins_late_keeps_nothing_of_what_it_passes() -> None:
    own = feed(Counted())
    slices = own.epoch(0, 3)
    assert numbers(next(slices).batch) == [18]
    assert own._kept is not None
    assert [batch.rows for batch in own._kept._kept] == [2]


def test_a_collate_function_that_draws_does_not_move_the_stream() -> None:
    """However often batches are cut, the rows that come are the same."""

    def shuffled() -> Iterator[Tensor]:
        for _ in range(ROWS):
            yield torch.randint(1000, ())

    def noisy(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) + torch.randint(1000, ())

    streams = [feed(Anew(shuffled), noisy, size=1) for _ in range(2)]
    first, second = (stream.epoch(0) for stream in streams)
    plain = [next(first).batch for _ in range(3)]
    for tick in range(3):
        assert torch.equal(next(second).batch, plain[tick])
        part = next(streams[1].read(0, [Place(0, 0, 1)]))
        assert torch.equal(part.batch, plain[0])


class Anew:
    def __init__(self, rows: Callable[[], Iterator[Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return self._rows()


def test_a_stream_that_ends_sooner_when_it_is_read_again_is_an_error() -> None:
    own = feed(Counted())
    with pytest.raises(BadInput, match="the stream has ended before batch 9, which other workers have read"):
        next(own.read(0, [Place(9, 0, 1)]))
