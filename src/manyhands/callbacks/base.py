"""The contract of a callback: the user's own code between the events of a run, on the driver."""

from __future__ import annotations

from typing import Literal

from manyhands.events import Event

Said = Literal["stop"] | None


class Callback:
    """Override what you need; each method gets one Event (docs/events.md) and may return "stop", where it says so.

    All are called on the driver, one after the other, in the order in which things happened. What they raise ends the
    run. What `on_epoch` and `on_validation` return is obeyed before the next tick, so a run that they stop is the same
    each time; `on_step` is called while the workers go on, and they stop together some ticks later.
    """

    def on_start(self, event: Event) -> None:
        """The first tick comes: rows, epochs, total steps, batch sizes."""

    def on_step(self, event: Event) -> Said:
        """All workers made a tick: its values are a row of `Run.history`. "stop" ends the run soon."""
        return None

    def on_validation(self, event: Event) -> Said:
        """Validated: values are {epoch, metrics, best}. "stop" ends the run here."""
        return None

    def on_epoch(self, event: Event) -> Said:
        """An epoch is over: values are {epoch, rows}. "stop" ends the run here."""
        return None

    def on_notice(self, event: Event) -> None:
        """A checkpoint was written, somebody warned, or the run was told to stop."""

    def on_end(self, event: Event) -> None:
        """The run is over: type "end" with {metrics, seconds}, or "failed" with {error, message}. Always the last call."""
