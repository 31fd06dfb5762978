"""The charts of the report: each a question, the sentence that answers it, and the figure."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.evidence.compare import bars, captions, figures, measures, style
from manyhands.evidence.compare.comparison import Comparison

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Draw = Callable[[Comparison], "Figure | None"]
Read = Callable[[Comparison], str]


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """An entry of a legend: a line's style and its name."""

    name: str
    variant_style: style.VariantStyle
    group: str = ""
    """The `legendgroup` of the traces that it shows and hides; "": it does not."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A question, the sentence that answers it from the data, and the figure that shows it."""

    name: str
    question: str
    reading: str
    figure: Mapping[str, Any] | None
    """As plotly.js takes it, without plotly's own legend; None where a sentence says it all."""
    legend: tuple[LegendEntry, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    """{part of the time: colour}, a legend too."""


def charts(comparison: Comparison) -> list[tuple[Chart, ...]]:
    """Alone, or two beside each other that share a legend: those that have something to show, and a caption in place of the
    distance where every variant is bit-equal to solo."""
    best, metric = "highest" if comparison.higher else "lowest", measures.curve_metric(comparison)
    parts = {part: style.PART_HUES[part][0] for part in bars.ORDER}

    def chart(draw: Draw, read: Read, question: str, **more: Any) -> Chart:
        figure, reading = draw(comparison), read(comparison)
        if figure is None:
            return Chart(name=draw.__name__, question=question, reading=reading, figure=None)
        page = json.loads(figure.update_layout(showlegend=False).to_json())
        return Chart(
            name=draw.__name__, question=question, reading=reading, figure=page, legend=_legend(figure), **more
        )

    groups = (
        (
            chart(
                figures.metric_over_time, captions.metric_over_time, f"Who has the {best} {metric} after the same time?"
            ),
            chart(figures.metric_over_rows, captions.metric_over_rows, "Who learns most from the same rows?"),
        ),
        (chart(bars.time_split, captions.time_split, "Where does the time of each worker go?", parts=parts),),
        (chart(figures.speed_up, captions.speed_up, "How much faster do more workers make it?"),),
        (
            chart(figures.distance_over_rows, captions.distance_over_rows, "How far from solo do they end up?"),
            chart(figures.distance_over_time, captions.distance_over_time, "Do they come back to solo?"),
        ),
        (chart(bars.staleness, captions.staleness, "How late are the updates that reach the server?"),),
        (
            chart(bars.bytes_sent, captions.bytes_sent, "How much is sent?"),
            chart(bars.memory, captions.memory, "How much memory does a worker need?"),
        ),
    )
    measured = [
        tuple(one for one in group if one.figure or (one.name == "distance_over_rows" and one.reading))
        for group in groups
    ]
    return [group for group in measured if group]


def left_out(comparison: Comparison) -> str:
    """Which variants and workers the charts do not show, or ""."""
    shown = measures.drawn(comparison)
    missing = [one.name for one in comparison.variants if comparison.of(one.name) and one not in shown]
    parts = []
    if missing:
        by = f"soonest at {comparison.target}" if comparison.target else f"best in {comparison.metric}"
        parts.append(
            f"The charts show solo and the {sum(not one.solo for one in shown)} others that were {by}, not {units.named(missing)}; the table has all."
        )
    most = max((len(measures.times_of_workers(comparison, one.name)) for one in shown), default=0)
    if most > bars.room(len(shown)):
        parts.append(
            f"Of many workers, at most {bars.room(len(shown))} a variant are drawn, from the one that computed least to the one that computed most."
        )
    return " ".join(parts)


# -- legends ----------------------------------------------------------------------------------------------------------------


def _legend(figure: Figure) -> tuple[LegendEntry, ...]:
    """Of the lines of a figure, in its order; () of one without lines."""
    lines = [trace for trace in figure.data if trace.type == "scatter" and trace.showlegend is not False]
    return tuple(
        LegendEntry(name=html.unescape(line.name), variant_style=_look(line), group=line.legendgroup or "")
        for line in lines
    )


def _look(line: Any) -> style.VariantStyle:
    """Without a symbol where it says how many workers, which then differ along the line."""
    symbol = line.marker.symbol if isinstance(line.marker.symbol, str) else ""
    return style.VariantStyle(
        colour=line.line.color, dash=line.line.dash or "solid", symbol=symbol, width=line.line.width
    )
