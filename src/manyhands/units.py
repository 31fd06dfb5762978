"""Counts, numbers, sizes and durations as text, the same in summaries, advice, tables and reports; sizes that people write;
text of other processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from manyhands.errors import BadInput

NOT_FINITE = "not finite"
_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_DURATIONS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6))
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def count(many: int, what: str, plural: str = "") -> str:
    """`1 core`, `2 cores`, `1,024 rows`; `plural` where it is not by an s: `2 pushes`."""
    return f"{many:,} {what if many == 1 else plural or what + 's'}"


def number(value: float) -> str:
    """Four digits that matter, no more: `12,970`, `0.9867`, `1.2e-05`; whole numbers whole."""
    if not math.isfinite(value):
        return NOT_FINITE
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """Three digits that matter; all of a large one before the point: `1,234`, `12.3`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def metric(value: float) -> str:
    """As `number`, with four decimals where most metrics lie, so that a column of them lines up."""
    return f"{value:.4f}" if 0.1 <= abs(value) < 10 else number(value)


def small(value: float) -> str:
    """Two digits, for distances: `0.20`, `2.4×10⁻⁶`; `0` is zero, bit for bit."""
    if value == 0 or not math.isfinite(value):
        return NOT_FINITE if value else "0"
    exponent = math.floor(math.log10(value))
    if exponent < -3:
        return f"{value / 10.0**exponent:.1f}×{power(exponent)}"
    return f"{value:.0f}" if value >= 10 else f"{value:#.2g}"


def power(exponent: int) -> str:
    """`10⁻⁶`, `0.1`, `1`"""
    return f"{10.0**exponent:g}" if -2 <= exponent <= 2 else f"10{str(exponent).translate(_RAISED)}"


def signed(value: float) -> str:
    """`+0.0031`, `−0.02`, `0`; two digits."""
    return f"{'−' if value < 0 else '+'}{abs(value):.2g}" if value else "0"


def times(ratio: float) -> str:
    """`1.62×`, `52.8×`, `1,024×`, `0.052×`"""
    if ratio < 0.1:
        return f"{ratio:.2g}×"
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}×"


def percent(share: float) -> str:
    """`38 %`, and `0.4 %` where it is less than one."""
    return f"{100 * share:.1f} %" if 0 < abs(share) < 0.01 else f"{100 * share:.0f} %"


def between(low: float, high: float, say: Callable[[float], str]) -> str:
    """`0.97–0.98`, `3.1–3.4 s`: the unit once; "" where both read the same."""
    first, last = say(low), say(high)
    if first == last:
        return ""
    value, space, unit = first.rpartition(" ")
    return f"{value if space and last.endswith(space + unit) else first}–{last}"


def read_bytes(text: str, what: str) -> int:
    """`2GB`, `512MB`, `1.5GiB`; BadInput otherwise, also for a number without a unit."""
    found = re.fullmatch(rf"({NUMBER})\s*([kKmMgGtT])(i?)[bB]", str(text).strip())
    if found is None or not float(found[1]):
        raise BadInput(f"{what} must be a size with its unit, such as 2GB, 512MB or 1.5GiB; got {text!r}")
    scale = 1024 ** (1 + "kmgt".index(found[2].lower())) if found[3] else SCALES[found[2].lower()]
    return int(float(found[1]) * scale)


def size(nbytes: float) -> str:
    """`512 B`, `61.2 MB`"""
    for unit, least in _SIZES:
        if nbytes >= least:
            return f"{nbytes / least:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float, digits: str = ".3g") -> str:
    """Three digits that matter: `2.5 µs`, `60 ms`, `1.5 min`, `1.2 h`."""
    unit, least = next((pair for pair in _DURATIONS if seconds >= pair[1]), ("ns", 1e-9))
    return f"{format(seconds / least, digits).rstrip('.')} {unit}"


def seconds(value: float, digits: int = 1) -> str:
    """Seconds with so many decimals, and milliseconds where those would hide them: `42.3 s`, `31.0 ms`."""
    return f"{value:,.{digits}f} s" if value >= 0.1 or not value else f"{1000 * value:.3g} ms"


def even_duration(seconds: float) -> str:
    """As `duration`, with the zeros at its end, so that a column of them lines up: `60.0 ms`, `1.50 min`."""
    return duration(seconds, "#.3g")


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`"""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def named(names: Sequence[str], most: int = 3) -> str:
    """`a`, `a and b`, `a; b and c` where names have commas in them, `a, b, c and 4 more`."""
    if len(names) > most + 1:
        shown, last = list(names[:most]), f"{len(names) - most} more"
    else:
        shown, last = list(names[:-1]), names[-1]
    joint = "; " if any("," in name for name in names) else ", "
    return f"{joint.join(shown)} and {last}" if shown else last


def printable(text: object, most: int = 200, keep: str = "") -> str:
    """At most so many characters of what another process or host sent, for messages and logs.

    A `?` stands for each character that is not printed, but for those in `keep`: escape sequences would command the
    terminal, and line ends would forge lines of a log.
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in str(text)[:most])
