"""Counts, numbers, sizes and durations as text, the same in summaries, advice, tables and reports; text of other processes."""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_DURATIONS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6))


def count(many: int, what: str, plural: str = "") -> str:
    """`1 core`, `2 cores`, `1,024 rows`; `plural` where it is not by an s: `2 pushes`."""
    return f"{many:,} {what if many == 1 else plural or what + 's'}"


def number(value: float) -> str:
    """Four digits that matter, no more: `12,970`, `0.9867`, `1.2e-05`; whole numbers whole."""
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def short(value: float) -> str:
    """Three digits that matter; all of a large one before the point: `1,234`, `12.3`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """`512 B`, `61.2 MB`"""
    for unit, least in _SIZES:
        if nbytes >= least:
            return f"{nbytes / least:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Three digits that matter: `2.5 µs`, `60 ms`, `1.5 min`, `1.2 h`."""
    for unit, least in _DURATIONS:
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a, b, c, d and 3 more`"""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def printable(text: object, most: int = 200, keep: str = "") -> str:
    """At most so many characters of what another process or host sent, for messages and logs.

    A `?` stands for each character that is not printed, but for those in `keep`: escape sequences would command the
    terminal, and line ends would forge lines of a log.
    """
    return "".join(char if char.isprintable() or char in keep else "?" for char in str(text)[:most])
