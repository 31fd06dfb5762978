"""The charts with lines: the metric and the distance from solo over a run, and speed-up against workers.

Each is a pure function from a comparison to a plotly figure, or None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from manyhands import units
from manyhands.evidence.compare import drawing, measures
from manyhands.evidence.compare.comparison import Comparison, Point, Variant
from manyhands.evidence.compare.drawing import HEIGHT, Json
from manyhands.evidence.compare.measures import Course
from manyhands.evidence.compare.significance import Mean

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Over = Literal["seconds", "rows"]  # of training, until a validation
DECADES = 30  # a metric to be low is drawn on a logarithmic axis where its largest value is so many times the least
EARLY = 12  # the last line ends so many times as late as the first: time is drawn on a logarithmic axis
MARKED = 30  # validations of a line; with more they have no markers
MANY = 8  # workers; with more both axes of the speed-up are logarithmic
ASIDE = 0.012  # of the place of a point, from one strategy to the next


# -- over a run ----------------------------------------------------------------------------------------------------------------


def metric(comparison: Comparison, over: Over) -> Figure | None:
    """Means of the judged metric, in a band from the least to the most of the repeats."""
    name, target = measures.curve_metric(comparison), comparison.target
    lines = _lines(
        comparison, lambda point: point.metrics.get(name), over, lambda value: f"{name} {units.metric(value)}"
    )
    if not lines:
        return None
    level = target.value if target is not None and target.metric == name else None
    values = [value for trace in lines for value in trace["y"] if value is not None]
    log = (
        not comparison.higher
        and min(values) > 0
        and max(values) > DECADES * min(values)
        and (level is None or level > 0)
    )
    y: Json = {"title": {"text": drawing.text(name)}} | ({"type": "log", "dtick": 1} if log else {})
    layout = {"xaxis": _from_zero(comparison, over, lines), "yaxis": y, "height": HEIGHT}
    if level is not None:  # what it says stands where no line ends: most end beyond it
        layout |= drawing.level(level, str(target), side="right", over=not comparison.higher, log=log)
    return drawing.figure(lines, layout)


def distance(comparison: Comparison, over: Over) -> Figure | None:
    """Distance of the parameters from solo's at the same rows, on a logarithmic axis; None also where all are zero."""
    lines = _lines(
        comparison,
        lambda point: point.distance,
        over,
        lambda value: f"distance {units.small(value)}",
        of_reference=False,
    )
    values = [value for trace in lines for value in trace["y"] if value is not None]
    positive = [value for value in values if value > 0]
    if not positive:
        return None
    zeros = len(positive) < len(values)
    least, most = math.floor(math.log10(min(positive))) - zeros, math.ceil(math.log10(max(positive)))
    for trace in lines:
        trace["y"] = [None if value is None else max(value, 10.0**least) for value in trace["y"]]
    y: Json = {"type": "log", "title": {"text": "distance from solo"}} | _powers(least, most, zeros)
    return drawing.figure(lines, {"xaxis": _from_zero(comparison, over, lines), "yaxis": y, "height": HEIGHT})


def _from_zero(comparison: Comparison, over: Over, lines: Sequence[Json]) -> Json:
    """An axis from 0; a logarithmic one where a line ends so early that nobody would see it."""
    time = f"{'virtual ' if comparison.simulated else ''}seconds of training"
    title = {"title": {"text": time if over == "seconds" else "rows, of all workers"}}
    ends = [trace["x"][-1] for trace in lines if trace.get("showlegend") is not False]
    first = min(trace["x"][0] for trace in lines)
    if first <= 0 or max(ends) <= EARLY * min(ends):
        return title | {"rangemode": "tozero"}
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(max(ends))) + 1)
    steps = (1, 2, 5) if len(decades) <= 3 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return title | {"type": "log", "tickvals": ticks, "ticktext": [units.number(tick) for tick in ticks]}


def _powers(least: int, most: int, zeros: bool) -> Json:
    """At most seven ticks of a logarithmic axis; with `zeros` the least power stands for zero."""
    every = max(1, math.ceil((most - least) / 6))
    powers = [power for power in range(most, least - 1, -every) if not zeros or power > least]
    ticks = [(power, units.power(power)) for power in powers] + ([(least, "0")] if zeros else [])
    return {
        "tickvals": [10.0**power for power, _ in ticks],
        "ticktext": [label for _, label in ticks],
        "range": [least - 0.15, most + 0.15],
    }


