"""Numbers of trials and over repeats, against calculations by hand."""

import math
from typing import Any

import pytest
from by_numbers import found

from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Point, Target


def tick(number: int, rows: int, seconds: float) -> dict[str, Any]:
    """A row of Run.history: half of its time is compute, the rest the other three parts."""
    parts = {"input_s": 0.2 * seconds, "compute_s": 0.5 * seconds, "exchange_s": 0.2 * seconds, "wait_s": 0.1 * seconds}
    return {"tick": number, "rows": rows, **parts}


RECORDED = [tick(0, 10, 1.0), tick(1, 10, 0.5), tick(2, 10, 0.25), tick(3, 6, 0.75), tick(4, 10, 2.0), tick(5, 10, 1.5)]
VALIDATIONS = [(1, {"test_accuracy": 0.5}), (3, {"test_accuracy": 0.9}), (5, {"test_accuracy": 0.8})]


def aim(value: float, metric: str = "test_accuracy", higher: bool = True) -> Target:
    return Target(metric=metric, value=value, higher=higher)


def test_a_recorded_history_as_points() -> None:
    points = measures.curve(RECORDED, VALIDATIONS)
    assert [point.rows for point in points] == [20, 36, 56]
    assert [point.seconds for point in points] == pytest.approx([1.5, 2.5, 6.0])
    assert [point.metrics["test_accuracy"] for point in points] == [0.5, 0.9, 0.8]


def test_ticks_that_are_complete_in_another_order_are_put_in_theirs() -> None:
    assert measures.curve([RECORDED[i] for i in (2, 0, 1, 5, 3, 4)], VALIDATIONS) == measures.curve(
        RECORDED, VALIDATIONS
    )


def test_of_two_validations_at_the_same_rows_the_last_counts() -> None:
    (point,) = measures.curve(RECORDED, [(5, {"a": 1.0}), (5, {"a": 2.0})])
    assert (point.rows, point.metrics) == (56, {"a": 2.0})


@pytest.mark.parametrize(
    ("value", "seconds", "rows"),
    [
        (0.4, 1.5, 20),  # at the first point already
        (0.5, 1.5, 20),
        (0.6, 1.5 + 1.0 / 4, 20 + 16 / 4),  # a quarter of the way from 0.5 to 0.9
        (0.8, 1.5 + 1.0 * 3 / 4, 20 + 16 * 3 / 4),
        (0.9, 2.5, 36),
    ],
)
def test_time_to_target_equals_the_calculation_by_hand(value: float, seconds: float, rows: float) -> None:
    assert measures.reached(measures.curve(RECORDED, VALIDATIONS), aim(value)) == pytest.approx((seconds, rows))


def test_a_target_that_no_point_reaches_is_none() -> None:
    points = measures.curve(RECORDED, VALIDATIONS)
    assert measures.reached(points, aim(0.91)) is None
    assert measures.reached([], aim(0.1)) is None
    assert measures.reached(points, aim(0.1, "test_f1")) is None


def test_where_less_is_better_the_target_is_reached_from_above() -> None:
    points = [Point(rows=10 * i, seconds=float(i), metrics={"loss": loss}) for i, loss in enumerate([4.0, 2.0, 3.0])]
    assert measures.reached(points, aim(2.5, "loss", higher=False)) == pytest.approx((0.75, 7.5))
    assert measures.reached(points, aim(1.0, "loss", higher=False)) is None


def test_behind_a_validation_that_was_not_a_number_there_is_no_line() -> None:
    losses = [math.nan, 2.0, math.inf, 1.0]
    points = [Point(rows=10 * i, seconds=float(i), metrics={"loss": loss}) for i, loss in enumerate(losses)]
    assert measures.reached(points, aim(2.5, "loss", higher=False)) == (1.0, 10.0)
    assert measures.reached(points, aim(1.5, "loss", higher=False)) == (3.0, 30.0)


