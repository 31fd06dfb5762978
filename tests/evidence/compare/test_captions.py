"""The sentences beside the charts: each is made of the comparison's numbers."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from synthetic import comparison

from manyhands.evidence.compare import charts
from manyhands.evidence.compare.comparison import Comparison, Point

READINGS = (
    charts.metric_over_time,
    charts.metric_over_rows,
    charts.time_split,
    charts.speed_up,
    charts.time_to_target,
    charts.distance_over_rows,
    charts.distance_over_time,
    charts.staleness,
    charts.bytes_sent,
    charts.memory,
)
ONE, FOUR, TWO, GOSSIP = "solo, 1 thread", "solo, 4 threads", "allreduce on 2", "gossip on 2"


def of(field: str, values: dict[str, Any], **changes: Any) -> Comparison:
    """Solo twice, allreduce and gossip on 2, with these values of a field in all of a variant's trials."""
    made = comparison(("allreduce", "gossip"), (2,), differences={}, **changes)
    trials = tuple(replace(one, **{field: values.get(one.variant, getattr(one, field))}) for one in made.trials)
    return replace(made, trials=trials)


def curve(*points: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(
        Point(rows=10 * (i + 1), seconds=seconds, metrics={"test_accuracy": value})
        for i, (seconds, value) in enumerate(points)
    )


def test_who_stands_where_when_the_first_ends() -> None:
    curves = {
        ONE: curve((2.0, 0.2), (8.0, 0.9)),
        FOUR: curve((2.0, 0.3), (6.0, 0.9)),
        TWO: curve((2.0, 0.6), (4.0, 0.8)),
        GOSSIP: curve((1.0, 0.1), (9.0, 0.5)),
    }
    made = of("curve", curves, target=None)
    assert charts.metric_over_time(made) == (
        "When the first had ended, after 4.00 s, allreduce on 2 was ahead with test_accuracy 0.8000; "
        "solo, 4 threads 0.6000; gossip on 2 0.2500."
    )
    assert "gossip on 2 was ahead" in charts.metric_over_time(replace(made, higher=False))
    level = of("curve", curves | {FOUR: curve((4.0, 0.80001), (6.0, 0.9))}, target=None)
    assert "solo, 4 threads and allreduce on 2 were level with test_accuracy 0.8000; gossip" in charts.metric_over_time(
        level
    )
    with_target = of("curve", curves)
    assert with_target.target is not None
    assert charts.metric_over_time(with_target) == charts.metric_over_time(made)  # the verdict speaks of a target


def test_what_the_metric_is_after_all_rows() -> None:
    metrics = {ONE: 0.97, FOUR: 0.98, TWO: 0.96, GOSSIP: 0.99}
    made = of("metrics", {name: {"test_accuracy": value} for name, value in metrics.items()})
    assert charts.metric_over_rows(made) == (
        "After all rows test_accuracy is between 0.9600 (allreduce on 2) and 0.9900 (gossip on 2)."
    )


def times(compute: float, exchange: float, wait: float, given: float = 0.0) -> tuple[dict[str, float], ...]:
    return ({"input": given, "compute": compute, "exchange": exchange, "wait": wait},)


def test_who_loses_most_to_the_exchange_and_whether_input_is_in_the_way() -> None:
    made = of("timing", {TWO: times(6, 3, 1), GOSSIP: times(9, 1, 0), ONE: times(1, 0, 0), FOUR: times(1, 0, 0)})
    assert charts.time_split(made) == (
        "Workers of allreduce on 2 spend 30 % of their time exchanging and 10 % waiting, the most; "
        "gossip on 2 both together 10 %. Input takes less than 10 % everywhere."
    )
    hungry = of("timing", {GOSSIP: times(5, 1, 0, given=4)})
    assert charts.time_split(hungry).endswith("Input takes 40 % of the time of gossip on 2.")


def test_speed_up_names_the_fastest_its_share_of_the_ideal_and_solos_own() -> None:
    made = of("rows_per_s", {ONE: 100.0, FOUR: 250.0, TWO: 150.0, GOSSIP: 120.0})
    assert charts.speed_up(made) == (
        "allreduce on 2 is fastest, 1.50× as fast as solo, 1 thread, 75 % of the ideal; solo, 4 threads alone gets 2.50×."
    )


def test_where_none_is_as_fast_as_solo_it_says_so() -> None:
    made = of("rows_per_s", {ONE: 100.0, FOUR: 250.0, TWO: 60.0, GOSSIP: 50.0})
    assert charts.speed_up(made) == (
        "No variant is as fast as solo, 1 thread; the nearest, allreduce on 2, reaches 0.60× of it, 30 % of the ideal; "
        "solo, 4 threads alone gets 2.50×."
    )


def test_distance_says_who_is_bit_equal_and_who_is_far() -> None:
    made = of("distance", {ONE: 2.4e-6, FOUR: 0.0, TWO: 0.0, GOSSIP: 0.22})
    assert charts.distance_over_rows(made) == (
        "Bit-equal to solo, 4 threads at the end: allreduce on 2. At the end the parameters of gossip on 2 are 22 % of their "
        "length away from those of solo, 4 threads; those of solo, 1 thread 2.4×10⁻⁶."
    )
    equal = of("distance", dict.fromkeys((ONE, FOUR, TWO, GOSSIP), 0.0))
    assert charts.distance_over_rows(equal) == (
        "Bit-equal to solo, 4 threads at the end: solo, 1 thread; allreduce on 2 and gossip on 2."
    )


@pytest.mark.parametrize(
    ("distances", "end"),
    [
        ((0.1, 0.4, 0.2), "40 %, after 2.00 s, and came back to 20 %."),
        ((0.1, 0.2, 0.4), "40 %, after 3.00 s: the distance grows to the end."),
    ],
)
def test_whether_the_farthest_comes_back(distances: tuple[float, ...], end: str) -> None:
    points = tuple(Point(rows=i, seconds=i + 1.0, metrics={}, distance=one) for i, one in enumerate(distances))
    made = of("curve", {ONE: (), FOUR: (), TWO: (), GOSSIP: points})
    assert charts.distance_over_time(made) == f"gossip on 2 was farthest away, {end}"


def test_staleness_names_the_latest_and_who_is_never_late() -> None:
    made = of("staleness", {TWO: {0: 9}, GOSSIP: {1: 1, 3: 2, 8: 1}})
    assert charts.staleness(made) == (
        "Half of the pushes of gossip on 2 are 3 versions late or more, the latest is 8 versions late. Never late: allreduce on 2."
    )
    fresh = of("staleness", {GOSSIP: {0: 5, 1: 1}})
    assert charts.staleness(fresh) == "Half of the pushes of gossip on 2 are not late, the latest is 1 version late."
    assert charts.staleness(of("staleness", {TWO: {0: 9}})) == "No push was late: allreduce on 2."


def test_bytes_name_the_most_and_the_least_of_those_that_send() -> None:
    made = of("bytes", {TWO: 60_000_000, GOSSIP: 5_000_000})
    assert (
        charts.bytes_sent(made)
        == "allreduce on 2 sends 60.0 MB, 2.5 KB for each row; gossip on 2 sends 5.0 MB, 12 times less."
    )
    near = of("bytes", {TWO: 60_000_000, GOSSIP: 54_000_000})
    assert charts.bytes_sent(near).endswith("gossip on 2 sends 54.0 MB, 90 % of that.")


def test_memory_names_the_most_and_solos() -> None:
    memory = {ONE: (1,), FOUR: (200_000_000,), TWO: (300_000_000, 100_000_000), GOSSIP: (1, 1)}
    assert charts.memory(of("memory", memory)) == (
        "A worker of allreduce on 2 needs the most, 300.0 MB, 600.0 MB for its 2; solo, 4 threads 200.0 MB."
    )


@pytest.mark.parametrize("read", READINGS, ids=lambda read: read.__name__)
def test_every_chart_has_a_sentence_and_nothing_measured_has_none(read: Callable[[Comparison], str]) -> None:
    made = comparison()
    assert read(made).endswith(".")
    assert read(replace(made, trials=(), differences={})) == ""
    assert read(replace(made, trials=(), variants=(), differences={})) == ""


@pytest.mark.parametrize("read", READINGS, ids=lambda read: read.__name__)
def test_what_is_not_finite_is_never_the_best(read: Callable[[Comparison], str]) -> None:
    made = comparison(("allreduce",), (2,), target=None)
    lost = tuple(
        replace(
            one,
            distance=math.nan,
            metrics=dict.fromkeys(one.metrics, math.nan),
            curve=tuple(replace(p, metrics=dict.fromkeys(p.metrics, math.nan), distance=math.inf) for p in one.curve),
        )
        if one.variant == TWO
        else one
        for one in made.trials
    )
    found = read(replace(made, trials=lost, differences={}))
    assert "nan" not in found
    assert "inf" not in found
    if read in (charts.metric_over_time, charts.metric_over_rows, charts.distance_over_rows):
        assert TWO not in found