def _lines(
    comparison: Comparison,
    of: Callable[[Point], float | None],
    over: Over,
    say: Callable[[float], str],
    of_reference: bool = True,
) -> list[Json]:
    """Bands first, so that no line is under one."""
    bands, lines, own_styles = [], [], drawing.styles_of(comparison)
    for variant in measures.drawn(comparison):
        course = measures.course(comparison, variant.name, of)
        if course is None or not (of_reference or variant.name != comparison.reference):
            continue
        own = {"name": drawing.text(variant.name), "legendgroup": str(comparison.variants.index(variant))}
        variant_style, x = own_styles[variant.name], course.seconds if over == "seconds" else course.rows
        bands += _band(course, x, own, variant_style)
        lines.append(_line(course, x, own, variant_style, say))
    return bands + lines


def _line(
    course: Course, x: Sequence[float], own: Json, variant_style: drawing.VariantStyle, say: Callable[[float], str]
) -> Json:
    return own | {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= MARKED else "lines",
        "x": list(x),
        "y": [None if value is None else value.middle for value in course.values],
        "line": {"color": variant_style.colour, "dash": variant_style.dash, "width": variant_style.width},
        "marker": {"symbol": variant_style.symbol, "size": 6, "color": variant_style.colour},
        "hovertext": [
            f"<b>{own['name']}</b><br>{drawing.text(drawing.text_of_mean(value, say))}<br>{units.even_duration(seconds)}, {units.number(rows)} rows"
            for value, seconds, rows in zip(course.values, course.seconds, course.rows, strict=True)
        ],
        "hoverinfo": "text",
    }


def _band(course: Course, x: Sequence[float], own: Json, variant_style: drawing.VariantStyle) -> list[Json]:
    """From the least to the most of the repeats, there and back; none where all repeats are alike."""
    known = [(at, value) for at, value in zip(x, course.values, strict=True) if value is not None]
    if all(value.low == value.high for _, value in known):
        return []
    there, back = [(at, one.high) for at, one in known], [(at, one.low) for at, one in reversed(known)]
    outline = {"x": [at for at, _ in there + back], "y": [value for _, value in there + back]}
    area = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": variant_style.band}
    return [own | outline | area | {"showlegend": False, "hoverinfo": "skip"}]


# -- speed-up ------------------------------------------------------------------------------------------------------------------


def speed_up(comparison: Comparison) -> Figure | None:
    """Speed-up against solo with one thread, by workers: a line a strategy, and the ideal, which is as many times as
    fast as it has threads more."""
    base = next(iter(comparison.solos), None)
    if base is None:
        return None
    found = _of_strategies(comparison, lambda variant: measures.speed_up(comparison, variant.name, base.name))
    if not found:
        return None
    variants = [variant for points in found.values() for variant, _ in points]
    counts = sorted({1, *(variant.workers for variant in variants)})
    log = counts[-1] > MANY
    kind: Json = {"type": "log"} if log else {"rangemode": "tozero"}
    ticks = {"tickvals": counts, "ticktext": [str(one) for one in counts]}
    x: Json = {"type": "log"} if log else {"range": [counts[0] - 0.06 * counts[-1], 1.06 * counts[-1]]}
    x |= ticks | {"title": {"text": "workers"}}
    y = (
        kind
        | (ticks if log else {})
        | {"title": {"text": f"times as fast as {drawing.text(drawing.label(base.name))}"}}
    )
    traces = [_ideal(comparison, variants)]
    traces += [_strategy(comparison, points, i - (len(found) - 1) / 2) for i, points in enumerate(found.values())]
    layout: Json = {"xaxis": x, "yaxis": y, "height": HEIGHT}
    threads = measures.speed_up(comparison, comparison.reference, base.name)
    if threads is not None and comparison.reference != base.name:
        layout |= drawing.level(threads.middle, comparison.reference, colour=drawing.INK[0], log=log)
    return drawing.figure(traces, layout)


