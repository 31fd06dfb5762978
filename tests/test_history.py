"""Numbers of several workers put together."""

import math
from typing import Any

import pytest

from manyhands.events import Event
from manyhands.history import History


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
    assert row is not None
    assert history.rows == [row]
    assert (row["tick"], row["step"], row["rows"], row["bytes"], row["round"]) == (0, 1, 8, 16, True)
    assert row["compute_s"] == pytest.approx(0.3)


def test_the_loss_is_the_mean_by_weight() -> None:
    """CASE 27: a worker without rows does not count."""
    history = History(3)
    history.add(step(0, loss=1.0, weight=1.0))
    history.add(step(1, loss=None, weight=0.0))
    row = history.add(step(2, loss=3.0, weight=3.0))
    assert row is not None
    assert row["loss"] == pytest.approx(2.5)


def test_a_nan_of_one_worker_shows_and_a_tick_without_rows_has_no_loss() -> None:
    history = History(2)
    history.add(step(0, loss=math.nan))
    row = history.add(step(1))
    assert row is not None
    assert math.isnan(row["loss"])
    history.add(step(0, tick=1, loss=None, weight=0.0))
    row = history.add(step(1, tick=1, loss=math.nan, weight=0.0))
    assert row is not None
    assert row["loss"] is None


def test_sums_are_means_over_workers_and_ticks_that_stayed_open_count_at_the_end() -> None:
    history = History(2)
    history.add(step(0))
    history.add(step(1, compute_s=0.6))
    history.add(step(1, tick=1))
    assert [row["tick"] for row in history.close()] == [1]
    assert history.timing() == pytest.approx({"input": 0.2, "compute": 0.6, "exchange": 0.6, "wait": 0.8})
    assert history.compute_s == pytest.approx({0: 0.2, 1: 0.8})
    assert history.close() == []


def test_an_earlier_launch_may_have_had_another_number_of_workers() -> None:
    history = History(2)
    history.preload([step(rank) for rank in range(4)])
    history.add(step(0, tick=1))
    assert history.add(step(1, tick=1)) is not None
    assert [row["rows"] for row in history.rows] == [16, 8]
    assert history.timing()["compute"] == pytest.approx(0.4)
