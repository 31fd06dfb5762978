"""What a worker delivers to the driver: a piece of the rows that come of all workers together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RowPiece:
    """Some neighbouring rows that a worker delivers, or the news that it delivers no more."""

    rank: int = 0
    """Of the worker."""
    number: int = -1
    """Where the piece stands among those of all workers; -1: as it comes."""
    part: int = 0
    """Of several pieces of one number, which one it is."""
    last: bool = True
    """Whether it is the last of its number."""
    parts: int = 0
    """Above 0: this worker delivers nothing from this piece on, of the numbers that leave the same remainder by `parts`."""
    rows: int = 0
    data: bytes | bytearray | memoryview = b""
    """What `row_batches.pack` made."""

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.part

    def header(self) -> dict[str, Any]:
        """All but the data and the rank, as JSON."""
        return {"number": self.number, "part": self.part, "last": self.last, "parts": self.parts, "rows": self.rows}
