"""The charts whose rows are variants: where time goes, what is sent and held, how late pushes are.

Each is a pure function from a comparison to a plotly figure, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from manyhands import units
from manyhands.evidence.compare import drawing, measures
from manyhands.evidence.compare.comparison import Comparison, Variant
from manyhands.evidence.compare.drawing import Json
from manyhands.evidence.compare.significance import Mean
from manyhands.server.staleness import quantile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ORDER = ("compute", "input", "exchange", "wait")  # what is lost stands at the end
MOST_BARS = 48  # workers of all variants in a chart
MOST_WORKERS = 8  # of one variant
WHOLE_TICKS = 10  # up to so many versions late each has its tick, and none has a half
MOST_BINS = 40  # of a histogram
SHORT = 32  # characters of a name beside much else
ROW = 46  # pixels of a bar with its name above it


# -- time, bytes, memory -----------------------------------------------------------------------------------------------------


def time_split(comparison: Comparison) -> Figure | None:
    """Shares of each worker's time, by what it did in it: compute, input, exchange, wait; of means over repeats."""
    found = {one: measures.times_of_workers(comparison, one.name) for one in measures.drawn(comparison)}
    found = {one: workers for one, workers in found.items() if any(sum(times.values()) for times in workers)}
    if not found:
        return None
    bars: list[Bar] = []
    labels: list[Json] = []
    at = 0.0
    for variant, workers in found.items():
        mean = sum(sum(times.values()) for times in workers) / len(workers)
        share = measures.shares_of_time(comparison, variant.name)["compute"]
        label = f"{units.even_duration(mean)}, {units.percent(share)} compute"
        labels += drawing.above(at - 0.5, drawing.label(variant.name, SHORT), label)
        for rank in picked(workers, len(found)):
            bars.append(Bar(at, variant.name, rank, workers[rank]))
            at += 1
        at += 2
    y = {"range": [at - 1.5, -2], "tickvals": [bar.at for bar in bars], "ticktext": [str(bar.rank) for bar in bars]}
    y |= {"showgrid": False, "tickfont": {"size": 10}}
    x = {"title": {"text": "share of the worker's time"}, "range": [0, 1], "tickformat": ".0%"}
    layout = {"barmode": "stack", "bargap": 0.15, "xaxis": x, "yaxis": y, "annotations": labels}
    margin = {"l": 26, "t": 4, "r": 14}
    return drawing.figure([_part(part, bars) for part in ORDER], layout | {"height": 90 + 17 * at, "margin": margin})


class Bar(NamedTuple):
    """A worker in the chart of times."""

    at: float
    variant: str
    rank: int
    times: Mapping[str, float]


def picked(workers: Sequence[Mapping[str, float]], variants: int) -> list[int]:
    """The ranks of a variant that are drawn: all, or as many as fit, from the least to the most compute."""
    places = room(variants)
    if len(workers) <= places:
        return list(range(len(workers)))
    by_compute = sorted(range(len(workers)), key=lambda rank: workers[rank]["compute"])
    return [by_compute[round(i * (len(workers) - 1) / (places - 1))] for i in range(places)]


