"""Numbers of several workers put together."""

import math
from dataclasses import replace
from typing import Any

import pytest

from manyhands.events import Event
from manyhands.recording.history import History


def step(rank: int, tick: int = 0, **values: Any) -> Event:
    default = {"epoch": 0, "loss": 1.0, "weight": 4.0, "rows": 4, "unused": 0, "rate": 0.1, "bytes": 8, "round": True}
    seconds = {"input_s": 0.1, "compute_s": 0.2, "exchange_s": 0.3, "wait_s": 0.4}
    return Event(
        type="step", rank=rank, tick=tick, step=tick + 1, time_s=float(tick), values=default | seconds | values
    )


def test_a_row_is_complete_when_all_workers_reported() -> None:
    history = History(2)
    assert history.add(step(1, tick=0)) is None
    assert history.add(step(1, tick=1)) is None
    row = history.add(step(0, tick=0, compute_s=0.4, round=False))
    assert history.rows == [row]
    assert (row["tick"], row["step"], row["rows"], row["bytes"], row["round"]) == (0, 1, 8, 16, True)
    assert row["compute_s"] == pytest.approx(0.3)


def test_the_loss_is_the_mean_by_weight() -> None:
    """CASE 27: a worker without rows does not count; a NaN of one shows; a tick without rows has no loss."""
    history = History(3)
    history.add(step(0, loss=1.0, weight=1.0))
    history.add(step(1, loss=None, weight=0.0))
    assert history.add(step(2, loss=3.0, weight=3.0))["loss"] == pytest.approx(2.5)
    history = History(2)
    history.add(step(0, loss=math.nan))
    assert math.isnan(history.add(step(1))["loss"])
    history.add(step(0, tick=1, loss=None, weight=0.0))
    assert history.add(step(1, tick=1, loss=math.nan, weight=0.0))["loss"] is None


def test_sums_are_means_over_workers_and_ticks_that_stayed_open_count_at_the_end() -> None:
    history = History(2)
    history.add(step(0))
    history.add(step(1, compute_s=0.6))
    history.add(step(1, tick=1))
    assert [row["tick"] for row in history.close()] == [1]
    assert history.timing() == pytest.approx({"input": 0.2, "compute": 0.6, "exchange": 0.6, "wait": 0.8})
    assert [one["compute"] for one in history.timing_of_workers()] == pytest.approx([0.2, 0.8])
    assert history.close() == []


def test_launches_and_generations_may_have_other_numbers_of_workers() -> None:
    history = History(2)
    history.preload([(step(rank), 0) for rank in range(4)])
    history.add(step(0, tick=1))
    assert history.add(step(1, tick=1)) is not None
    assert [row["rows"] for row in history.rows] == [16, 8]
    assert history.timing()["compute"] == pytest.approx(0.4)
    steps = [step(0, 0), step(1, 0), step(0, 1)]
    later = [replace(step(0, tick), generation=1) for tick in (2, 3)]
    rows = History(1).rows_of([*((event, 2) for event in steps), *((event, 1) for event in later)])
    assert [(row["tick"], row["step"]) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 4)]


# -- leased rows, staleness ----------------------------------------------------------------------------------------------


def leased(rank: int, tick: int, part: int, parts: int = 2, **values: Any) -> Event:
    return step(rank, tick, lease=[tick, part, 0], parts=parts, **values)


