"""The sentences beside the charts: whose names and numbers they hold."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from synthetic import comparison

from manyhands.evidence.compare import charts
from manyhands.evidence.compare.comparison import Comparison, Point

ONE, FOUR, TWO, GOSSIP = NAMES = "solo, 1 thread", "solo, 4 threads", "allreduce on 2", "gossip on 2"


def of(field: str, values: dict[str, Any]) -> Comparison:
    """Solo twice, allreduce and gossip on 2, with these values of a field in all of a variant's trials."""
    made = comparison(("allreduce", "gossip"), (2,), differences={})
    trials = tuple(replace(one, **{field: values.get(one.variant, getattr(one, field))}) for one in made.trials)
    return replace(made, trials=trials)


def curve(*points: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(
        Point(rows=10 * i, seconds=seconds, metrics={"test_accuracy": value}, distance=value)
        for i, (seconds, value) in enumerate(points, 1)
    )


def times(compute: float, exchange: float, wait: float, given: float = 0.0) -> tuple[dict[str, float], ...]:
    return ({"input": given, "compute": compute, "exchange": exchange, "wait": wait},)


CURVES = {
    ONE: curve((2.0, 0.2), (8.0, 0.9)),
    FOUR: curve((2.0, 0.3), (6.0, 0.9)),
    TWO: curve((2.0, 0.6), (4.0, 0.8)),
    GOSSIP: curve((1.0, 0.1), (9.0, 0.5)),
}
AWAY: dict[str, Any] = {ONE: (), FOUR: (), TWO: ()}
METRICS = [{"test_accuracy": value} for value in (0.97, 0.98, 0.96, 0.99)]
SPLIT = [times(1, 0, 0), times(1, 0, 0), times(6, 3, 1), times(9, 1, 0)]
SAYS: dict[Callable[[Comparison], str], list[tuple[str, Any, str]]] = {
    charts.time_to_target: [],
    charts.metric_over_time: [
        ("curve", CURVES, "4.00 s, allreduce.* 0.8000; solo, 4 threads 0.6000; gossip on 2 0.2500"),
        ("curve", CURVES | {FOUR: curve((4, 0.80001), (6, 0.9))}, "4 threads and allreduce .*level.*0.8000; gossip"),
    ],
    charts.metric_over_rows: [("metrics", METRICS, r"0.9600 \(allreduce on 2\) and 0.9900 \(gossip on 2\)")],
    charts.time_split: [
        ("timing", SPLIT, "allreduce.*30 %.* 10 % waiting.*; gossip.*10 %.*Input .*less than 10 %"),
        ("timing", {GOSSIP: times(5, 1, 0, given=4)}, "Input takes 40 % .*gossip"),
    ],
    charts.speed_up: [
        ("rows_per_s", (100, 250, 150, 120), "allreduce.* fastest, 1.50× .*1 thread, 75 % .*; solo, 4 threads.*2.50×"),
        ("rows_per_s", (100, 250, 60, 50), "No variant.*1 thread.*allreduce.* 0.60× .*30 % .*4 threads.* 2.50×"),
    ],
    charts.distance_over_rows: [
        ("distance", (2.4e-6, 0.0, 0.0, 0.22), "equal .*: allreduce on 2\\..* gossip .*22 %.*; .*1 thread 2.4×10⁻⁶"),
        ("distance", (0.0,) * 4, "^Bit-equal .*4 threads .*: solo, 1 thread; allreduce on 2 and gossip on 2.$"),
    ],
    charts.distance_over_time: [
        ("curve", AWAY | {GOSSIP: curve((1, 0.1), (2, 0.4), (3, 0.2))}, "gossip .*40 %, after 2.00 s.* back to 20 %"),
        ("curve", AWAY | {GOSSIP: curve((1, 0.1), (2, 0.2), (3, 0.4))}, "gossip .*40 %, after 3.00 s.*grows"),
    ],
    charts.staleness: [
        ("staleness", {TWO: {0: 9}, GOSSIP: {1: 1, 3: 2, 8: 1}}, "gossip .*3 versions .*8 versions.*Never.*allreduce"),
        ("staleness", {GOSSIP: {0: 5, 1: 1}}, "gossip on 2 are not late, .*1 version late.$"),
        ("staleness", {TWO: {0: 9}}, "No push was late: allreduce"),
    ],
    charts.bytes_sent: [
        ("bytes", (0, 0, 60_000_000, 5_000_000), "allreduce.*60.0 MB, 2.5 KB .*; gossip.*5.0 MB, 12 times less"),
        ("bytes", (0, 0, 60_000_000, 54_000_000), "gossip on 2 .*54.0 MB, 90 %"),
    ],
    charts.memory: [("memory", ((1,), (2 * 10**8,), (3 * 10**8, 10**8), (1, 1)), "allreduce.*300.*600.*2; .*200.0 MB")],
}


def test_each_sentence_has_the_names_and_numbers_of_its_chart() -> None:
    for read, says in SAYS.items():
        for field, values, words in says:
            given = values if isinstance(values, dict) else dict(zip(NAMES, values, strict=True))
            found = read(of(field, given))
            assert re.search(words, found), (read.__name__, words, found)
    low = replace(of("curve", CURVES), higher=False)
    assert f"{GOSSIP} was ahead" in charts.metric_over_time(low)


def test_nothing_measured_is_not_said_and_what_is_not_finite_is_never_the_best() -> None:
    made = comparison(("allreduce",), (2,), target=None, differences={})
    lost = {"distance": math.nan, "metrics": {"train_accuracy": math.nan, "test_accuracy": math.nan}}
    gone = tuple(Point(rows=i, seconds=1.0 * i, metrics=lost["metrics"], distance=math.inf) for i in (1, 2))
    trials = tuple(replace(one, **lost, curve=gone) if one.variant == TWO else one for one in made.trials)
    for read in SAYS:
        assert read(comparison()), read
        assert read(replace(comparison(), trials=(), differences={})) == "", read
        assert read(replace(comparison(), trials=(), variants=(), differences={})) == "", read
        found = read(replace(made, trials=trials))
        assert not re.search("nan|inf", found), read
        if read in (charts.metric_over_time, charts.metric_over_rows, charts.distance_over_rows):
            assert TWO not in found, read
