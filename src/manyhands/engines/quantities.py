"""Quantities as people write them (10ms, 100Mbit, 5x), and lists of options made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from manyhands.errors import BadInput, UnknownName
from manyhands.spec import did_you_mean, split_commas
from manyhands.units import NUMBER, SCALES

TIME = rf"{NUMBER}(?:[mµun]?s)?"

_PER_SECOND = {"": 1, "s": 1, "ms": 1_000, "us": 1_000_000, "µs": 1_000_000, "ns": 1_000_000_000}
_BITS = {"": 1, **SCALES}


def read_seconds(text: str, what: str) -> float:
    """`2s`, `10ms`, `50us`, `5ns`, or a number, which is seconds; BadInput otherwise. `what` names it in messages."""
    found = re.fullmatch(rf"({NUMBER})\s*([mµun]?s)?", text.strip())
    if found is None:
        raise BadInput(f"{what} must be a time in seconds, such as 0.01, 10ms, 50us or 2s; got {text!r}")
    return float(found[1]) / _PER_SECOND[found[2] or ""]


def read_bandwidth(text: str, what: str) -> float:
    """`1Gbit`, `100Mbit/s`, `100Mbps`, `inf`, or a number, which is bit/s; BadInput otherwise."""
    text = text.strip()
    if text.lower() == "inf":
        return math.inf
    found = re.fullmatch(rf"({NUMBER})\s*(?:([kKmMgGtT]?)(?:[bB]it(?:/s)?|bps))?", text)
    if found is None or not float(found[1]):
        bytes_too = ": bytes are not bits, 1 MB/s is 8Mbit" if re.search(r"B(?!it)|[bB]yte", text) else ""
        raise BadInput(
            f"{what} must be a number of bit/s above 0, such as 1e9, 100Mbit, 1Gbit or inf; got {text!r}{bytes_too}"
        )
    return float(found[1]) * _BITS[(found[2] or "").lower()]


def read_factor(text: str, what: str) -> float:
    """`5x`, `0.5x`, or a number above 0; BadInput otherwise."""
    found = re.fullmatch(rf"({NUMBER})x?", text.strip())
    if found is None or not float(found[1]):
        raise BadInput(f"{what} must be a factor above 0, such as 5x (5 times as long) or 0.5x; got {text!r}")
    return float(found[1])


def read_items(text: str, what: str) -> list[tuple[str, str]]:
    """`a=1,b=2` as [("a", "1"), ("b", "2")]; a word without `=` as (word, ""). Brackets around all are dropped.

    `what` names the list in messages ("network"). BadInput for an item without a name, or with nothing behind `=`.
    """
    text = text.strip()
    if text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1]
    items = []
    for item in split_commas(text) if text.strip() else []:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not name or (equals and not value):
            raise BadInput(f"{what} must be option=value, with commas between several; got {item!r} in {text!r}")
        items.append((name, value.strip("\"'")))
    return items


def unknown(name: str, what: str, valid: Iterable[str]) -> UnknownName:
    """The error for an option that does not exist; it lists those that do."""
    valid = list(valid)
    hint = did_you_mean(name, valid)
    return UnknownName(f"{what} has no option {name!r}{hint}: write option=value with one of {', '.join(valid)}")


def expect_number(value: float, what: str, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """BadInput unless a finite number above `above` and of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInput(f"{what} must be a finite number; got {value!r}")
    if value <= above or value < least:
        raise BadInput(
            f"{what} must be {f'above {above:g}' if value <= above else f'at least {least:g}'}; got {value!r}"
        )


def shown(value: float) -> str:
    """A number in as few characters as give exactly it."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
