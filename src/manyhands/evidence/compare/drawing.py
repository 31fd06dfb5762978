"""How charts are drawn: colours, dashes, symbols, axes, labels, escaped names; the one place that makes a plotly figure.

They read on a phone and on white or black: names stand above bars, a variant looks the same in the legend, the table
and every chart, texts are precomputed and escaped, because plotly takes a part of HTML and templates in them. Lines of
a variant share its place as `legendgroup`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.significance import Mean

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HEIGHT = 360  # pixels
LABEL = 40  # characters of a name

Json = dict[str, Any]

# As (on white, on black). Found by a search that keeps all of them, and solo's ink, apart for people who see all
# colours, no red, no green or no blue; test_style.py measures by how much, and the contrast with the page.
INK = ("#1b1f24", "#e9ecef")  # solo
HUES = (
    ("#0c4b85", "#5b84c0"),
    ("#f0791c", "#f48b5d"),
    ("#197f4f", "#41c98e"),
    ("#736ed9", "#ae8df5"),
    ("#806201", "#b58a21"),
    ("#4ca1d9", "#8dc3f0"),
    ("#af5e87", "#e89abf"),
    ("#929e51", "#f3e38f"),
)
PART_HUES = {  # of a worker's time
    "input": ("#199ec1", "#51c5dd"),
    "compute": ("#9ea09d", "#8a8d90"),
    "exchange": ("#da8506", "#f2a33b"),
    "wait": ("#9d3b79", "#b72e50"),
}
MUTED = ("#6b7580", "#98a2ad")  # ideals and targets
DASHES = {  # plotly's name of a dash: the lengths that SVG takes
    "solid": "",
    "dash": "5 3",
    "dot": "1.5 2.5",
    "dashdot": "5 2 1.5 2",
    "longdash": "8 3",
    "longdashdot": "8 2 1.5 2",
}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
BAND = 0.16  # opacity of what the repeats lie between


# -- what a variant looks like ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VariantStyle:
    """How a variant is drawn: the hue says which strategy, dash and symbol how many workers."""

    colour: str  # on white; `dark_colours` has what it becomes on black
    dash: str
    symbol: str
    width: float = 2.0

    @property
    def band(self) -> str:
        return see_through(self.colour)


def styles_of(comparison: Comparison) -> dict[str, VariantStyle]:
    """Of each variant, by name."""
    strategies = list(dict.fromkeys(one.strategy for one in comparison.variants if not one.solo))
    places = sorted({(one.workers, one.threads) for one in comparison.variants if not one.solo})
    found = {}
    for one in comparison.variants:
        if one.solo:
            dash, symbol = ("solid", "circle") if one.name == comparison.reference else ("dot", "square")
            found[one.name] = VariantStyle(colour=INK[0], dash=dash, symbol=symbol, width=3.0)
            continue
        hue = strategies.index(one.strategy)
        turn = hue // len(HUES) * len(places) + places.index((one.workers, one.threads))
        found[one.name] = VariantStyle(
            colour=HUES[hue % len(HUES)][0], dash=list(DASHES)[turn % len(DASHES)], symbol=SYMBOLS[turn % len(SYMBOLS)]
        )
    return found


def dark_colours() -> dict[str, str]:
    """{colour on white: colour on black}, of all that charts use."""
    pairs = dict([INK, MUTED, *HUES, *PART_HUES.values()])
    return pairs | {see_through(light): see_through(dark) for light, dark in pairs.items()}


def see_through(colour: str) -> str:
    """`rgba(0, 114, 178, 0.16)` of `#0072b2`"""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {BAND})"


# -- parts of a chart -------------------------------------------------------------------------------------------------


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
    value: float, name: str, *, colour: str = MUTED[0], side: str = "left", over: bool = True, log: bool = False
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
