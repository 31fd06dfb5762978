"""Numbers of trials and over repeats, against calculations by hand; what was found, to JSON and back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from by_numbers import found
from synthetic import changed, comparison

from manyhands.errors import BadInput
from manyhands.evidence.compare import measures
from manyhands.evidence.compare.comparison import Comparison, Point, Target
from manyhands.evidence.compare.report import load


def tick(number: int, rows: int, seconds: float) -> dict[str, Any]:
    """A row of Run.history: half of its time is compute, the rest the other three parts."""
    parts = {"input_s": 0.2 * seconds, "compute_s": 0.5 * seconds, "exchange_s": 0.2 * seconds, "wait_s": 0.1 * seconds}
    return {"tick": number, "rows": rows, **parts}


RECORDED = [tick(0, 10, 1.0), tick(1, 10, 0.5), tick(2, 10, 0.25), tick(3, 6, 0.75), tick(4, 10, 2.0), tick(5, 10, 1.5)]
VALIDATIONS = [(1, {"test_accuracy": 0.5}), (3, {"test_accuracy": 0.9}), (5, {"test_accuracy": 0.8})]


def aim(value: float, metric: str = "test_accuracy", higher: bool = True) -> Target:
    return Target(metric=metric, value=value, higher=higher)


def test_a_recorded_history_as_points_and_as_a_rate() -> None:
    points = measures.curve(RECORDED, VALIDATIONS)
    assert [point.rows for point in points] == [20, 36, 56]
    assert [point.seconds for point in points] == pytest.approx([1.5, 2.5, 6.0])
    assert [point.metrics["test_accuracy"] for point in points] == [0.5, 0.9, 0.8]
    assert measures.curve([RECORDED[i] for i in (2, 0, 1, 5, 3, 4)], VALIDATIONS) == points  # complete in another order
    (last,) = measures.curve(RECORDED, [(5, {"a": 1.0}), (5, {"a": 2.0})])
    assert (last.rows, last.metrics) == (56, {"a": 2.0})
    slow = [tick(i, 10, 5.0) for i in range(3)]
    assert measures.rows_per_s(slow + [tick(i, 10, 0.5) for i in range(3, 20)]) == pytest.approx(20.0)
    late = [tick(i, 10, 5.0) for i in range(5)]  # 5 % of 100
    assert measures.rows_per_s(late + [tick(i, 10, 0.5) for i in range(5, 100)]) == pytest.approx(20.0)
    assert measures.rows_per_s([slow[0], tick(1, 10, 0.5), tick(2, 10, 0.5)]) == pytest.approx(20.0)  # at most half
    assert measures.rows_per_s([tick(0, 10, 2.0)]) == pytest.approx(5.0)
    assert measures.rows_per_s([]) == 0.0


def losses(*values: float) -> list[Point]:
    return [Point(rows=10 * i, seconds=float(i), metrics={"loss": loss}) for i, loss in enumerate(values)]


def test_time_to_target_equals_the_calculation_by_hand() -> None:
    points = measures.curve(RECORDED, VALIDATIONS)
    for value, seconds, rows in (
        (0.4, 1.5, 20),  # at the first point already
        (0.5, 1.5, 20),
        (0.6, 1.5 + 1.0 / 4, 20 + 16 / 4),  # a quarter of the way from 0.5 to 0.9
        (0.8, 1.5 + 1.0 * 3 / 4, 20 + 16 * 3 / 4),
        (0.9, 2.5, 36),
    ):
        assert measures.reached(points, aim(value)) == pytest.approx((seconds, rows)), value
    for some, never in ((points, aim(0.91)), ([], aim(0.1)), (points, aim(0.1, "test_f1"))):
        assert measures.reached(some, never) is None
    falling = losses(4.0, 2.0, 3.0)
    assert measures.reached(falling, aim(2.5, "loss", higher=False)) == pytest.approx((0.75, 7.5))
    assert measures.reached(falling, aim(1.0, "loss", higher=False)) is None
    broken = losses(math.nan, 2.0, math.inf, 1.0)  # behind what is not a number there is no line
    assert measures.reached(broken, aim(2.5, "loss", higher=False)) == (1.0, 10.0)
    assert measures.reached(broken, aim(1.5, "loss", higher=False)) == (3.0, 30.0)


def test_a_speed_up_needs_all_repeats_of_both() -> None:
    for lacking in (
        {"solo": [10.0], "allreduce on 2": [None], "gossip on 2": [20.0]},
        {"solo": [10.0, 40.0], "allreduce on 2": [20.0, None]},  # twice the first repeat, and as fast as the mean
    ):
        made = found(lacking, failures={"allreduce on 2": "it broke"})
        assert measures.speed_up(made, "allreduce on 2", "solo") is None


def test_the_margin_of_a_metric_and_the_variant_of_solo_that_is_to_beat() -> None:
    metrics = {"solo": [0.5, 0.9, 1.0], "allreduce on 2": [0.5, 0.9, 1.0]}
    comparison = found({"solo": [10.0] * 3, "allreduce on 2": [10.0] * 3}, metrics)
    difference = comparison.difference("allreduce on 2", "test_accuracy")
    assert (difference.margin, difference.outcome) == (pytest.approx(0.008), "same")
    for rate, best in ((90.0, "solo, 2 threads"), (103.0, "solo, 2 threads"), (120.0, "solo, 1 thread")):
        made = found({"solo, 1 thread": [rate] * 3, "solo, 2 threads": [100.0] * 3})
        assert measures.better_solo(made) == best, rate
    assert measures.better_solo(found({"solo": [1.0] * 3, "allreduce on 2": [2.0] * 3})) == "solo"


def test_numbers_over_repeats() -> None:
    name, late = "allreduce on 2", [{3: 1, 0: 2}, {3: 4}, {7: 0}]
    made = changed(comparison(), name, bytes=[1, 3, 2], target_seconds=[1.0, None, 1.0], staleness=late)
    assert measures.middles(made, "bytes")[name] == 2
    assert name not in measures.middles(made, "target_seconds")
    assert list(measures.staleness(made, name).items()) == [(0, 2), (3, 5)]


def test_metrics_that_are_drawn_and_those_at_the_end() -> None:
    made = comparison()
    assert measures.curve_metric(made) == "test_accuracy"
    kin = (Point(rows=1, seconds=1.0, metrics={"validation_loss": 1.0, "validation_accuracy": 0.5}),)
    only = tuple(replace(one, curve=kin) for one in made.trials)
    assert measures.curve_metric(replace(made, trials=only)) == "validation_accuracy"
    assert measures.curve_metric(replace(made, trials=())) == ""
    assert measures.final_metrics(made) == ("test_accuracy", "train_accuracy")
    losses = dict.fromkeys(["train_loss", "validation_loss", "test_loss"], 1.0)
    trials = tuple(replace(one, metrics=losses) for one in made.trials)
    judged = replace(made, trials=trials, metric="validation_loss")
    assert measures.final_metrics(judged) == ("validation_loss", "train_loss", "test_loss")


def test_drawn_are_solo_and_the_best_and_who_reached_the_target_first() -> None:
    made = comparison(tuple(f"local-sgd:period={i}" for i in range(1, 16)), (2,), target=None)
    best = sorted(
        (one for one in made.variants if not one.solo),
        key=lambda one: -fmean(trial.metrics["test_accuracy"] for trial in made.of(one.name)),
    )
    drawn = measures.drawn(made, 6)
    assert [one.name for one in drawn[:2]] == ["solo, 1 thread", "solo, 4 threads"]
    assert set(drawn[2:]) == set(best[:4])
    assert list(drawn) == [one for one in made.variants if one in drawn]
    lowest = measures.drawn(replace(made, higher=False), 6)
    assert set(lowest[2:]) == set(best[-4:])
    made = comparison(("allreduce", "gossip", "diloco"), (2,), fails=("diloco on 2",))
    trials = tuple(
        replace(one, target_seconds=None, metrics={"test_accuracy": 1.0}) if one.variant == "allreduce on 2" else one
        for one in made.trials
    )
    assert [one.name for one in measures.drawn(replace(made, trials=trials), 3)][2:] == ["gossip on 2"]
    assert len(measures.drawn(replace(made, trials=trials), 99)) == 4


AIM = Target(metric="test_accuracy", value=0.97, higher=True)


def one(**changes: object) -> Comparison:
    made = found(
        {"solo, 1 thread": [50.0] * 3, "solo, 2 threads": [100.0] * 3, "downpour on 2": [150.0, 160.0, 170.0], "gossip on 2": [1.0, 1.0, None]},
        {},
        {"solo, 1 thread": [2.0] * 3, "solo, 2 threads": [1.0] * 3, "downpour on 2": [None] * 3, "gossip on 2": [1.0, None, None]},
        failures={"gossip on 2": "it broke"},
        target=AIM,
        shapes=((2, 3), (3,)),
    )  # fmt: skip
    curve = (Point(rows=10, seconds=0.5, metrics={"test_accuracy": math.inf}, distance=0.25),)
    trials = tuple(trial.__class__(**{**vars(trial), "curve": curve}) for trial in made.trials)
    return made.__class__(**{**vars(made), "trials": trials, **changes})


def test_a_comparison_comes_back_as_it_was_from_a_file_too(tmp_path: Path) -> None:
    made = one()
    text = made.to_json()
    assert "\n" not in text
    back = Comparison.from_json(text)
    assert (back.trials, back.variants, back.differences) == (made.trials, made.variants, made.differences)
    assert back.differences["downpour on 2"][2].middle == math.inf
    assert [advice.text for advice in back.advice] == [advice.text for advice in made.advice]
    assert back.to_json() == text
    assert (back.target, back.shapes, back.verdict) == (AIM, ((2, 3), (3,)), made.verdict)
    (tmp_path / "report.json").write_text(text)
    assert load(tmp_path).to_json() == load(tmp_path / "report.json").to_json() == text


def test_what_no_comparison_wrote_is_refused_and_what_is_asked_of_one() -> None:
    made = one()
    json.loads(made.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for text in ("", "{}", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "shapes": 3}'):
        with pytest.raises(BadInput, match="not the report.json of a comparison"):
            Comparison.from_json(text)
    with pytest.raises(BadInput, match="another version of manyhands wrote it"):
        Comparison.from_json(json.dumps({**json.loads(made.to_json()), "surprise": 1}))
    assert [trial.repeat for trial in made.of("gossip on 2")] == [0, 1]
    assert (made.failure("gossip on 2"), made.failure("downpour on 2")) == ("it broke", "")
    assert not {"gossip on 2", "solo, 2 threads"} & made.differences.keys()
    difference = made.difference("downpour on 2", "target_seconds")
    assert (difference.outcome, difference.different) == ("worse", True)
    assert made.difference("downpour on 2", "no_such") is None
    assert made.of("downpour on 2")[0].worker_seconds == pytest.approx(2 * 1000 / 150)
