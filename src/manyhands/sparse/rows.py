"""The declaration of a table: parameters as rows of one length, found by a key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.errors import BadInput, UnknownName, is_whole

DTYPES = ("float32", "float64")
_INITIAL = ("zeros", "constant", "uniform", "positive", "normal")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A table, declared: rows of `dim` numbers, one for each key in range(rows)."""

    fields: tuple[str, ...] = ()
    """The fields of a batch in which its keys stand; (): each step may change every row."""
    dim: int = 1
    rows: int
    initial: str = "zeros"
    """zeros, constant:C (each number is C), uniform:A (from -A to A), positive:A (uniform from 0 to A) or normal:S (mean 0,
    standard deviation S). A number depends on the seed, the table's name, its key and its column alone."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.rows is None:
            raise BadInput(
                "Rows: a table needs its number of rows, since workers keep it whole or share its memory: rows=1_000_000, with keys from 0 on. Tables of any keys are "
                "kept at a parameter server, which is not built yet"
            )
        for name in ("dim", "rows"):
            if not is_whole(getattr(self, name)):
                raise BadInput(f"Rows: {name} must be a whole number of at least 1, not {getattr(self, name)!r}")
        if self.dtype not in DTYPES:
            raise UnknownName(f"Rows: no dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        self.initial_number()

    def initial_number(self) -> tuple[str, float]:
        """("uniform", A) and so on; ("zeros", 0.0). Raises UnknownName or BadInput."""
        kind, colon, text = self.initial.partition(":")
        if kind not in _INITIAL or (kind == "zeros") == bool(colon):
            forms = "zeros, constant:C, uniform:A, positive:A, normal:S"
            raise UnknownName(f"Rows: no initial {self.initial!r}: give one of {forms}, with a number after the colon")
        if kind == "zeros":
            return kind, 0.0
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (number < 0 and kind != "constant"):
            raise BadInput(f"Rows: initial {self.initial!r} needs a number behind the colon: {kind}:0.1, for example")
        return kind, number
