from __future__ import annotations

import math

import pytest

from manyhands import units


def test_counts() -> None:
    assert [units.count(n, "row") for n in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]
    assert [units.count(n, "push", "pushes") for n in (1, 2)] == ["1 push", "2 pushes"]


@pytest.mark.parametrize(
    ("value", "four", "three"),
    [
        (0, "0", "0"),
        (12970, "12,970", "12,970"),
        (12970.4, "12,970", "12,970"),
        (999.96, "1000", "1,000"),
        (123.456, "123.5", "123"),
        (12.345, "12.35", "12.3"),
        (99.96, "99.96", "100"),
        (-0.98672, "-0.9867", "-0.987"),
        (1.2e-05, "1.2e-05", "1.2e-05"),
        (math.inf, "inf", "inf"),
        (math.nan, "nan", "nan"),
    ],
)
def test_numbers(value: float, four: str, three: str) -> None:
    assert (units.number(value), units.short(value)) == (four, three)


def test_sizes() -> None:
    assert [units.size(n) for n in (0, 999, 1000, 61_234_000, 2_500_000_000_000)] == [
        *("0 B", "999 B", "1.0 KB", "61.2 MB", "2.5 TB")
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-9, "2.5 ns"),
        (2.5e-6, "2.5 µs"),
        (1.5e-3, "1.5 ms"),
        (1, "1 s"),
        (90, "1.5 min"),
        (3600, "1 h"),
        (2 * 86_400, "2 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_lists() -> None:
    assert [units.listed(names) for names in (["a"], list("abcd"), list("abcdefg"))] == [
        *("a", "a, b, c, d", "a, b, c, d and 3 more")
    ]


def test_text_of_others_moves_no_cursor_and_forges_no_line() -> None:
    forged = "alpha\x1b[2J\r\nWARNING all is well\u202e\x9b1m"
    assert units.printable(forged) == "alpha?[2J??WARNING all is well??1m"
    assert units.printable("a\n\tb\x07", keep="\n\t") == "a\n\tb?"
    assert units.printable("Zürich 東京 " + "x" * 500, 12) == "Zürich 東京 xx"
    assert units.printable(7) == "7"