def test_a_leased_batch_is_complete_when_all_its_slices_are_whoever_made_them() -> None:
    history = History(2)
    assert history.add(leased(0, 0, 0, parts=3)) is None
    assert history.add(leased(0, 9, 1, parts=3)) is None
    assert history.add(leased(0, 9, 2, parts=3)) is None
    row = history.add(leased(0, 9, 0, parts=3, rows=3))  # one worker made all three, of an epoch that three began
    assert (row["tick"], row["rows"]) == (9, 11)
    assert row["compute_s"] == pytest.approx(0.3)  # 0.6 s of one worker: the mean over two
    assert history.add(leased(1, 0, 1, parts=3)) is None
    assert history.add(leased(1, 0, 2, parts=3)) is not None
    assert [row["tick"] for row in history.rows] == [9, 0]  # in the order of completion
    assert [row["step"] for row in history.rows] == [1, 2]  # the run's, not the workers' own
    assert history.timing()["compute"] == pytest.approx(0.6)
    assert sum(one["compute"] for one in history.timing_of_workers()) / 2 == pytest.approx(0.6)


def test_a_lost_workers_slice_is_reported_once() -> None:
    """Whether it had reported it is not known: nothing of the batch, a part of it, or all."""
    history = History(2)
    assert history.add(leased(1, 0, 0, parts=1, again=True)) is not None  # nobody had reported any of it
    assert history.add(leased(0, 2, 0)) is None
    assert history.add(leased(1, 2, 0, again=True, rows=3)) is None
    row = history.add(leased(1, 2, 1, again=True))
    assert (row["tick"], row["rows"]) == (2, 7)
    assert [history.add(leased(1, tick, 0, again=True)) for tick in (0, 2)] == [None, None]
    assert history.add(leased(1, 1, 0, parts=1)) is not None
    assert [history.add(leased(1, tick, 0, again=True)) for tick in range(3)] == [None] * 3
    assert [row["tick"] for row in history.rows] == [0, 2, 1]
    assert history.consumed == 4 + 7 + 4
    assert history.close() == []


def test_a_resumed_epoch_keeps_its_parts_and_completes_what_was_begun() -> None:
    history = History(2)
    history.preload((leased(rank, tick, rank, parts=3), 3) for rank, tick in ((0, 0), (1, 0), (2, 0), (2, 1)))
    assert [row["rows"] for row in history.rows] == [12]
    assert history.add(leased(0, 1, 0, parts=3)) is None
    row = history.add(leased(0, 1, 1, parts=3))
    assert (row["tick"], row["rows"], row["step"]) == (1, 12, 2)
    assert history.close() == []


def test_staleness_is_counted_by_worker_and_in_all() -> None:
    history = History(3)
    assert (history.staleness(), history.staleness_of_workers(), history.gain()) == ({}, [], None)
    history.preload([(step(0, staleness=[4]), 0)])
    history.add(step(0, tick=1, staleness=[1, 0], pushes=[[1], [3]]))
    history.add(step(2, tick=1, staleness=[1]))
    history.add(step(1, tick=1, pulls=[[0]]))
    history.add(step(1, tick=2, gain=0.5))
    history.add(step(0, tick=2, gain=0.7))
    history.add(step(0, tick=3, gain=0.4))
    assert history.gain() == 0.5
    assert history.staleness() == {0: 1, 1: 2, 4: 1}
    assert history.staleness_of_workers() == [{0: 1, 1: 1, 4: 1}, {}, {1: 1}]


def test_memory_is_bounded_and_rows_still_cover_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.recording.history.MOST_ROWS", 8)
    history = History(1)
    for tick in range(1000):
        told = history.add(step(0, tick, loss=float(tick), rate=1.0 / (tick + 1)))
        assert (told["tick"], told["ticks"], told["loss"]) == (tick, 1, float(tick))  # callbacks hear every tick
        assert len(history.rows) <= 8
    assert [row["ticks"] for row in history.rows] == [128] * 7 + [104]
    assert [row["step"] for row in history.rows] == [128, 256, 384, 512, 640, 768, 896, 1000]
    assert history.rows[0]["loss"] == pytest.approx(63.5)
    assert sum(row["rows"] for row in history.rows) == history.consumed == 4000
    assert sum(row["compute_s"] for row in history.rows) == pytest.approx(history.timing()["compute"])
    assert history.highest_rate == 1.0
    assert history.steps == 1000
