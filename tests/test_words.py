from __future__ import annotations

import math

import pytest

from manyhands import words


def test_counts() -> None:
    assert [words.count(n, "row") for n in (0, 1, 2, 1024)] == ["0 rows", "1 row", "2 rows", "1,024 rows"]
    assert [words.count(n, "push", "pushes") for n in (1, 2)] == ["1 push", "2 pushes"]


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
    assert (words.number(value), words.short(value)) == (four, three)


def test_sizes() -> None:
    assert [words.size(n) for n in (0, 999, 1000, 61_234_000, 2_500_000_000_000)] == [
        *("0 B", "999 B", "1.0 KB", "61.2 MB", "2,500.0 GB")
    ]
