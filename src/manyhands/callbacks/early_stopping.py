"""Stop when validation no longer improves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import override

from manyhands.callbacks.base import Callback, CallbackResult
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.replica.evaluation import higher_is_better
from manyhands.task import Task


@dataclass(kw_only=True)
class EarlyStopping(Callback):
    """Ends the run at the `patience`-th validation in a row without improvement over the best.

    A NaN is never an improvement. A resumed run goes on counting where its checkpoint was.
    """

    metric: str = "validation_loss"
    """A metric of the validation. Another name raises BadInput, which lists the metrics."""
    patience: int = 3
    """Validations without improvement; increase it if validation is noisy."""
    min_delta: float = 0.0
    """An improvement is larger than this."""
    mode: Literal["auto", "min", "max"] = "auto"
    """auto: by the metric's name, as `keep` (an accuracy: max, a loss: min); BadInput if the name does not show it."""

    best: float | None = field(default=None, init=False)
    failures: int = field(default=0, init=False)
    """Validations since the best."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise BadInput(f"EarlyStopping: patience must be at least 1 validation, not {self.patience}")
        if not self.min_delta >= 0:
            raise BadInput(f"EarlyStopping: min_delta must be 0 or more, not {self.min_delta}")
        if self.mode not in ("auto", "min", "max"):
            raise BadInput(f"EarlyStopping: mode must be auto, min or max, not {self.mode!r}")
        if self.mode == "auto" and higher_is_better(self.metric) is None:
            raise BadInput(
                f"EarlyStopping cannot tell from the name {self.metric!r} whether a higher or a lower value is better: "
                'give mode="max" or mode="min"'
            )

    @override
    def check(self, task: Task) -> None:
        if task.validation_data is None:
            raise BadInput(
                f"EarlyStopping watches {self.metric}, and the task has no validation_data: give it some, or leave EarlyStopping out"
            )

    @override
    def on_start(self, event: Event) -> None:
        self.best, self.failures = None, 0

    @override
    def on_validation(self, event: Event) -> CallbackResult:
        metrics = event.values["metrics"]
        if self.metric not in metrics:
            raise BadInput(
                f"EarlyStopping watches {self.metric!r}, and validation reports {', '.join(metrics) or 'nothing'}: "
                "give metric= one of the reported names"
            )
        if self._better(metrics[self.metric]):
            self.best, self.failures = metrics[self.metric], 0
            return None
        self.failures += 1
        return "stop" if self.failures >= self.patience else None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "failures": self.failures}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.failures = state["best"], state["failures"]

    def _better(self, value: float) -> bool:
        if value != value:
            return False
        if self.best is None:
            return True
        higher = self.mode == "max" or (self.mode == "auto" and higher_is_better(self.metric))
        return value > self.best + self.min_delta if higher else value < self.best - self.min_delta
