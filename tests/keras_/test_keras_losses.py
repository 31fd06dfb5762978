"""A compiled model's loss, its weight, and metrics that add up."""

from typing import Any

import numpy as np
import pytest
import torch
from keras_models import Lazy, dense, keras, rows

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.replica import evaluation

losses: Any = Lazy("manyhands.keras.losses")
module: Any = Lazy("manyhands.keras.module")


def evaluated(model: Any, *data: Any) -> dict[str, float]:
    """In batches of 7 rows."""
    task = mh.keras.task(model, *data[:2])
    feed = Feed(open_source(data), batch_size=7, shuffle=False)
    of_model = evaluation.of_model(task, task.model.eval(), feed.device)
    return evaluation.evaluate(of_model, feed, SoloGroup(), lambda batch: None)


def test_metrics_over_many_batches_are_those_of_keras() -> None:
    """Means, and what is no mean: an AUC, a precision, a root of a mean."""
    x, classes = rows(50)
    y = (classes == 1).astype("float32")[:, None]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation="sigmoid")])
    kinds = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")]
    model.compile("sgd", "binary_crossentropy", metrics=[*kinds, keras.metrics.RootMeanSquaredError(name="rmse")])
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    assert wanted.keys() == {"loss", "accuracy", "auc", "p", "rmse"}
    assert evaluated(model, x, y) == pytest.approx(wanted, abs=1e-6)


def test_weighted_metrics_and_sample_weights_leave_what_training_has_counted() -> None:
    x, y = rows(30)
    weight = np.linspace(0, 2, 30).astype("float32")
    model = dense(weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")])
    model.fit(x[:20], y[:20], verbose=0)
    wanted = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    before = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert evaluated(model, x, y, weight) == pytest.approx(wanted, abs=1e-6)
    evaluated(model, x[:5], y[:5])
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == before


def weight_of(model: Any, batch: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    mean, weight = losses.loss(module.KerasModule(model).train(), batch)
    return float(mean.detach()), weight


def test_the_weight_is_what_the_mean_divides_by() -> None:
    """Of sequences of whole numbers, of which 0 is none: the positions that are not masked. Else rows, or their weights."""
    x = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 5, 6, 1], [1, 0, 0, 0, 0]])
    y = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 1, 0, 1], [1, 0, 0, 0, 0]])
    model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(7, 3, mask_zero=True), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    parts = [weight_of(model, (x[:1], y[:1])), weight_of(model, (x[1:], y[1:]))]
    whole, positions = weight_of(model, (x, y))
    assert positions == 8
    assert [weight for _, weight in parts] == [2, 6]
    assert sum(mean * weight for mean, weight in parts) / 8 == pytest.approx(whole, abs=1e-6)
    batch = (*(torch.tensor(part) for part in rows(4)), torch.tensor([1.0, 2.0, 0.0, 0.5]))
    by_weights = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    assert weight_of(dense(loss=by_weights), batch)[1] == 3.5
    assert weight_of(dense(), batch)[1] == 4


def test_losses_that_are_no_means_or_divide_by_different_things_are_refused() -> None:
    for reduction in ("sum", None):
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        with pytest.raises(mh.BadInput, match="sum_over_batch_size"):
            mh.keras.task(dense(loss=loss), *rows())
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")])
    with pytest.raises(mh.BadInput, match="their sum has no single weight"):
        mh.keras.task(model, rows()[0], [rows()[0][:, 0], rows()[0][:, 1]])


def test_columns_that_the_model_does_not_take_are_refused_before_a_step() -> None:
    inputs = {name: keras.Input((1,), name=name) for name in "ab"}
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([*inputs.values()])))
    model.compile("sgd", "mse")
    column = np.ones((8, 1), "float32")
    for data, message in [
        (({"a": column}, column), "no column 'b', which is an input of the model; it has a"),
        ({"a": column, "b": column, "y": column}, r"gives the columns a, b, y: give collate="),
    ]:
        with pytest.raises(mh.BadInput, match=message):
            mh.train(mh.keras.task(model, lambda data=data: data, batch_size=4), workers=1)
