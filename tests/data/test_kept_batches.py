"""A stream that is read once, whatever slices are asked for, as long as they are of what is kept."""

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

    def __init__(self, row: Callable[[int], Tensor] = torch.tensor) -> None:
        self.begun = self.given = 0
        self._row = row

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        for i in range(ROWS):
            self.given += 1
            yield self._row(i)


def feed(rows: Iterable[Tensor], collate: Callable[[list[Tensor]], Tensor] | None = None, size: int = 2) -> Feed:
    return Feed(open_source(rows, collate=collate), rank=0, size=size, batch_size=BATCH, keeps=True)


def test_after_a_change_of_members_the_batch_under_way_is_cut_anew_and_nothing_is_read_again() -> None:
    rows = Counted()
    own = feed(rows)
    slices = own.epoch(0)
    assert [next(slices).batch.tolist() for _ in range(2)] == [[0, 1, 2], [6, 7, 8]]
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
    assert [part.batch.tolist() for part in own.read(0, [Place(0, 1, 2), Place(2, 0, 3)])] == [[3, 4, 5], [12, 13]]
    assert own.rows_of(0, [Place(0, 1, 2), Place(3, 2, 3)]) == 4
    assert rows.begun == 1
    own.keep_from(0, 2)
    assert next(own.read(0, [Place(2, 2, 3)])).batch.tolist() == [16, 17]
    assert rows.begun == 1
    assert next(own.read(0, [Place(1, 0, 1)])).batch.tolist() == [6, 7, 8, 9, 10, 11]
    assert rows.begun == 2
    with pytest.raises(BadInput, match="ended before batch 9"):
        next(own.read(0, [Place(9, 0, 1)]))
    late = feed(Counted())  # one that joins late keeps nothing of what it passes
    assert next(late.epoch(0, 3)).batch.tolist() == [18]
    assert late._kept is not None
    assert [batch.rows for batch in late._kept._kept] == [2]


def test_a_collate_function_that_draws_does_not_move_the_stream() -> None:
    """However often batches are cut, the rows that come are the same."""

    def noisy(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) + torch.randint(1000, ())

    streams = [feed(Counted(lambda _: torch.randint(1000, ())), noisy, size=1) for _ in range(2)]
    first, second = (stream.epoch(0) for stream in streams)
    plain = [next(first).batch for _ in range(3)]
    for tick in range(3):
        assert torch.equal(next(second).batch, plain[tick])
        part = next(streams[1].read(0, [Place(0, 0, 1)]))
        assert torch.equal(part.batch, plain[0])
