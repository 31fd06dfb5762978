"""A compiled Keras model's loss and metrics, as the loss and metrics of a task.

The state of a model's metrics is one vector, which workers can add up. Every metric is a function of state variables
that add up over batches, and Keras itself adds them over replicas: an accuracy's total and count, an AUC's true
positives at each threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.batch import rows_of
from manyhands.errors import BadInput
from manyhands.keras.backend import keras
from manyhands.keras.module import KerasModule, module_of
from manyhands.task import Measure, Metrics, Summed

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def loss(model: nn.Module, batch: Any) -> Measure:
    """(the loss that `model.fit` minimises, what its mean divides by). Updates the model's metrics if the module `counts`."""
    module = module_of(model)
    x, y, sample_weight = _unpacked(module, batch)
    predicted = model(x)
    with module.placed():
        mean = _loss(module.keras, x, y, predicted, sample_weight, training=True)
        weight = _weight(module.keras, batch, predicted, sample_weight)
        if module.counts:
            with torch.no_grad():
                count(module.keras, mean, weight, (x, y, predicted, sample_weight))
    return mean, weight


def metrics(model: nn.Module, batch: Any) -> Metrics:
    """The loss, and the model's metrics under Keras's names, as sums of their state over all batches and workers."""
    module = module_of(model)
    x, y, sample_weight = _unpacked(module, batch)
    predicted = model(x)
    with module.placed(), separate(module.keras):
        mean = _loss(module.keras, x, y, predicted, sample_weight, training=False)
        weight = _weight(module.keras, batch, predicted, sample_weight)
        count(module.keras, mean, weight, (x, y, predicted, sample_weight))
        sums = read(module.keras)

    def besides_loss(total: Tensor) -> dict[str, float]:
        return {name: value for name, value in results_of(module, total).items() if name != "loss"}

    return {"loss": (mean, weight), "metrics": Summed(sums, besides_loss)}


def _unpacked(module: KerasModule, batch: Any) -> tuple[Any, Any, Any]:
    """(x, y, sample weights); BadInput for a batch of columns, and for inputs of which one is not there."""
    if isinstance(batch, Mapping):
        raise BadInput(
            f"data for a Keras model gives batches (x, y) or (x, y, sample_weight), and this one gives the columns {', '.join(map(str, batch))}: "
            'give collate= that makes such a batch of rows, ({"a": …, "b": …}, y) for a model of several inputs'
        )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    wanted = getattr(module.keras, "input", None)  # by name, where the model has several
    if (
        isinstance(x, Mapping)
        and isinstance(wanted, Mapping)
        and (lacking := [name for name in wanted if name not in x])
    ):
        raise BadInput(
            f"the data has no column {lacking[0]!r}, which is an input of the model; it has {', '.join(map(str, x))}: give data with this column"
        )
    return x, y, sample_weight


def _loss(model: Any, x: Any, y: Any, predicted: Any, sample_weight: Any, training: bool) -> Tensor:
    value: Tensor = model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight, training=training)
    return value


def _weight(model: Any, batch: Any, predicted: Any, sample_weight: Any) -> float:
    """The divisor of the loss's mean: rows, the sum of the sample weights, or the positions that are not masked."""
    outputs = keras.tree.flatten(predicted)
    mask = getattr(outputs[0], "_keras_mask", None) if len(outputs) == 1 else None
    if reductions(model) == ["mean_with_sample_weight"] and sample_weight is not None:
        weights = sample_weight if mask is None else sample_weight * mask
        return float(weights.sum())
    return float(rows_of(batch) if mask is None else mask.sum())


def reductions(model: Any) -> list[str]:
    """The reduction of each loss that the model was compiled with."""
    losses = [one for one in keras.tree.flatten(model.loss) if one is not None]
    return [str(one.reduction) if isinstance(one, keras.losses.Loss) else "sum_over_batch_size" for one in losses]


def of_logits(model: Any) -> bool:
    """Whether a loss of the model takes logits. By default Keras's losses take probabilities."""
    return any(getattr(one, "from_logits", False) for one in keras.tree.flatten(model.loss))


def check_losses(model: Any) -> None:
    """Raise BadInput for a loss that is no mean, or for losses whose means divide by different weights."""
    kinds = reductions(model)
    sums = [kind for kind in kinds if kind not in _MEANS]
    if sums:
        raise BadInput(
            f"a loss has reduction={sums[0]!r}, and workers average losses: compile the model with "
            "reduction='sum_over_batch_size'"
        )
    if len(kinds) > 1 and "mean_with_sample_weight" in kinds:
        raise BadInput(
            "of several losses, one divides by its sample weights and the others by rows, so their sum has no single "
            "weight: compile the model with reduction='sum_over_batch_size'"
        )


# -- the state of metrics ---------------------------------------------------------------------------------------------


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
