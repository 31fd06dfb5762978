"""What the tasks on sparse rows share: their files, and how many rows a slice has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.data.csr import Csr

SLICE_NS = 10_000_000
"""What a slice should take: a step of the loop costs about 0.3 ms besides."""
SLICES_AN_EPOCH = 16
"""At least, so that workers share an epoch and rates fall smoothly, also where a few slices would be long enough."""


def read_both(
    read: Callable[..., Csr], path: str, validation_path: str | None, **options: Any
) -> tuple[Csr, Csr | None, dict[str, int]]:
    """(training rows, validation rows, the features and fields that both need)."""
    rows = read(path, **options)
    validation = read(validation_path, **options) if validation_path else None
    both = [rows, validation] if validation is not None else [rows]
    return (
        rows,
        validation,
        {"features": max(part.features for part in both), "fields": max(part.field_count for part in both)},
    )


def slice_rows(rows: Csr, ns: float) -> int:
    """Rows that a worker takes at once, if a row takes so many nanoseconds."""
    return max(1, min(int(SLICE_NS / ns), len(rows) // SLICES_AN_EPOCH))


def entries_a_row(rows: Csr) -> float:
    return max(1.0, len(rows.keys) / len(rows))