def time_to_target(comparison: Comparison) -> Figure | None:
    """Seconds of training until the target, by workers: a line a strategy, from solo with one thread on; and the ideal, which
    is solo's time divided by workers and threads. None without a target, and with one number of workers alone."""
    base = next(iter(comparison.solos), None)
    alone = None if base is None else _reached(comparison, base)
    found = _of_strategies(comparison, lambda variant: _reached(comparison, variant))
    variants = [variant for points in found.values() for variant, _ in points]
    counts = sorted({1, *(variant.workers for variant in variants)})
    if comparison.target is None or base is None or len(counts) < 3:
        return None
    x: Json = {
        "title": {"text": "workers"},
        "type": "log",
        "tickvals": counts,
        "ticktext": [str(one) for one in counts],
    }
    time = f"{'virtual ' if comparison.simulated else ''}seconds until {comparison.target}"
    say = units.even_duration
    traces = [_strategy(comparison, points, i - (len(found) - 1) / 2, say) for i, points in enumerate(found.values())]
    layout: Json = {
        "xaxis": x,
        "yaxis": {"title": {"text": drawing.text(time)}, "type": "log", "dtick": "D2"},
        "height": HEIGHT,
    }
    if alone is not None:
        traces = [_ideal(comparison, variants, lambda times: alone.middle / times, say), *traces]
        layout |= drawing.level(alone.middle, base.name, colour=drawing.INK[0], log=True)
    return drawing.figure(traces, layout)


def _reached(comparison: Comparison, variant: Variant) -> Mean | None:
    """Seconds until the target, of a variant that reaches it in every repeat."""
    found = measures.mean_of(comparison, variant.name, "target_seconds")
    return None if found is None or found.missing else found


def _of_strategies(
    comparison: Comparison, spread_of: Callable[[Variant], Mean | None]
) -> dict[str, list[tuple[Variant, Mean]]]:
    """{strategy: its variants by workers, and their number}, of the strategies of which any variant is drawn."""
    drawn = {variant.strategy for variant in measures.drawn(comparison) if not variant.solo}
    found: dict[str, list[tuple[Variant, Mean]]] = {}
    for variant in sorted(comparison.variants, key=lambda one: (one.workers, one.threads)):
        spread = spread_of(variant)
        if variant.strategy in drawn and spread is not None:
            found.setdefault(variant.strategy, []).append((variant, spread))
    return found


def _ideal(
    comparison: Comparison,
    variants: Sequence[Variant],
    of: Callable[[float], float] = float,
    say: Callable[[float], str] = units.times,
) -> Json:
    """of: what is drawn of a speed-up."""
    most: dict[int, float] = {}
    for variant in variants:
        most[variant.workers] = max(most.get(variant.workers, 0.0), measures.ideal(comparison, variant))
    if len({variant.threads for variant in variants}) == 1:  # a straight line, which begins at one worker
        most[1] = measures.ideal(comparison, variants[0]) / variants[0].workers
    points = sorted(most.items())
    return {
        "type": "scatter",
        "mode": "lines+text" if len(points) > 1 else "markers+text",
        "name": "ideal",
        "showlegend": False,
        "x": [workers for workers, _ in points],
        "y": [of(times) for _, times in points],
        "text": [""] * (len(points) - 1) + ["ideal"],
        "textposition": "top left" if of(points[0][1]) <= of(points[-1][1]) else "bottom left",  # beside the line's end
        "cliponaxis": False,
        "textfont": {"color": drawing.MUTED[0]},
        "line": {"color": drawing.MUTED[0], "dash": "dash", "width": 1.5},
        "marker": {"color": drawing.MUTED[0], "symbol": "diamond-open", "size": 9},
        "hovertext": [f"ideal on {workers}: {say(of(times))}" for workers, times in points],
        "hoverinfo": "text",
    }


def _strategy(
    comparison: Comparison,
    points: Sequence[tuple[Variant, Mean]],
    place: float,
    say: Callable[[float], str] = units.times,
) -> Json:
    """`place` among the strategies, 0 in the middle: points of the same workers stand a little beside each other."""
    own = [drawing.styles_of(comparison)[variant.name] for variant, _ in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": drawing.text(points[0][0].strategy),
        "x": [variant.workers * (1 + ASIDE * place) for variant, _ in points],
        "y": [spread.middle for _, spread in points],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [spread.high - spread.middle for _, spread in points],
            "arrayminus": [spread.middle - spread.low for _, spread in points],
            "color": own[0].colour,
            "thickness": 1.2,
            "width": 3,
        },
        "line": {"color": own[0].colour, "width": own[0].width},
        "marker": {"symbol": [one.symbol for one in own], "size": 8, "color": own[0].colour},
        "hovertext": [
            f"<b>{drawing.text(variant.name)}</b><br>{drawing.text_of_mean(spread, say)}" for variant, spread in points
        ],
        "hoverinfo": "text",
    }
