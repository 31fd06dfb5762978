"""What the charts of a comparison share: axes, labels, the escaping of names, the one place that makes a plotly figure.

They read on a phone and on white or black: names stand above bars, colours are those of style.py, texts are precomputed
and escaped, because plotly takes a part of HTML and templates in them. Lines of a variant share its place as
`legendgroup`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.evidence.compare import style
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.significance import Mean

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HEIGHT = 360  # pixels
LABEL = 40  # characters of a name

Json = dict[str, Any]


def text(name: str) -> str:
    """A user's string in a chart: none of it is a tag or an entity to plotly."""
    return html.escape(name, quote=False)


def figure(traces: Sequence[Json], layout: Json) -> Figure:
    from plotly.graph_objects import Figure

    axis = {"automargin": True, "zeroline": False, "fixedrange": False}
    axes = {name: axis | given for name, given in layout.items() if name.startswith(("xaxis", "yaxis"))}
    margin = {"l": 8, "r": 8, "t": 12, "b": 8} | layout.get("margin", {})
    common = {"template": {}, "showlegend": True, "hovermode": "closest", "autosize": True}
    return Figure(data=list(traces), layout=common | layout | axes | {"margin": margin})


def seconds_axis(comparison: Comparison) -> Json:
    return {"title": {"text": f"{'virtual ' if comparison.simulated else ''}seconds of training"}}


def text_of_mean(found: Mean | None, say: Callable[[float], str]) -> str:
    """`0.97 (0.96–0.98)`"""
    if found is None:
        return units.NOT_FINITE
    between = units.between(found.low, found.high, say)
    return say(found.middle) + (f" ({between})" if between else "")


def label(name: str, most: int = LABEL) -> str:
    """A name short enough for a chart on a phone: the middle is cut, the end says how many workers."""
    if len(name) <= most:
        return name
    tail = most // 3
    return f"{name[: most - tail - 1]}…{name[-tail:]}"


def above(at: float, name: str, value: str) -> list[Json]:
    """The line above a bar: whose it is at the left, how much at the right."""
    line = {"xref": "paper", "yref": "y", "y": at, "yanchor": "bottom", "showarrow": False, "borderpad": 0}
    left = line | {"x": 0, "xanchor": "left", "text": text(label(name))}
    return [left, line | {"x": 1, "xanchor": "right", "text": value}]


def level(
    value: float, name: str, *, colour: str = style.MUTED[0], side: str = "left", over: bool = True, log: bool = False
) -> Json:
    """A line across the chart with its text at the left or right, above or below; `log`: a logarithmic axis."""
    shape = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": colour, "width": 1.2, "dash": "dot"},
    }
    words = {
        "xref": "paper",
        "x": 0 if side == "left" else 1,
        "xanchor": side,
        "y": math.log10(value) if log else value,
        "yanchor": "bottom" if over else "top",
        "showarrow": False,
        "text": text(label(name)),
        "font": {"color": colour},
    }
    return {"shapes": [shape], "annotations": [words]}
