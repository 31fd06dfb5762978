"""The rule of the error bars."""

from __future__ import annotations

import math

import pytest

from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput
from manyhands.evidence.estimate.bars import FLOOR, Bars, bars_of


def profile(errors: dict[str, float], workers: int = 2, batch_sizes: tuple[int, ...] = (8, 16, 24)) -> Profile:
    return Profile(
        networks={"local": SimNetworkSpec()},
        compute=Compute(),
        task="digits",
        workers=workers,
        batch_sizes=batch_sizes,
        errors=errors,
    )


def test_where_it_was_measured_it_is_off_by_as_much_as_it_was_then() -> None:
    found = bars_of(profile({"allreduce": 0.2, "gossip": 0.5}), "allreduce", 2, 16, 0.0)
    assert found == Bars(factor=1.2, error=pytest.approx(0.2), tried=True, besides=0.0, doublings=0.0)


def test_a_prediction_that_was_half_is_off_by_a_factor_of_two() -> None:
    """So the measured time itself lies within the bars, whatever the sign."""
    for error in (0.3, -0.3, -0.5):
        found = bars_of(profile({"allreduce": error}), "allreduce", 2, 16, 0.0)
        assert found is not None
        predicted, measured = 1 + error, 1.0
        assert predicted / found.factor <= measured * (1 + 1e-12)
        assert measured <= predicted * found.factor * (1 + 1e-12)
    assert found.factor == pytest.approx(2)


def test_a_small_error_counts_as_the_floor() -> None:
    found = bars_of(profile({"allreduce": 0.001}), "allreduce", 2, 16, 0.0)
    assert found is not None
    assert found.factor == 1 + FLOOR


def test_one_that_was_not_tried_takes_the_largest_whatever_its_sign() -> None:
    found = bars_of(profile({"allreduce": 0.2, "local-sgd": -0.25}), "gossip", 2, 16, 0.0)
    assert found is not None
    assert (found.tried, found.error) == (False, pytest.approx(1 / 0.75 - 1))


def test_what_was_not_measured_of_a_short_step_may_take_half_as_long_or_twice() -> None:
    """Exchange, leases and waiting of a strategy that was not tried; of one that was, they are in its own error."""
    given = profile({"allreduce": 0.2})
    tried, other = (bars_of(given, name, 4, 16, 0.4) for name in ("allreduce", "downpour"))
    assert tried is not None
    assert other is not None
    assert (tried.besides, other.besides) == (0.0, 0.4)
    assert tried.factor == pytest.approx(1.2**2)
    assert other.factor == pytest.approx(1.2**2 * 1.4)


@pytest.mark.parametrize(("workers", "doublings"), [(2, 0), (4, 1), (16, 3), (512, 8), (1, 1), (3, math.log2(1.5))])
def test_each_doubling_of_workers_multiplies_by_it_again(workers: int, doublings: float) -> None:
    found = bars_of(profile({"allreduce": 0.1}), "allreduce", workers, 16, 0.0)
    assert found is not None
    assert found.doublings == pytest.approx(doublings)
    assert found.factor == pytest.approx(1.1 ** (1 + doublings))


@pytest.mark.parametrize(("rows", "doublings"), [(8, 0), (20, 0), (24, 0), (4, 1), (2, 2), (96, 2)])
def test_and_each_doubling_of_rows_beyond_what_was_measured(rows: float, doublings: float) -> None:
    found = bars_of(profile({"allreduce": 0.1}), "allreduce", 2, rows, 0.0)
    assert found is not None
    assert found.factor == pytest.approx(1.1 ** (1 + doublings))


def test_both_add_up() -> None:
    found = bars_of(profile({"allreduce": 0.1}), "allreduce", 8, 4, 0.0)
    assert found is not None
    assert found.factor == pytest.approx(1.1**4)


def test_without_known_batch_sizes_rows_do_not_count() -> None:
    found = bars_of(profile({"allreduce": 0.1}, batch_sizes=()), "allreduce", 2, 1000, 0.0)
    assert found is not None
    assert found.doublings == 0


def test_a_profile_without_errors_gives_none() -> None:
    assert bars_of(profile({}), "allreduce", 8, 16, 0.0) is None


def test_a_prediction_of_no_time_is_refused() -> None:
    with pytest.raises(BadInput, match=r"prediction error of gossip is -1, .* calibrate again"):
        bars_of(profile({"allreduce": 0.1, "gossip": -1.0}), "allreduce", 8, 16, 0.0)
