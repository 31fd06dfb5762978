"""A task that takes a real one's place: as many rows, the same optimizer's state, a model of few numbers whose gradient costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.evidence.estimate.shape import ReadingPlan, Shape
from manyhands.strategies.base import Strategy
from manyhands.task import Task

NEVER = 1 << 40
_MOVE = 1e-3
CODEC = "bf16"
"""Stands for every codec: its one exchange takes as long as all of the real one's (see lengths.py)."""


class Vector(nn.Module):
    """One parameter [n]."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(n, dtype=dtype))


class Keeper(torch.optim.Optimizer):
    """Keeps what another optimizer would, and moves a little at each step: some servers tell a new center by its numbers."""

    def __init__(self, parameters: Any, state: Mapping[str, Any], largest: torch.Size) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._kept, self._largest = state, largest

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += _MOVE
                if self._kept and not self.state[parameter]:
                    self.state[parameter] = {name: self._own(value, parameter) for name, value in self._kept.items()}

    def _own(self, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == self._largest:
            return torch.zeros_like(parameter, dtype=value.dtype)
        return torch.zeros(value.shape, dtype=value.dtype)


def stand_in(task: Task, shape: Shape, reading: ReadingPlan, length: int) -> Task:
    """The task with a model of `length` numbers. Its rows are never looked at, and take no memory."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        vector: Tensor = model.vector  # type: ignore[assignment]
        return (vector * 0).sum()

    return Task(
        name=task.name,
        model=lambda: Vector(length, shape.dtype),
        loss=loss,
        optimizer=lambda model: Keeper(model.parameters(), shape.state, shape.largest),
        train_data=torch.zeros(1, 1).expand(NEVER if reading.rows is None else reading.rows, 1),
        batch_size=reading.batch_size,
        epochs=NEVER,
        shuffle=False,
        seed=task.seed,
    )


def steady(strategy: Strategy) -> Strategy:
    """The strategy as it goes on for most of a training: without a warm-up; and with the codec that stands for its own."""
    options = {field.name for field in fields(strategy)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    if "warmup" in options:
        changes["warmup"] = 0
    if codec_named(strategy) != "none":
        changes |= {"compress": CODEC, "feedback": None}
    return replace(strategy, **changes) if changes else strategy  # type: ignore[type-var]


def codec_named(strategy: Strategy) -> str:
    """What its option `compress` says; none without that option."""
    return str(getattr(strategy, "compress", "none"))
