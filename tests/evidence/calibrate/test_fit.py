"""Fitting, on samples whose constants are known."""

import math
import random
import statistics

import pytest

from manyhands.evidence.calibrate.fit import fit_compute, lognormal, step_seconds, two_terms


def test_two_terms_finds_planted_constants_exactly_where_nothing_is_noise() -> None:
    xs = [(1.0, 8.0), (1.0, 16.0), (1.0, 24.0)]
    found = two_terms(xs, [0.003 + 0.002 * rows for _, rows in xs])
    assert found.first == pytest.approx(0.003)
    assert found.second == pytest.approx(0.002)
    assert found.worst == pytest.approx(0, abs=1e-12)


def test_two_terms_weighs_errors_by_the_size_of_what_was_measured() -> None:
    """An error of a tenth counts the same at 1 µs and at 1 s; with absolute errors the small ones would not count at all."""
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    noise = random.Random(1)
    ys = [(2e-5 + 1e-9 * size) * (1 + 0.02 * noise.uniform(-1, 1)) for size in sizes]
    found = two_terms([(1.0, size) for size in sizes], ys)
    assert found.first == pytest.approx(2e-5, rel=0.03)
    assert found.second == pytest.approx(1e-9, rel=0.03)
    assert found.worst < 0.03


def test_no_constant_is_negative_and_terms_that_samples_do_not_separate_are_one() -> None:
    falling = two_terms([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])
    assert (falling.first > 0, falling.second) == (True, 0)
    through_zero = two_terms([(1.0, 1.0), (1.0, 2.0)], [1.0, 3.0])
    assert (through_zero.first, through_zero.second > 0) == (0, True)
    found = two_terms([(1.0, 5.0)], [10.0])
    assert (found.first, found.second) in ((10.0, 0.0), (0.0, 2.0))
    assert found.residuals == pytest.approx((0.0,))
    weighted = two_terms([(1.0, 0.0), (1.0, 0.0)], [1.0, 2.0], weights=[1.0, 0.0])
    assert weighted.residuals == pytest.approx((0.0, -0.5))  # the relative error of the fit


def test_spread_finds_mean_and_jitter_of_a_lognormal_among_outliers() -> None:
    noise = random.Random(2)
    samples = [0.05 * math.exp(0.1 * noise.gauss()) for _ in range(2000)]
    for place in range(0, 2000, 50):
        samples[place] = 5.0  # the machine did something else
    found = lognormal(samples)
    assert found.sigma == pytest.approx(0.1, rel=0.15)
    assert found.mean == pytest.approx(0.05 * math.exp(0.1**2 / 2), rel=0.02)
    assert statistics.fmean(samples) > 2 * found.mean
    assert lognormal([0.2, 0.3, 0.2]).sigma == 0
    same = lognormal([0.2] * 10)
    assert (same.mean, same.sigma) == pytest.approx((0.2, 0))


def test_computed_finds_row_step_and_jitter_in_the_runs_that_nothing_slowed_down() -> None:
    noise = random.Random(3)
    step, row, sigma = 4e-3, 1e-3, 0.05

    def block(rows: int, drift: float) -> list[float]:
        factors = (math.exp(sigma * noise.gauss() - sigma**2 / 2) for _ in range(400))
        return [(step + row * rows) * drift * factor for factor in factors]

    drifts = (1.8, 1.0, 1.4)
    found = fit_compute({rows: [block(rows, drift) for drift in drifts] for rows in (8, 16, 24)}, rows=16)
    assert found.step == pytest.approx(step, rel=0.1)
    assert found.row == pytest.approx(row, rel=0.03)
    assert found.jitter == pytest.approx(sigma, rel=0.1)
    assert set(found.residuals) == {8, 16, 24}
    assert max(map(abs, found.residuals.values())) < 0.02


def test_computed_is_best_where_it_matters_most() -> None:
    """Three sizes that lie on no line: the fit goes nearest to the one that the task has."""
    bent = {8: [[0.010] * 8], 16: [[0.030] * 8], 24: [[0.031] * 8]}
    middle, last = fit_compute(bent, rows=16), fit_compute(bent, rows=24)
    assert abs(middle.residuals[16]) < abs(last.residuals[16])
    assert abs(last.residuals[24]) < abs(middle.residuals[24])
    with pytest.raises(ValueError, match="no samples"):
        fit_compute({}, rows=16)


def test_step_seconds_are_of_whole_blocks() -> None:
    assert step_seconds([0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 8.5], every=3) == pytest.approx([2.0, 2.5 / 3])
    assert step_seconds([0.0, 1.0], every=3) == []
