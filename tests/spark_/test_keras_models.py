from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
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
from manyhands.keras.module import KerasModule
from manyhands.replica.evaluation import AveragedOutputs
from manyhands.spark.keras_models import is_keras, keras_module, metrics_of, single_output_threshold
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
def test_the_threshold_of_class_one_follows_the_loss(loss: Any, threshold: float) -> None:
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
    with pytest.raises(BadInput, match=r"\.Own, .*import the module that registers it"):
        load(str(tmp_path / "m"))


def forged(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """A saved Keras model whose configuration was changed."""
    save(str(folder / "m"), None, KerasModule(compiled()))
    with zipfile.ZipFile(folder / "m" / "model.keras") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(files["config.json"])
    change(config)
    files["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(folder / "m" / "model.keras", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return str(folder / "m")


def _put(one: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["config"]["layers"].append(one)


def _function(module: str, name: str) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


HOSTILE = {
    "Python code": {"class_name": "__lambda__", "config": {"value": ["4wEA", None, None]}},
    "a function of os": _function("os", "system"),
    "a function of builtins": _function("builtins", "eval"),
    "a function that fetches": _function("keras.utils", "get_file"),
    "a module within": _function("keras.src.utils.file_utils", "get_file"),
    "another package": {"module": "torch.fx", "class_name": "GraphModule", "config": {}, "registered_name": None},
    "a layer that loads": {"module": "keras.saving", "class_name": "load_model", "config": {}, "registered_name": None},
    "a look-alike": {"module": "keras.layersx", "class_name": "Dense", "config": {}, "registered_name": None},
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_keras_archive_names_no_code(
    hostile: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **options: object) -> None:
        pytest.fail("Keras was asked to make it")

    monkeypatch.setattr(keras.saving, "load_model", never)
    with pytest.raises(BadInput, match="neither part of Keras"):
        load(
            forged(tmp_path, _put({"module": "keras.layers", "class_name": "Lambda", "config": {"function": hostile}}))
        )


def test_keras_loads_in_safe_mode_whatever_the_process_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options_given = {}
    monkeypatch.setattr(keras.saving, "load_model", lambda path, **options: options_given.update(options) or compiled())
    load(forged(tmp_path, lambda config: None))
    assert options_given["safe_mode"] is True


@pytest.mark.parametrize("version", ["3.9.0", "3.13.1"])
def test_an_older_keras_loads_nothing(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path / "m"), None, KerasModule(compiled()))
    monkeypatch.setattr(keras, "__version__", version)
    with pytest.raises(BadInput, match=f"needs Keras 3.13.2 or newer.* this is Keras {version}"):
        load(str(tmp_path / "m"))


def test_the_class_of_a_keras_model_is_named(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), None, KerasModule(compiled()))
    assert load(str(tmp_path / "m"), keras.Sequential)[1] is not None
    with pytest.raises(BadInput, match="of class Sequential; got Functional"):
        load(
            str(tmp_path / "m"), keras.models.Functional if hasattr(keras.models, "Functional") else type(_functional())
        )


def _functional() -> Any:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs) + 1)
    model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


class Own(keras.Model):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last = keras.layers.Dense(1, activation="relu", kernel_initializer=keras.initializers.HeNormal(seed=1))

    def call(self, x: Any) -> Any:
        return self.last(x)


def test_models_of_all_kinds_come_back(tmp_path: Path) -> None:
    own = Own()
    own.compile("adamw", "mse")
    x = torch.randn(5, 3)
    own(x)  # builds it
    for number, model in enumerate((_functional(), own)):
        module, where = KerasModule(model), str(tmp_path / str(number))
        save(where, None, module)
        if model is own:
            with pytest.raises(BadInput, match=r"\.Own, "):
                load(where)
        with torch.no_grad():
            assert torch.equal(load(where, type(model))[1].eval()(x), module.eval()(x))


def test_what_is_no_archive(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), None, KerasModule(compiled()))
    (tmp_path / "m" / "model.keras").write_bytes(b"PK no zip")
    with pytest.raises(BadInput, match="holds no Keras archive"):
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
