"""Whether a run takes what its plan predicted: compared once, after its first steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands import units
from manyhands.worker import Worker

STEPS = 20  # of the run, after which it is compared
_FIRST = 4  # of these steps, left out: memory and caches are new to them
_FAR = 0.25  # of what was predicted: farther off, the part that is off is named
_TERMS = {
    "compute": ("compute", "update"),
    "wait": ("wait",),
    "exchange": ("exchange",),
}  # measured: of what is predicted


class PlanCheck:
    """On one worker of a run that a plan was made for."""

    def __init__(self, predicted: Mapping[str, Any], total_ticks: int | None) -> None:
        self._predicted = predicted
        self._until = STEPS if total_ticks is None else min(STEPS, total_ticks)
        self._ticks: list[Mapping[str, float]] = []

    def add(self, *, compute: float, wait: float, exchange: float, input: float) -> bool:
        """A tick's seconds. Whether `compare` is due, which all workers then call."""
        self._ticks.append({"compute": compute, "wait": wait, "exchange": exchange, "input": input})
        return len(self._ticks) == self._until

    def compare(self, worker: Worker, peak_bytes: int) -> dict[str, Any]:
        """What was predicted and what came, of the worker with the longest step and of that with the most memory; with a
        line that says so. A collective of the workers of a replica."""
        ticks = self._ticks[_FIRST:] or self._ticks
        own = {name: statistics.median(tick[name] for tick in ticks) for name in ticks[0]}
        own |= {"step_s": statistics.median(sum(tick.values()) for tick in ticks), "memory": float(peak_bytes)}
        return compared(self._predicted, worker.mesh.model.all_gather_json(own))


def compared(predicted: Mapping[str, Any], members: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """members: of each stage, the seconds of a step and of its parts, and its bytes."""
    slowest = max(members, key=lambda one: one["step_s"])
    planned_bytes, came_bytes = max(predicted["memory"]), max(one["memory"] for one in members)
    step, memory = slowest["step_s"] / predicted["step_s"] - 1, came_bytes / planned_bytes - 1
    message = (
        f"plan: {units.duration(predicted['step_s'])} and {units.size(planned_bytes)}; measured {units.duration(slowest['step_s'])} "
        f"({step:+.0%}) and {units.size(came_bytes)} ({memory:+.0%})"
    )
    if abs(step) > _FAR:
        terms = {name: sum(predicted["terms"].get(part, 0.0) for part in parts) for name, parts in _TERMS.items()}
        terms["input"] = 0.0
        busiest = max(members, key=lambda one: one["compute"])
        off = max(terms, key=lambda name: abs(busiest[name] - terms[name]))
        message += (
            f"; what is off is {off}, {units.duration(terms[off])} in the plan and {units.duration(busiest[off])} here"
        )
    return {
        "message": message,
        "predicted_s": predicted["step_s"],
        "step_s": slowest["step_s"],
        "predicted_bytes": planned_bytes,
        "bytes": came_bytes,
        "stages": [dict(one) for one in members],
    }
