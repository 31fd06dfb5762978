"""The contract of a callback: the user's code on the driver, called at the events of a run."""

from __future__ import annotations

from typing import Any, Literal

from manyhands.events import Event
from manyhands.task import Task

CallbackResult = Literal["stop"] | None


class Callback:
    """Override the methods that you need. Each gets one Event (docs/events.md); some may return "stop".

    Methods are called on the driver, one at a time, in the order of events. An exception ends the run. A stop by
    `on_epoch` or `on_validation` takes effect before the next step, so such runs are reproducible. `on_step` is called
    while the workers continue; after a stop they end together some steps later.

    What a callback must remember when a run is resumed is its `state_dict`: it is saved with each checkpoint. Where a
    run starts again by itself (`max_restarts`), callbacks see one run: `on_notice` gets a `change` of kind "restart",
    then `load_state_dict` what was remembered at the checkpoint, and the steps after it come again.
    """

    def check(self, task: Task) -> None:
        """Before anything starts: raise BadInput where the task has not what this callback needs."""

    def on_start(self, event: Event) -> None:
        """Before the first step: rows, epochs, total steps, batch sizes."""

    def on_step(self, event: Event) -> CallbackResult:
        """After a step of all workers: values are a row of `Run.history`. "stop" ends the run soon."""
        return None

    def on_validation(self, event: Event) -> CallbackResult:
        """After a validation: values are {epoch, metrics, best}. "stop" ends the run here."""
        return None

    def on_epoch(self, event: Event) -> CallbackResult:
        """After an epoch: values are {epoch, rows}. "stop" ends the run here."""
        return None

    def on_notice(self, event: Event) -> None:
        """After a checkpoint, a warning, a fault, a change of the members, a restart, or a request to stop."""

    def on_end(self, event: Event) -> None:
        """After the run: type "end" with {metrics, seconds}, or "failed" with {error, message}. Always the last call."""

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint, as JSON; all events up to it have been seen. {}: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; called after `on_start` of a run that is resumed from such a checkpoint."""
