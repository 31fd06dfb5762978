"""What travelled: payload bytes and messages by operation, headers apart."""

from __future__ import annotations

from collections import defaultdict


class Ledger:
    """Counts what one rank sent. A message is one algorithm step, however many frames carry it."""

    def __init__(self) -> None:
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._messages: defaultdict[str, int] = defaultdict(int)

    def add(self, operation: str, bytes: int, messages: int = 1) -> None:
        self._bytes[operation] += bytes
        self._messages[operation] += messages

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{operation: {"bytes", "messages"}}"""
        return {name: {"bytes": self._bytes[name], "messages": self._messages[name]} for name in sorted(self._bytes)}

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())
