from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest
import torch
from spark_models import line

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.evaluation import AveragedOutputs
from manyhands.keras.module import KerasModule
from manyhands.spark.of_keras import is_keras, keras_module, metrics_of, single_output_threshold
from manyhands.spark.stored_model import load, save


def compiled(loss: Any = "binary_crossentropy", **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("adam", loss, metrics=["accuracy", keras.metrics.AUC(name="auc")], **options)
    return model


def test_what_is_a_keras_model() -> None:
    model = compiled()
    assert is_keras(model)
    assert not is_keras(line)
    assert keras_module(KerasModule(model)) is not None
    assert keras_module(line()) is None
    assert metrics_of(line()) is None


@pytest.mark.parametrize(
    ("loss", "threshold"),
    [
        ("binary_crossentropy", 0.5),
        (keras.losses.BinaryCrossentropy(from_logits=True), 0.0),
        ([keras.losses.BinaryCrossentropy()], 0.5),
    ],
)
def test_class_one_begins_where_the_loss_says(loss: Any, threshold: float) -> None:
    assert single_output_threshold(KerasModule(compiled(loss))) == threshold
    assert single_output_threshold(line()) == 0.0


def test_a_keras_model_comes_back_compiled(tmp_path: Path) -> None:
    module = KerasModule(compiled())
    save(str(tmp_path / "m"), None, module)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.json", "model.keras"]
    make, again = load(str(tmp_path / "m"))
    assert make is None
    x = torch.randn(5, 3)
    with torch.no_grad():
        assert torch.equal(again.eval()(x), module.eval()(x))
    batch = (x, torch.tensor([0, 1, 1, 0, 1]))
    for evaluate in (metrics_of(module), metrics_of(again)):
        assert evaluate is not None
    with torch.no_grad():
        assert float(metrics_of(again)(again, batch)["loss"][0]) == float(metrics_of(module)(module, batch)["loss"][0])  # type: ignore[misc, index]


def test_layers_that_are_not_here(tmp_path: Path) -> None:
    class Own(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    model = keras.Sequential([keras.Input((3,)), Own(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    save(str(tmp_path / "m"), None, KerasModule(model))
    with pytest.raises(BadInput, match="registers its own layers"):
        load(str(tmp_path / "m"))


def test_an_ensemble_comes_back_with_its_members(tmp_path: Path) -> None:
    ensemble = AveragedOutputs([line(), line()])
    save(str(tmp_path / "m"), line, ensemble)
    _, again = load(str(tmp_path / "m"))
    x = torch.from_numpy(np.ones((2, 2), "float32"))
    assert torch.equal(again(x), ensemble(x))


def test_a_keras_model_has_its_own_loss() -> None:
    with pytest.raises(BadInput, match="has its own loss and optimizer"):
        mh.spark.Estimator(model=compiled(), criterion=torch.nn.functional.mse_loss)
