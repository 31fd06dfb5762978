"""Means over repeats, courses over a run, and which variants are drawn."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from synthetic import comparison

from manyhands.evidence.compare import means
from manyhands.evidence.compare.comparison import Comparison, Point, Trial, Variant
from manyhands.evidence.compare.significance import Mean, mean


def test_what_is_not_finite_is_counted_apart() -> None:
    found = mean([1.0, math.nan, 4.0, None, 4.0, math.inf])
    assert found == Mean(middle=3.0, low=1.0, high=4.0, missing=3)
    assert mean([None, math.nan]) is None


def test_rates_and_times_have_the_geometric_mean() -> None:
    assert mean([1.0, 4.0], geometric=True) == Mean(middle=pytest.approx(2.0), low=1.0, high=4.0)
    assert mean([0.0, 4.0], geometric=True) == Mean(middle=0.0, low=0.0, high=4.0)
    same = mean([0.1] * 3, geometric=True)
    assert same is not None
    assert same.middle == 0.1


def of_trials(*trials: Trial, **changes: object) -> Comparison:
    names = dict.fromkeys(trial.variant for trial in trials)
    variants = tuple(
        Variant(strategy=name.partition(" ")[0].rstrip(","), workers=2, threads=1, name=name) for name in names
    )
    return replace(comparison((), ()), **({"variants": variants, "trials": trials} | changes))


def trial(name: str, repeat: int = 0, **changes: object) -> Trial:
    return replace(Trial(variant=name, repeat=repeat, seed=repeat), **changes)  # type: ignore[arg-type]


def test_a_course_pairs_the_validations_of_repeats() -> None:
    def curve(*values: tuple[int, float, float]) -> tuple[Point, ...]:
        return tuple(Point(rows=rows, seconds=seconds, metrics={"m": value}) for rows, seconds, value in values)

    found = of_trials(
        trial("a", 0, curve=curve((10, 1.0, 0.1), (20, 2.0, math.nan), (30, 3.0, 0.7))),
        trial("a", 1, curve=curve((10, 3.0, 0.3), (20, 4.0, 0.4))),
    )
    course = means.course(found, "a", lambda point: point.metrics["m"])
    assert course is not None
    assert (course.rows, course.seconds) == ((10, 20), (pytest.approx(3**0.5), pytest.approx(8**0.5)))
    assert course.values[0] == Mean(middle=pytest.approx(0.2), low=0.1, high=0.3)
    assert course.values[1] == Mean(middle=0.4, low=0.4, high=0.4, missing=1)
    assert means.course(found, "a", lambda point: point.distance) is None


def test_middles_leave_out_who_lacks_a_repeat() -> None:
    found = of_trials(trial("a", 0, bytes=1), trial("a", 1, bytes=3), trial("b", 0, target_seconds=1.0), trial("b", 1))
    assert means.middles(found, lambda one: one.bytes) == {"a": 2, "b": 0}
    assert means.middles(found, lambda one: one.target_seconds) == {}


def test_the_drawn_metric_is_the_targets_or_the_nearest_kin() -> None:
    made = comparison()
    assert means.curve_metric(made) == "test_accuracy"
    only = tuple(
        replace(
            one,
            curve=tuple(replace(p, metrics={"validation_loss": 1.0, "validation_accuracy": 0.5}) for p in one.curve),
        )
        for one in made.trials
    )
    assert means.curve_metric(replace(made, trials=only)) == "validation_accuracy"
    assert means.curve_metric(replace(made, trials=())) == ""


def test_final_metrics_are_train_judged_and_test_without_repetition() -> None:
    made = comparison()
    assert means.final_metrics(made) == ("train_accuracy", "test_accuracy")
    trials = tuple(
        replace(one, metrics=dict.fromkeys(["train_loss", "validation_loss", "test_loss"], 1.0)) for one in made.trials
    )
    judged = replace(made, trials=trials, metric="validation_loss")
    assert means.final_metrics(judged) == ("train_loss", "validation_loss", "test_loss")


def test_a_speed_up_is_of_the_means_and_lies_between_those_of_the_repeats() -> None:
    found = of_trials(
        trial("solo", 0, rows_per_s=100.0),
        trial("solo", 1, rows_per_s=200.0),
        trial("a", 0, rows_per_s=200.0),
        trial("a", 1, rows_per_s=1600.0),
        repeats=2,
    )
    assert means.speed_up(found, "a", "solo") == Mean(middle=pytest.approx(4.0), low=2.0, high=8.0)
    assert means.speed_up(replace(found, trials=found.trials[2:]), "a", "solo") is None


def test_times_are_means_by_worker_and_shares_are_of_all() -> None:
    def times(compute: float, wait: float) -> dict[str, float]:
        return {"input": 0.0, "compute": compute, "exchange": 1.0, "wait": wait}

    found = of_trials(
        trial("a", 0, timing=(times(1, 0), times(2, 1))),
        trial("a", 1, timing=(times(3, 0), times(4, 1))),
        trial("b", 0),
    )
    assert [worker["compute"] for worker in means.times_of_workers(found, "a")] == [2, 3]
    assert means.shares_of_time(found, "a") == pytest.approx(
        {"input": 0, "compute": 5 / 8, "exchange": 2 / 8, "wait": 1 / 8}
    )
    assert means.shares_of_time(found, "b") == {}


def test_staleness_adds_up_over_repeats() -> None:
    found = of_trials(trial("a", 0, staleness={3: 1, 0: 2}), trial("a", 1, staleness={3: 4, 7: 0}))
    assert list(means.staleness(found, "a").items()) == [(0, 2), (3, 5)]


def test_drawn_are_solo_and_the_best_in_their_order() -> None:
    made = comparison(tuple(f"local-sgd:period={i}" for i in range(1, 16)), (2,), target=None)
    best = sorted(
        (one for one in made.variants if not one.solo),
        key=lambda one: -fmean(trial.metrics["test_accuracy"] for trial in made.of(one.name)),
    )
    drawn = means.drawn(made, 6)
    assert [one.name for one in drawn[:2]] == ["solo, 1 thread", "solo, 4 threads"]
    assert set(drawn[2:]) == set(best[:4])
    assert list(drawn) == [one for one in made.variants if one in drawn]
    lowest = means.drawn(replace(made, higher=False), 6)
    assert set(lowest[2:]) == set(best[-4:])


def test_who_reached_the_target_is_drawn_before_who_did_not_and_who_failed_is_not() -> None:
    made = comparison(("allreduce", "gossip", "diloco"), (2,), fails=("diloco on 2",))
    trials = tuple(
        replace(one, target_seconds=None, metrics={"test_accuracy": 1.0}) if one.variant == "allreduce on 2" else one
        for one in made.trials
    )
    assert [one.name for one in means.drawn(replace(made, trials=trials), 3)][2:] == ["gossip on 2"]
    assert len(means.drawn(replace(made, trials=trials), 99)) == 4
