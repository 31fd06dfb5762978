"""Numbers and lists as people read them, the same in the table, the charts, their sentences and the pull request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from manyhands import units
from manyhands.units import count as count
from manyhands.units import size as size

NOT_FINITE = "not finite"
NAMED = 3  # names in a sentence, before it says how many more there are
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LABEL = 40  # characters of a name in a chart


def number(value: float) -> str:
    """As `units.number`, where it is one."""
    return units.number(value) if math.isfinite(value) else NOT_FINITE


def metric(value: float) -> str:
    """As `number`, with four decimals where most metrics lie, so that a column of them lines up."""
    return f"{value:.4f}" if 0.1 <= abs(value) < 10 else number(value)


def small(value: float) -> str:
    """Two digits: for distances, where the size says enough: `0.20`, `2.4×10⁻⁶`; `0` is zero, bit for bit."""
    if value == 0 or not math.isfinite(value):
        return NOT_FINITE if value else "0"
    exponent = math.floor(math.log10(value))
    if exponent < -3:
        return f"{value / 10.0**exponent:.1f}×{power(exponent)}"
    return f"{value:.0f}" if value >= 10 else f"{value:#.2g}"


def power(exponent: int) -> str:
    """`10⁻⁶`, `0.1`, `1`"""
    return f"{10.0**exponent:g}" if -2 <= exponent <= 2 else f"10{str(exponent).translate(_RAISED)}"


def between(low: float, high: float, say: Callable[[float], str]) -> str:
    """`0.97–0.98`, `3.1–3.4 s`: the unit once; "" where both read the same."""
    first, last = say(low), say(high)
    if first == last:
        return ""
    value, space, unit = first.rpartition(" ")
    return f"{value if space and last.endswith(space + unit) else first}–{last}"


def signed(value: float) -> str:
    """`+0.0031`, `−0.02`, `0`; two digits."""
    return f"{'−' if value < 0 else '+'}{abs(value):.2g}" if value else "0"


def seconds(value: float) -> str:
    """`0.410 ms`, `3.20 s`, `2 min 5 s`, `3 h 12 min`; three digits, so that a column of them lines up."""
    if value < 0.1:
        return f"{1e3 * value:#.3g} ms"
    if value < 99.95:
        return f"{value:#.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def times(ratio: float) -> str:
    """`1.62×`, `52.8×`, `1,024×`, `0.052×`"""
    if ratio < 0.1:
        return f"{ratio:.2g}×"
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"


def percent(share: float) -> str:
    """`38 %`, and `0.4 %` where it is less than one."""
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.01 else f"{100 * share:.0f} %"


def named(names: Sequence[str], most: int = NAMED) -> str:
    """`a`, `a and b`, `a; b and c` where names have commas in them, `a, b, c and 4 more`."""
    if len(names) > most + 1:
        shown, last = list(names[:most]), f"{len(names) - most} more"
    else:
        shown, last = list(names[:-1]), names[-1]
    joint = "; " if any("," in name for name in names) else ", "
    return f"{joint.join(shown)} and {last}" if shown else last


def label(name: str, most: int = LABEL) -> str:
    """A name short enough for a chart on a phone: the middle is cut, the end says how many workers."""
    if len(name) <= most:
        return name
    tail = most // 3
    return f"{name[: most - tail - 1]}…{name[-tail:]}"
