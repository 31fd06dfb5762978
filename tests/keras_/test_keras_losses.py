"""A compiled model's loss, its weight, and metrics that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from keras_models import compiled, dense, keras, rows

import manyhands as mh
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.keras import losses
from manyhands.keras.module import KerasModule
from manyhands.replica import evaluation


def evaluated(model: Any, *data: Any, batch_size: int = 7) -> dict[str, float]:
    task = mh.keras.task(model, *data[:2])
    feed = Feed(open_source(data), batch_size=batch_size, shuffle=False)
    return evaluation.evaluate(
        evaluation.of_model(task, task.model.eval(), feed.device), feed, SoloGroup(), lambda batch: None
    )


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


def test_evaluating_leaves_what_training_has_counted() -> None:
    x, y = rows(20)
    model = dense()
    model.fit(x, y, verbose=0)
    before = {name: float(value) for name, value in model.get_metrics_result().items()}
    evaluated(model, x[:5], y[:5])
    assert {name: float(value) for name, value in model.get_metrics_result().items()} == before


def test_weighted_metrics_and_sample_weights() -> None:
    x, y = rows(30)
    weight = np.linspace(0, 2, 30).astype("float32")
    model = dense(weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")])
    wanted = model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True)
    assert evaluated(model, x, y, weight) == pytest.approx(wanted, abs=1e-6)


def masked(**options: Any) -> Any:
    """Sequences of whole numbers, of which 0 is none."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Embedding(7, 3, mask_zero=True), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    model.compile("sgd", loss)
    return model


def weight_of(model: Any, batch: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    mean, weight = losses.loss(KerasModule(model).train(), batch)
    return float(mean.detach()), weight


def test_the_weight_is_what_the_mean_divides_by() -> None:
    x = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 5, 6, 1], [1, 0, 0, 0, 0]])
    y = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 1, 0, 1], [1, 0, 0, 0, 0]])
    model = masked()
    parts = [weight_of(model, (x[:1], y[:1])), weight_of(model, (x[1:], y[1:]))]
    whole, positions = weight_of(model, (x, y))
    assert positions == 8
    assert [weight for _, weight in parts] == [2, 6]
    assert sum(mean * weight for mean, weight in parts) / 8 == pytest.approx(whole, abs=1e-6)


def test_a_mean_with_sample_weights_divides_by_their_sum() -> None:
    x, y = rows(4)
    weight = torch.tensor([1.0, 2.0, 0.0, 0.5])
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    model = dense(loss=loss)
    assert weight_of(model, (torch.tensor(x), torch.tensor(y), weight))[1] == 3.5
    assert weight_of(dense(), (torch.tensor(x), torch.tensor(y), weight))[1] == 4


@pytest.mark.parametrize("reduction", ["sum", None])
def test_a_loss_that_is_no_mean_is_refused(reduction: str | None) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    with pytest.raises(mh.BadInput, match="sum_over_batch_size"):
        mh.keras.task(dense(loss=loss), *rows())


def test_losses_that_divide_by_different_things_are_refused() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])
    model.compile("sgd", ["mse", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")])
    with pytest.raises(mh.BadInput, match="their sum has no single weight"):
        mh.keras.task(model, rows()[0], [rows()[0][:, 0], rows()[0][:, 1]])


def test_the_loss_has_the_models_regularisers() -> None:
    model = compiled(lambda: keras.Input((4,)), lambda: keras.layers.Dense(5, kernel_regularizer="l2"))
    x, y = (torch.tensor(part) for part in rows(6))
    mean, _ = weight_of(model, (x, y))
    with torch.no_grad():
        bare = float(keras.losses.sparse_categorical_crossentropy(y, model(x)).mean())
        assert mean == pytest.approx(bare + float(sum(model.losses)), abs=1e-6)
    assert mean > bare + 1e-3


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
            mh.train(mh.keras.task(model, data_of(data), batch_size=4), workers=1)


def data_of(columns: Any) -> Any:
    """Data that gives batches of these columns."""
    return lambda: columns
