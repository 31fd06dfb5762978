"""`mh.keras.task`: a compiled Keras model and its rows, declared as a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from manyhands.data.batch import slice_rows
from manyhands.errors import BadInput
from manyhands.keras import losses, rows
from manyhands.keras.backend import keras
from manyhands.keras.callbacks import KerasCallbacks
from manyhands.keras.module import KerasModule
from manyhands.keras.optimizer import KerasOptimizer
from manyhands.task import Task, check_fields


def task(
    model: Any,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    test_data: Any = None,
    batch_size: int | None = 32,
    epochs: int = 1,
    callbacks: Iterable[Any] = (),
    shuffle: bool = True,
    **fields: Any,
) -> Task:
    """A compiled Keras model as a task, with its own loss, optimizer, metrics and callbacks.

    After `mh.train`, the model has the final weights.

    model: compiled; built, or built here from the first rows. x, y, sample_weight: arrays, or lists, tuples and dicts
        of arrays if the model has several inputs or outputs. Or x is data that gives (x,), (x, y) or (x, y,
        sample_weight) batches: all that `Task.train_data` accepts, including `mh.spark.frame`.
    class_weight: {class: weight of its rows}; 1 for other classes.
    validation_data, test_data: (x, y), (x, y, sample_weight), or data that gives such batches.
    validation_split: this share of the rows, the last ones, validates instead of training.
    batch_size: GLOBAL rows a step, of all workers together.
    callbacks: keras.callbacks, called on worker 0 (docs/keras.md).
    fields: any other field of Task.

    With one worker and shuffle=False, weights and losses are those of `model.fit(x, y, shuffle=False)`. Raises BadInput
    for a model that is not compiled, for Keras on another backend than torch, and for losses and metrics that cannot be
    averaged over workers.
    """
    check_fields(fields)
    _check(model)
    train_data, validation = x, _given(validation_data)
    if rows.is_arrays(x):
        train_data = rows.packed(x, y, sample_weight, class_weight)
        if validation_split and validation is None:
            train_data, validation = rows.split(train_data, validation_split)
            validation = validation if class_weight is None else validation[:2]  # `fit` weighs no validation by class
    elif any(one is not None for one in (y, sample_weight, class_weight)) or validation_split:
        raise BadInput(
            "x gives whole batches, (x, y) or (x, y, sample_weight), so y, sample_weight, class_weight and "
            "validation_split cannot be used: leave them out, or give x as an array"
        )
    if isinstance(train_data, tuple):  # rows are at hand: build weights, optimizer, loss and metrics, as `fit` does
        model._symbolic_build(data_batch=slice_rows(train_data, 0, 1))
    elif not model.built:
        raise BadInput(
            "the model has no weights yet, and there are no rows to build it from: give it an Input, or call it on a "
            "batch first"
        )
    if "batch_size_per_worker" in fields:
        batch_size = None
    return Task(
        model=KerasModule(model),
        loss=losses.loss,
        optimizer=_optimizer,
        train_data=train_data,
        validation_data=validation,
        test_data=_given(test_data),
        evaluate=losses.metrics,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=shuffle,
        worker_callback=KerasCallbacks(tuple(callbacks)),
        **{"name": model.name, **fields},
    )


def _optimizer(model: nn.Module) -> KerasOptimizer:
    assert isinstance(model, KerasModule)
    return KerasOptimizer(model)


def _given(data: Any) -> Any:
    """Validation or test data: (x, y[, sample_weight]) as rows, anything else unchanged."""
    if isinstance(data, tuple) and 1 <= len(data) <= 3 and rows.is_arrays(data[0]):
        return rows.packed(*data)
    return data


def _check(model: Any) -> None:
    """Raise BadInput for a model that cannot be trained."""
    if (backend := keras.config.backend()) != "torch":
        raise BadInput(
            f"manyhands trains Keras models on the torch backend, and Keras runs on {backend}: set KERAS_BACKEND=torch in "
            "the environment before Keras is imported, and build the model again"
        )
    if not isinstance(model, keras.Model):
        raise BadInput(
            f"model must be a keras.Model, not a {type(model).__module__}.{type(model).__name__}: for a PyTorch module "
            "use mh.Task(model=…)"
        )
    if not isinstance(next((v.value for v in model.variables), Tensor()), Tensor):
        raise BadInput(
            "the model was built on another backend: set KERAS_BACKEND=torch before Keras is imported, and build it "
            "again"
        )
    if not model.compiled or model.optimizer is None:
        raise BadInput("the model is not compiled: call model.compile(optimizer=…, loss=…) before mh.keras.task")
    for step in ("train_step", "test_step"):
        if getattr(type(model), step) is not getattr(keras.Model, step):
            raise BadInput(
                f"{type(model).__name__} has a {step} of its own, which would not be called: put what it computes into "
                "compute_loss and compute_metrics"
            )
    optimizer = model.optimizer
    inner = [name for name, one in vars(optimizer).items() if isinstance(one, keras.optimizers.Optimizer)]
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        raise BadInput(
            "loss scaling is not supported: use the dtype policy mixed_bfloat16 instead of mixed_float16, and leave "
            "loss_scale_factor out"
        )
    if inner:
        raise BadInput(f"{type(optimizer).__name__} holds other optimizers: compile the model with one of them")
    if optimizer.use_ema:
        raise BadInput(
            "use_ema=True is not supported: leave it out, or keep the best weights with "
            "EarlyStopping(restore_best_weights=True)"
        )
    losses.check_losses(model)
