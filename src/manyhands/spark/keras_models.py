"""What the Estimator does differently for Keras models. Keras is imported only if such a model is given."""

from __future__ import annotations

import io
import json
import re
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from manyhands.errors import BadInput
from manyhands.task import Evaluate
from manyhands.units import printable

if TYPE_CHECKING:
    from manyhands.keras.module import KerasModule


def is_keras(model: Any) -> bool:
    """Whether it is a Keras model."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


def keras_module(model: nn.Module) -> KerasModule | None:
    """The model if it is a KerasModule, else None."""
    imported = sys.modules.get("manyhands.keras.module")
    return model if imported is not None and isinstance(model, imported.KerasModule) else None


def single_output_threshold(model: nn.Module) -> float:
    """The threshold of class 1: 0.5 if the model's loss takes probabilities, 0 for logits."""
    module = keras_module(model)
    if module is None:
        return 0.0
    from manyhands.keras.losses import of_logits

    return 0.0 if of_logits(module.keras) else 0.5


def metrics_of(model: nn.Module) -> Evaluate | None:
    """The metrics of a Keras model; None for another model."""
    if keras_module(model) is None:
        return None
    from manyhands.keras.losses import metrics

    return metrics


def to_bytes(module: KerasModule) -> bytes:
    """Keras's own archive: JSON and weights."""
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        path = Path(folder) / "model.keras"
        module.keras.save(path)
        return path.read_bytes()


def from_bytes(data: bytes, what: str, named: Any = None) -> KerasModule:
    """The compiled model of an archive. Raises BadInput, naming `what`, if the archive names code that is not trusted.

    named: the model's class; None: one of Keras's own, or one that is registered with Keras.
    """
    from manyhands.keras.backend import keras
    from manyhands.keras.module import KerasModule

    if tuple(map(int, re.findall(r"\d+", keras.__version__)[:3])) < _SAFE:
        raise BadInput(
            f"loading {what} needs Keras {'.'.join(map(str, _SAFE))} or newer, whose safe mode has no known bypass; this is "
            f"Keras {keras.__version__}: pip install -U 'manyhands[keras]'"
        )
    config = _config(data, what)
    found = config.get("class_name") if isinstance(config, dict) else None
    if not isinstance(found, str) or (named is not None and found != getattr(named, "__name__", None)):
        raise BadInput(
            f"{what} holds a Keras model of class {printable(found)}; got {getattr(named, '__name__', named)} as its model: "
            "give its own class"
        )
    for one in _objects(config):
        _check_known(one, named, what)
    own = {} if named is None or named.__module__.startswith("keras.") else {named.__name__: named}
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        path = Path(folder) / "model.keras"
        path.write_bytes(data)
        try:
            return KerasModule(keras.saving.load_model(path, custom_objects=own, safe_mode=True))
        except DAMAGE as error:
            raise BadInput(
                f"{what} holds a Keras model that cannot be made here: {error}. Import the module that registers its own "
                "layers and losses (keras.saving.register_keras_serializable) before loading"
            ) from error


DAMAGE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError),
    *(ValueError, zipfile.BadZipFile, zlib.error),
)
"""Errors of reading a damaged file, and of making a module of its numbers. (A RecursionError is a RuntimeError.)"""
_SAFE = (3, 13, 2)  # the bound of the extra `keras`
_OWN = re.compile(
    r"keras\.(src\.)?(activations|backend\.torch\.optimizers|constraints|dtype_policies|initializers|layers|losses|metrics|models|ops|optimizers|"
    r"quantizers|random|regularizers)(\.|$)"
)
"""Keras's modules with parts of models. Others have functions that read or download files."""
_OWN_CLASSES = ("Sequential", "Functional", "Model", "DTypePolicy", "DTypePolicyMap", "KerasTensor")
_CODE = ("__lambda__", "__typespec__")
_MOST_CONFIG_BYTES = 64 << 20


def _config(data: bytes, what: str) -> Any:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if (size := archive.getinfo("config.json").file_size) > _MOST_CONFIG_BYTES:
                raise BadInput(
                    f"the Keras configuration in {what} has {size:,} bytes, and at most {_MOST_CONFIG_BYTES:,} are "
                    "read: save the model again"
                )
            return json.loads(archive.read("config.json"))
    except BadInput:
        raise
    except DAMAGE as error:
        raise BadInput(f"{what} holds no Keras archive ({error!r}): save the model again") from error


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """All objects that Keras makes of a configuration, itself included."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        for value in config.values():
            yield from _objects(value)
    elif isinstance(config, list):
        for value in config:
            yield from _objects(value)


def _check_known(one: dict[str, Any], named: Any, what: str) -> None:
    """Raise BadInput for code that is neither Keras's own, nor registered with Keras, nor named by the caller."""
    from manyhands.keras.backend import keras

    module, name, registered = one.get("module"), one["class_name"], one.get("registered_name")
    if name == "function":  # then the configuration is its name
        name = one.get("config")
    if name in _CODE or not isinstance(name, str):
        known = False
    elif isinstance(module, str) and module.partition(".")[0] == "keras":
        known = name in _OWN_CLASSES if module == "keras" else _OWN.match(module) is not None
    elif named is not None and name == named.__name__:
        known = True
    else:
        known = (module in (None, "builtins") and name.startswith("__")) or any(
            isinstance(key, str) and keras.saving.get_registered_object(key) is not None for key in (registered, name)
        )
    if not known:
        raise BadInput(
            f"{what} needs {printable(module)}.{printable(name)}, which is neither part of Keras nor given here. If "
            "you trust it, import the module that registers it (keras.saving.register_keras_serializable), or give the "
            "model's class (Model.load(path, model=…))"
        )
