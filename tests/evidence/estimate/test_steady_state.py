"""When a mean is known well enough, on steps that a hand can add up."""

from __future__ import annotations

import pytest

from manyhands.events import Event
from manyhands.evidence.calibrate.observe import WARM
from manyhands.evidence.estimate.steady_state import MOST_STEPS, SteadyObserver


def step(rank: int, time_s: float, *, round: bool = True, rows: int = 4, **more: object) -> Event:
    values = {"compute_s": 0.06, "exchange_s": 0.03, "rows": rows, "unused": 0, "bytes": 1000, "round": round, **more}
    return Event(type="step", time_s=time_s, rank=rank, values=values)


def feed(observer: SteadyObserver, seconds: list[float], workers: int = 2, period: int = 1, **more: object) -> int:
    """Steps of these lengths until the observer has enough; how many it took."""
    now = 0.0
    for number, length in enumerate(seconds, 1):
        if observer.stopping():
            return number - 1
        now += length
        for rank in range(workers):
            observer.event(step(rank, now, round=number % period == 0, **more))
    return len(seconds)


def test_equal_steps_are_known_as_soon_as_enough_of_them_were_seen() -> None:
    observer = SteadyObserver(512, None)
    assert feed(observer, [0.1] * 100, workers=512) == WARM + 8
    found = observer.measured()
    assert (found.steps, found.step_s, found.spread) == (8, pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    assert (found.compute, found.exchange, found.wait) == (pytest.approx(0.6), pytest.approx(0.3), pytest.approx(0.1))
    assert (found.rows, found.bytes, found.staleness) == (2048, 1000, None)
    first = SteadyObserver(64, None)  # the first steps are not looked at
    feed(first, [9.0] * WARM + [0.1] * 50, workers=64)
    assert first.measured().step_s == pytest.approx(0.1)


def test_a_block_is_a_whole_round_or_a_short_epoch() -> None:
    """One step in five takes longer: means of other numbers of steps would differ."""
    observer = SteadyObserver(256, None)
    taken = feed(observer, [0.5 if number % 5 == 4 else 0.1 for number in range(100)], workers=256, period=5)
    found = observer.measured()
    assert (found.step_s, found.steps, taken) == (pytest.approx(0.18), 10, WARM + 10)
    observer = SteadyObserver(64, 3)  # every third step is an epoch's last, whatever the rounds say
    feed(observer, [0.4 if number % 3 == 2 else 0.1 for number in range(300)], workers=64)
    found = observer.measured()
    assert (found.step_s, found.steps % 3) == (pytest.approx(0.2), 0)
    assert feed(SteadyObserver(512, 100), [0.1] * 99, workers=512) == WARM + 8  # long epochs are not looked at


def test_it_goes_on_while_the_mean_is_not_known() -> None:
    observer = SteadyObserver(512, None)
    lengths = [0.1 if number % 2 else 0.3 for number in range(200)]
    taken = feed(observer, lengths, workers=512)
    found = observer.measured()
    assert WARM + 8 < taken < 200
    assert taken == observer.steps == 128  # the most that is simulated of 512 workers: 50 % would take 625 of these
    assert found.spread == pytest.approx(0.5 / (124 - 1) ** 0.5, rel=1e-6)


def test_the_requested_number_of_steps_is_measured_and_one_exchange_is_not_enough() -> None:
    observer = SteadyObserver(2, None, steps=20)
    assert feed(observer, [0.1] * 300) == WARM + 20
    assert observer.measured().steps == 20
    observer = SteadyObserver(2, None, steps=20)
    feed(observer, [0.1] * 300, period=20)
    assert observer.measured() is None
    observer = SteadyObserver(2, None)  # without any exchange all steps are alike
    assert feed(observer, [0.1] * 3000, period=10**6) == MOST_STEPS
    found = observer.measured()
    assert (found.step_s, found.rounds, found.simulated) == (pytest.approx(0.1), 0, MOST_STEPS)


def test_rows_that_were_dropped_do_not_count_and_staleness_is_of_all_pushes() -> None:
    observer = SteadyObserver(512, None)
    feed(observer, [0.1] * 30, workers=512, unused=1, staleness=[1, 5, 5])
    found = observer.measured()
    assert (found.rows, found.staleness) == (3 * 512, 5)


def test_workers_at_their_own_pace_make_global_batches_together() -> None:
    """Worker 0 makes two steps while worker 1 makes one; three reports of two workers are one and a half batches."""
    observer, now = SteadyObserver(2, None, steps=30), 0.0
    while not observer.stopping():
        now += 0.1
        observer.event(step(0, now))
        if round(now * 10) % 2 == 0:
            observer.event(step(1, now))
    found = observer.measured()
    assert found.step_s == pytest.approx(0.2 / 1.5, rel=0.02)
