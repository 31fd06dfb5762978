import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spark_models import line

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.spark.keras_models import is_keras, keras_module, metrics_of, single_output_threshold
from manyhands.spark.stored_model import load, save
from refusals import all_refused

pytestmark = pytest.mark.slow  # Keras takes seconds to import


@pytest.fixture
def compiled(keras: Any) -> Callable[..., Any]:
    """Makes a KerasModule of one sigmoid."""
    from manyhands.keras.module import KerasModule

    def make(loss: Any = "binary_crossentropy") -> KerasModule:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile("adam", loss, metrics=["accuracy", keras.metrics.AUC(name="auc")])
        return KerasModule(model)

    return make


def test_what_is_a_keras_model_and_its_threshold_of_class_one(keras: Any, compiled: Any) -> None:
    module = compiled()
    assert is_keras(module.keras)
    assert keras_module(module) is not None
    assert not is_keras(line)
    assert keras_module(line()) is None
    assert metrics_of(line()) is None
    assert single_output_threshold(compiled(keras.losses.BinaryCrossentropy(from_logits=True))) == 0.0
    for loss in ("binary_crossentropy", [keras.losses.BinaryCrossentropy()]):
        assert single_output_threshold(compiled(loss)) == 0.5
    assert single_output_threshold(line()) == 0.0
    with pytest.raises(BadInput, match="has its own loss and optimizer"):
        mh.spark.Estimator(model=module.keras, criterion=torch.nn.functional.mse_loss)


def test_a_keras_model_comes_back_compiled(keras: Any, compiled: Any, tmp_path: Path) -> None:
    module, where = compiled(), str(tmp_path / "m")
    save(where, None, module)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.json", "model.keras"]
    make, again = load(where)
    assert make is None
    batch = (torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
    evaluate, evaluate_again = metrics_of(module), metrics_of(again)
    assert evaluate is not None
    assert evaluate_again is not None
    with torch.no_grad():
        assert torch.equal(again.eval()(batch[0]), module.eval()(batch[0]))
        assert float(evaluate_again(again, batch)["loss"][0]) == float(evaluate(module, batch)["loss"][0])  # type: ignore[index]
    assert load(where, keras.Sequential)[1] is not None
    with pytest.raises(BadInput, match="of class Sequential; got Functional"):
        load(where, type(_functional(keras)))
    (tmp_path / "m" / "model.keras").write_bytes(b"PK no zip")
    with pytest.raises(BadInput, match="holds no Keras archive"):
        load(where)


def _functional(keras: Any) -> Any:
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs) + 1)
    model.compile("sgd", keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


def test_models_of_all_kinds_come_back_where_their_classes_are_known(keras: Any, tmp_path: Path) -> None:
    from manyhands.keras.module import KerasModule

    class Own(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.last = keras.layers.Dense(1, activation="relu", kernel_initializer=keras.initializers.HeNormal(seed=1))

        def call(self, x: Any) -> Any:
            return self.last(x)

    class Layer(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            return x

    own, layered = Own(), keras.Sequential([keras.Input((3,)), Layer(), keras.layers.Dense(1)])
    own.compile("adamw", "mse")
    layered.compile("sgd", "mse")
    x = torch.randn(5, 3)
    own(x)  # builds it
    for number, model in enumerate((_functional(keras), own, layered)):
        module, where = KerasModule(model), str(tmp_path / str(number))
        save(where, None, module)
        if model is own:
            with pytest.raises(BadInput, match=r"\.Own, "):
                load(where)
        if model is layered:
            with pytest.raises(BadInput, match=r"\.Layer, .*import the module that registers it"):
                load(where)
            continue
        with torch.no_grad():
            assert torch.equal(load(where, type(model))[1].eval()(x), module.eval()(x))


def _function(module: str, name: str) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, "registered_name": "function"}


HOSTILE = [
    {"class_name": "__lambda__", "config": {"value": ["4wEA", None, None]}},  # Python code
    _function("os", "system"),
    _function("builtins", "eval"),
    _function("keras.utils", "get_file"),
    _function("keras.src.utils.file_utils", "get_file"),  # a module within
    {"module": "torch.fx", "class_name": "GraphModule", "config": {}, "registered_name": None},
    {"module": "keras.saving", "class_name": "load_model", "config": {}, "registered_name": None},
    {"module": "keras.layersx", "class_name": "Dense", "config": {}, "registered_name": None},  # a look-alike
]


def test_a_keras_archive_names_no_code(
    keras: Any, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is Keras asked to make it; otherwise it loads in safe mode, whatever the process allows."""
    save(str(tmp_path / "m"), None, compiled())
    archive = tmp_path / "m" / "model.keras"
    with zipfile.ZipFile(archive) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    options_given: list[dict[str, Any]] = []
    made = compiled().keras
    monkeypatch.setattr(keras.saving, "load_model", lambda path, **options: options_given.append(options) or made)

    def load_with(hostile: dict[str, Any]) -> Any:
        config = json.loads(files["config.json"])
        layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"function": hostile}}
        config["config"]["layers"].append(layer)
        with zipfile.ZipFile(archive, "w") as packed:
            for name, data in {**files, "config.json": json.dumps(config).encode()}.items():
                packed.writestr(name, data)
        return load(str(tmp_path / "m"))

    all_refused(load_with, [(hostile, "neither part of Keras") for hostile in HOSTILE])
    assert options_given == []
    save(str(tmp_path / "m"), None, compiled())
    load(str(tmp_path / "m"))
    assert options_given[0]["safe_mode"] is True
    for version in ("3.9.0", "3.13.1"):
        monkeypatch.setattr(keras, "__version__", version)
        with pytest.raises(BadInput, match=f"needs Keras 3.13.2 or newer.* this is Keras {version}"):
            load(str(tmp_path / "m"))
