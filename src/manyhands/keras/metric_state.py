"""The state of a Keras model's metrics as one vector, which workers can add up.

Every metric is a function of state variables that add up over batches, and Keras itself adds them over replicas: an
accuracy's total and count, an AUC's true positives at each threshold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manyhands.keras.module import KerasModule


def count(model: Any, mean: Tensor, weight: float, batch: tuple[Any, Any, Any, Any]) -> None:
    """Add a batch (x, y, predictions, sample weights) of this loss, as `model.fit` does."""
    model._loss_tracker.update_state(mean, sample_weight=weight)
    x, y, predicted, sample_weight = batch
    model.compute_metrics(x, y, predicted, sample_weight=sample_weight)


def read(model: Any) -> Tensor:
    """[k] float64, on the CPU: all state variables, one after the other. k grows at a metric's first batch."""
    states = [variable.value.detach().to("cpu", torch.float64).reshape(-1) for variable in model.metrics_variables]
    return torch.cat(states)


def write(model: Any, state: Tensor) -> None:
    """Set the metrics to [k] `state` of `read`. Metrics that had no batch then are reset."""
    start = 0
    for variable in model.metrics_variables:
        size = variable.value.numel()
        part = state[start : start + size] if start < len(state) else torch.zeros(size)
        variable.assign(part.reshape(variable.shape).to(variable.value.dtype))
        start += size


def results(model: Any) -> dict[str, float]:
    """{name: value} of all metrics, under Keras's names."""
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def results_of(module: KerasModule, state: Tensor) -> dict[str, float]:
    """{name: value} for another [k] `state`. The metrics' own state does not change."""
    with module.placed(), separate(module.keras):
        write(module.keras, state)
        return results(module.keras)


@contextmanager
def separate(model: Any) -> Iterator[None]:
    """Reset the metrics inside, and put back their state afterwards."""
    before = read(model)
    model.reset_metrics()
    try:
        yield
    finally:
        write(model, before)
