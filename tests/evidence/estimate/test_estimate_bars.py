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
    for error, factor in ((0.3, 1.3), (-0.3, 1 / 0.7), (-0.5, 2), (0.001, 1 + FLOOR)):  # a small error is the floor
        assert bars_of(profile({"allreduce": error}), "allreduce", 2, 16, 0.0).factor == pytest.approx(factor), error
    assert bars_of(profile({}), "allreduce", 8, 16, 0.0) is None
    with pytest.raises(BadInput, match=r"prediction error of gossip is -1, .* calibrate again"):
        bars_of(profile({"allreduce": 0.1, "gossip": -1.0}), "allreduce", 8, 16, 0.0)


def test_one_that_was_not_tried_takes_the_largest_and_what_was_not_measured_of_a_short_step() -> None:
    """Exchange, leases and waiting of a strategy that was not tried; of one that was, they are in its own error."""
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