def room(variants: int) -> int:
    """How many workers of each of so many variants have a bar of their own."""
    return min(MOST_WORKERS, max(2, MOST_BARS // max(1, variants)))


def _part(part: str, bars: Sequence[Bar]) -> Json:
    shares = [bar.times[part] / (sum(bar.times.values()) or 1.0) for bar in bars]
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": shares,
        "y": [bar.at for bar in bars],
        "marker": {"color": drawing.PART_HUES[part][0], "line": {"width": 0}},
        "hovertext": [
            f"<b>{drawing.text(bar.variant)}</b>, worker {bar.rank}<br>{part} {units.even_duration(bar.times[part])}, {units.percent(share)}"
            for bar, share in zip(bars, shares, strict=True)
        ],
        "hoverinfo": "text",
    }


def bytes_sent(comparison: Comparison) -> Figure | None:
    """Bytes that all workers of a variant sent, means."""
    sent = {one: measures.mean_of(comparison, one.name, "bytes") for one in measures.drawn(comparison)}
    if not any(found and found.high for found in sent.values()):
        return None
    return _bars(comparison, sent, lambda _, found: drawing.text_of_mean(found, units.size))


def memory(comparison: Comparison) -> Figure | None:
    """The most that any one worker held, means."""

    def say(variant: Variant, found: Mean) -> str:
        return units.size(found.middle) + (f" × {variant.workers}" if variant.workers > 1 else "")

    held = {one: measures.mean_of(comparison, one.name, "most_memory") for one in measures.drawn(comparison)}
    return _bars(comparison, held, say)


def _bars(
    comparison: Comparison, found: Mapping[Variant, Mean | None], say: Callable[[Variant, Mean], str]
) -> Figure | None:
    known = [(variant, value) for variant, value in found.items() if value is not None]
    if not known:
        return None
    labels = [
        one
        for at, (variant, value) in enumerate(known)
        for one in drawing.above(at - 0.22, variant.name, say(variant, value))
    ]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [value.middle for _, value in known],
        "y": list(range(len(known))),
        "width": 0.34,
        "marker": {
            "color": [drawing.styles_of(comparison)[variant.name].colour for variant, _ in known],
            "line": {"width": 0},
        },
        "hovertext": [f"<b>{drawing.text(variant.name)}</b><br>{say(variant, value)}" for variant, value in known],
        "hoverinfo": "text",
    }
    y = {"range": [len(known) - 0.6, -0.85], "visible": False}
    layout = {"xaxis": {"visible": False, "rangemode": "tozero"}, "yaxis": y, "annotations": labels}
    return drawing.figure([trace], layout | {"height": ROW * len(known) + 16, "margin": {"l": 0, "t": 0, "b": 0}})


# -- staleness -----------------------------------------------------------------------------------------------------------------


def staleness(comparison: Comparison) -> Figure | None:
    """Staleness of pushes as shares of all pushes: one histogram a variant, on one axis."""
    found = {one: measures.staleness(comparison, one.name) for one in measures.drawn(comparison)}
    found = {one: histogram for one, histogram in found.items() if histogram}
    if not found:
        return None
    width = -(-(max(max(histogram) for histogram in found.values()) + 1) // MOST_BINS)
    most = max(max(_binned(histogram, width).values()) for histogram in found.values())
    traces, labels, axes = [], [], {}
    for i, (variant, histogram) in enumerate(found.items()):
        name = "" if i == 0 else str(i + 1)
        traces.append(_histogram(comparison, variant, histogram, width) | {"yaxis": f"y{name}"})
        top = 1 - i / len(found)
        axes[f"yaxis{name}"] = {
            "domain": [top - 0.68 / len(found), top - 0.22 / len(found)],
            "range": [0, most],
            "visible": False,
        }
        lateness = f"median {quantile(histogram, 0.5)}, latest {max(histogram)}"
        above = drawing.above(top - 0.2 / len(found), variant.name, lateness)
        labels += [one | {"yref": "paper"} for one in above]
    x = {
        "title": {"text": "versions late"},
        "anchor": axes and f"y{len(found) if len(found) > 1 else ''}",
        "rangemode": "tozero",
        **({"dtick": 1} if max(map(max, found.values())) <= WHOLE_TICKS else {}),
    }
    height = 84 * len(found) + 50
    return drawing.figure(
        traces, {"xaxis": x, **axes, "annotations": labels, "height": height, "margin": {"l": 4, "t": 0}, "bargap": 0.1}
    )


def _binned(histogram: Mapping[int, int], width: int) -> dict[int, float]:
    """{first staleness of a bin: share of the pushes}"""
    total = sum(histogram.values())
    shares: dict[int, float] = {}
    for versions, pushes in histogram.items():
        start = versions // width * width
        shares[start] = shares.get(start, 0.0) + pushes / total
    return shares


def _histogram(comparison: Comparison, variant: Variant, histogram: Mapping[int, int], width: int) -> Json:
    bins = _binned(histogram, width)
    spans = [str(start) if width == 1 else f"{start}–{start + width - 1}" for start in bins]
    return {
        "type": "bar",
        "x": [start + (width - 1) / 2 for start in bins],
        "y": list(bins.values()),
        "width": 0.9 * width,
        "marker": {"color": drawing.styles_of(comparison)[variant.name].colour, "line": {"width": 0}},
        "hovertext": [
            f"<b>{drawing.text(variant.name)}</b><br>{units.percent(share)} of the pushes are {span} "
            f"version{'' if span == '1' else 's'} late"
            for span, share in zip(spans, bins.values(), strict=True)
        ],
        "hoverinfo": "text",
    }
