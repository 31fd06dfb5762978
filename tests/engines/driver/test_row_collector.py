from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from manyhands.data.row_batches import pack, to_batch
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.driver.row_collector import TOTAL, RowCollector
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from manyhands.transport.frame import FrameError


def piece(number: int, rank: int = 0, rows: int = 4) -> RowPiece:
    data = pack([to_batch(torch.arange(rows * number, rows * number + rows))])
    return RowPiece(rank=rank, number=number, rows=rows, data=data)


def test_rows_in_memory_come_in_order_and_are_counted_by_worker() -> None:
    told: list[tuple[int, int]] = []
    with RowCollector(None, progress=lambda done, total: told.append((done, total))) as collector:
        collector.event(Event(type=TOTAL, values={"rows": 12}))
        for number, rank in ((2, 1), (0, 0), (1, 1)):
            collector.take_rows(piece(number, rank))
        collector.finish()
        assert collector.values().tolist() == list(range(12))
    assert collector.rows_of_workers == {0: 4, 1: 8}
    assert told == [(4, 12), (8, 12), (12, 12)]


def test_what_is_too_early_waits_in_memory_up_to_the_limit(tmp_path: Path) -> None:
    """Whoever delivers more is to wait; it goes on when the missing rows have come. The next piece's worker never waits."""
    path, early = tmp_path / "out.parquet", [piece(number) for number in (1, 2, 3)]
    with RowCollector(path, waiting_bytes=2 * len(early[0].data)) as collector:
        for one in early:
            collector.take_rows(one)
        assert [collector.must_wait(one) for one in early] == [True, True, True]
        first = piece(0)
        collector.take_rows(first)
        assert not any(map(collector.must_wait, [first, *early]))
        collector.finish()
    assert pq.read_table(path)["prediction"].to_pylist() == list(range(16))


def test_whose_rows_have_gone_on_never_waits(tmp_path: Path) -> None:
    """Also where more than the limit waits for others; below the limit, and in memory, nobody does."""
    with RowCollector(tmp_path / "out.parquet", waiting_bytes=10) as collector:
        for number in (2, 3, 0):
            collector.take_rows(piece(number))
        assert [collector.must_wait(piece(number)) for number in (2, 3, 0)] == [True, True, False]
    for output, limit in ((tmp_path / "out.parquet", 1 << 20), (None, 0)):
        with RowCollector(output, waiting_bytes=limit) as collector:
            collector.take_rows(early := piece(1))
            assert not collector.must_wait(early)


def test_where_nobody_may_wait_what_is_too_early_lies_in_a_file_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    with RowCollector(path, holds=False, waiting_bytes=1000) as collector:
        for number in reversed(range(1, 40)):
            collector.take_rows(one := piece(number))
            assert not collector.must_wait(one)
            assert collector._order.waiting_bytes <= 1000
        assert collector._early is not None
        assert list(tmp_path.iterdir()) == []
        collector.take_rows(piece(0))
        collector.finish()
    assert pq.read_table(path)["prediction"].to_pylist() == list(range(160))
    assert collector._early.closed


def test_who_does_not_write_counts(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    with RowCollector(path, writes=False) as collector:
        collector.take_rows(piece(0))
        collector.finish()
        assert (collector.rows, collector.values()) == (4, None)
    assert not path.exists()


def test_rows_that_never_came_are_no_rows_or_are_not_alike() -> None:
    """No rows is a frame error; what is not alike is the user's."""
    with RowCollector(None) as collector:
        collector.take_rows(piece(1))
        with pytest.raises(ManyhandsError, match="rows of number 0, part 0 never came"):
            collector.finish()
    with RowCollector(None) as collector:
        with pytest.raises(FrameError, match="cannot be read"):
            collector.take_rows(RowPiece(number=0, rows=1, data=b"nonsense"))
        with pytest.raises(FrameError, match="came before"):
            collector.take_rows(piece(0))
        collector.take_rows(RowPiece(number=1, rows=2, data=pack([to_batch(torch.ones(2))])))
        collector.take_rows(piece(2))
        with pytest.raises(BadInput, match="same columns"):
            collector.values()


def test_a_reason_to_stop() -> None:
    collector = RowCollector(None)
    assert collector.stopping() == ""
    collector.stop("preempted")
    assert collector.stopping() == "preempted"
