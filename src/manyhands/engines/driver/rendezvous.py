"""Where processes of a run meet through the driver, before they can reach each other. Pure: no clock, no socket."""

from __future__ import annotations

from typing import Any


class Rendezvous:
    """Who came to which meeting, and with what. A name may be used again once its meeting is over."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, Any]] = {}

    def come(self, seat: int, name: str, seats: list[int], value: Any) -> list[Any] | None:
        """A seat comes to the meeting `name` of `seats`: all their values in that order if it is the last, else None."""
        came = self._open.setdefault(name, {})
        came[seat] = value
        if any(other not in came for other in seats):
            return None
        del self._open[name]
        return [came[other] for other in seats]
