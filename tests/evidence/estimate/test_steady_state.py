"""When a mean is known well enough, on steps that a hand can add up; and the rule of the error bars."""

import math

import pytest

from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.evidence.calibrate.observe import WARM
from manyhands.evidence.estimate.bars import FLOOR, Bars, bars_of
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


def test_a_mean_is_known_after_whole_blocks() -> None:
    observer = SteadyObserver(512, None)
    assert feed(observer, [0.1] * 100, workers=512) == WARM + 8
    found = observer.measured()
    assert (found.steps, found.step_s, found.spread) == (8, pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    assert (found.compute, found.exchange, found.wait) == (pytest.approx(0.6), pytest.approx(0.3), pytest.approx(0.1))
    assert (found.rows, found.bytes, found.staleness) == (2048, 1000, None)
    first = SteadyObserver(64, None)  # the first steps are not looked at
    feed(first, [9.0] * WARM + [0.1] * 50, workers=64)
    assert first.measured().step_s == pytest.approx(0.1)
    observer = SteadyObserver(512, None)
    feed(observer, [0.1] * 30, workers=512, unused=1, staleness=[1, 5, 5])
    found = observer.measured()
    assert (found.rows, found.staleness) == (3 * 512, 5)


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


def test_it_goes_on_while_the_mean_is_not_known_or_as_long_as_it_is_told() -> None:
    observer = SteadyObserver(512, None)
    lengths = [0.1 if number % 2 else 0.3 for number in range(200)]
    taken = feed(observer, lengths, workers=512)
    found = observer.measured()
    assert WARM + 8 < taken < 200
    assert taken == observer.steps == 128  # the most that is simulated of 512 workers: 50 % would take 625 of these
    assert found.spread == pytest.approx(0.5 / (124 - 1) ** 0.5, rel=1e-6)
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


def profile(errors: dict[str, float], workers: int = 2, batch_sizes: tuple[int, ...] = (8, 16, 24)) -> Profile:
    return Profile(
        networks={"local": SimNetworkSpec()},
        compute=Compute(),
        task="digits",
        workers=workers,
        batch_sizes=batch_sizes,
        errors=errors,
    )


def test_the_bars_where_it_was_measured_and_of_one_that_was_not_tried() -> None:
    found = bars_of(profile({"allreduce": 0.2, "gossip": 0.5}), "allreduce", 2, 16, 0.0)
    assert found == Bars(factor=1.2, error=pytest.approx(0.2), tried=True, besides=0.0, doublings=0.0)
    for error, factor in ((0.3, 1.3), (-0.3, 1 / 0.7), (-0.5, 2), (0.001, 1 + FLOOR)):  # a small error is the floor
        assert bars_of(profile({"allreduce": error}), "allreduce", 2, 16, 0.0).factor == pytest.approx(factor), error
    assert bars_of(profile({}), "allreduce", 8, 16, 0.0) is None
    with pytest.raises(BadInput, match=r"prediction error of gossip is -1, .* calibrate again"):
        bars_of(profile({"allreduce": 0.1, "gossip": -1.0}), "allreduce", 8, 16, 0.0)
    found = bars_of(profile({"allreduce": 0.2, "local-sgd": -0.25}), "gossip", 2, 16, 0.0)
    assert (found.tried, found.error) == (False, pytest.approx(1 / 0.75 - 1))
    tried, other = (bars_of(profile({"allreduce": 0.2}), name, 4, 16, 0.4) for name in ("allreduce", "downpour"))
    assert (tried.besides, other.besides) == (0.0, 0.4)
    assert (tried.factor, other.factor) == pytest.approx((1.2**2, 1.2**2 * 1.4))


def test_each_doubling_of_workers_and_of_rows_beyond_what_was_measured_multiplies_by_it_again() -> None:
    given = profile({"allreduce": 0.1})
    for workers, rows, doublings in (
        *((2, 16, 0), (4, 16, 1), (16, 16, 3), (512, 16, 8), (1, 16, 1), (3, 16, math.log2(1.5))),
        *((2, 8, 0), (2, 20, 0), (2, 24, 0), (2, 4, 1), (2, 2, 2), (2, 96, 2)),
        (8, 4, 3),
    ):
        found = bars_of(given, "allreduce", workers, rows, 0.0)
        assert found.doublings == pytest.approx(doublings), (workers, rows)
        assert found.factor == pytest.approx(1.1 ** (1 + doublings)), (workers, rows)
    assert bars_of(profile({"allreduce": 0.1}, batch_sizes=()), "allreduce", 2, 1000, 0.0).doublings == 0
