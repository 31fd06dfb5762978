"""Differences, against values that are known in closed form, and against chance."""

import math
import statistics as plain

import numpy as np
import pytest

from manyhands.evidence.compare.significance import (
    EXACT,
    Mean,
    bootstrap,
    difference,
    interval,
    judged,
    mean,
    student,
    t_quantile,
    t_within,
)

TIMES = {"of": "seconds", "margin": 0.05, "higher": False}


def test_students_distribution_and_interval_as_in_tables_and_in_closed_form() -> None:
    for freedom, t in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (10, 2.228), (120, 1.980)):
        assert t_quantile(freedom) == pytest.approx(t, abs=6e-4), freedom
    for t in (0.0, 0.3, 1.0, 7.0):
        assert t_within(t, 1) == pytest.approx(2 / math.pi * math.atan(t))
        assert t_within(t, 2) == pytest.approx(t / math.sqrt(2 + t * t))
        angle = math.atan(t / math.sqrt(3))
        assert t_within(t, 3) == pytest.approx(2 / math.pi * (angle + math.sin(angle) * math.cos(angle)))
    low, high = student([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), abs=1e-4)
    assert student([5.0]) == (-math.inf, math.inf)
    assert student([5.0, 5.0]) == (5.0, 5.0)


def test_the_interval_is_the_wider_of_students_and_the_bootstraps() -> None:
    assert bootstrap([4.0]) == (4.0, 4.0)
    # of 2 there are 4 resamples, of 3 there are 27: the least has a chance of 1/27 > 2.5 %, and so has the greatest
    assert bootstrap([1.0, 5.0]) == (1.0, 5.0)
    assert bootstrap([1.0, 2.0, 9.0]) == pytest.approx((1.0, 9.0))
    # of 4 there are 256: 1 of them has the mean 0, 4 have 1/4, 6 + 4 have 2/4, …: 2.5 % are 6.4 of them
    assert bootstrap([0.0, 1.0, 2.0, 3.0])[0] == pytest.approx(0.5)
    values = np.random.default_rng(0).normal(10, 2, 100).tolist()
    assert len(values) > EXACT
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values)
    reach = 1.96 * plain.pstdev(values) / 10
    assert (low, high) == pytest.approx((plain.fmean(values) - reach, plain.fmean(values) + reach), abs=0.05 * reach)
    few = [1.0, 2.0, 3.0]
    assert interval(few) == student(few)
    skewed = [*range(20), 200.0]  # Student's is the wider below, the bootstrap's above
    assert interval(skewed) == (student(skewed)[0], bootstrap(skewed)[1])
    assert student(skewed)[0] < bootstrap(skewed)[0]
    assert bootstrap(skewed)[1] > student(skewed)[1]


def test_times_are_compared_as_ratios_and_metrics_as_differences_repeat_by_repeat() -> None:
    found = difference([2.0, 8.0, 4.0], [1.0, 1.0, 1.0], **TIMES)
    assert found.middle == pytest.approx(4.0)
    assert found.low < 2.0 <= 8.0 < found.high  # Student's is the wider here
    turned = difference([1.0, 1.0, 1.0], [2.0, 8.0, 4.0], **TIMES)
    assert turned.middle == pytest.approx(1 / found.middle)
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))
    found = difference([0.90, 0.92, 0.91], [0.95, 0.96, 0.97], of="test_accuracy", margin=0.01, higher=True)
    assert found.middle == pytest.approx(-0.05)
    assert (found.of, found.margin, found.outcome) == ("test_accuracy", 0.01, "worse")
    assert found.low < -0.06 < -0.04 < found.high < 0
    drift = [1.0, 3.0, 9.0]
    assert difference([1.2 * d for d in drift], drift, **TIMES).outcome == "worse"
    assert difference([1.2 * d for d in drift], drift[::-1], **TIMES).outcome == "unclear"
    with pytest.raises(ValueError, match="3 repeats of one and 2"):
        difference(drift, [1.0, 1.0], **TIMES)


def test_the_rule() -> None:
    for ratios, outcome in (
        ([1.2, 1.2, 1.2], "worse"),  # all pairs differ by the same: Student's interval is a point
        ([1 / 1.2, 1 / 1.2, 1 / 1.2], "better"),
        ([1.04, 1.04, 1.04], "same"),
        ([1.0, 1.0, 1.0], "same"),
        ([1.06, 1.06, 1.06], "worse"),
        ([1.3, 1.2, 1.25], "worse"),
        ([1.3, 1.1, 1.25], "unclear"),  # all beyond the margin, but Student's interval is not
        ([1.3, 1.04, 1.25], "unclear"),  # one pair inside the margin
        ([0.8, 1.2, 1.0], "unclear"),
        ([1.3, 1.3], "unclear"),  # too few
        ([1.0], "unclear"),
        ([1.01, 1.0, 1.01], "same"),
    ):
        ones = [1.0] * len(ratios)
        assert difference(ratios, ones, **TIMES).outcome == outcome, ratios
        other = {"better": "worse", "worse": "better"}.get(outcome, outcome)
        assert difference(ratios, ones, of="rows_per_s", margin=0.05, higher=True).outcome == other, ratios
    for metric, outcome in ((-0.02, "better"), (0.02, "worse"), (0.01, "same"), (-0.01, "same")):
        assert judged([metric] * 3, 0.01, higher=False) == outcome, metric  # on the margin is inside


def test_a_target_that_was_not_always_reached_is_never_better_and_numbers_without_a_ratio_say_nothing() -> None:
    for own, reference, outcome, middle in (
        ([None, None, None], [3.0, 4.0, 5.0], "worse", math.inf),
        ([None, None], [3.0, 4.0], "unclear", math.inf),  # too few repeats
        ([None, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0], "unclear", 1 / 3),
        ([1.0, 1.0, 1.0, 1.0], [None, 3.0, 3.0, 3.0], "unclear", 1 / 3),
        ([1.0, 1.0, 1.0], [None, None, None], "unclear", math.nan),
        ([None, None, None], [None, None, None], "unclear", math.nan),
        ([None, None, None], [3.0, None, 5.0], "unclear", math.nan),
        *(([1.0, odd, 1.0], [1.0] * 3, "unclear", math.nan) for odd in (math.nan, math.inf, 0.0, -1.0)),
    ):
        found = difference(own, reference, of="target_seconds", margin=0.05, higher=False)
        assert found.outcome == outcome, (own, reference)
        assert found.middle == pytest.approx(middle, nan_ok=True), (own, reference)


def test_means_count_what_is_not_finite_apart_and_those_of_rates_are_geometric() -> None:
    found = mean([1.0, math.nan, 4.0, None, 4.0, math.inf])
    assert found == Mean(middle=3.0, low=1.0, high=4.0, missing=3)
    assert mean([None, math.nan]) is None
    assert mean([1.0, 4.0], geometric=True) == Mean(middle=pytest.approx(2.0), low=1.0, high=4.0)
    assert mean([0.0, 4.0], geometric=True) == Mean(middle=0.0, low=0.0, high=4.0)
    same = mean([0.1] * 3, geometric=True)
    assert same.middle == 0.1
