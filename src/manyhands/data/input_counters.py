"""What reading the data cost one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class InputCounters:
    """What reading cost this process; threads add to it."""

    bytes: int = 0
    """Read from the files or their store, whatever was made of it."""
    reads: int = 0
    retries: int = 0
    """Reads that failed and were made again."""
    hits: int = 0
    """Blocks of rows that the host had already."""
    misses: int = 0
    """Blocks of rows that were read and decoded."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, many in counts.items():
                setattr(self, name, getattr(self, name) + many)

    def to_json(self) -> dict[str, int]:
        with self._lock:
            return {one.name: getattr(self, one.name) for one in fields(self) if not one.name.startswith("_")}

    def __reduce__(self) -> tuple[Any, ...]:  # to a loader process, which counts for itself
        return InputCounters, ()
