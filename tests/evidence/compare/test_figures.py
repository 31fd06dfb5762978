"""The charts with lines: what is drawn, where, and that names are only text."""

import math
from dataclasses import replace
from typing import Any

import pytest
from synthetic import HOSTILE, comparison, hostile

from manyhands.evidence.compare import bars, drawing, figures, measures
from manyhands.evidence.compare.comparison import Comparison, Point, Target, Trial, Variant


def metric_over_time(made: Comparison) -> Any:
    return figures.metric(made, "seconds")


def metric_over_rows(made: Comparison) -> Any:
    return figures.metric(made, "rows")


def distance_over_rows(made: Comparison) -> Any:
    return figures.distance(made, "rows")


def distance_over_time(made: Comparison) -> Any:
    return figures.distance(made, "seconds")


ALL = (
    *(metric_over_time, metric_over_rows, figures.speed_up, distance_over_rows, distance_over_time),
    *(bars.time_split, bars.staleness, bars.bytes_sent, bars.memory),
)
SOLO = Variant(strategy="solo", workers=1, threads=1, name="solo")
OTHER = Variant(strategy="allreduce", workers=2, threads=1, name="allreduce on 2")


def two(curves: dict[str, list[list[tuple[int, float, float, float | None]]]], **changes: Any) -> Comparison:
    """Solo and allreduce on 2, with curves of (rows, seconds, metric, distance), a list of them by repeat."""

    def points(of: list[tuple[int, float, float, float | None]]) -> tuple[Point, ...]:
        return tuple(Point(rows=r, seconds=s, metrics={"test_accuracy": m}, distance=d) for r, s, m, d in of)

    trials = tuple(
        Trial(variant=name, repeat=i, seed=i, rows_per_s=100.0 * (1 if name == "solo" else 3), curve=points(one))
        for name, repeats in curves.items()
        for i, one in enumerate(repeats)
    )
    given = {"variants": (SOLO, OTHER), "trials": trials, "reference": "solo", "repeats": 2}
    return replace(comparison((), (), target=None), **(given | changes))


