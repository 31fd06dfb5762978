"""Which colour, dash and symbol a variant has: the same in the legend, the table and every chart."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.evidence.compare.comparison import Comparison

# As (on white, on black). Found by a search that keeps all of them, and solo's ink, apart for people who see all
# colours, no red, no green
# or no blue; the test of this file measures by how much, and the contrast with the page.
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


@dataclass(frozen=True, kw_only=True)
class VariantStyle:
    """How a variant is drawn: the hue says which strategy, dash and symbol how many workers."""

    colour: str
    """On white; `dark_colours` has what it becomes on black."""
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