def test_a_rate_leaves_out_the_first_ticks_and_their_time() -> None:
    slow = [tick(i, 10, 5.0) for i in range(3)]
    assert measures.rows_per_s(slow + [tick(i, 10, 0.5) for i in range(3, 20)]) == pytest.approx(20.0)
    late = [tick(i, 10, 5.0) for i in range(5)]  # 5 % of 100
    assert measures.rows_per_s(late + [tick(i, 10, 0.5) for i in range(5, 100)]) == pytest.approx(20.0)
    assert measures.rows_per_s([slow[0], tick(1, 10, 0.5), tick(2, 10, 0.5)]) == pytest.approx(20.0)  # at most half
    assert measures.rows_per_s([tick(0, 10, 2.0)]) == pytest.approx(5.0)
    assert measures.rows_per_s([]) == 0.0


def test_speed_up_is_against_solo_with_one_thread_and_with_all_repeat_by_repeat() -> None:
    rates = {
        "solo, 1 thread": [100.0, 200.0],
        "solo, 2 threads": [150.0, 300.0],
        "allreduce on 2": [300.0, 300.0],  # 3 and 1.5 times one thread
    }
    one = measures.speed_up(found(rates), "allreduce on 2")
    assert one.one_thread == pytest.approx(math.sqrt(3 * 1.5))
    assert one.all_threads == pytest.approx(math.sqrt(2 * 1))
    assert one.efficiency == pytest.approx(math.sqrt(3 * 1.5) / 2)  # 2 workers with a thread each
    solo = measures.speed_up(found(rates), "solo, 2 threads")
    assert (solo.one_thread, solo.all_threads, solo.efficiency) == pytest.approx((1.5, 1.0, 0.75))


def test_where_solo_has_one_variant_efficiency_is_over_workers() -> None:
    one = measures.speed_up(found({"solo": [10.0], "allreduce on 4": [30.0]}), "allreduce on 4")
    assert (one.one_thread, one.all_threads, one.efficiency) == pytest.approx((3.0, 3.0, 0.75))


def test_without_any_repeat_in_common_there_is_no_speed_up() -> None:
    rates = {"solo": [10.0], "allreduce on 2": [None], "gossip on 2": [20.0]}
    one = measures.speed_up(found(rates, failures={"allreduce on 2": "it broke"}), "allreduce on 2")
    assert (one.one_thread, one.all_threads, one.efficiency) == (None, None, None)


def test_a_variant_that_lacks_a_repeat_has_no_speed_up_of_other_repeats() -> None:
    rates = {"solo": [10.0, 40.0], "allreduce on 2": [20.0, None]}  # twice the first repeat, and as fast as the mean
    one = measures.speed_up(found(rates, failures={"allreduce on 2": "it broke"}), "allreduce on 2")
    assert (one.one_thread, one.all_threads, one.efficiency) == (None, None, None)


def test_the_margin_of_a_metric_is_a_share_of_the_references_mean() -> None:
    rates = {"solo": [10.0] * 3, "allreduce on 2": [10.0] * 3}
    comparison = found(rates, {"solo": [0.5, 0.9, 1.0], "allreduce on 2": [0.5, 0.9, 1.0]})
    difference = comparison.difference("allreduce on 2", "test_accuracy")
    assert difference is not None
    assert difference.margin == pytest.approx(0.008)
    assert difference.outcome == "same"


def test_the_better_of_solos_variants_is_the_one_to_beat() -> None:
    slower = found({"solo, 1 thread": [90.0] * 3, "solo, 2 threads": [100.0] * 3})
    assert measures.better_solo(slower) == "solo, 2 threads"
    near = found({"solo, 1 thread": [103.0] * 3, "solo, 2 threads": [100.0] * 3})
    assert measures.better_solo(near) == "solo, 2 threads"
    faster = found({"solo, 1 thread": [120.0] * 3, "solo, 2 threads": [100.0] * 3})
    assert measures.better_solo(faster) == "solo, 1 thread"
    assert measures.better_solo(found({"solo": [1.0] * 3, "allreduce on 2": [2.0] * 3})) == "solo"