def drawn(draw: Any, made: Comparison) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(traces, layout), as plotly.js takes them."""
    found = draw(made).to_plotly_json()
    return found["data"], found["layout"]


def lines(traces: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in traces if trace.get("showlegend") is not False}


CURVES = {
    "solo": [[(10, 1.0, 0.2, 0.0), (20, 1.5, 0.6, 0.0)], [(10, 4.0, 0.4, 0.0), (20, 6.0, 0.8, 0.0)]],
    "allreduce on 2": [[(10, 0.5, 0.1, 0.0), (20, 1.0, 0.5, 0.1)], [(10, 0.5, 0.3, 0.0), (20, 1.0, math.nan, 0.3)]],
}


def test_lines_are_means_against_seconds_and_against_rows() -> None:
    over_time = lines(drawn(metric_over_time, two(CURVES))[0])
    assert list(over_time["solo"]["x"]) == pytest.approx([2.0, 3.0])
    assert list(over_time["solo"]["y"]) == pytest.approx([0.3, 0.7])
    over_rows = lines(drawn(metric_over_rows, two(CURVES))[0])
    assert list(over_rows["solo"]["x"]) == [10, 20]
    assert list(over_rows["allreduce on 2"]["y"]) == pytest.approx([0.2, 0.5])


def test_bands_go_from_the_least_to_the_most_and_back_below_all_lines() -> None:
    traces, _ = drawn(metric_over_rows, two(CURVES))
    assert [trace.get("fill") for trace in traces] == ["toself", "toself", None, None]
    assert list(traces[0]["x"]) == [10, 20, 20, 10]
    assert list(traces[0]["y"]) == [0.4, 0.8, 0.6, 0.2]
    assert traces[0]["legendgroup"] == lines(traces)["solo"]["legendgroup"] != traces[1]["legendgroup"]
    once = {name: repeats[:1] for name, repeats in CURVES.items()}
    assert not [trace for trace in drawn(metric_over_rows, two(once))[0] if trace.get("fill")]


def test_what_is_not_finite_is_a_gap_and_the_target_a_line_where_its_metric_is_drawn() -> None:
    gaps = dict(CURVES) | {"allreduce on 2": [[(10, 0.5, math.nan, None), (20, 1.0, 0.5, None)]]}
    found = lines(drawn(metric_over_rows, two(gaps))[0])["allreduce on 2"]
    assert list(found["y"]) == [None, 0.5]
    assert "not finite" in found["hovertext"][0]
    never = {name: [[(10, 1.0, math.nan, None)]] for name in CURVES}
    assert metric_over_rows(two(never)) is None
    aim = Target(metric="test_accuracy", value=0.5, higher=True)
    _, layout = drawn(metric_over_time, two(CURVES, target=aim))
    assert [(shape["y0"], shape["y1"]) for shape in layout["shapes"]] == [(0.5, 0.5)]
    assert layout["annotations"][0]["text"] == "test_accuracy ≥ 0.5"
    elsewhere = replace(aim, metric="test_loss")
    assert "shapes" not in drawn(metric_over_time, two(CURVES, target=elsewhere))[1]


def test_axes_are_logarithmic_where_a_metric_falls_far_or_a_line_would_be_too_short_to_see() -> None:
    falling = {"solo": [[(10, 1.0, 9.0, None), (20, 2.0, 0.01, None)]]}
    made = two(falling, higher=False, target=Target(metric="test_accuracy", value=0.1, higher=False))
    _, layout = drawn(metric_over_rows, made)
    assert layout["yaxis"]["type"] == "log"
    assert layout["shapes"][0]["y0"] == 0.1  # shapes take values, annotations exponents
    assert layout["annotations"][0]["y"] == pytest.approx(-1)
    assert "type" not in drawn(metric_over_rows, replace(made, higher=True))[1]["yaxis"]
    slow = dict(CURVES) | {"solo": [[(10, 50.0, 0.2, None), (20, 100.0, 0.6, None)]]}
    axis = drawn(metric_over_time, two(slow, simulated={"network": "latency=1ms"}))[1]["xaxis"]
    assert (axis["type"], list(axis["ticktext"])) == ("log", ["0.1", "1", "10", "100"])
    assert axis["title"]["text"].startswith("virtual seconds")
    assert "type" not in drawn(metric_over_time, two(CURVES))[1]["xaxis"]


def test_zero_distance_has_a_tick_of_its_own_below_the_least_power() -> None:
    traces, layout = drawn(distance_over_rows, two(CURVES))
    assert list(lines(traces)) == ["allreduce on 2"]  # the reference is at no distance from itself
    ticks = dict(zip(layout["yaxis"]["ticktext"], layout["yaxis"]["tickvals"], strict=True))
    assert list(lines(traces)["allreduce on 2"]["y"]) == [ticks["0"], pytest.approx(0.2)]
    assert (ticks["0"], ticks["0.1"]) == pytest.approx((0.01, 0.1))
    assert min(traces[0]["y"]) >= 0
    apart = {"allreduce on 2": [[(10, 1.0, 0.1, 1e-9), (20, 2.0, 0.1, 0.5)]]}
    axis = drawn(distance_over_time, two(apart))[1]["yaxis"]
    assert "0" not in axis["ticktext"]
    assert len(axis["ticktext"]) <= 7
    exponents = [math.log10(value) for value in axis["tickvals"]]
    assert axis["range"][0] < min(exponents) < max(exponents) < axis["range"][1]
    equal = {"allreduce on 2": [[(10, 1.0, 0.1, 0.0), (20, 2.0, 0.1, 0.0)]]}
    assert distance_over_rows(two(equal)) is None


def test_speed_up_has_a_line_a_strategy_the_ideal_and_solo_with_all_threads() -> None:
    made = comparison(("allreduce", "gossip"), (2, 4))
    traces, layout = drawn(figures.speed_up, made)
    assert [trace["name"] for trace in traces] == ["ideal", "allreduce", "gossip"]
    assert (list(traces[0]["x"]), list(traces[0]["y"])) == ([1, 2, 4], [1.0, 2.0, 4.0])
    assert [round(x) for x in traces[1]["x"]] == [2, 4]
    assert traces[1]["line"]["color"] == drawing.styles_of(made)["allreduce on 2"].colour
    assert layout["annotations"][0]["text"] == "solo, 4 threads"
    assert 2 < layout["shapes"][0]["y0"] < 3
    made = comparison()
    failed = tuple(replace(one, failure="broken") if one.variant == "solo, 1 thread" else one for one in made.trials)
    assert figures.speed_up(replace(made, trials=failed)) is None
    assert figures.speed_up(replace(made, variants=tuple(one for one in made.variants if one.solo))) is None


def test_the_ideal_counts_threads_of_workers_and_is_of_those_with_most() -> None:
    traces, _ = drawn(figures.speed_up, comparison(("allreduce",), (2, 4), threads=2))
    assert (list(traces[0]["x"]), list(traces[0]["y"])) == ([1, 2, 4], [2.0, 4.0, 8.0])
    made = comparison(("allreduce", "gossip"), (2, 4))
    threads = {"allreduce on 2": 1, "allreduce on 4": 3, "gossip on 2": 2, "gossip on 4": 2}
    variants = (
        replace(one, workers=2, threads=threads[one.name]) if one.name in threads else one for one in made.variants
    )
    traces, _ = drawn(figures.speed_up, replace(made, variants=tuple(variants)))
    assert (list(traces[0]["x"]), list(traces[0]["y"])) == ([2], [6.0])
    assert traces[0]["mode"] == "markers+text"


def test_error_bars_reach_from_the_least_to_the_most_ratio() -> None:
    made = two(CURVES)
    trials = tuple(
        replace(one, rows_per_s=200.0) if (one.variant, one.repeat) == ("allreduce on 2", 0) else one
        for one in made.trials
    )
    own = drawn(figures.speed_up, replace(made, trials=trials))[0][1]
    middle = own["y"][0]
    assert middle == pytest.approx(math.sqrt(6))
    assert middle + own["error_y"]["array"][0] == pytest.approx(3)
    assert middle - own["error_y"]["arrayminus"][0] == pytest.approx(2)


def test_many_workers_are_on_logarithmic_axes_and_few_of_many_variants_are_drawn() -> None:
    _, layout = drawn(figures.speed_up, comparison(("allreduce",), (2, 64)))
    assert layout["xaxis"]["type"] == layout["yaxis"]["type"] == "log"
    assert layout["annotations"][0]["y"] < 1  # the level of solo, as an exponent
    made = comparison(tuple(f"local-sgd:period={i}" for i in range(1, 31)), (2,))
    assert len(lines(drawn(metric_over_time, made)[0])) == measures.MOST_DRAWN


@pytest.mark.parametrize("draw", ALL, ids=lambda draw: draw.__name__)
def test_every_chart_has_known_colours_and_names_as_text_only_and_nothing_measured_is_none(draw: Any) -> None:
    """plotly takes `<a>` and entities in texts, and `%{…}` in templates."""
    traces, layout = drawn(draw, comparison())
    assert traces
    assert layout["height"] > 100
    used = {text for text in texts((traces, layout)) if text.startswith(("#", "rgb"))}
    assert used <= set(drawing.dark_colours())
    found = texts(drawn(draw, hostile()))
    assert not [one for one in found if "<a" in one or "<img" in one or one in ("hovertemplate", "texttemplate")]
    assert any(drawing.text(HOSTILE)[:9] in output for output in found)  # it is there, but for its tags
    for changes in ({"trials": ()}, {"variants": (), "trials": ()}):
        assert draw(replace(comparison(), **changes)) is None


def texts(value: Any) -> list[str]:
    """All strings in it, keys included."""
    if isinstance(value, dict):
        return [*value, *(text for one in value.values() for text in texts(one))]
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def test_long_names_lose_their_middle_only() -> None:
    name = "diloco:period=16,outer_momentum=0.9,compress=topk:0.01 on 64"
    short = drawing.label(name)
    assert len(short) == drawing.LABEL
    assert short.startswith("diloco:period=16")
    assert short.endswith(" on 64")
    assert drawing.label("allreduce on 2") == "allreduce on 2"
