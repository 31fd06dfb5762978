"""The charts: what is drawn, where, in which colours, and that names are only text."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from synthetic import HOSTILE, SPECS, changed, comparison, hostile

from manyhands.evidence.compare import bars, drawing, figures
from manyhands.evidence.compare.comparison import Comparison, Point, Target, Trial, Variant

Draw = Callable[[Comparison], Any]


def along(draw: Callable[[Comparison, str], Any], x: str) -> Draw:
    return lambda made: draw(made, x)


metric_over_time, metric_over_rows = (along(figures.metric, x) for x in ("seconds", "rows"))
distance_over_time, distance_over_rows = (along(figures.distance, x) for x in ("seconds", "rows"))
ALL = {
    "metric": metric_over_time,
    "distance": distance_over_rows,
    "speed_up": figures.speed_up,
    **{draw.__name__: draw for draw in (bars.time_split, bars.staleness, bars.bytes_sent, bars.memory)},
}
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


def test_lines_are_means_and_bands_go_from_the_least_to_the_most_and_back() -> None:
    over_time = lines(drawn(metric_over_time, two(CURVES))[0])
    assert list(over_time["solo"]["x"]) == pytest.approx([2.0, 3.0])
    assert list(over_time["solo"]["y"]) == pytest.approx([0.3, 0.7])
    over_rows = lines(drawn(metric_over_rows, two(CURVES))[0])
    assert list(over_rows["solo"]["x"]) == [10, 20]
    assert list(over_rows["allreduce on 2"]["y"]) == pytest.approx([0.2, 0.5])
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


def test_speed_up_has_a_line_a_strategy_and_the_ideal_counts_threads_of_workers() -> None:
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
    first, *others = (one for one in made.trials if one.variant != "solo")
    own = drawn(figures.speed_up, replace(made, trials=(*made.of("solo"), replace(first, rows_per_s=200.0), *others)))[
        0
    ][1]
    middle = own["y"][0]
    assert middle == pytest.approx(math.sqrt(6))
    assert middle + own["error_y"]["array"][0] == pytest.approx(3)
    assert middle - own["error_y"]["arrayminus"][0] == pytest.approx(2)


def test_every_chart_has_known_colours_and_names_as_text_only_and_nothing_measured_is_none() -> None:
    """plotly takes `<a>` and entities in texts, and `%{…}` in templates."""
    for name, draw in ALL.items():
        traces, layout = drawn(draw, comparison())
        assert traces, name
        assert layout["height"] > 100
        used = {text for text in texts((traces, layout)) if text.startswith(("#", "rgb"))}
        assert used <= set(drawing.dark_colours()), name
        found = texts(drawn(draw, hostile()))
        assert not [one for one in found if "<a" in one or "<img" in one or one in ("hovertemplate", "texttemplate")]
        assert any(drawing.text(HOSTILE)[:9] in output for output in found), name  # it is there, but for its tags
        for changes in ({"trials": ()}, {"variants": (), "trials": ()}):
            assert draw(replace(comparison(), **changes)) is None, name


def texts(value: Any) -> list[str]:
    """All strings in it, keys included."""
    if isinstance(value, dict):
        return [*value, *(text for one in value.values() for text in texts(one))]
    if isinstance(value, list | tuple):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def times(**parts: float) -> dict[str, float]:
    return {"input": 0.0, "compute": 0.0, "exchange": 0.0, "wait": 0.0} | parts


def labels(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """[(name, what is said of it)]"""
    output = [one["text"] for one in layout["annotations"]]
    return list(zip(output[::2], output[1::2], strict=True))


def test_times_are_shares_of_each_worker_stacked_from_compute_to_wait() -> None:
    both = times(compute=3.0, wait=1.0), times(compute=1.0, exchange=2.0, input=1.0)
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", timing=both)
    traces, layout = drawn(bars.time_split, made)
    assert [trace["name"] for trace in traces] == ["compute", "input", "exchange", "wait"]
    of_two = {trace["name"]: list(trace["x"])[-2:] for trace in traces}
    assert of_two == {"compute": [0.75, 0.25], "input": [0, 0.25], "exchange": [0, 0.5], "wait": [0.25, 0]}
    assert labels(layout)[-1] == ("allreduce on 2", "4.00 s, 50 % compute")
    assert "worker 1<br>exchange 2.00 s, 50 %" in traces[2]["hovertext"][-1]


def test_of_many_workers_those_from_the_least_to_the_most_compute_are_drawn() -> None:
    workers = [times(compute=float((7 * rank) % 64), wait=1.0) for rank in range(64)]
    ranks = bars.picked(workers, 3)
    computed = [workers[rank]["compute"] for rank in ranks]
    assert len(ranks) == bars.MOST_WORKERS == 8
    assert computed == sorted(computed)
    assert (computed[0], computed[-1]) == (0, 63)
    assert bars.picked(workers[:8], 3) == list(range(8))
    assert [bars.room(variants) for variants in (0, 1, 6, 12, 48)] == [8, 8, 8, 4, 2]


def test_bytes_and_the_largest_workers_memory_are_bars_with_their_size_beside_the_name() -> None:
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", bytes=61_200_000)
    traces, layout = drawn(bars.bytes_sent, made)
    assert list(traces[0]["x"]) == [0, 0, 61_200_000]
    assert labels(layout) == [("solo, 1 thread", "0 B"), ("solo, 4 threads", "0 B"), ("allreduce on 2", "61.2 MB")]
    assert list(traces[0]["marker"]["color"]) == [one.colour for one in drawing.styles_of(made).values()]
    assert bars.bytes_sent(comparison((), ())) is None
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", memory=(100_000_000, 300_000_000))
    made = changed(made, "solo, 1 thread", memory=())
    traces, layout = drawn(bars.memory, made)
    assert list(traces[0]["x"])[-1] == 300_000_000
    assert labels(layout)[-1] == ("allreduce on 2", "300.0 MB × 2")
    assert [name for name, _ in labels(layout)] == ["solo, 4 threads", "allreduce on 2"]


def test_staleness_is_in_shares_a_row_for_each_variant_that_has_any_and_a_long_tail_is_binned() -> None:
    made = comparison(("allreduce", "downpour", "dynsgd"), (2,))
    made = changed(made, "downpour on 2", staleness={0: 3, 2: 1})
    made = changed(made, "dynsgd on 2", staleness={1: 5})
    traces, layout = drawn(bars.staleness, made)
    assert [(list(one["x"]), list(one["y"])) for one in traces] == [([0, 2], [0.75, 0.25]), ([1], [1.0])]
    assert labels(layout) == [("downpour on 2", "median 0, latest 2"), ("dynsgd on 2", "median 1, latest 1")]
    made = changed(comparison(("downpour",), (2,)), "downpour on 2", staleness={0: 1, 1: 1, 399: 2})
    traces, _ = drawn(bars.staleness, made)
    assert traces[0]["width"] == pytest.approx(9)
    assert [(x, y) for x, y in zip(traces[0]["x"], traces[0]["y"], strict=True)] == [(4.5, 0.5), (394.5, 0.5)]
    assert "50 % of the pushes are 390–399 versions late" in traces[0]["hovertext"][1]


def test_each_of_many_variants_has_a_look_of_its_own_whose_hue_is_the_strategys() -> None:
    made = comparison(tuple(f"local-sgd:period={i}" for i in range(1, 11)), (1, 2, 4))
    found = drawing.styles_of(made)
    assert len({(one.colour, one.dash, one.symbol) for one in found.values()}) == len(made.variants) == 32
    found = drawing.styles_of(comparison(SPECS, (2, 4)))
    own, more, other = (found[name] for name in ("allreduce on 2", "allreduce on 4", "gossip:graph=exponential on 2"))
    assert own.colour == more.colour != other.colour
    assert own.dash != more.dash
    assert {look for one in found.values() for look in (one.colour, one.band)} <= set(drawing.dark_colours())
