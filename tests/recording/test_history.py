"""Numbers of several workers put together, and what a loss, a leave and a join cost, against sums by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from step_events import step

from manyhands.events import Event
from manyhands.recording.goodput import Goodput
from manyhands.recording.history import History


def test_a_row_is_complete_when_all_workers_reported_and_sums_are_means_over_workers() -> None:
    history = History(2)
    assert history.add(step(1, tick=0)) is None
    assert history.add(step(1, tick=1)) is None
    row = history.add(step(0, tick=0, compute_s=0.4, round=False))
    assert history.rows == [row]
    assert (row["tick"], row["step"], row["rows"], row["bytes"], row["round"]) == (0, 1, 8, 16, True)
    assert row["compute_s"] == pytest.approx(0.3)
    history = History(2)
    history.add(step(0))
    history.add(step(1, compute_s=0.6))
    history.add(step(1, tick=1))
    assert [row["tick"] for row in history.close()] == [1]
    assert history.timing() == pytest.approx({"input": 0.2, "compute": 0.6, "exchange": 0.6, "wait": 0.8})
    assert [one["compute"] for one in history.timing_of_workers()] == pytest.approx([0.2, 0.8])
    assert history.close() == []


def test_the_loss_is_the_mean_by_weight_of_the_workers_of_its_launch() -> None:
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


def leased(rank: int, tick: int, part: int, parts: int = 2, **values: Any) -> Event:
    return step(rank, tick, lease=[tick, part, 0], parts=parts, **values)


def test_a_leased_batch_is_complete_when_all_its_slices_are_and_a_lost_slice_is_reported_once() -> None:
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


def test_losses_and_restarts_cost_the_steps_made_again_the_pauses_and_the_absence() -> None:
    found = Goodput(4, 1.0).result(11.0)
    assert found == {"goodput": 1.0, "wall_s": 10.0, "absent_s": 0.0, "paused_s": 0.0, "repeated_s": 0.0}
    for size, happened, end, repeated, paused, absent in (
        # a loss, 0.5 s after the newest step; one worker is absent from 10 to 13; three wait while it joins
        (4, [("lost", 10.0), ("formed", 10.2, 3, 9.5), ("formed", 13.0, 4, 12.9)], 20.0, 3 * 0.5, 3 * 0.2 + 3 * 0.1, 3),
        # two losses at once are one pause
        (4, [("lost", 10.0), ("lost", 10.1), ("formed", 10.3, 2, 10.0)], 10.3, 0, 2 * 0.3, 0.1 + 2 * 0.2),
        (2, [("formed", 5.0, 1, 4.9)], 10.0, 0, 0.1, 5),
        (2, [("formed", 5.0, 4, 5.0)], 10.0, 0, 0, 0),
        # a restart costs all since the checkpoint, whose newest step was complete at 7
        (4, [("stopped", 10.0), ("resumed", 12.0, 4, 7.0)], 20.0, 4 * 3, 4 * 2, 0),
        # three paused for a second, one is absent from 8 on; what was made from 7 to 8, and from 9 to 10, is made again
        (
            *(4, [("lost", 8.0), ("formed", 9.0, 3, 8.0), ("stopped", 10.0), ("resumed", 11.0, 4, 7.0)]),
            *(11.0, 4 * 1 + 3 * 1, 3 + 4, 2),
        ),
        # the next one failed before it began
        (2, [("stopped", 5.0), ("stopped", 6.0), ("resumed", 8.0, 2, -1.0)], 8.0, 2 * 5, 2 * 3, 0),
    ):
        goodput = Goodput(size, 0.0)
        for what, *when in happened:
            getattr(goodput, what)(*when)
        found, costs = goodput.result(end), {"repeated_s": repeated, "paused_s": paused, "absent_s": absent}
        assert {name: found[name] for name in costs} == pytest.approx(costs), happened
        assert found["goodput"] == pytest.approx(1 - sum(costs.values()) / (size * end)), happened
